"""The engine's promises, on tiny random models: what is kept, what follows it, where it ends, and what it costs."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from parse_infer.decoding.adaptive import MIN_SAMPLES
from parse_infer.drafters.model_drafter import ModelDrafter
from parse_infer.engine import ParseEngine
from parse_infer.judge.zero_shot import ZeroShotJudge
from parse_infer.models.decoder import Decoder
from parse_infer.models.growing_kv_cache import GrowingKVCache
from parse_infer.request.events import Accepted, Done, Drafted, Interrupted, Resumed, Verified
from parse_infer.settings.acceptance import maximal_valid_prefix
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import Sampling
from parse_infer.speculation.registry import load_token_drafter
from parse_infer.text.cuts import CutPolicy
from parse_infer.text.prompts import Verbatim
from tests.parse_infer.language_models import (
    TokenCount,
    language_model,
    llama_tokenizer,
    printable,
    resembling,
    word_tokenizer,
)

PROMPT = "Tom has 5 apples."
PROBE_LEN = 2  # of the random adapter


@pytest.fixture
def engine(make_engine) -> ParseEngine:
    return make_engine()


def greedy(engine: ParseEngine, ids: list[int], n: int) -> list[int]:
    """The target's greedy continuation of any context, by a decoder of its own."""
    decoder = Decoder(engine.target.model, engine.target.eos_ids)
    decoder.seek(ids)
    return list(decoder.decode(n))


def partial_threshold(engine: ParseEngine, rule: str = "first_failure", **options) -> float:
    """A threshold at which the engine keeps some segments of its first draft, but not all."""
    options = {"max_new_tokens": 40, "block_tokens": "whole", **options}
    _, verified, *_ = itertools.islice(engine.stream(PROMPT, **options), 2)
    validity = [segment.validity for segment in verified.segments]
    for threshold in sorted(validity):
        if 0 < maximal_valid_prefix(validity, threshold, rule) < len(validity):
            return threshold
    raise AssertionError(f"no threshold splits {validity}: choose another seed")


def threshold_of_both(engine: ParseEngine, **options) -> float:
    """A threshold at which target and draft model both write a part of the answer."""
    _, verified, *_ = itertools.islice(engine.stream(PROMPT, **{**options, "block_tokens": "whole"}), 2)
    thresholds = sorted(segment.validity for segment in verified.segments)
    for threshold in thresholds:
        spans = engine.generate(PROMPT, threshold=threshold, **options).spans
        if {span.source for span in spans} == {"draft", "target"}:
            return threshold
    raise AssertionError(f"one of the two writes everything at each of {thresholds}: choose another seed")


# The answer is the target's own where that is promised


@pytest.mark.parametrize("block_tokens", ["whole", "auto", 6])
@pytest.mark.parametrize("keep_greedy_match", [True, False])
def test_threshold_above_one_is_the_greedy_target(engine, block_tokens, keep_greedy_match):
    alone = engine.generate_target(PROMPT, max_new_tokens=40)
    ours = engine.generate(
        PROMPT, max_new_tokens=40, threshold=1.01, block_tokens=block_tokens, keep_greedy_match=keep_greedy_match
    )
    assert ours.token_ids == alone.token_ids and len(ours.token_ids) == 40
    assert ours.text == alone.text and ours.finish_reason == alone.finish_reason
    if not keep_greedy_match:
        assert ours.stats.accepted_tokens == 0


def test_above_one_only_the_greedy_match_takes_a_second_draft(engine):
    """Without it a second draft would be dropped like the first."""
    settings = GenerationSettings(40, threshold=1.01, keep_greedy_match=False)
    blocks, whole = (engine.generate(PROMPT, settings, block_tokens=n) for n in (4, "whole"))
    assert blocks.token_ids == whole.token_ids and blocks.stats == whole.stats, (blocks.stats, whole.stats)
    for lossless in ({"keep_greedy_match": True}, {"mode": "exact"}):
        found = engine.generate(PROMPT, settings, block_tokens=4, **lossless)
        assert found.stats.rounds > 1 and found.token_ids == whole.token_ids


@pytest.mark.parametrize("block_tokens", ["whole", "auto", 6])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3)], ids=["greedy", "sampled"])
def test_nothing_is_drafted_that_nobody_would_keep(engine, block_tokens, sampling):
    settings = GenerationSettings(40, threshold=1.01, block_tokens=block_tokens, resume_sampling=sampling)
    engine.backend.target_drafter = load_token_drafter("draft", engine.target, engine.draft)
    ours, lossless = engine.generate(PROMPT, settings), engine.generate_target(PROMPT, settings, speculate=True)
    assert ours.token_ids == lossless.token_ids and len(ours.token_ids) == 40
    assert ours.stats.draft_tokens == 0 < ours.stats.drafter_forwards  # measured times decide how many
    greedy = sampling.greedy  # else no token can be kept as the target's own choice
    given = engine.generate(PROMPT, settings, draft_text="Tom has 4.")
    assert bool(given.stats.draft_tokens) == greedy
    assert engine.generate(PROMPT, settings, threshold=1.0).stats.draft_tokens
    engine.backend.target_drafter = load_token_drafter("lookup", engine.target)
    assert bool(engine.generate(PROMPT, settings).stats.draft_tokens) == greedy  # it proposes less than a draft


@pytest.mark.parametrize("block_tokens", ["whole", 6])
def test_exact_mode_is_the_greedy_target_for_fewer_forwards(engine, block_tokens):
    alone = engine.generate_target(PROMPT, max_new_tokens=40)
    ours = engine.generate(PROMPT, max_new_tokens=40, mode="exact", block_tokens=block_tokens)
    assert ours.token_ids == alone.token_ids
    assert 0 < ours.stats.acceptance_rate < 1
    assert ours.stats.target_forwards < alone.stats.target_forwards
    assert (ours.stats.rounds > 1) == (block_tokens != "whole")


def test_exact_mode_needs_no_judge(make_engine):
    engine = make_engine()
    bare = ParseEngine.from_models(engine.target, engine.draft)
    ours = bare.generate(PROMPT, max_new_tokens=30, mode="exact")
    assert ours.token_ids == bare.generate_target(PROMPT, max_new_tokens=30).token_ids
    with pytest.raises(ValueError, match="has no judge"):
        bare.generate(PROMPT)


def test_every_architecture_keeps_both_promises(make_model, tokenizer, random_adapter, architecture):
    model = make_model(architecture)
    draft = language_model(resembling(make_model, model, 0.1, architecture), tokenizer)
    engine = ParseEngine.from_models(language_model(model, tokenizer), draft, random_adapter(model, probe_ids=()))
    alone = engine.generate_target(PROMPT, max_new_tokens=20)  # prompt and answer are longer than any sliding window
    for threshold, mode in ((1.5, "validity"), (1.0, "validity"), (1.5, "exact")):  # no validity here reaches 1.0
        settings = GenerationSettings(20, threshold, mode=mode, block_tokens=6, keep_greedy_match=False)
        ours = engine.generate(PROMPT, settings)
        assert ours.token_ids == alone.token_ids
        assert ours.stats.rounds > 1 or threshold > 1  # an exact draft may be right throughout


# The target alone, interruptions, and prompts as they stand


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


# What is kept of the draft, and what follows


@pytest.mark.parametrize("rule", ["first_failure", "longest"])
def test_the_target_resumes_behind_the_maximal_valid_prefix(engine, rule):
    draft = engine.generate_draft(PROMPT, max_new_tokens=36 if rule == "longest" else 40).token_ids
    text = engine.target.tokenizer.decode(draft)
    threshold = partial_threshold(engine, rule, draft_text=text, max_new_tokens=50)
    options = {"max_new_tokens": 50, "keep_greedy_match": False, "acceptance": rule, "threshold": threshold}
    _, verified, accepted, *_, done = engine.stream(PROMPT, draft_text=text, **options)
    kept = maximal_valid_prefix([s.validity for s in verified.segments], threshold, rule)
    cut = sum(s.n_tokens for s in verified.segments[:kept])
    assert 0 < cut < len(draft) and accepted.n_tokens == cut
    result = done.generation
    assert result.token_ids[:cut] == draft[:cut]
    prompt = engine.target.render(PROMPT)
    assert result.token_ids[cut:] == greedy(engine, prompt + draft[:cut], 50 - cut)
    assert [span.validity for span in result.spans[:kept]] == [s.validity for s in verified.segments[:kept]]
    assert (result.spans[kept].source, result.spans[kept].validity) == ("target", None)


def test_the_rules_differ_where_a_failure_lies_in_the_middle(engine):
    *_, done = engine.stream(PROMPT, max_new_tokens=40, threshold=0.0)
    validity = [span.validity for span in done.generation.spans]
    threshold = validity[-1]  # the whole draft holds
    assert min(validity) < threshold
    first = engine.generate(PROMPT, max_new_tokens=40, threshold=threshold, keep_greedy_match=False)
    longest = engine.generate(
        PROMPT, max_new_tokens=40, threshold=threshold, keep_greedy_match=False, acceptance="longest"
    )
    assert first.stats.accepted_tokens < longest.stats.accepted_tokens == 40


def test_a_draft_accepted_as_a_whole_costs_one_forward(engine):
    draft = engine.generate_draft(PROMPT, max_new_tokens=40)
    ours = engine.generate(PROMPT, max_new_tokens=40, threshold=0.0)
    assert ours.token_ids == draft.token_ids and ours.text == draft.text
    assert (ours.stats.target_forwards, ours.stats.acceptance_rate) == (1, 1.0)


def test_the_exact_tail_changes_no_token_and_saves_forwards(engine):
    own = engine.generate_target(PROMPT, max_new_tokens=40).text
    text = own[:38] + ("x" if own[38] != "x" else "y")  # the target's own answer but for its last letter
    threshold = partial_threshold(engine, draft_text=text)
    settings = GenerationSettings(max_new_tokens=40, threshold=threshold)
    without = engine.generate(PROMPT, settings.override(keep_greedy_match=False), draft_text=text)
    with_tail = engine.generate(PROMPT, settings, draft_text=text)
    saved = 38 - without.stats.accepted_tokens
    assert 0 < saved < 38 and with_tail.stats.exact_tail_tokens == saved
    assert with_tail.stats.accepted_tokens == 38
    assert with_tail.token_ids == without.token_ids
    assert with_tail.stats.target_forwards <= without.stats.target_forwards - saved
    tail = next(span for span in with_tail.spans if span.validity is None)
    assert (tail.source, tail.n_tokens) == ("draft", saved)


def test_no_exact_tail_where_the_target_samples(engine):
    sampled = engine.generate(
        PROMPT, max_new_tokens=40, threshold=1.5, resume_sampling=Sampling(temperature=1.0, seed=3)
    )
    assert sampled.stats.accepted_tokens == 0


# Costs


def test_the_rejected_rest_of_a_draft_saves_forwards_and_changes_nothing(engine):
    own = engine.generate_target(PROMPT, max_new_tokens=40)
    at = len(own.text) // 3
    text = own.text[:at] + ("x" if own.text[at] != "x" else "y") + own.text[at + 1 :]  # one wrong letter
    ours = engine.generate(PROMPT, max_new_tokens=40, threshold=1.5, draft_text=text)
    assert ours.token_ids == own.token_ids
    assert ours.stats.accepted_tokens == ours.stats.exact_tail_tokens == at
    # 6 guesses and the target's own token each, once two tokens are found again.
    assert ours.stats.target_forwards <= 1 + -(-(40 - at) // 7) + 4


def test_the_first_resumed_token_costs_no_forward(engine):
    result = engine.generate(PROMPT, max_new_tokens=30, threshold=1.0, keep_greedy_match=False)
    assert result.stats.target_forwards == 1 + (30 - 1)  # the pass, then one for each token but the first


def test_a_shared_prompt_is_not_prefilled_again(engine):
    prompt = engine.target.render(PROMPT)
    settings = GenerationSettings(max_new_tokens=24, threshold=1.0, keep_greedy_match=False)
    probes = 24 // 4 * PROBE_LEN
    for again, context in ((PROMPT, 1), (PROMPT[:-1] + "!", 2)):  # only what differs, and the end of the prompt
        engine.generate(PROMPT, settings)
        with TokenCount(engine.target.model) as target, TokenCount(engine.draft.model) as draft:
            engine.generate(again, settings)
        assert target.widths[0] == context + 24 + probes < len(prompt) + 24 + probes
        assert draft.widths[0] == context


def test_consecutive_blocks_read_only_what_is_new(engine):
    settings = GenerationSettings(max_new_tokens=40, threshold=1.0, keep_greedy_match=False, block_tokens=8)
    with TokenCount(engine.target.model) as target, TokenCount(engine.draft.model) as draft:
        events = list(engine.stream(PROMPT, settings))
    prompt = len(engine.target.render(PROMPT))
    drafts = [event for event in events if isinstance(event, Drafted)]
    passes = [width for width in target.widths if width > 1]
    assert [event.n_tokens for event in drafts] == [8] * 9 + [4]  # the target writes 4 tokens after each
    probes = [PROBE_LEN * -(-event.n_tokens // 4) for event in drafts]
    expected = [event.n_tokens + n + 1 for event, n in zip(drafts, probes, strict=True)]  # 1: the target's last token
    expected[0] += prompt - 1
    assert passes == expected
    # The draft model reads the prompt once, then the segment that the target wrote and the guesses behind it.
    assert draft.widths[0] == prompt and max(draft.widths[1:]) <= 8


def test_statistics_count_what_happened(engine):
    threshold = partial_threshold(engine)
    with TokenCount(engine.target.model) as target, TokenCount(engine.draft.model) as draft:
        events = list(engine.stream(PROMPT, max_new_tokens=40, block_tokens=6, threshold=threshold))
    stats, drafted = events[-1].generation.stats, [e for e in events if isinstance(e, Drafted)]
    assert stats.rounds == len(drafted) > 1
    assert stats.draft_tokens == sum(e.n_tokens for e in drafted)
    assert stats.accepted_tokens == sum(e.n_tokens for e in events if isinstance(e, Accepted))
    assert stats.verification_passes == sum(e.n_tokens > 0 for e in drafted)
    assert stats.target_forwards == len(target.widths)
    assert stats.draft_forwards == len(draft.widths)


# Where an answer ends


def test_max_new_tokens_bounds_a_draft_that_never_ends(engine):
    result = engine.generate(PROMPT, max_new_tokens=17, threshold=0.0)
    assert (len(result.token_ids), result.finish_reason) == (17, "length")
    assert result.stats.draft_tokens == 17 and result.stats.target_forwards == 1


@pytest.mark.parametrize("block_tokens", ["whole", "auto", 6])
def test_the_target_goes_on_where_the_draft_models_window_ends(make_engine, block_tokens):
    prompt = make_engine().target.render(PROMPT)
    engine = make_engine(draft_window=len(prompt) + 12)
    result = engine.generate(PROMPT, max_new_tokens=30, threshold=0.0, block_tokens=block_tokens)
    sizes = [4, 2, 4, 2] if block_tokens == 6 else [4] * 3  # a segment has 4 tokens, or ends with its block
    assert [(s.source, s.n_tokens) for s in result.spans] == [*(("draft", n) for n in sizes), ("target", 18)]
    assert result.token_ids[12:] == greedy(engine, prompt + result.token_ids[:12], 18)
    assert result.stats.verification_passes == {"whole": 1, "auto": 1, 6: 2}[block_tokens]
    # A draft that may continue leaves no state for the target's first token.
    assert result.stats.target_forwards == result.stats.verification_passes + 17 + (block_tokens == 6)


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_the_targets_window_bounds_answer_and_probes(make_engine, threshold):
    engine = make_engine()
    room = 20
    engine.target.window = len(engine.target.render(PROMPT)) + room
    with TokenCount(engine.target.model) as target:
        drafted, *_, done = engine.stream(PROMPT, threshold=threshold, keep_greedy_match=False)
    assert drafted.n_tokens == room - PROBE_LEN
    assert (len(done.generation.token_ids), done.generation.finish_reason) == (room, "length")
    assert done.generation.token_ids[room - PROBE_LEN :] == greedy(
        engine, engine.target.render(PROMPT) + done.generation.token_ids[: room - PROBE_LEN], PROBE_LEN
    )
    assert len(target.widths) == done.generation.stats.target_forwards


def end_with(engine: ParseEngine, token: int) -> ParseEngine:
    """The same engine with another token as the end of an answer."""
    for part in (engine.target, engine.draft):
        part.model.generation_config.eos_token_id = token
    target = language_model(engine.target.model, engine.target.tokenizer)
    draft = language_model(engine.draft.model, engine.draft.tokenizer)
    return ParseEngine.from_models(target, draft, engine.backend.judge)


def test_an_end_token_in_the_draft_ends_the_answer(engine):
    draft = engine.generate_draft(PROMPT, max_new_tokens=40)
    token = draft.token_ids[20]
    first = draft.token_ids.index(token)
    result = end_with(engine, token).generate(PROMPT, max_new_tokens=40, threshold=0.0)
    assert result.token_ids == draft.token_ids[: first + 1]
    assert (result.text, result.finish_reason) == (draft.text[:first], "eos")
    assert result.stats.target_forwards == 1


def test_an_end_token_of_the_target_ends_the_answer(engine):
    alone = engine.generate_target(PROMPT, max_new_tokens=40)
    token = alone.token_ids[20]
    first = alone.token_ids.index(token)
    ending = end_with(engine, token)
    result = ending.generate(PROMPT, max_new_tokens=40, threshold=1.5)
    assert result.token_ids == alone.token_ids[: first + 1]
    assert (result.text, result.finish_reason) == (alone.text[:first], "eos")
    assert ending.generate_target(PROMPT, max_new_tokens=40).token_ids == result.token_ids


def fresh_substring(text: str, position: int, before: int = 3, after: int = 3) -> str:
    """The text around `position`, which must not occur earlier."""
    stop = text[position - before : position + after]
    assert len(stop) == before + after and text.index(stop) == position - before, (
        f"{stop!r} occurs earlier in {text!r}"
    )
    return stop


def check_stop(result, full: str, stop: str) -> None:
    assert result.text == full[: full.index(stop) + len(stop)]
    assert result.finish_reason == "stop"
    assert "".join(span.text for span in result.spans) == result.text
    assert sum(span.n_tokens for span in result.spans) == len(result.token_ids) == len(result.text)  # 1 token a letter


def test_a_stop_string_inside_the_draft(engine):
    full = engine.generate(PROMPT, max_new_tokens=40, threshold=0.0)
    stop = fresh_substring(full.text, 10)
    with TokenCount(engine.draft.model) as draft:
        result = engine.generate(PROMPT, max_new_tokens=40, threshold=0.0, stop=stop)
    check_stop(result, full.text, stop)
    assert len(draft.widths) == len(result.text) < 40  # the draft model does not write on either
    assert result.stats.target_forwards == 1


def test_a_stop_string_before_characters_that_nobody_can_read(engine):
    draft = "It is 7. END \ufffd\ufffd"
    answer = engine.generate(PROMPT, draft_text=draft, threshold=0.0, stop="END", max_new_tokens=40)
    assert (answer.text, answer.finish_reason) == ("It is 7. END", "stop")
    assert answer.stats.draft_tokens == len(answer.token_ids) == 12


def test_a_stop_string_inside_a_text_draft(engine):
    result = engine.generate(PROMPT, draft_text="One two.\nThree four.", threshold=0.0, stop=["four", "o."])
    check_stop(result, "One two.\nThree four.", "o.")


def test_a_stop_string_across_the_seam(engine):
    settings = GenerationSettings(
        40, threshold=partial_threshold(engine), block_tokens="whole", keep_greedy_match=False
    )
    full = engine.generate(PROMPT, settings)
    seam = full.stats.accepted_tokens
    stop = fresh_substring(full.text, seam)  # three letters of the draft and three of the target
    check_stop(engine.generate(PROMPT, settings.override(stop=stop)), full.text, stop)


def test_a_stop_string_in_the_resumed_part(engine):
    settings = GenerationSettings(
        40, threshold=partial_threshold(engine), block_tokens="whole", keep_greedy_match=False
    )
    full = engine.generate(PROMPT, settings)
    position = next(
        p for p in range(full.stats.accepted_tokens + 3, 38) if full.text.index(full.text[p - 3 : p + 3]) == p - 3
    )
    stop = fresh_substring(full.text, position)
    check_stop(engine.generate(PROMPT, settings.override(stop=stop)), full.text, stop)


def test_a_stop_string_from_the_target_into_the_next_draft(engine):
    settings = GenerationSettings(max_new_tokens=40, threshold=1.0, block_tokens=6)
    full = engine.generate(PROMPT, settings)
    ends = list(itertools.accumulate(span.n_tokens for span in full.spans))
    sources = [span.source for span in full.spans]
    at = next(
        end
        for end, pair in zip(ends, itertools.pairwise(sources), strict=False)
        if end > 8 and pair == ("target", "draft")
    )
    stop = fresh_substring(full.text, at)
    check_stop(engine.generate(PROMPT, settings.override(stop=stop)), full.text, stop)


def test_a_stop_string_in_the_rejected_part_ends_nothing(engine):
    draft = engine.generate_draft(PROMPT, max_new_tokens=40).text
    full = engine.generate(PROMPT, max_new_tokens=40, threshold=1.5, keep_greedy_match=False)
    position = next(p for p in range(1, 38) if draft[p - 1 : p + 2] not in full.text)
    result = engine.generate(
        PROMPT, max_new_tokens=40, threshold=1.5, keep_greedy_match=False, stop=draft[position - 1 : position + 2]
    )
    assert result.text == full.text and result.finish_reason == "length"


# Spans and events


@pytest.mark.parametrize("block_tokens", ["whole", "auto", 6])
@pytest.mark.parametrize("letters", [True, False])
def test_spans_and_events_add_up_to_the_text(
    make_engine, make_model, tokenizer, random_adapter, block_tokens, letters
):
    if letters:
        engine = make_engine()
    else:  # every byte may come, so that characters break at seams and many are no characters at all
        model = make_model("llama")
        draft = resembling(make_model, model, 0.2)
        engine = ParseEngine.from_models(
            language_model(model, tokenizer), language_model(draft, tokenizer), random_adapter(model, probe_ids=())
        )
    settings = {"max_new_tokens": 40, "block_tokens": block_tokens}
    # The second adapter has token doubt, which grows more slowly than the doubt about segments.
    threshold = threshold_of_both(engine, **settings) if letters or block_tokens == "whole" else 0.99
    events = list(engine.stream(PROMPT, threshold=threshold, **settings))
    assert [type(e) for e in events[:3]] == [Drafted, Verified, Accepted] and isinstance(events[-1], Done)
    result = events[-1].generation
    assert result.text == tokenizer.decode(result.token_ids, skip_special_tokens=True) != ""
    assert "".join(span.text for span in result.spans) == result.text
    assert sum(span.n_tokens for span in result.spans) == len(result.token_ids)
    assert {span.source for span in result.spans} == {"draft", "target"}
    assert "".join(e.text for e in events if isinstance(e, (Accepted, Resumed))) == result.text
    resumed = [e.token_id for e in events if isinstance(e, Resumed)]
    assert len(resumed) == sum(span.n_tokens for span in result.spans if span.source == "target")
    drafted, verified, accepted = events[:3]
    if letters:
        assert "".join(s.text for s in verified.segments) == drafted.text == accepted.text + accepted.rejected


def test_the_target_replaces_the_rejected_segment_of_each_block(engine):
    """This judge has a probe alone, so it knows only that a segment fails."""
    settings = GenerationSettings(max_new_tokens=30, threshold=1.0, keep_greedy_match=False, block_tokens=8)
    events = list(engine.stream(PROMPT, settings))  # no validity here reaches 1.0
    written = [sum(isinstance(e, Resumed) and e.round == r for e in events) for r in range(1, 9)]
    assert written == [4] * 7 + [2]  # the adapter's cut policy: 4 tokens a segment
    assert events[-1].generation.token_ids == engine.generate_target(PROMPT, settings).token_ids


def test_the_draft_model_continues_from_the_targets_token(engine):
    settings = GenerationSettings(max_new_tokens=30, threshold=1.0, keep_greedy_match=False, block_tokens=8)
    answer: list[int] = []
    for event in engine.stream(PROMPT, settings):
        if isinstance(event, Drafted) and event.n_tokens:
            decoder = Decoder(engine.draft.model, engine.draft.eos_ids)
            decoder.seek(engine.draft.render(PROMPT) + answer)
            own = list(decoder.decode(min(8, 30 - len(answer))))
            assert event.text == engine.draft.tokenizer.decode(own)
        elif isinstance(event, Resumed):
            answer.append(event.token_id)


# Requests


def test_a_list_of_prompts_keeps_its_order(engine):
    prompts = ["One.", [{"role": "user", "content": "Two."}], "Three."]
    settings = GenerationSettings(max_new_tokens=10, threshold=0.45)
    together = engine.generate(prompts, settings)
    assert [r.token_ids for r in together] == [engine.generate(p, settings).token_ids for p in prompts]
    assert together[1].token_ids == engine.generate("Two.", settings).token_ids
    assert len({r.text for r in together}) == 3
    assert engine.generate([], settings) == []


def test_draft_texts_belong_to_prompts_one_by_one(engine):
    results = engine.generate(["One.", "Two."], draft_text=["It is 1.", "It is 2."], threshold=0.0)
    assert [r.text for r in results] == ["It is 1.", "It is 2."]
    assert all(r.finish_reason == "eos" and r.stats.draft_forwards == 0 for r in results)
    with pytest.raises(ValueError, match="one each"):
        engine.generate(["One.", "Two."], draft_text="It is 1.")
    with pytest.raises(ValueError, match="draft text is"):
        engine.generate("One.", draft_text=" ")


def test_a_rejected_draft_text_leaves_the_greedy_target(engine):
    alone = engine.generate_target(PROMPT, max_new_tokens=20)
    for block_tokens in ("whole", 6):
        ours = engine.generate(PROMPT, draft_text="No.", threshold=1.5, max_new_tokens=20, block_tokens=block_tokens)
        assert ours.token_ids == alone.token_ids
        assert ours.stats.target_forwards == 20


def test_sampling_is_reproducible_by_its_seed(engine):
    def texts(seed: int) -> tuple[str, str]:
        hot = Sampling(temperature=1.5, seed=seed)
        drafted, *_, done = engine.stream(
            PROMPT, max_new_tokens=12, draft_sampling=hot, resume_sampling=hot, threshold=1.0
        )
        return drafted.text, done.generation.text

    assert texts(1) == texts(1)
    assert texts(1)[0] != texts(2)[0] and texts(1)[1] != texts(2)[1]


def test_a_rejected_token_is_not_drawn_again_by_the_noise_that_wrote_it(make_engine):
    """One seed for both models, as `generate --seed` gives it: their random numbers differ all the same."""
    engine = make_engine(noise=0.0)
    hot = Sampling(temperature=50.0, seed=1)  # nearly uniform: the same random numbers would give the same tokens
    for block_tokens in ("whole", 6):
        settings = GenerationSettings(
            16, threshold=1.0, block_tokens=block_tokens, draft_sampling=hot, resume_sampling=hot
        )
        drafts, written = [], []
        for event in engine.stream(PROMPT, settings):
            if isinstance(event, Drafted):
                drafts.append(event.text)
                written.append("")
            elif isinstance(event, Resumed):
                written[-1] += event.text
        assert all(draft[:4] != text[:4] for draft, text in zip(drafts, written, strict=True) if len(text) >= 4)
        assert len({text[:4] for text in written}) == len(written)


def test_between_blocks_the_target_writes_its_own_greedy_token(engine):
    prompt = engine.target.render(PROMPT)
    for keep_greedy_match in (True, False):
        settings = {"max_new_tokens": 60, "block_tokens": 6, "keep_greedy_match": keep_greedy_match}
        result = engine.generate(PROMPT, threshold=threshold_of_both(engine, **settings), **settings)
        assert result.stats.rounds > 1
        at = 0
        for span in result.spans:
            if span.validity is None:
                ids = result.token_ids[at : at + span.n_tokens]
                assert ids == greedy(engine, prompt + result.token_ids[:at], span.n_tokens)
            at += span.n_tokens


def test_a_draft_of_one_segment_goes_on_as_long_as_it_holds(engine):
    drafter = ModelDrafter(engine.draft, engine.target, one_segment=engine.backend.segmenter.policy)
    stepwise = ParseEngine.from_models(engine.target, engine.draft, engine.backend.judge, drafter=drafter)
    whole = engine.generate(PROMPT, max_new_tokens=20, threshold=0.0)
    ours = stepwise.generate(PROMPT, max_new_tokens=20, threshold=0.0)
    assert ours.token_ids == whole.token_ids
    assert (ours.stats.rounds, ours.stats.target_forwards) == (5, 5)  # a segment has 4 tokens
    assert all(span.source == "draft" for span in ours.spans)


def test_segments_are_judged_as_parts_of_their_answer(make_engine, random_adapter):
    """A judge of tokens reads the accepted segments as drafts, not as the target's own tokens."""
    base = make_engine()
    judge = random_adapter(base.target.model, logprobs=True)
    engine = ParseEngine.from_models(base.target, base.draft, judge)
    drafter = ModelDrafter(base.draft, base.target, one_segment=engine.backend.segmenter.policy)
    stepwise = ParseEngine.from_models(base.target, base.draft, judge, drafter=drafter)
    settings = {"max_new_tokens": 20, "threshold": 0.0, "block_tokens": "whole"}
    whole, steps = (
        [s.validity for e in each.stream(PROMPT, **settings) if isinstance(e, Verified) for s in e.segments]
        for each in (engine, stepwise)
    )
    assert len(set(whole)) > 2 and steps == pytest.approx(whole, abs=1e-4)


def test_the_targets_tokens_are_not_sampled_with_the_same_randomness(engine):
    hot = Sampling(temperature=50.0, seed=1)  # nearly uniform: the same random numbers would give the same tokens
    settings = GenerationSettings(max_new_tokens=16, threshold=1.0, block_tokens=6, resume_sampling=hot)
    ids = engine.generate(PROMPT, settings).token_ids
    assert len(set(ids)) > 8


def test_another_request_ends_an_open_stream(engine):
    stream = engine.stream(PROMPT, max_new_tokens=20, threshold=1.5, keep_greedy_match=False)
    next(event for event in stream if isinstance(event, Resumed))
    alone = engine.generate_target("Other.", max_new_tokens=5)
    with pytest.raises(RuntimeError, match="another request"):
        list(stream)
    assert engine.generate_target("Other.", max_new_tokens=5).token_ids == alone.token_ids


@pytest.mark.parametrize("kind", [Drafted, Verified, Accepted, Resumed])
@pytest.mark.parametrize("other", ["generate", "stream", "score"])
def test_another_request_ends_an_open_stream_wherever_it_stands(engine, kind, other):
    settings = GenerationSettings(20, threshold=partial_threshold(engine), block_tokens=6, keep_greedy_match=False)
    stream = engine.stream(PROMPT, settings)
    next(event for event in stream if isinstance(event, kind))
    if other == "generate":
        engine.generate("Other.", max_new_tokens=2)
    elif other == "stream":
        next(engine.stream("Other."))
    else:
        engine.score("Other.", "It is 1.")
    with pytest.raises(RuntimeError, match="another request"):
        list(stream)


@pytest.mark.parametrize("kind", [Drafted, Verified, Accepted, Resumed])
def test_what_runs_no_model_leaves_an_open_stream_alone(engine, kind):
    """A check, a request that was only prepared, and requests that are refused."""
    settings = GenerationSettings(20, threshold=partial_threshold(engine), block_tokens=6, keep_greedy_match=False)
    expected = engine.generate(PROMPT, settings)
    stream = engine.stream(PROMPT, settings)
    next(event for event in stream if isinstance(event, kind))
    engine.check("Other.", settings)
    engine.check("Other.", settings, "A draft.")
    prepared = engine.stream("Other.", settings)
    with pytest.raises(ValueError, match="context window"):
        engine.generate(["Other.", "x" * 3000])
    with pytest.raises(ValueError, match="context window"):
        engine.score(PROMPT, "x" * 3000)
    *_, done = stream
    assert (done.generation.text, done.generation.spans) == (expected.text, expected.spans)
    *_, done = prepared
    assert done.generation.text == engine.generate("Other.", settings).text


def test_the_forwards_of_the_draft_model_count_whatever_it_does(engine):
    guided = ParseEngine.from_models(
        engine.target,
        engine.draft,
        engine.backend.judge,
        target_drafter=load_token_drafter("draft", engine.target, engine.draft),
    )
    with TokenCount(engine.draft.model) as draft:
        text = guided.generate(PROMPT, max_new_tokens=12, draft_text="No.", threshold=1.5).stats
    assert text.draft_forwards == len(draft.widths) > 0
    with TokenCount(engine.draft.model) as draft:
        alone = guided.generate_target(PROMPT, max_new_tokens=12, speculate=True).stats
    assert alone.draft_forwards == len(draft.widths) > 0


def test_a_dropped_stream_leaves_the_engine_usable(engine):
    stream = engine.stream(PROMPT, max_new_tokens=20, threshold=1.5, keep_greedy_match=False)
    next(event for event in stream if isinstance(event, Resumed))
    stream.close()
    expected = engine.generate_target(PROMPT, max_new_tokens=10).token_ids
    assert engine.generate(PROMPT, max_new_tokens=10, threshold=1.5).token_ids == expected


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("ending", ["close", "collected"])
def test_a_dropped_stream_waits_for_nobody(engine, ending, adaptive):
    """Another thread holds the models for as long as it likes; an event loop or the garbage collector goes on."""
    streams = [engine.stream(PROMPT, max_new_tokens=20, threshold=1.5, keep_greedy_match=False, adaptive=adaptive)]
    next(event for event in streams[0] if isinstance(event, Resumed))
    working, dropped = Event(), Event()

    def hold() -> bool:
        working.set()
        return not dropped.wait(20)  # interrupts the work below where nothing is dropped

    def drop() -> None:
        streams[0].close() if ending == "close" else streams.clear()
        dropped.set()

    with ThreadPoolExecutor(2) as pool:
        with engine.backend.cancellable(hold):
            other = pool.submit(engine.generate, "Other.", max_new_tokens=6, threshold=1.5, adaptive=adaptive)
            assert working.wait(20)
            pool.submit(drop)
            found = other.result()  # Interrupted: the drop has waited for the models
        assert found.token_ids == engine.generate_target("Other.", max_new_tokens=6).token_ids
    expected = engine.generate_target(PROMPT, max_new_tokens=10).token_ids
    assert engine.generate(PROMPT, max_new_tokens=10, threshold=1.5, adaptive=adaptive).token_ids == expected


# Bad input is found before any work


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt is empty"),
        (" \n", "prompt is empty"),
        ([{"role": "user", "content": ""}], "prompt is empty"),
        ("x" * 3000, "3002 tokens for 'target', whose context window is 2048"),
        ([{"role": "user"}], "not a chat message"),
        ([{"content": "How many?"}], "not a chat message"),
        (7, "not 7"),
    ],
)
def test_a_bad_prompt_is_one_clear_sentence_before_any_work(engine, prompt, message):
    before = engine.target.decoder.forwards, engine.draft.decoder.forwards
    for call in (
        lambda: engine.generate(prompt),
        lambda: engine.generate([PROMPT, prompt]),
        lambda: engine.generate(prompt, draft_text="It is 1."),
        lambda: engine.stream(prompt),
        lambda: engine.generate_target(prompt),
        lambda: engine.score(prompt, "It is 1."),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert (engine.target.decoder.forwards, engine.draft.decoder.forwards) == before


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("block_tokens", ["whole", "auto", 6])
def test_a_prompt_beyond_the_draft_models_window_is_the_targets_alone(make_engine, block_tokens, adaptive):
    engine = make_engine(draft_window=10)
    engine.controller.note = lambda *_, **__: pytest.fail("an empty draft tells nothing about drafts")
    for _ in range(MIN_SAMPLES + 1):
        found = engine.generate(PROMPT, max_new_tokens=20, block_tokens=block_tokens, adaptive=adaptive)
        assert found.token_ids == engine.generate_target(PROMPT, max_new_tokens=20).token_ids
        assert [span.source for span in found.spans] == ["target"] and found.stats.verification_passes == 0
    assert engine.draft.decoder.forwards == 0
    engine = make_engine()
    engine.target.window = 10
    with pytest.raises(ValueError, match="'target', whose context window is 10"):
        engine.generate(["a", PROMPT])
    assert engine.target.decoder.forwards == engine.draft.decoder.forwards == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"treshold": 0.5}, "did you mean 'threshold'"),
        ({"threshold": -0.1}, "-0.1"),
        ({"threshold": float("nan")}, "nan"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"mode": "fast"}, "validity, exact"),
        ({"acceptance": "all"}, "first_failure, longest"),
        ({"block_tokens": "stop"}, "whole number of at least 1, or one of: auto, whole"),
        ({"block_tokens": 0}, "block_tokens is 0"),
        ({"block_tokens": True}, "block_tokens is True"),
        ({"stop": ("",)}, "stop string"),
        ({"draft_sampling": 0.7}, "Sampling"),
        ({"mode": "exact", "resume_sampling": Sampling(temperature=1.0)}, "greedy"),
    ],
)
def test_bad_settings_are_one_clear_sentence(engine, overrides, message):
    with pytest.raises(ValueError, match=message):
        engine.generate(PROMPT, **overrides)


def test_no_draft_model(make_engine):
    engine = make_engine()
    alone = ParseEngine.from_models(engine.target, judge=engine.backend.judge)
    for call in (alone.generate, alone.stream, alone.generate_draft):
        with pytest.raises(ValueError, match="no draft model"):
            call(PROMPT)
    assert alone.generate(PROMPT, draft_text="Fine.", threshold=0.0).text == "Fine."


# Thresholds, scores, judges


def test_the_threshold_comes_from_the_adapter_unless_given(make_engine):
    engine = make_engine()
    engine.backend.judge.config.threshold = 0.25
    parts = engine.target, engine.draft, engine.backend.judge
    assert ParseEngine.from_models(*parts).threshold == 0.25
    assert ParseEngine.from_models(*parts, threshold=0.75).threshold == 0.75
    engine.backend.judge.config.threshold = None
    assert ParseEngine.from_models(*parts).threshold == 0.5
    with pytest.raises(ValueError, match="-1"):
        ParseEngine.from_models(*parts, threshold=-1)
    strict = ParseEngine.from_models(*parts, threshold=2.0)
    assert strict.generate(PROMPT, max_new_tokens=8, keep_greedy_match=False).stats.accepted_tokens == 0
    assert strict.generate(PROMPT, max_new_tokens=8, threshold=0.0).stats.accepted_tokens == 8


def test_score_judges_a_response_as_a_draft_is_judged(engine):
    response = "There are 2 x 3 = 6.\nSo é 6."
    _, verified, *_ = engine.stream(PROMPT, draft_text=response, threshold=0.0)
    score = engine.score(PROMPT, response)
    assert [s.validity for s in score.segments] == pytest.approx([s.validity for s in verified.segments], abs=1e-5)
    assert "".join(s.text for s in score.segments) == response
    assert score.validity == score.segments[-1].validity and score.threshold == 0.5
    below = [i for i, s in enumerate(score.segments) if s.validity < 0.5]
    assert score.first_error == (below[0] if below else None)
    lines = engine.score(PROMPT, response, cut_policy=CutPolicy("step"))
    assert [s.text for s in lines.segments] == ["There are 2 x 3 = 6.\n", "So é 6."]
    assert lines.validity == pytest.approx(score.validity, abs=1e-5)
    unfinished = engine.score(PROMPT, response, finished=False)
    assert unfinished.validity != pytest.approx(score.validity, abs=1e-5)


def test_score_refuses_what_it_cannot_judge(engine):
    with pytest.raises(ValueError, match="context window of 'target'"):
        engine.score(PROMPT, "x" * 2100)
    with pytest.raises(ValueError, match="response is ''"):
        engine.score(PROMPT, "")
    with pytest.raises(ValueError, match="has no judge"):
        ParseEngine.from_models(engine.target, engine.draft).score(PROMPT, "Fine.")


def test_zero_shot_needs_no_adapter(engine):
    judge = ZeroShotJudge(engine.target.model, engine.target.tokenizer, words=("yes", "no"))
    zero = ParseEngine.from_models(engine.target, engine.draft, judge)
    assert zero.threshold == 0.5
    result = zero.generate(PROMPT, draft_text="One.\nTwo.\nThree.", threshold=0.0)
    assert [s.text for s in result.spans] == ["One.\n", "Two.\n", "Three."]
    assert all(0 < s.validity < 1 for s in result.spans)
    alone = zero.generate_target(PROMPT, max_new_tokens=12)
    assert zero.generate(PROMPT, max_new_tokens=12, threshold=1.5).token_ids == alone.token_ids


# Another tokenizer for the draft model


@pytest.mark.parametrize("block_tokens", ["whole", "auto", 6])
def test_other_tokens_the_answer_is_still_the_targets(mixed_engine, block_tokens):
    alone = mixed_engine.generate_target(PROMPT, max_new_tokens=24)
    for options in ({"threshold": 1.5}, {"mode": "exact"}):
        ours = mixed_engine.generate(PROMPT, max_new_tokens=24, block_tokens=block_tokens, **options)
        assert ours.token_ids == alone.token_ids


def test_other_tokens_an_accepted_draft_is_the_draft_models_text(mixed_engine):
    draft = mixed_engine.generate_draft(PROMPT, max_new_tokens=40)
    ours = mixed_engine.generate(PROMPT, max_new_tokens=40, threshold=0.0)
    assert ours.text == draft.text[:40] and len(ours.token_ids) == 40  # one target token a letter
    assert ours.stats.target_forwards == 1


def test_other_tokens_the_draft_model_continues_from_the_targets_text(mixed_engine):
    draft, words = mixed_engine.draft, mixed_engine.draft.tokenizer
    settings = GenerationSettings(max_new_tokens=16, threshold=1.0, keep_greedy_match=False, block_tokens=6)
    written = ""
    for event in mixed_engine.stream(PROMPT, settings):
        if isinstance(event, Drafted) and event.n_tokens:
            decoder = Decoder(draft.model, draft.eos_ids)
            decoder.seek(draft.render(PROMPT) + words.encode(written, add_special_tokens=False))
            own = words.decode(list(decoder.decode(min(6, 16 - len(written)))))
            assert own.startswith(event.text)  # whole words of the block
        elif isinstance(event, Resumed):
            written += event.text


# Token drafters change the cost and nothing else


@pytest.mark.parametrize("block_tokens", ["whole", "auto", 6])
@pytest.mark.parametrize("name", ["lookup", "draft"])
def test_token_drafters_change_no_span(engine, name, block_tokens):
    settings = {"max_new_tokens": 60, "block_tokens": block_tokens, "threshold": partial_threshold(engine)}
    plain = engine.generate(PROMPT, **settings)
    faster = ParseEngine.from_models(
        engine.target,
        engine.draft,
        engine.backend.judge,
        target_drafter=load_token_drafter(name, engine.target, engine.draft),
    )
    for _ in range(2):  # also with everything that a first answer left in the caches
        ours = faster.generate(PROMPT, **settings)
        assert [(s.text, s.source, s.n_tokens) for s in ours.spans] == [
            (s.text, s.source, s.n_tokens) for s in plain.spans
        ]
        validity = [s.validity for s in plain.spans if s.validity is not None]
        assert [s.validity for s in ours.spans if s.validity is not None] == pytest.approx(validity, abs=1e-4)
    alone = engine.generate_target(PROMPT, max_new_tokens=60)
    guided = faster.generate_target(PROMPT, max_new_tokens=60, speculate=True)
    assert guided.token_ids == alone.token_ids
    if name == "draft":
        assert guided.stats.target_forwards < alone.stats.target_forwards


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target_drafter": "lokup"}, "target_drafter is 'lokup'; did you mean 'lookup'?"),
        ({"target_drafter": "draft:tokens=2.5", "draft": "zoo:draft"}, "must be a whole number, not 2.5"),
        ({"target_drafter": ":tokens=3"}, "target_drafter is ''; known: lookup, draft"),
        ({"target_drafter": "draft"}, "which needs a draft model"),
        ({"target_drafter": "eagle3"}, "target_drafter is 'eagle3': give the folder of a trained"),
        ({"target_drafter": "lookup:tokens=x"}, "'tokens=x' in the token drafter 'lookup:tokens=x' is not KEY=NUMBER"),
    ],
)
def test_a_wrong_token_drafter_is_found_before_anything_is_loaded(arguments, message, monkeypatch):
    monkeypatch.setattr(
        "parse_infer.backends.local.backend.load_language_model", lambda *a, **k: pytest.fail("a model was loaded")
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        ParseEngine.from_pretrained("zoo:target", **arguments)
