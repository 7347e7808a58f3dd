"""The target alone, interruptions, threads, and verbatim prompts."""

from __future__ import annotations

import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from parse_infer.drafters.model_drafter import ModelDrafter
from parse_infer.engine import ParseEngine
from parse_infer.models.growing_kv_cache import GrowingKVCache
from parse_infer.request.events import Interrupted
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import Sampling
from parse_infer.text.prompts import Verbatim
from parse_infer.token_drafters.registry import load_token_drafter
from tests.parse_infer.engine.thresholds import PROMPT, greedy, partial_threshold
from tests.parse_infer.language_models import (
    language_model,
    llama_tokenizer,
    printable,
    word_tokenizer,
)


def test_the_target_alone_can_be_watched(engine):
    *tokens, done = engine.stream_target(PROMPT, max_new_tokens=20)
    alone = engine.generate_target(PROMPT, max_new_tokens=20)
    assert done.generation.text == alone.text == "".join(event.text for event in tokens)
    assert [event.token_id for event in tokens] == alone.token_ids
    assert done.generation.stats.target_forwards == alone.stats.target_forwards


@pytest.mark.parametrize("at", [0, 1, 7, 25, 30])
def test_an_interruption_ends_the_work_before_the_next_forward(engine, at):
    """At the prompt, within the draft, and while the target writes; the engine goes on as if nothing had been."""
    settings = {"max_new_tokens": 24, "threshold": 1.0, "keep_greedy_match": False}
    own = engine.generate(PROMPT, **settings)
    engine.generate("Another one.", max_new_tokens=4)
    asked = itertools.count()
    before = engine.target.decoder.forwards + engine.draft.decoder.forwards
    with pytest.raises(Interrupted), engine.backend.cancellable(lambda: next(asked) == at):
        engine.generate(PROMPT, **settings)
    assert engine.target.decoder.forwards + engine.draft.decoder.forwards == before + at
    again = engine.generate(PROMPT, **settings)
    assert again.token_ids == own.token_ids


@pytest.mark.parametrize(
    ("drafter", "settings"),
    [
        (None, {"block_tokens": 40, "threshold": 1.0}),
        (None, {"mode": "exact"}),
        ("draft", {"threshold": 2.0}),
        ("draft", None),
    ],
)
@pytest.mark.slow
def test_a_request_takes_the_memory_of_its_caches_once(engine, monkeypatch, drafter, settings):
    """For each layer of a model: no buffer grows, and nothing is copied, within the budget."""
    engine.backend.target_drafter = load_token_drafter(drafter, engine.target, engine.draft) if drafter else None
    allocated, grow = [], GrowingKVCache._resize
    monkeypatch.setattr(GrowingKVCache, "_resize", lambda layer, used: [allocated.append(layer), grow(layer, used)])
    for again in range(2):  # and none at all for the next request that begins alike
        allocated.clear()
        if settings is None:
            found = engine.generate_target(PROMPT, max_new_tokens=280, speculate=drafter is not None)
        else:
            found = engine.generate(PROMPT, max_new_tokens=280, **settings)
        assert len(found.token_ids) == 280
        times = Counter(map(id, allocated))
        assert not times if again else times and set(times.values()) == {1}, times


@pytest.mark.slow
def test_threads_take_turns(engine):
    prompts = [f"Tom has {n} apples." for n in range(6)]
    settings = GenerationSettings(24, threshold=partial_threshold(engine), block_tokens=6)
    wanted = [engine.generate(prompt, settings).token_ids for prompt in prompts]
    alone = [engine.generate_target(prompt, settings).token_ids for prompt in prompts]

    def ask(i: int) -> tuple[list[int], list[int]]:
        return engine.generate(prompts[i], settings).token_ids, engine.generate_target(prompts[i], settings).token_ids

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, [*range(6)] * 4))
    assert found == list(zip(wanted, alone, strict=True)) * 4


def test_a_continued_text_keeps_its_spaces(make_model, tokenizer):
    words = llama_tokenizer()
    size = {"vocab_size": len(words), "eos_token_id": 1, "pad_token_id": 1}
    target = language_model(printable(make_model("llama", **size), words), words)
    engine = ParseEngine.from_models(
        target, language_model(printable(make_model("llama", seed=3, **size), words), words)
    )
    spaced = 0
    for text in ("Once", "Once upon", "Once upon a", "Once upon a time", "so they share 19."):
        prompt = Verbatim(text)
        ids = target.render(prompt)
        for model, answer in (
            (target, engine.generate(prompt, mode="exact", max_new_tokens=8)),
            (engine.draft, engine.generate_draft(prompt, max_new_tokens=8)),
        ):
            assert text + answer.text == model.tokenizer.decode(ids + answer.token_ids, skip_special_tokens=True)
            spaced += answer.text.startswith(" ")
        drafter = ModelDrafter(engine.draft, language_model(make_model("llama"), tokenizer))
        drafter.reset(prompt, Sampling())  # and on the way to a target with other tokens
        assert tokenizer.decode(drafter.propose([], 8).ids).startswith(answer.text)
    assert spaced, "no text begins with a space: choose other prompts"


def test_a_verbatim_prompt_meets_no_template(make_engine, make_model, tokenizer, random_adapter):
    engine = make_engine()
    ids = tokenizer.encode(PROMPT)
    own = greedy(engine, ids, 16)
    chosen = Verbatim.of_tokens([*ids[:4], 257, *ids[4:]], tokenizer)  # with a special token in between
    for prompt, wanted in ((Verbatim(PROMPT), own), (chosen, greedy(engine, list(chosen.ids), 16))):
        assert engine.generate(prompt, max_new_tokens=16, threshold=1.01).token_ids == wanted
        assert engine.generate(prompt, max_new_tokens=16, mode="exact", draft_text="So 5.").token_ids == wanted
    other = ParseEngine.from_models(
        engine.target, language_model(make_model("llama", vocab_size=300), word_tokenizer())
    )
    assert other.generate(chosen, max_new_tokens=16, mode="exact").token_ids == greedy(engine, list(chosen.ids), 16)
    with pytest.raises(ValueError, match="empty"):
        engine.generate(Verbatim(""))
    with pytest.raises(ValueError, match="999 is no token"):
        engine.generate(Verbatim("", (999,)))
