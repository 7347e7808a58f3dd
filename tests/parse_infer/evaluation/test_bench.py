"""The benchmark: statistics, what each mode computes, and a whole run that stops and goes on."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from parse_infer.calibration.held_out import prompt_hash
from parse_infer.calibration.record_store import RecordStore
from parse_infer.decoding import adaptive
from parse_infer.decoding.adaptive import MIN_SAMPLES
from parse_infer.decoding.block_length import FIRST, BlockLength
from parse_infer.engine import ParseEngine
from parse_infer.evaluation import assisted
from parse_infer.evaluation import figure as figures
from parse_infer.evaluation.assisted import AssistantSettings, in_target_vocabulary
from parse_infer.evaluation.mode_names import (
    DEFAULT_MODES,
    MODES,
    SWEPT,
    block_tokens_of,
    check_modes,
    describe_mode,
    judge_of,
    lossless_of,
)
from parse_infer.evaluation.modes import Mode, make_modes, problems_digest, read_draft, timed
from parse_infer.evaluation.records import Record
from parse_infer.evaluation.report import speedups, summarise
from parse_infer.evaluation.results_file import to_columns, write_results
from parse_infer.evaluation.run import BenchSettings, run_bench, schedule
from parse_infer.evaluation.statistics import (
    difference_interval,
    rate_ratio_interval,
    ratio_intervals,
    share_interval,
    wilson_interval,
)
from parse_infer.evaluation.tables import category_table, header, rows, terminal_tables
from parse_infer.judge.registry import find_rule
from parse_infer.models.loading import LanguageModel
from parse_infer.models.token_map import token_map
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import Sampling
from parse_infer.text.cuts import CutPolicy
from parse_infer.token_drafters.draft_model_proposer import DraftModelProposer
from parse_infer.token_drafters.prompt_lookup import PromptLookupDrafter
from tests.parse_infer.language_models import reduced_pair, resembling, word_tokenizer
from tests.parse_infer.token_drafters.test_eagle import make_head
from tools.doc_tables import read_results

KEYS = {
    *("accuracy", "accuracy_ci", "accuracy_diff", "accuracy_diff_ci", "tokens_per_s", "speedup", "speedup_ci"),
    *("acceptance_rate", "target_forwards", "limit_share"),
}


@dataclass(frozen=True)
class Problem:
    id: str
    prompt: str
    reference: str = ""


PROBLEMS = [Problem(f"p{i}", f"What is {i} and {i}?") for i in range(4)]
BUDGET = 12
ALL_MODES = (*MODES, "target+lookup", "target+draft", "parse+none", "parse+lookup", "parse+draft")


@pytest.fixture
def engine(
    make_model: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast, random_adapter
) -> ParseEngine:
    target, draft = make_model("llama", seed=0), make_model("llama", seed=5)
    return ParseEngine.from_models(
        LanguageModel("tiny-target", target, tokenizer),
        LanguageModel("tiny-draft", draft, tokenizer),
        random_adapter(target),
    )


def make(engine: ParseEngine, *names: str, **settings) -> list[Mode]:
    return make_modes(engine, names, GenerationSettings(BUDGET, **settings))


def outputs(engine: ParseEngine, names: tuple[str, ...], **settings) -> dict[str, list[list[int]]]:
    modes = make(engine, *names, **settings)
    return {m.name: [timed(engine, m, p.prompt)[0].token_ids for p in PROBLEMS] for m in modes}


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_the_terminals_table_shows_every_mode_and_figure(width):
    long = "target+runs/a-long-folder/of-an-eagle3-head:tokens=12:top_k=4"
    figures = {
        "accuracy": 0.875,
        "accuracy_ci": (0.825, 0.915),
        "accuracy_diff": -0.133,
        "accuracy_diff_ci": (-0.285, 0.031),
    }
    figures |= {"tokens_per_s": 12345.0, "speedup": 13.73, "speedup_ci": (13.53, 13.93), "over_lossless": 15.43}
    figures |= {"over_lossless_ci": (15.01, 15.99)}
    figures |= {"seconds_per_answer": 12.345, "first_text_s": 1.234, "longest_wait_s": 1.234, "acceptance_rate": 0.876}
    figures |= {"drafted": 123.45, "target_forwards": 123.4, "acceptance_length": 12.34, "limit_share": 0.876}
    results = {
        "environment": {"problems": 300},
        "modes": dict.fromkeys(["target", "target+draft", long, "parse"], figures),
    }
    console = Console(width=width, file=io.StringIO())
    for table in terminal_tables(results, width):
        console.print(table)
    shown = console.file.getvalue()
    tables = len(terminal_tables(results, width))
    lines = shown.splitlines()
    assert "…" not in shown and max(map(len, lines)) <= width
    for mode in ("target", "target+draft", "parse"):
        assert sum(re.match(rf"{re.escape(mode)}(\s|$)", line) is not None for line in lines) == tables
    for figure in (
        "87.5",
        "[82.5, 91.5]",
        "[-28.5, +3.1]",
        "12345",
        "[13.53, 13.93]",
        "15.43×",
        "[15.01, 15.99]",
        "12.345",
        "123.45",
        "123.4",
        "12.34",
    ):
        assert shown.count(figure) >= 3, figure


def test_wilson_interval_has_width_at_the_ends_and_holds_the_share():
    low, high = wilson_interval(300, 300)
    assert 0.98 < low < 1 and high == pytest.approx(1)
    low, high = wilson_interval(81, 263)  # Newcombe 1998, table II: 0.2553 to 0.3662
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)
    with pytest.raises(ValueError, match="must not be greater than"):
        wilson_interval(3, 2)


@pytest.mark.parametrize(("n", "k", "a", "b"), [(30, 2, 49, 1), (100, 4, 199, 1), (100, 4, 0.5, 0.2), (50, 8, 2, 1)])
def test_the_interval_of_samples_covers_their_share_and_difference(n, k, a, b):
    """Also where nearly all are right, and where the samples of a problem are alike."""
    generator, held, apart = np.random.default_rng(1), 0, 0
    for _ in range(300):
        chance = generator.beta(a, b, n)
        worse = np.clip(chance - 0.05 * generator.random(n), 0, 1)
        theirs, ours = (generator.binomial(k, each) / k for each in (chance, worse))
        low, high = share_interval(theirs, k)
        held += low <= a / (a + b) <= high
        low, high = difference_interval(ours, theirs, samples=k)
        apart += low <= (worse - chance).mean() <= high
    assert held / 300 > 0.92 and apart / 300 > 0.92, (held, apart)
    alike = np.repeat([1.0, 0.0], [80, 20])
    assert share_interval(alike, 8) == pytest.approx(wilson_interval(80, 100)), "samples that are alike add nothing"
    assert share_interval(np.ones(20), 4) == pytest.approx(wilson_interval(20, 20)), "nor where they do not differ"
    low, high = difference_interval(alike * 0.75, alike * 0.75, samples=4)
    assert low < -0.005 and high > 0.005, "equal shares of few problems are not surely equal"
    assert share_interval(np.full(100, 0.8), 1) == pytest.approx(wilson_interval(80, 100))


def test_bootstrap_is_paired_and_repeatable():
    generator = np.random.default_rng(0)
    seconds = generator.uniform(1, 100, 60)  # problems differ much more than modes do
    tokens = np.full(60, 50.0)
    low, high = rate_ratio_interval(tokens, seconds / 2, tokens, seconds)
    assert low == pytest.approx(2) and high == pytest.approx(2)
    share, other = generator.random(60), generator.random(60) < 0.8
    interval = difference_interval(share, other, seed=3)
    assert interval == difference_interval(share, other, seed=3)
    assert interval[0] < share.mean() - other.mean() < interval[1]
    above, below = generator.random((200, 2)), generator.random((200, 1)) + 0.5
    found = ratio_intervals(above, below)
    for own, (low, high) in zip(above.T, found, strict=True):
        one = rate_ratio_interval(own, below[:, 0], np.ones(200), np.ones(200))
        assert (low, high) == pytest.approx(one, abs=0.01) and low < own.sum() / below.sum() < high


@pytest.mark.slow
def test_the_interval_of_a_difference_of_shares():
    """It covers the true difference as often as it says, also where the two differ seldom or not at all."""
    generator = np.random.default_rng(0)
    for n, lost, gained in ((50, 0.02, 0.0), (150, 0.01, 0.005), (150, 0.02, 0.08), (400, 0.1, 0.05)):
        covered = 0
        for u in generator.random((400, n)):
            theirs, ours = u < 0.8, (u >= lost) & ((u < 0.8) | (u > 1 - gained))
            low, high = difference_interval(ours, theirs)
            covered += low <= gained - lost <= high
            assert difference_interval(theirs, ours) == pytest.approx((-high, -low))
        assert covered / 400 > 0.93, (n, lost, gained)
    low, high = difference_interval([1] * 160 + [0] * 40, [1] * 160 + [0] * 40)
    assert -0.02 < low == -high < 0
    large = difference_interval([1] * 9000 + [0] * 1000, [1] * 5000 + [0] * 5000)
    assert large == pytest.approx((0.39, 0.41), abs=0.001)


def test_every_mode_comes_first_equally_often_and_the_sweep_stays_within_its_limit():
    modes = [Mode(name, lambda prompt: None) for name in ("target", "parse", "parse@0.5")]
    runs = list(schedule(PROBLEMS, modes, 3, 2))
    assert len(runs) == 2 * (3 * 3 + 2)
    first = [next(m.name for p, m, r in runs if p is problem and r == 0) for problem in PROBLEMS[:3]]
    assert sorted(first) == ["parse", "parse@0.5", "target"]
    assert not any(p is PROBLEMS[3] and "@" in m.name for p, m, r in runs)


def test_lossless_modes_write_what_the_target_writes(engine):
    wanted = outputs(engine, ("target",))["target"]
    found = outputs(engine, ("parse", "sequential", "assisted", "transformers"), threshold=1.1)
    assert found == dict.fromkeys(found, wanted)


def test_a_threshold_of_zero_keeps_the_whole_draft(engine):
    found = outputs(engine, ("draft", "parse", "sequential"), threshold=0.0)
    assert found["draft"] == found["parse"] == found["sequential"]


def test_sequential_verification_reads_each_segment_once(engine):
    mode = make(engine, "sequential", threshold=0.0)[0]
    stats = timed(engine, mode, PROBLEMS[0].prompt)[0].stats
    assert stats.rounds == stats.verification_passes == stats.target_forwards == BUDGET // 4  # cut every 4 tokens
    assert stats.acceptance_rate == 1


def test_assisted_generation_is_counted(engine):
    mode = make(engine, "assisted")[0]
    stats = timed(engine, mode, PROBLEMS[0].prompt)[0].stats
    assert 0 < stats.target_forwards <= BUDGET and stats.draft_forwards > 0
    assert stats.accepted_tokens == BUDGET - stats.target_forwards


def test_token_exact_share_is_that_of_the_target(engine):
    own = engine.generate_target(PROBLEMS[0].prompt, max_new_tokens=BUDGET).token_ids
    assert read_draft(engine, PROBLEMS[0].prompt, own)[1] == BUDGET
    other = [*own[:5], (own[5] + 1) % 256, *own[6:]]
    seconds, exact = read_draft(engine, PROBLEMS[0].prompt, other)
    assert seconds > 0 and exact == 5


def test_no_mode_starts_from_another_ones_cache(engine):
    target, parse = make(engine, "target", "parse", threshold=1.1)
    timed(engine, parse, PROBLEMS[0].prompt)
    generation, _ = timed(engine, target, PROBLEMS[0].prompt)
    assert generation.stats.target_forwards == BUDGET  # the prompt is read again


GUIDED = ("parse", "parse+none", "parse+lookup", "parse-min-p", "parse-zero-shot", "sequential")


def test_every_mode_cuts_drafts_as_the_engine_does(engine):
    policy = CutPolicy("tokens", every=3)  # the adapter's own: every 4
    engine = ParseEngine.from_models(engine.target, engine.draft, engine.backend.judge, cut_policy=policy)
    for mode in make(engine, *GUIDED, threshold=0.0):
        assert mode.engine.backend.segmenter.policy == policy, mode.name
        stats = timed(engine, mode, PROBLEMS[0].prompt)[0].stats
        if mode.name == "sequential":
            assert stats.rounds == BUDGET / 3


def test_baselines_use_the_token_drafter_of_parse(engine, make_model):
    draft = LanguageModel("alike", resembling(make_model, engine.target.model), engine.draft.tokenizer)
    engine = ParseEngine.from_models(engine.target, draft, engine.backend.judge)
    drafters = {mode.name: mode.engine.backend.target_drafter for mode in make(engine, *GUIDED, "target")}
    assert drafters["target"] is drafters["parse+none"] is None
    assert isinstance(drafters["parse+lookup"], PromptLookupDrafter)
    for name in ("parse", "parse-min-p", "parse-zero-shot", "sequential"):
        assert isinstance(drafters[name], DraftModelProposer), name
    # They are used: with nothing accepted, the target writes everything, and needs fewer forwards for it.
    forwards = {}
    for mode in make(engine, "parse", "parse+none", threshold=1.1, keep_greedy_match=False):
        forwards[mode.name] = sum(timed(engine, mode, p.prompt)[0].stats.target_forwards for p in PROBLEMS)
    assert forwards["parse"] < forwards["parse+none"]


def test_an_engines_own_token_drafters_play_no_part(engine):
    guesses = DraftModelProposer(engine.draft, engine.target)
    engine = ParseEngine.from_models(engine.target, engine.draft, engine.backend.judge, target_drafter=guesses)
    target, parse = make(engine, "target", "parse+none", threshold=1.1)
    assert timed(engine, target, PROBLEMS[0].prompt)[0].stats.target_forwards == BUDGET  # plain: a token each
    assert parse.engine.backend.target_drafter is None


def test_a_draft_model_with_other_tokens_proposes_nothing(engine, make_model):
    draft = LanguageModel("foreign", make_model("llama", seed=5, vocab_size=300, eos_token_id=0), word_tokenizer())
    foreign = ParseEngine.from_models(engine.target, draft, engine.backend.judge)
    assert [mode.engine.backend.target_drafter for mode in make(foreign, *GUIDED[:2], *GUIDED[3:])] == [None] * 5


def test_a_draft_model_with_few_of_the_targets_tokens_takes_part_everywhere(make_model, random_adapter):
    target, draft = reduced_pair(make_model, noise=0.01)
    engine = ParseEngine.from_models(target, draft, random_adapter(target.model))
    modes = make(engine, "target", "assisted", "target+draft:tokens=4", "parse", threshold=1.1)
    assert isinstance(modes[-1].engine.backend.target_drafter, DraftModelProposer)
    found = {mode.name: [timed(engine, mode, p.prompt)[0] for p in PROBLEMS] for mode in modes}
    texts = {name: [generation.token_ids for generation in found[name]] for name in found}
    assert texts == dict.fromkeys(texts, texts["target"])
    alone = sum(generation.stats.target_forwards for generation in found["target"])
    for name in ("assisted", "target+draft:tokens=4"):
        assert sum(generation.stats.target_forwards for generation in found[name]) < 0.8 * alone, name


def test_in_the_targets_vocabulary_a_draft_model_says_the_same(make_model):
    target, draft = reduced_pair(make_model)
    tokens = token_map(draft.tokenizer, target.tokenizer)
    other = in_target_vocabulary(draft, target, tokens)
    known = [tokens.target_ids[i] for i in (7, 100, 260, -1, 0)]
    own = [i for token in known for i in tokens.from_target(token)]
    with torch.no_grad():
        wide = other(torch.tensor([known])).logits
        narrow = draft.model(torch.tensor([own])).logits
    assert (wide.shape[-1], narrow.shape[-1]) == (300, len(draft.tokenizer)) and len(draft.tokenizer) < 300
    assert torch.equal(wide[..., tokens.target_ids], narrow)
    assert wide.isneginf().sum(-1).unique().tolist() == [300 - len(draft.tokenizer)]
    assert other.model.layers[0].mlp.up_proj.weight is draft.model.model.layers[0].mlp.up_proj.weight


def test_sizes_follow_the_name_of_the_mode(engine):
    fine, coarse = make(engine, "target+draft:tokens=1:confidence=0", "target+draft:tokens=9:confidence=0")
    drafted = [timed(engine, mode, PROBLEMS[0].prompt)[0].stats.drafter_forwards for mode in (fine, coarse)]
    assert drafted[0] < drafted[1]
    names = ("assisted:tokens=1:confidence=0", "assisted:tokens=5:confidence=0:schedule=heuristic", "assisted")
    draft = engine.draft.model
    before, seen = draft.generation_config.to_dict(), []

    def note(model, _) -> None:
        config = model.generation_config
        seen.append((config.num_assistant_tokens, config.num_assistant_tokens_schedule))

    draft.register_forward_pre_hook(note)
    for mode in make(engine, *names):
        seen.clear()
        stats = timed(engine, mode, PROBLEMS[0].prompt)[0].stats
        assert draft.generation_config.to_dict() == before, mode.name
        if mode.name == names[0]:
            assert set(seen) == {(1, None)} and stats.draft_forwards <= stats.target_forwards
        elif mode.name == names[1]:
            assert seen[0] == (5, "heuristic")
        else:
            assert set(seen) == {(None, None)}
    assert AssistantSettings.parse("assisted:tokens=8:confidence=0.25") == AssistantSettings(8, 0.25)


def test_an_ensemble_of_assisted_generation_keeps_what_the_mixture_prefers(engine):
    prompt = PROBLEMS[0].prompt
    (plain, mixed) = make(engine, "assisted", "assisted:ensemble=0.3")
    answers = [timed(engine, mode, prompt)[0].token_ids for mode in (plain, mixed)]
    context = engine.target.render(prompt)
    with torch.inference_mode():
        target, draft = (
            each.model(torch.tensor([context + answers[1]])).logits[0, len(context) - 1 : -1].softmax(-1)
            for each in (engine.target, engine.draft)
        )
    own, preferred = target.argmax(-1).tolist(), (0.3 * target + 0.7 * draft).argmax(-1).tolist()
    assert all(token in pair for token, *pair in zip(answers[1], own, preferred, strict=True))
    assert answers[1] != own and answers[0] != answers[1], "the models must differ for this test"


def test_an_ensemble_needs_a_transformers_that_has_it(monkeypatch):
    monkeypatch.setattr(assisted, "GenerationConfig", object)
    with pytest.raises(ValueError, match=r"needs assistant_ensemble_weight, which transformers .* lacks: install"):
        check_modes(["assisted:ensemble=0.5"])


def test_a_rule_is_a_mode_with_its_options(engine):
    fly = "parse-fly:entropy=0.5:window=2"
    names = (fly, f"{fly}:8", "parse-relaxed-acceptance", "parse-fly:16")
    judges = ["fly:entropy=0.5,window=2", "fly:entropy=0.5,window=2", "relaxed_acceptance:", "fly:"]
    assert [judge_of(name) for name in (*names, "parse", "target+draft")] == [*judges, None, None]
    modes = make(engine, *names)
    assert [mode.engine.backend.judge.rule for mode in modes] == list(map(find_rule, judges))
    assert [block_tokens_of(name) for name in names] == [None, 8, None, 16]
    lengths = [timed(engine, mode, PROBLEMS[0].prompt)[0].stats.block_tokens for mode in modes[1::2]]
    assert lengths == [8, 16]
    swept = make_modes(engine, ["parse-typical-acceptance"], GenerationSettings(8), thresholds=(0.2,))
    assert [mode.name for mode in swept] == ["parse-typical-acceptance", "parse-typical-acceptance@0.2"]
    assert describe_mode(fly).endswith("with the next tokens, entropy=0.5, window=2")
    for wrong, sentence in (
        ("parse-fly:size=2", "'size' is no option of the judge fly"),
        ("parse-fly:window=0", "the window of fly is 0"),
        ("parse-fly:window=2:wole", "'wole' is no option of the judge fly"),
        ("parse-flie", "unknown mode 'parse-flie'; did you mean 'parse-fly'"),
        ("parse-fly:window=2+lookup", "unknown mode"),
    ):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            check_modes([wrong])


def test_modes_in_words():
    assert describe_mode("parse+none") == "PARSE with the trained adapter, no token drafter"
    assert set(DEFAULT_MODES) - set(MODES) == {"target+draft"}


@pytest.mark.parametrize("size", ["tokens=0", "confidence=2", "schedule=never", "size=3", "", "ensemble=1"])
def test_wrong_sizes_of_assisted_generation_are_named(size):
    name = f"assisted:{size}"
    with pytest.raises(ValueError, match=f"in mode '{name}' is none of: tokens=NUMBER"):
        check_modes([name])


def test_a_mode_may_say_what_follows_a_rejected_draft(engine):
    settings = GenerationSettings(max_new_tokens=24, threshold=1.0, block_tokens="whole", keep_greedy_match=False)
    names = ("parse", "parse:whole", "parse:8", "parse:8+none")
    modes = make_modes(engine, names, settings)
    rounds = {mode.name: timed(engine, mode, PROBLEMS[0].prompt)[0].stats.rounds for mode in modes}
    assert rounds["parse"] == rounds["parse:whole"] == 1
    assert rounds["parse:8"] == rounds["parse:8+none"] > 1
    with pytest.raises(ValueError, match="unknown mode 'parse:hand_bak'"):
        check_modes(["parse:hand_bak"])


def test_a_mode_may_let_the_target_answer_alone(engine, monkeypatch):
    monkeypatch.setattr(adaptive, "CLEAR_SPEEDUP", math.inf)  # else the pace on this machine decides
    (mode,) = make_modes(engine, ["parse:adaptive"], GenerationSettings(8, threshold=1.0, block_tokens="whole"))
    found = [timed(engine, mode, PROBLEMS[0].prompt)[0].stats.rounds for _ in range(2 * MIN_SAMPLES)]
    assert found == [1] * MIN_SAMPLES + [0] * MIN_SAMPLES, "both ways are tried before they are compared"
    assert describe_mode(mode.name).endswith(", adaptive")


def test_a_mode_may_stream(make_engine, random_adapter, monkeypatch):
    """The same text, after a first block that is short."""
    monkeypatch.setattr(BlockLength, "end_after", lambda length, survival: False)
    base = make_engine(noise=0.0)
    judge = random_adapter(base.target.model)
    engine = ParseEngine.from_models(base.target, base.draft, judge)
    modes = make_modes(engine, ["parse", "parse:stream"], GenerationSettings(48, threshold=0.0))
    whole, streamed = (timed(engine, mode, PROBLEMS[0].prompt)[0] for mode in modes)
    assert streamed.token_ids == whole.token_ids and len(whole.token_ids) > 2 * FIRST
    assert streamed.stats.rounds > whole.stats.rounds == 1


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["parze"], "unknown mode 'parze'; did you mean 'parse'"),
        ([" "], "no mode to run; modes: target"),
        (["parse+medusa"], "'medusa': give the folder of a trained head, as recipes/medusa.yaml trains one"),
    ]
    + [
        ([name], "unknown mode")
        for name in ("draft+lookup", "parse+", "target:tokens=2", "target+lookup+lookup", "parse+draft+lookup")
    ],
)
def test_unknown_modes_are_named(names, message):
    with pytest.raises(ValueError, match=message):
        check_modes(names)


def test_a_mode_without_its_part_is_refused(engine):
    alone = ParseEngine.from_models(engine.target)
    with pytest.raises(ValueError, match="mode 'parse' needs a draft model"):
        make_modes(alone, ("target", "parse"))
    with pytest.raises(ValueError, match="mode 'sequential' needs an adapter"):
        make_modes(ParseEngine.from_models(engine.target, engine.draft), ("sequential",))


@pytest.mark.slow
def test_an_interrupted_run_resumes_without_repeating(engine, tmp_path: Path):
    settings = BenchSettings(ALL_MODES, GenerationSettings(6), thresholds=(0.5,), sweep_limit=1, repeats=2)
    calls = 0

    def check(problem: Problem, text: str) -> bool:
        nonlocal calls
        if not text:  # asked before anything is measured, whether there are references at all
            return False
        calls += 1
        if calls == 20:
            raise KeyboardInterrupt
        return len(text) % 2 == 0

    with pytest.raises(KeyboardInterrupt):
        run_bench(engine, PROBLEMS[:2], check, tmp_path, settings)
    assert not (tmp_path / "results.json").exists()
    before = (tmp_path / "records.jsonl").read_text()
    assert before.count("\n") == 19
    (tmp_path / "records.jsonl").write_text(before + '{"problem_id": "p0", "mo')  # cut off while writing

    results = run_bench(engine, PROBLEMS[:2], check, tmp_path, settings)
    assert (tmp_path / "records.jsonl").read_text().startswith(before)
    rows = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    keys = {(r["problem_id"], r["mode"], r["repeat"]) for r in rows}
    assert len(keys) == len(rows) == 2 * (2 * len(ALL_MODES) + len(SWEPT))
    assert calls == len(rows) + 1

    assert json.loads((tmp_path / "results.json").read_text()) == json.loads(json.dumps(results))
    evidence = read_results(tmp_path / "results.json")
    ids = evidence["records"]["problems"]
    kept = list(from_columns(evidence["records"]))
    assert json.loads(json.dumps(summarise(kept, ids, evidence["environment"]))) == evidence
    assert len(kept) == len(rows) and not any(r.text for r in kept)
    assert list(results["modes"]) == list(ALL_MODES)
    assert all(set(figures) >= KEYS for figures in results["modes"].values())
    assert results["modes"]["target"]["speedup"] == 1 and results["modes"]["target"]["accuracy_diff"] == 0
    for lossless in ("assisted", "target+lookup", "target+draft"):
        low, high = results["modes"][lossless]["accuracy_diff_ci"]
        assert results["modes"][lossless]["accuracy_diff"] == 0 and low == -high, lossless
    for name in ("none", "lookup", "draft"):  # what is guessed changes no answer of PARSE either
        texts = {mode: [r["text"] for r in rows if r["mode"] == mode] for mode in ("parse", f"parse+{name}")}
        assert texts["parse"] == texts[f"parse+{name}"]
    assert results["modes"]["target+draft"]["drafter_forwards"] > 0
    assert 0 <= results["acceptance"]["token_exact"] <= 1
    assert results["sweep"]["problems"] == 1 and len(results["sweep"]["points"]) == len(SWEPT)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "| parse |" in (tmp_path / "results.md").read_text()
    assert not list(tmp_path.glob(".*"))

    size = (tmp_path / "records.jsonl").stat().st_size
    run_bench(engine, PROBLEMS[:2], check, tmp_path, settings)
    assert (tmp_path / "records.jsonl").stat().st_size == size
    with pytest.raises(ValueError, match=r"holds a benchmark with max_new_tokens 6 and this one has 13"):
        run_bench(engine, PROBLEMS[:2], check, tmp_path, BenchSettings(ALL_MODES, GenerationSettings(13), repeats=2))


def test_modes_without_target_or_draft_leave_their_comparisons_open(engine, tmp_path: Path):
    settings = BenchSettings(("parse",), GenerationSettings(BUDGET), thresholds=())
    results = run_bench(engine, PROBLEMS[:2], lambda p, text: True, tmp_path, settings)
    figures = results["modes"]["parse"]
    assert figures["speedup"] is None and figures["accuracy_diff"] is None and figures["limit_share"] is None
    assert figures["accuracy"] == 1 and (tmp_path / "figure.png").exists()


@pytest.mark.slow
def test_more_problems_add_to_a_finished_run(engine, tmp_path: Path):
    settings = BenchSettings(("target", "parse"), GenerationSettings(4), thresholds=())

    def measured(problems: list[Problem]) -> list[tuple[str, str]]:
        """The records' problems and modes, after the run."""
        shown = run_bench(engine, problems, lambda p, t: True, tmp_path, settings)
        assert shown["records"]["problems"] == [p.id for p in problems]
        assert shown["environment"]["problems"] == len(problems)
        assert shown["environment"]["digest"] == problems_digest(problems)
        rows = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
        return [(row["problem_id"], row["mode"]) for row in rows]

    first = [("p0", "target"), ("p0", "parse")]
    assert measured(PROBLEMS[:1]) == first
    more = [*first, ("p1", "parse"), ("p1", "target")]
    assert measured(PROBLEMS[:2]) == more
    assert measured(PROBLEMS[1:2]) == more
    other = replace(PROBLEMS[0], prompt=PROBLEMS[2].prompt)  # of the same id
    assert measured([other, PROBLEMS[1]]) == [*more, *first]


def test_problems_must_be_there_and_differ(engine, tmp_path: Path):
    with pytest.raises(ValueError, match="no problems"):
        run_bench(engine, [], lambda p, t: True, tmp_path)
    with pytest.raises(ValueError, match="2 problems have the id 'p0'"):
        run_bench(engine, [PROBLEMS[0], PROBLEMS[0]], lambda p, t: True, tmp_path)
    before = engine.target.decoder.forwards
    with pytest.raises(ValueError, match="some problems have references and others have none"):
        run_bench(engine, PROBLEMS[:2], lambda p, t: None if p.id == "p0" else True, tmp_path)
    assert engine.target.decoder.forwards == before


def test_problems_that_the_adapter_was_trained_on_are_not_measured(engine, tmp_path: Path):
    judge, settings = engine.backend.judge, BenchSettings(("target", "parse"), GenerationSettings(4), thresholds=())
    engine.backend.judge = replace(judge, train_problems=frozenset({prompt_hash(PROBLEMS[1].prompt)}))
    results = run_bench(engine, PROBLEMS, lambda p, t: True, tmp_path / "some", settings)
    assert results["records"]["problems"] == ["p0", "p2", "p3"]
    assert results["environment"]["problems"] == 3
    engine.backend.judge = replace(judge, train_problems=frozenset(prompt_hash(p.prompt) for p in PROBLEMS))
    before = engine.target.decoder.forwards
    with pytest.raises(ValueError, match="4 of the 4 problems are among those that the adapter"):
        run_bench(engine, PROBLEMS, lambda p, t: True, tmp_path / "all", settings)
    assert engine.target.decoder.forwards == before and not (tmp_path / "all").exists()


def test_a_head_that_was_trained_again_is_measured_again(engine, tmp_path: Path):
    """It has the same name and is another rival."""
    head = make_head(engine.target).save_pretrained(tmp_path / "head")
    settings = BenchSettings(("target", f"target+{head}"), GenerationSettings(4))
    run_bench(engine, PROBLEMS[:1], lambda p, t: True, tmp_path / "out", settings)
    weights = load_file(path := head / "model.safetensors")
    save_file({name: values * 2 if values.is_floating_point() else values for name, values in weights.items()}, path)
    with pytest.raises(ValueError, match="holds a benchmark with drafters"):
        run_bench(engine, PROBLEMS[:1], lambda p, t: True, tmp_path / "out", settings)


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match="threshold must be a finite number"):
        BenchSettings(thresholds=(0.5, -1.0))
    with pytest.raises(ValueError, match="repeats is 0"):
        BenchSettings(repeats=0)


SAMPLED_TWICE: dict[str, Any] = {"sampling": {"temperature": 0.7}, "repeats": 2}


def record(problem: str, mode: str, seconds: float, tokens: int, correct: bool | None = True, **more) -> Record:
    own = {"digest": problem, "repeat": 0, "text": "", "finish_reason": "eos", "target_forwards": 1, **more}
    return Record(problem_id=problem, mode=mode, correct=correct, seconds=seconds, n_tokens=tokens, **own)


def from_columns(columns: dict[str, Any]) -> Iterator[Record]:
    """Convert columns to records with empty texts."""
    for mode, values in columns["modes"].items():
        n = len(values["correct"]) // columns["repeats"]
        for i, right in enumerate(values["correct"]):
            row = {name: column[i] for name, column in values.items()}
            own = {
                "problem_id": columns["problems"][i % n],
                "digest": columns["problems"][i % n],
                "mode": mode,
                "repeat": i // n,
                "text": "",
            }
            yield Record(**{**row, **own, "correct": bool(right)})


def test_speedup_is_the_ratio_of_rates_and_time_speedup_that_of_times():
    records = [record("a", "target", 2.0, 100), record("a", "parse", 1.0, 40, draft_tokens=50, accepted_tokens=40)]
    records += [record("a", "draft", 0.5, 50, False, prefill_s=0.3, token_exact_tokens=10)]
    results = summarise(records, ["a"], {"modes": ["target", "draft", "parse"]})
    parse = results["modes"]["parse"]
    assert parse["speedup"] == pytest.approx(0.8) and parse["time_speedup"] == 2
    assert results["limit"]["tokens_per_s"] == 62.5 and parse["limit_share"] == pytest.approx(0.64)
    assert results["acceptance"] == {"semantic": 0.8, "token_exact": 0.2}
    assert results["modes"]["draft"]["accuracy_diff"] == -1


def test_lossless_speculation_is_a_baseline_with_and_without_the_target():
    """Its answers are the target's own, so the difference to it is one to the target."""
    records = [record("a", "target+draft", 2.0, 100), record("b", "target+draft", 2.0, 100, False)]
    records += [record("a", "parse:whole", 1.0, 60, False), record("b", "parse:whole", 1.0, 60, False)]
    alone = summarise(records, ["a", "b"], {"modes": ["target+draft", "parse:whole"]})["modes"]
    assert alone["parse:whole"]["over_lossless"] == pytest.approx(1.2) and alone["target+draft"]["over_lossless"] == 1
    assert (alone["parse:whole"]["accuracy_diff"], alone["parse:whole"]["speedup"]) == (-0.5, None)
    records += [record("a", "target", 4.0, 100, False), record("b", "target", 4.0, 100, False)]
    both = summarise(records, ["a", "b"], {"modes": ["target", "target+draft", "parse:whole"]})["modes"]
    assert both["parse:whole"]["over_lossless"] == pytest.approx(1.2) and both["target"]["over_lossless"] == 0.5
    assert (both["parse:whole"]["accuracy_diff"], both["target+draft"]["accuracy_diff"]) == (0.0, 0.5)


def test_without_references_answers_are_compared_with_the_targets_own():
    def one(mode: str, text: str) -> Record:
        return replace(record("a", mode, 1.0, 10, text=text), correct=None)

    records = [one("target+draft", "own"), one("parse:whole", "other")]
    modes = summarise(records, ["a"], {})["modes"]
    assert (modes["target+draft"]["accuracy"], modes["parse:whole"]["accuracy_diff"]) == (1, -1)
    modes = summarise([*records, one("target", "other")], ["a"], {})["modes"]
    assert (modes["target+draft"]["accuracy_diff"], modes["parse:whole"]["accuracy_diff"]) == (-1, 0)


def test_nothing_is_compared_where_nothing_can_be():
    """Samples differ by chance; without target and lossless speculation there is nothing to compare with."""

    def one(mode: str, text: str, problem: str = "a", repeat: int = 0) -> Record:
        return replace(record(problem, mode, 1.0, 10, text=text, repeat=repeat), correct=None)

    for records, environment in (
        ([one("parse:whole", "x"), one("parse-min-p", "x")], {}),
        ([one(m, f"{m}{i}", repeat=i) for m in ("target", "parse:whole") for i in (0, 1)], SAMPLED_TWICE),
    ):
        results = summarise(records, ["a"], {**environment, "problems": 1})
        assert {m["accuracy"] for m in results["modes"].values()} == {None}
        assert all(row[1:3] == ["", ""] for row in rows(results["modes"])), "no share, and no difference"
    single = summarise([one("target", "x"), one("parse:whole", "x")], ["a"], {})["modes"]["parse:whole"]
    assert single["speedup"] == 1 and single["speedup_ci"] is None, "one problem has no spread"


def test_lossless_speculation_with_sizes_is_the_baseline_where_it_is_alone():
    records = [record("a", "target+draft:tokens=12", 2.0, 100), record("a", "parse:whole", 1.0, 100)]
    assert summarise(records, ["a"], {})["modes"]["parse:whole"]["over_lossless"] == 2
    assert lossless_of(["target+draft:tokens=12", "target+draft"]) == "target+draft"
    assert lossless_of(["target", "target+lookup"]) is None


def test_a_category_counts_problems_and_the_figure_shows_every_mode(tmp_path, monkeypatch):
    names = ["target", "target+lookup", "parse", "parse+lookup", "parse:whole"]
    drafted = {"draft_tokens": 10, "accepted_tokens": 5}
    records = [record(p, mode, 1.0, 10, repeat=i, **drafted) for mode in names for p in ("a", "b") for i in (0, 1)]
    environment = SAMPLED_TWICE | {"modes": names, "problems": 2}
    results = summarise(records, ["a", "b"], environment, {"a": "maths", "b": "code"})
    assert [part["n"] for part in results["categories"].values()] == [1, 1]
    shown: list[str] = []
    point = figures._point
    monkeypatch.setattr(figures, "_point", lambda *given: (shown.append(given[3]), point(*given)))
    figures.draw_figure(results, tmp_path / "figure.png")
    assert len(shown) == len(names) and {"target+lookup", "parse+lookup", "parse:whole"} <= set(shown)


def test_the_median_of_repeats_counts():
    records = [record("a", "target", s, 10, repeat=i) for i, s in enumerate((1.0, 9.0, 2.0))]
    assert summarise(records, ["a"], {})["modes"]["target"]["tokens_per_s"] == 5


def test_all_samples_of_a_sampled_benchmark_count():
    """Problem by problem, as intervals resample problems; a text that comes twice is counted once as distinct."""
    right = {"target": {"a": (1, 1), "b": (0, 0)}, "parse": {"a": (1, 1), "b": (1, 0)}}
    records = [
        record(
            p,
            mode,
            2.0 if mode == "target" else 1.0,
            10,
            bool(x),
            repeat=i,
            **more,
            text=f"{p}{i * (mode == 'target')}",
        )
        for mode, problems in right.items()
        for more in [{"draft_tokens": 10, "accepted_tokens": 5} if mode == "parse" else {}]
        for p, each in problems.items()
        for i, x in enumerate(each)
    ]
    environment = {"sampling": {"temperature": 0.7}, "repeats": 2, "modes": ["target", "parse"]}
    modes = summarise(records, ["a", "b"], environment)["modes"]
    target, parse = modes["target"], modes["parse"]
    assert (target["n"], target["accuracy"], parse["accuracy"], parse["accuracy_diff"]) == (2, 0.5, 0.75, 0.25)
    assert (target["pass_at_k"], parse["pass_at_k"]) == (0.5, 1.0)
    assert (target["distinct"], parse["distinct"]) == (1.0, 0.5)
    low, high = parse["accuracy_diff_ci"]
    assert -0.5 < low < 0.25 < high < 1, "two problems, of which one gains nothing, show little"
    assert parse["speedup"] == parse["time_speedup"] == 2


def test_intervals_of_speed_resample_problems_however_many_answers_each_has():
    """Nine alike answers to one problem, and one to each of two: as independent rows they would look certain."""
    seconds = [1.0] * 9 + [4.0, 2.0]
    ours = [record("x", "parse", 1.0, 10) for _ in seconds]
    theirs = [record("x", "target", each, 10) for each in seconds]
    problems = ["a"] * 9 + ["b", "c"]
    found, naive = (speedups(ours, theirs, keys, seed=0) for keys in (problems, range(11)))
    assert found["speedup"] == naive["speedup"] == pytest.approx(15 / 11) == found["time_speedup"]
    assert found["speedup_ci"][1] == pytest.approx(4, abs=0.01) == found["time_speedup_ci"][1], (
        "only problem b is drawn"
    )
    assert naive["speedup_ci"][1] < 2.5


def test_drafts_that_a_judge_reads_are_drawn_if_asked(engine, tmp_path: Path):
    """A judge that keeps everything writes the draft: the same text for greedy drafts, others for drawn ones."""
    settings = BenchSettings(("parse:whole",), GenerationSettings(BUDGET, threshold=0.0), Sampling(1.0, top_k=50))
    settings = replace(settings, thresholds=(), repeats=2)
    drawn = replace(settings, draft_temperature=0.9)
    assert drawn.answers().draft_sampling == Sampling(0.9, top_k=50) and settings.answers().draft_sampling.greedy
    found = {
        folder: run_bench(engine, PROBLEMS[:1], lambda p, t: True, tmp_path / folder, each)
        for folder, each in (("greedy", settings), ("drawn", drawn))
    }
    distinct = {folder: results["modes"]["parse:whole"]["distinct"] for folder, results in found.items()}
    assert distinct["greedy"] == 0.5 and distinct["drawn"] == 1
    assert "draft_temperature" not in found["greedy"]["environment"]
    assert "(drafts that a judge reads: 0.9)" in (tmp_path / "drawn" / "results.md").read_text()
    with pytest.raises(ValueError, match="does not take draft_sampling: --draft-temperature sets it"):
        replace(settings, generation=GenerationSettings(draft_sampling=Sampling(1.0)))
    with pytest.raises(ValueError, match="temperature"):
        replace(settings, draft_temperature=-1.0)


@pytest.mark.slow
def test_a_sampled_benchmark_samples_in_every_mode(engine, tmp_path: Path):
    names = ("target", "draft", "target+draft", "assisted", "transformers", "parse", "parse:whole")
    settings = BenchSettings(names, GenerationSettings(BUDGET), Sampling(1.0, top_k=50), thresholds=(), repeats=3)
    results = run_bench(engine, PROBLEMS[:2], lambda problem, text: len(text) % 2 == 0, tmp_path, settings)
    rows = [json.loads(line) for line in (tmp_path / "records.jsonl").open()]
    for name in names:
        figures = results["modes"][name]
        assert figures["n"] == 2 and figures["distinct"] > 1 / 3, f"{name} writes the same text again and again"
    again = run_bench(engine, PROBLEMS[:2], lambda problem, text: len(text) % 2 == 0, tmp_path / "b", settings)
    other = [json.loads(line) for line in (tmp_path / "b" / "records.jsonl").open()]
    timed_free = ("target", "draft", "transformers")
    texts = [[r["text"] for r in each if r["mode"] in timed_free] for each in (rows, other)]
    assert texts[0] == texts[1] and again["environment"]["sampling"] == {**asdict(settings.sampling)}
    with pytest.raises(ValueError, match="holds a benchmark with sampling"):
        run_bench(engine, PROBLEMS[:2], lambda p, text: True, tmp_path, replace(settings, sampling=Sampling(0.5)))
    with pytest.raises(ValueError, match="a benchmark seeds each answer itself"):
        replace(settings, sampling=Sampling(1.0, seed=1))


def test_a_damaged_record_is_named_with_its_line(tmp_path: Path):
    store = RecordStore(tmp_path, {"seed": 0}, Record)
    store.append(record("a", "target", 1.0, 10))
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(ValueError, match=r"records.jsonl, line 2 is damaged"):
        RecordStore(tmp_path, {"seed": 0}, Record)
    with pytest.raises(ValueError, match="seed 0 and this one has 1"):
        RecordStore(tmp_path, {"seed": 1}, Record)


def test_records_survive_as_columns_with_a_line_each(tmp_path: Path):
    ids = ["a [1]", "b, {2}"]
    records = [
        record(problem, mode, 0.5 + i, 10 * i, i % 2 == 0, repeat=repeat, draft_tokens=i if mode == "parse" else None)
        for i, (repeat, problem, mode) in enumerate(product((0, 1), ids, ("target", "parse")))
    ] + [record(ids[0], "parse@0.5", 1.0, 3, repeat=repeat) for repeat in (0, 1)]
    columns = to_columns(records[::-1], ids)
    assert set(from_columns(columns)) == set(records)
    assert "draft_tokens" not in columns["modes"]["target"]
    write_results(tmp_path / "results.json", {"environment": {}, "modes": {}, "sweep": None, "records": columns})
    lines = (tmp_path / "results.json").read_text().splitlines()
    assert '        "n_tokens": [0, 20, 40, 60],' in lines and len(lines) < 40
    assert read_results(tmp_path / "results.json")["records"] == columns


def test_results_that_are_none_are_one_sentence(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="run parse-infer bench"):
        read_results(tmp_path / "results.json")
    (tmp_path / "results.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match="has no key 'environment'"):
        read_results(tmp_path / "results.json")


def test_prompts_without_references_are_compared_with_the_target():
    """By category, with tokens per forward; an answer that differs from the target's is the only kind of mistake."""

    def answer(mode: str, problem: str, text: str, forwards: int, seconds: float) -> Record:
        return record(problem, mode, seconds, 12, None, text=text, target_forwards=forwards)

    records = [answer("target", name, f"text of {name}", 12, 1.2) for name in ("a", "b", "c")]
    records += [answer("target+lookup", name, f"text of {name}", 4, 0.6) for name in ("a", "b")]
    records.append(answer("target+lookup", "c", "another text", 6, 0.3))
    environment = {"modes": ["target", "target+lookup"]}
    results = summarise(records, ["a", "b", "c"], environment, {"a": "qa", "b": "qa", "c": "writing"})
    assert results["environment"]["scored"] is False
    assert results["modes"]["target"]["accuracy"] == 1
    assert results["modes"]["target+lookup"]["accuracy"] == pytest.approx(2 / 3)
    lookup = {category: part["modes"]["target+lookup"] for category, part in results["categories"].items()}
    assert lookup == {
        "qa": {"acceptance_length": 3.0, "speedup": pytest.approx(2.0)},
        "writing": {"acceptance_length": 2.0, "speedup": pytest.approx(4.0)},
    }
    assert header(results["environment"])[1] == "as the target, %"
    assert "| qa | 2 | 3.00 (2.00×) |" in category_table(results)
