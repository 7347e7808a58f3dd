"""The keywords of the engine: the names that people know, values from NumPy, and one sentence for an unknown one."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch

import parse_infer
from parse_infer.engine import ParseEngine
from parse_infer.errors import SettingsError
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import Sampling

PROMPT = "Tom has 5 apples."
PAIR = {"target": "zoo:target", "draft": "zoo:draft"}


def test_sampling_keywords_set_both_models():
    settings = GenerationSettings.of(temperature=0.7, top_p=0.9, top_k=5, seed=3)
    assert settings.resume_sampling == settings.draft_sampling == Sampling(0.7, 0.9, 5, 3)
    other = settings.override(seed=4, draft_temperature=0)
    assert (other.resume_sampling, other.draft_sampling) == (Sampling(0.7, 0.9, 5, 4), Sampling(0.0, 0.9, 5, 4))
    greedy = settings.override(mode="exact", temperature=0)
    assert greedy.resume_sampling == Sampling(0.0, 0.9, 5, 3)
    own = GenerationSettings.of(resume_sampling=Sampling(0.2, top_k=2), temperature=0.5)
    assert own.resume_sampling == Sampling(0.5, top_k=2)


def test_every_way_to_answer_takes_sampling_keywords(make_engine):
    engine, hot = make_engine(), {"temperature": 5.0, "seed": 1, "max_new_tokens": 12}
    explicit = GenerationSettings(12, draft_sampling=Sampling(5.0, seed=1), resume_sampling=Sampling(5.0, seed=1))
    for ways in (engine.generate, engine.generate_target, engine.generate_draft):
        assert ways(PROMPT, **hot).token_ids == ways(PROMPT, explicit).token_ids
        assert ways(PROMPT, **hot).token_ids != ways(PROMPT, max_new_tokens=12).token_ids
    for stream in (engine.stream, engine.stream_target):
        assert list(stream(PROMPT, **hot))[-1].generation.token_ids


def test_settings_may_be_a_mapping(make_engine):
    engine = make_engine()
    settings = GenerationSettings(9, threshold=0.2, draft_sampling=Sampling(0.5, seed=2), stop=("x",))
    for mapping in (asdict(settings), {"max_new_tokens": 9, "threshold": 0.2}):
        assert len(engine.generate(PROMPT, mapping).token_ids) <= 9
    assert GenerationSettings.of(asdict(settings)) == settings
    engine.check(PROMPT, {"max_new_tokens": 9})
    for wrong in (5, "fast", [1]):
        with pytest.raises(SettingsError, match="it must be GenerationSettings"):
            engine.generate(PROMPT, wrong)


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor], ids=["int64", "uint8", "tensor"])
def test_integers_of_other_libraries_are_integers(kind):
    names = ("max_new_tokens", "block_tokens", "strict_tokens", "min_tokens", "top_k", "seed")
    expected = GenerationSettings.of(**dict.fromkeys(names, 4), stop_token_ids=[4])
    assert GenerationSettings.of(**{name: kind(4) for name in names}, stop_token_ids=[kind(4)]) == expected
    numbers = GenerationSettings.of(threshold=np.float32(0.5), temperature=np.float64(0.5), ignore_eos=np.bool_(True))
    assert numbers == GenerationSettings.of(threshold=0.5, temperature=0.5, ignore_eos=True)
    assert {type(v) for v in (numbers.threshold, numbers.ignore_eos, expected.min_tokens)} == {float, bool, int}
    assert GenerationSettings(stop_token_ids=np.array([4, 5])).stop_token_ids == (4, 5)
    with pytest.raises(SettingsError, match="max_new_tokens is 0; it must be a whole number"):
        GenerationSettings(max_new_tokens=kind(0))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda e: e.generate(PROMPT, temprature=1), "'temprature' is not a generation setting; did you mean"),
        (lambda e: e.generate(PROMPT, {"max_new_token": 1}), "did you mean 'max_new_tokens'?"),
        (lambda e: e.generate(PROMPT, {1: 2}), "'1' is not a generation setting; known: "),
        (lambda e: e.generate(PROMPT, draft_sampling={"topk": 1}), "'topk' is no field of draft_sampling"),
        (lambda e: e.generate(PROMPT, mode="exact", temperature=1), "temperature is 1, but mode 'exact' compares"),
        (lambda e: ParseEngine.from_models(e.target, foo=1), "'foo' is not an option; known: "),
        (lambda e: ParseEngine.from_models(e.target.model), "LlamaForCausalLM; give LanguageModel(name"),
        (lambda e: ParseEngine.from_models(e.target, "zoo:draft"), "draft is a str; give LanguageModel("),
        (lambda e: ParseEngine.from_pretrained(**PAIR, adaptor="x"), "'adaptor' is not an option; did you mean"),
        (lambda e: ParseEngine.from_pretrained(**PAIR, torch_dtype="x"), "did you mean 'dtype'?"),
        (lambda e: ParseEngine.from_pretrained(**PAIR, target_url="x"), "of the backend 'vllm' only"),
        (lambda e: ParseEngine.from_pretrained(**PAIR, backend="vllm", device="cpu"), "of the backend 'local' only"),
        (lambda e: ParseEngine.from_pretrained(**PAIR, backend="vlm"), "backend is 'vlm'; it must be one of"),
    ],
)  # fmt: skip
def test_an_unknown_keyword_is_one_sentence(make_engine, call, sentence):
    with pytest.raises(SettingsError) as found:
        call(make_engine())
    assert sentence in str(found.value) and "_" * 2 not in str(found.value)


def test_an_engine_is_built_from_what_the_package_exports(make_engine):
    given = make_engine()
    target, draft = (
        parse_infer.LanguageModel(role, language.model, language.tokenizer)
        for role, language in (("target", given.target), ("draft", given.draft))
    )
    engine = parse_infer.ParseEngine.from_models(target, draft)
    expected = given.generate_target(PROMPT, max_new_tokens=12).token_ids
    assert engine.generate(PROMPT, max_new_tokens=12, mode="exact").token_ids == expected


@pytest.mark.parametrize("block_tokens", ["auto", 4, "whole"])
def test_lossless_speculation_needs_no_judge(make_engine, block_tokens):
    """In each of its spellings; `mode="exact"` is the one in the documentation."""
    given = make_engine()
    engine, n = ParseEngine.from_models(given.target, given.draft), 16
    expected = given.generate_target(PROMPT, max_new_tokens=n).token_ids
    for settings in ({"mode": "exact"}, {"threshold": 2}, {"threshold": 2, "keep_greedy_match": False}):
        found = engine.generate(PROMPT, max_new_tokens=n, block_tokens=block_tokens, **settings)
        assert found.token_ids == expected, settings
        # Where no draft token can be kept, none is drafted.
        assert bool(found.stats.draft_tokens) == settings.get("keep_greedy_match", True), settings
    assert engine.generate_target(PROMPT, max_new_tokens=n, speculate=True).token_ids == expected
    with pytest.raises(SettingsError, match="has no judge"):
        engine.generate(PROMPT, threshold=0.5)


def test_statistics_say_what_blocks_became(make_engine):
    engine = make_engine()
    for given, became in ((4, 4), ("whole", "whole"), ("auto", "whole")):  # the judge asks behind segments
        stats = engine.generate(PROMPT, max_new_tokens=20, threshold=0.0, block_tokens=given).stats
        assert stats.block_tokens == became and sum(stats.blocks) == stats.draft_tokens > 0
        assert len(stats.blocks) == stats.verification_passes and max(stats.blocks) <= (4 if given == 4 else 20)
    assert engine.generate(PROMPT, max_new_tokens=20, mode="exact").stats.block_tokens == "auto"
    assert engine.generate(PROMPT, max_new_tokens=9, draft_text="Six.", block_tokens=4).stats.block_tokens == "whole"
    alone = engine.generate_target(PROMPT, max_new_tokens=9).stats
    assert (alone.block_tokens, alone.blocks) == (None, [])
