"""Predict from a few labelled problems what a trained judge would bring: the arithmetic of `parse-data plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from data_tools.labels.build_config import BuildConfig
from data_tools.labels.rows import LabelledDraft
from data_tools.labels.summary import Summary
from parse_infer.decoding.block_length import LONGEST, Costs, expected_pace
from parse_infer.evaluation.statistics import Interval, rate_ratio_interval

_GPU_RATIOS = (4, 10, 20)  # cost of a target forward in draft tokens
_WEAK_TARGET = 0.8  # share of right answers below which single greedy rollouts label badly


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval."""

    value: float
    interval: Interval


@dataclass(frozen=True)
class PredictedSpeedup:
    """Speed-up over the target alone at the best block length, without the prompt's prefill."""

    block_tokens: int
    speedup: Estimate


@dataclass(frozen=True)
class BuildPlan:
    """The content of plan.json. Figures of drafts are those of each problem's draft at the lowest temperature.

    Attributes:
        problems: number of labelled problems.
        target_right, draft_right, both_right: shares of problems; `draft_right` is None with `drop_unsolved`.
        kept: share of draft tokens before the first wrong segment.
        hazard: first errors per draft token seen before them.
        greedy_match: share of draft tokens that are the target's greedy choice.
        undecided: share of prefixes without a label.
        first_segment_errors: share of first errors in the first segment; None without errors or with sampled rollouts.
        costs: of this machine; None for served models.
        speedups: {assumed costs: {"lossless" or "perfect_judge": prediction}}.
        build_problems: the recipe's limit; 1,000 for a recipe without limit.
        seconds_per_problem, build_hours: None if no build was timed.
    """

    problems: int
    target_right: Estimate
    draft_right: Estimate | None
    both_right: Estimate
    tokens_per_draft: float
    kept: Estimate
    hazard: Estimate
    greedy_match: Estimate
    undecided: float
    first_segment_errors: float | None
    costs: Costs | None
    speedups: dict[str, dict[str, PredictedSpeedup]]
    build_problems: int
    build_drafts_with_error: int
    seconds_per_problem: float | None
    build_hours: float | None
    notes: list[str]


def share(parts: Sequence[float], wholes: Sequence[float]) -> Estimate:
    """Estimate sum(parts) / sum(wholes) by a bootstrap over problems; both [n], entry i from problem i.

    At 0 and 1 resamples have no spread. The other bound is then 3 / sum(wholes) away (rule of three).
    """
    ones, total = [1.0] * len(parts), sum(wholes)
    value = sum(parts) / total
    low, high = rate_ratio_interval(parts, wholes, ones, ones) or (0.0, 1.0)
    if value == 0:
        high = min(1.0, 3 / total)
    if value == 1:
        low = max(0.0, 1 - 3 / total)
    return Estimate(value, (low, high))


def tokens_to_first_error(draft: LabelledDraft) -> float:
    """Count the tokens up to the first wrong token (included), or all tokens of a draft without error.

    Labels locate the wrong token only within a segment: it is expected in the middle.
    """
    start, error = draft.kept_by_oracle, draft.first_error
    return float(start) if error is None else (start + draft.cuts[error] + 1) / 2


def best_block(survival: float, costs: Costs, longest: int = LONGEST) -> tuple[int, float]:
    """Return the block length with the fewest seconds per token, and its speed-up over the target alone.

    Args:
        survival: probability that a draft token is accepted, if all tokens before it in the block are.
        longest: maximum block length, at least 1.
    """
    pace, block = min((expected_pace([survival] * n, costs), n) for n in range(1, longest + 1))
    return block, (costs.forward_s + costs.read_s) / pace


def predict(survival: Estimate, costs: Costs, longest: int = LONGEST) -> PredictedSpeedup:
    """Predict the speed-up at the best block length; its interval comes from the bounds of the survival."""
    block, speedup = best_block(survival.value, costs, longest)
    low, high = (best_block(bound, costs, longest)[1] for bound in survival.interval)
    return PredictedSpeedup(block, Estimate(speedup, (low, high)))


def make_plan(
    config: BuildConfig,
    summary: Summary,
    problems: int,
    rows: Sequence[LabelledDraft],
    matches: Mapping[str, int],
    costs: Costs | None,
    seconds_per_problem: float | None,
) -> BuildPlan:
    """Compute the plan.

    Args:
        summary: counts of all drafts.
        problems: number of labelled problems, including those without drafts.
        rows: one draft per problem, at least one of them with tokens.
        matches: tokens that are the target's greedy choice, by `where` of the draft.
    """
    # A problem whose rollouts were all cut off says nothing about the target.
    answered = [row for row in rows if row.target_value is not None]
    unsolved = [0.0] * (problems - len(rows) - summary.rollouts.unanswered if config.drop_unsolved else 0)
    target_value = [row.target_value or 0.0 for row in answered] + unsolved
    draft_correct = [float(bool(row.draft_correct)) for row in answered] + unsolved
    both = [value * right for value, right in zip(target_value, draft_correct, strict=True)]
    ones = [1.0] * len(both)
    target_right = share(target_value, ones)

    drafts = [row for row in rows if row.draft_ids]
    lengths = [float(len(row.draft_ids)) for row in drafts]
    mean_length = sum(lengths) / len(lengths)
    hazard = share([float(row.first_error is not None) for row in drafts], [tokens_to_first_error(r) for r in drafts])
    survivals = {
        "lossless": share([matches[row.where] for row in drafts], lengths),
        "perfect_judge": Estimate(1 - hazard.value, (1 - hazard.interval[1], 1 - hazard.interval[0])),
    }
    assumed = {"this machine": costs} if costs else {}
    assumed |= {f"GPU, draft token 1/{ratio} of a forward": Costs(1 / ratio, 1.0, 0.0) for ratio in _GPU_RATIOS}
    longest = min(LONGEST, max(1, round(mean_length)))  # no block is longer than the answer

    greedy, n = config.rollout_sampling.greedy, config.limit or 1000
    return BuildPlan(
        problems=problems,
        target_right=target_right,
        draft_right=None if config.drop_unsolved else share(draft_correct, ones),
        both_right=share(both, ones),
        tokens_per_draft=mean_length,
        kept=share([float(row.kept_by_oracle) for row in drafts], lengths),
        hazard=hazard,
        greedy_match=survivals["lossless"],
        undecided=summary.undecided / max(1, summary.prefixes + summary.undecided),
        first_segment_errors=summary.error_segment[0] / summary.with_error if greedy and summary.with_error else None,
        costs=costs,
        speedups={
            name: {kind: predict(survival, each, longest) for kind, survival in survivals.items()}
            for name, each in assumed.items()
        },
        build_problems=n,
        build_drafts_with_error=round(summary.with_error / problems * n),
        seconds_per_problem=seconds_per_problem,
        build_hours=None if seconds_per_problem is None else seconds_per_problem * n / 3600,
        notes=_notes(config, target_right.value),
    )


def _notes(config: BuildConfig, target_right: float) -> list[str]:
    notes = []
    if config.rollout_sampling.greedy and target_right < _WEAK_TARGET:
        notes.append(
            f"The target is right in only {target_right:.0%} of the problems, so one greedy rollout labels many "
            "prefixes wrong: sample rollouts (rollouts 4, rollout_temperature 0.7, margin 0.4)."
        )
    if config.check_with == "own_answer":
        notes.append("check_with own_answer: right answers are those that agree with the target's own.")
    if config.drop_unsolved:
        notes.append("drop_unsolved: the draft model answered only the problems that the target solves.")
    return notes
