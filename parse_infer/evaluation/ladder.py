"""Three steps that make a pair faster: the speed to expect of each, and which to take, for `parse-infer advise`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from parse_infer.decoding.block_length import costs_of
from parse_infer.evaluation.capacity_plan import Row, plan
from parse_infer.evaluation.serving_costs import Costs

Step = Literal["lossless", "rule", "judge"]
STEPS: dict[Step, str] = {
    "lossless": "lossless speculation",
    "rule": "a rule with a bound",
    "judge": "a judge with a bound",
}
_FASTER = 1.1  # times as fast: less is not worth a step, as predictions are up to a quarter too high
_REQUESTS = 500  # of a simulation


@dataclass(frozen=True)
class Acceptance:
    """How a measured pair accepted drafts, which is an assumption about another pair.

    Attributes:
        tokens: of the answer, per target forward.
        drafted: forwards of the draft model per token of the answer.
    """

    tokens: float
    drafted: float


# Rounded figures of docs/results: qwen-coder-mt-bench.json, qwen-coder-3850.json and thresholds.json.
CASES: dict[str, dict[Step, Acceptance]] = {
    "public pair, chat": {"lossless": Acceptance(3.3, 1.06)},
    "public pair, maths": {"lossless": Acceptance(8.0, 1.07), "judge": Acceptance(9.8, 1.21)},
    "tuned pair, maths": {
        "lossless": Acceptance(12.0, 1.31),
        "rule": Acceptance(26.7, 1.16),
        "judge": Acceptance(28.7, 1.12),
    },
}


@dataclass(frozen=True)
class Advice:
    """What to do with a pair.

    Attributes:
        speedups: {case: {step: predicted speed-up over the target alone}}.
        step: the recommended one; None: the target alone.
        reasons: sentences.
    """

    speedups: dict[str, dict[Step, float]]
    step: Step | None
    reasons: list[str]


def predict_speedup(costs: Costs, acceptance: Acceptance) -> float:
    """Predict the speed over the target alone for one request at a time. Judge and overhead are left out."""
    target_s, draft_s = costs.target_token_s.at(1), costs.draft_token_s.at(1)
    prompt_s = costs.prompt_tokens * costs.read_token_s.at(1)
    each = costs_of(
        draft_s, target_s, costs.draft_tokens * costs.read_token_s.at(1), max(1, round(costs.draft_tokens) - 1)
    )
    pace = each.forward_s / acceptance.tokens + acceptance.drafted * each.per_token
    return (prompt_s + costs.answer_tokens * target_s) / (prompt_s + costs.answer_tokens * pace)


def load_row(costs: Costs, step: Step, rate: float, gpus: int) -> Row:
    """Simulate an arrival rate, with drafts accepted as in the public pair's maths, else as in the tuned pair's."""
    *_, public, tuned = CASES.values()
    accepted = public.get(step, tuned[step])
    drafts = replace(
        costs, draft_tokens=accepted.drafted * accepted.tokens, kept_tokens=accepted.tokens - 1, target_tokens=1.0
    )
    return plan(drafts, [rate], gpus, 1 if gpus > 1 else 0, _REQUESTS)[0]


def advise(costs: Costs, has_judge: bool, rate: float | None = None, gpus: int = 2) -> Advice:
    """Recommend a step. No rule is recommended unmeasured: of two measured pairs one gained by it.

    Args:
        costs: seconds of the forwards, and mean lengths.
        has_judge: whether the user has an adapter, and can calibrate it.
        rate: arrivals per second; None: one request at a time.
    """
    speedups = {
        case: {step: predict_speedup(costs, accepted) for step, accepted in steps.items()}
        for case, steps in CASES.items()
    }
    *_, best = speedups.values()
    if max(best.values()) < _FASTER:
        share = costs.draft_token_s.at(1) / costs.target_token_s.at(1)
        why = (
            f"A draft token takes {share:.2f} of a target forward: too slow, however many are accepted. "
            "Take a smaller draft model, or let the target speculate without one (--target-drafter lookup)."
        )
        return Advice(speedups, None, [why])
    step: Step = "judge" if has_judge else "lossless"
    reasons = [
        "You have an adapter, and a calibration bounds what it loses. Measure step 1 too: where no promise is faster, "
        "keep it."
        if has_judge
        else "It needs nothing trained, and every answer stays the target's own. Steps 2 and 3 were faster than it on "
        "the tuned pair, and not on the public one: calibrate on your prompts before you take them."
    ]
    if slower := [case for case, steps in speedups.items() if steps["lossless"] < 1]:
        reasons.append(
            f"Accepted as in {slower[0]}, drafts are slower than the target alone: measure before you serve."
        )
    if rate is not None:
        load = f"At {rate:g} arrivals/s on {gpus} GPUs, `parse-infer plan`"
        single = len(costs.target_token_s.points) == 1
        measure = " Costs of one request know no batching: `python -m tools.measure_servers costs`." if single else ""
        if not load_row(costs, step, rate, gpus).pays:
            return Advice(speedups, None, [f"{load} predicts no gain from {STEPS[step]}.{measure}"])
        case = next(name for name in [*CASES][1:] if step in CASES[name])
        reasons.append(f"{load} predicts a gain, too, if drafts are accepted as in {case}.{measure}")
    return Advice(speedups, step, reasons)
