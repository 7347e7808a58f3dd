"""Where an answer ends by its tokens: `ignore_eos`, `stop_token_ids` and `min_tokens`, as vLLM has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from parse_infer.engine import ParseEngine
from parse_infer.models.decoder import Decoder
from parse_infer.request.answer import Answer
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import Sampling
from parse_infer.token_drafters.registry import load_token_drafter
from tests.parse_infer.language_models import language_model

PROMPT = "Tom has 5 apples."
N = 40


def reference(engine: ParseEngine, settings: GenerationSettings) -> list[int]:
    """The target's greedy answer, token by token, straight from the definition of the settings."""
    decoder, prompt, ids = Decoder(engine.target.model, ()), engine.target.render(PROMPT), list[int]()
    ends = sorted(engine.target.eos_ids | set(settings.stop_token_ids))
    while len(ids) < settings.max_new_tokens:
        decoder.seek([*prompt, *ids])
        logits = decoder.next_logits().clone()
        if len(ids) < settings.min_tokens:
            logits[ends] = -torch.inf
        ids.append(int(logits.argmax()))
        if ids[-1] in settings.stop_token_ids or (ids[-1] in engine.target.eos_ids and not settings.ignore_eos):
            break
    return ids


@pytest.fixture
def engine(make_engine) -> ParseEngine:
    """Its models end an answer with a letter that both of them write soon, though not at once."""
    plain = make_engine()
    ids = plain.generate_target(PROMPT, max_new_tokens=N).token_ids
    draft = plain.generate_draft(PROMPT, max_new_tokens=N).token_ids
    token = next(token for token in ids if token in draft and min(ids.index(token), draft.index(token)) > 5)
    for part in (plain.target, plain.draft):
        part.model.generation_config.eos_token_id = token
    target, drafting = (language_model(part.model, part.tokenizer, part.name) for part in (plain.target, plain.draft))
    return ParseEngine.from_models(target, drafting, plain.backend.judge)


Cases = Sequence[tuple[str, Callable[[list[int], int], dict]]]
CASES: Cases = [
    ("ignore", lambda ids, eos: {"ignore_eos": True}),
    ("stop", lambda ids, eos: {"ignore_eos": True, "stop_token_ids": [ids[25]]}),
    ("two ends", lambda ids, eos: {"stop_token_ids": [next(i for i in ids if i != eos)]}),
    ("least", lambda ids, eos: {"min_tokens": 20}),
    ("least, ignored", lambda ids, eos: {"min_tokens": 20, "ignore_eos": True}),
    ("least and stop", lambda ids, eos: {"min_tokens": 13, "stop_token_ids": ids[:3]}),
    ("all of them", lambda ids, eos: {"min_tokens": N}),
]


def settings_of(engine: ParseEngine, case: str) -> GenerationSettings:
    free = reference(engine, GenerationSettings(N, ignore_eos=True))
    (eos,) = engine.target.eos_ids - {engine.target.tokenizer.eos_token_id}
    assert eos in free[5:13], "the plain answer ends early"
    return GenerationSettings(N, **dict(CASES)[case](free, eos))


@pytest.mark.parametrize("case", [name for name, _ in CASES])
@pytest.mark.parametrize("guesses", [None, "lookup", "draft"])
@pytest.mark.slow
def test_above_one_and_exact_are_the_greedy_target_with_the_same_end(engine, case, guesses):
    settings = settings_of(engine, case)
    wanted = reference(engine, settings)
    assert wanted != reference(engine, GenerationSettings(N))
    if guesses is not None:
        engine.backend.target_drafter = load_token_drafter(guesses, engine.target, engine.draft)
    alone = engine.generate_target(PROMPT, settings, speculate=True)
    assert alone.token_ids == wanted
    for threshold, mode in ((1.01, "validity"), (1.0, "validity"), (1.01, "exact")):  # no validity reaches 1.0
        for block_tokens in ("whole", 6):
            for keep_greedy_match in (True, False):
                options = {
                    "threshold": threshold,
                    "mode": mode,
                    "block_tokens": block_tokens,
                    "keep_greedy_match": keep_greedy_match,
                }
                ours = engine.generate(PROMPT, settings, **options)
                assert ours.token_ids == wanted, options
                assert (ours.text, ours.finish_reason) == (alone.text, alone.finish_reason)


@pytest.mark.parametrize("case", [name for name, _ in CASES])
@pytest.mark.parametrize("block_tokens", ["whole", 6])
def test_an_accepted_draft_keeps_to_them_too(engine, case, block_tokens):
    settings = settings_of(engine, case)
    ours = engine.generate(PROMPT, settings, threshold=0.0, block_tokens=block_tokens)
    assert ours.stats.accepted_tokens or case == "least and stop"  # its draft begins with an end token
    ends = set(settings.stop_token_ids) | (set() if settings.ignore_eos else engine.target.eos_ids)
    banned = set(settings.stop_token_ids) | engine.target.eos_ids
    assert not banned & set(ours.token_ids[: settings.min_tokens])
    behind = ours.token_ids[settings.min_tokens :]
    assert not ends & set(behind[:-1]) and (ours.token_ids[-1] in ends) == (ours.finish_reason == "eos")
    assert ours.finish_reason == "eos" or len(ours.token_ids) == N
    assert "".join(span.text for span in ours.spans) == ours.text
    assert sum(span.n_tokens for span in ours.spans) == len(ours.token_ids)
    shown = ours.token_ids[:-1] if ours.finish_reason == "eos" else ours.token_ids
    assert ours.text == engine.target.tokenizer.decode(shown), "the end token counts, and has no text"


@pytest.mark.parametrize("guesses", [None, "draft"])
def test_what_is_sampled_holds_no_end_too_early(engine, guesses):
    if guesses is not None:
        engine.backend.target_drafter = load_token_drafter(guesses, engine.target, engine.draft)
    hot = Sampling(3.0, seed=1)
    often = [token for token in range(97, 120) if token not in engine.target.eos_ids]
    settings = GenerationSettings(30, min_tokens=12, stop_token_ids=often, resume_sampling=hot, draft_sampling=hot)
    for threshold in (0.0, 1.01):
        for seed in range(4):
            again = Sampling(3.0, seed=seed)
            found = engine.generate(PROMPT, settings, threshold=threshold, resume_sampling=again, draft_sampling=again)
            assert not {*often, *engine.target.eos_ids} & set(found.token_ids[:12]), found.token_ids
            assert len(found.token_ids) >= 12


def test_stop_strings_count_after_min_tokens_only(tokenizer):
    """As in vLLM: a stop string ends the answer where a later token completes it."""
    ids = tokenizer.encode("ab ab ab ab")
    for least, text in ((0, "ab"), (1, "ab"), (2, "ab ab"), (4, "ab ab"), (5, "ab ab ab"), (11, "ab ab ab ab")):
        for sizes in ([11], [1] * 11, [2, 9], [5, 6], [4, 3, 4]):
            answer, at = Answer(tokenizer, {258}, ["ab"], 20, min_tokens=least), 0
            assert tokenizer.decode(answer.truncate(ids, 99)) == text
            for size in sizes:
                piece = answer.truncate(ids[at : at + size], 99)
                answer.add(piece, "draft")
                at += size
            assert answer.text == text and answer.is_finished == (least != 11), (least, sizes)


def test_wrong_ones_are_refused(engine):
    for settings, told in [
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 41}, "min_tokens is 41, but max_new_tokens is 40"),
        ({"min_tokens": True}, "min_tokens is True"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids contains 1.5"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5"),
        ({"stop_token_ids": [260]}, "260 is no token of 'target', which has tokens 0 to 259"),
        ({"ignore_eos": 1}, "ignore_eos is 1"),
    ]:
        with pytest.raises(ValueError, match=told):
            engine.generate(PROMPT, max_new_tokens=N, **settings)
