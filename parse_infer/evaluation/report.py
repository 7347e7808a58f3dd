"""Compute results from records: accuracies, speeds and intervals, as JSON-ready numbers.

`summarise` returns `{"environment", "modes": {mode: figures}, "limit", "acceptance", "sweep", "records"}`, and
"categories" if the problems have categories. The records (`parse_infer.evaluation.results_file`) suffice to recompute
all of it. Figures of a mode:

- accuracy, accuracy_ci: share of right answers, 95 % Wilson interval. For a task without references (environment:
  scored is False), the share of greedy answers equal to the target's, or without it to those of lossless speculation;
  None without both, and for samples, which differ by chance;
- accuracy_diff, accuracy_diff_ci: accuracy minus the target's on the same problems, 95 % interval (Newcombe, paired);
  without the mode "target", minus that of lossless speculation ("target+draft"), whose greedy answers in float32 are
  the target's own;
- tokens_per_s: all answer tokens / all seconds;
- speedup, speedup_ci: tokens_per_s / the target's, paired bootstrap; independent of the answers' length;
- time_speedup, time_speedup_ci: the target's time per answer / the mode's;
- over_lossless, over_lossless_ci: tokens_per_s / that of lossless speculation, as speedup;
- acceptance_rate: accepted / proposed draft tokens;
- first_text_s, longest_wait_s: mean seconds to the first text, and mean longest time without new text after it;
- drafted: draft tokens per token of the answer;
- target_forwards, drafter_forwards: forwards per answer of the target and of token drafters;
- acceptance_length: tokens per target forward (meaningless for the draft model alone);
- limit_share: tokens_per_s / the limit's. The limit is the draft model alone plus one target forward over prompt and
  draft; only a faster draft model can exceed it.

With repeats, times are medians per problem. Repeats of a sampled benchmark are samples: all of them count, intervals
resample problems, and two figures say how alike the samples of a problem are:

- pass_at_k: share of the problems that at least one of the k samples answers right;
- distinct: distinct texts among the k samples, as a share of k.

Comparisons with a target or draft model that was not run are None.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parse_infer.evaluation.mode_names import lossless_of
from parse_infer.evaluation.records import AnswerFigures, Record, acceptance_rate, costs
from parse_infer.evaluation.results_file import to_columns
from parse_infer.evaluation.statistics import difference_interval, rate_ratio_interval, share_interval

Figures = dict[str, Any]


def summarise(
    records: Sequence[Record],
    problem_ids: Sequence[str],
    environment: dict[str, Any],
    categories: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Build the content of `results.json`. Every mode needs a record per problem, a sweep for the first problems.

    Args:
        categories: category by problem id, for a separate table.
    """
    if any(record.correct is None for record in records):  # the task has no references
        environment = environment | {"scored": False}
        records = records if environment.get("sampling") else _compared(records)
    samples = int(environment.get("repeats", 1)) if environment.get("sampling") else 1
    table = _by_mode(records, problem_ids, samples)
    seed = int(environment.get("seed", 0))
    base = {name: rows for name, rows in table.items() if "@" not in name}
    order = [name for name in environment.get("modes", base) if name in base]
    modes = {name: _figures(base[name], base, seed, samples) for name in order}
    results: dict[str, Any] = {"environment": environment, "modes": modes}
    results |= dict.fromkeys(("limit", "acceptance", "sweep", "categories"))
    if "draft" in base:
        results["limit"] = {"tokens_per_s": _limit_rate(base["draft"])}
    if "parse" in base:
        parse = modes["parse"]
        results["acceptance"] = {
            "semantic": parse["semantic_acceptance"],
            "token_exact": parse["token_exact_acceptance"],
        }
    swept = {name: rows for name, rows in table.items() if "@" in name}
    if swept:
        n = min(len(rows) for rows in swept.values())  # of answers
        part = {name: rows[:n] for name, rows in base.items()}
        points = []
        for name, rows in swept.items():
            mode, _, threshold = name.partition("@")
            points.append({"mode": mode, "threshold": float(threshold), **_figures(rows, part, seed, samples)})
        points.sort(key=lambda point: (point["mode"], point["threshold"]))
        results["sweep"] = {
            "problems": n // samples,
            "points": points,
            "modes": {name: _figures(part[name], part, seed, samples) for name in order},
        }
    if categories:
        results["categories"] = _by_category(base, order, categories, samples)
    results["records"] = to_columns(records, problem_ids)
    return results


def _compared(records: Sequence[Record]) -> list[Record]:
    """Without references, answers equal to the target's are right; without its mode, to lossless speculation's."""
    modes = dict.fromkeys(r.mode for r in records)
    base = "target" if "target" in modes else lossless_of(modes)
    own = {(r.problem_id, r.repeat): r.text for r in records if r.mode == base}
    return [replace(r, correct=r.text == own.get((r.problem_id, r.repeat))) for r in records] if own else [*records]


def _by_category(
    base: dict[str, list[Record]], order: Sequence[str], categories: Mapping[str, str], samples: int
) -> dict[str, dict[str, Any]]:
    """Per category: number of problems, and per mode the tokens per target forward and the speed-up."""
    by_category: dict[str, dict[str, Any]] = {}
    for category in sorted(set(categories.values())):
        part = {name: [r for r in base[name] if categories.get(r.problem_id) == category] for name in order}
        figures = {name: costs(rows) for name, rows in part.items()}
        by_category[category] = {
            "n": len(part[order[0]]) // samples,
            "modes": {
                name: {
                    "acceptance_length": sum(r.n_tokens for r in rows) / max(1, sum(r.target_forwards for r in rows)),
                    "speedup": figures[name]["tokens_per_s"] / figures["target"]["tokens_per_s"]
                    if "target" in figures
                    else None,
                }
                for name, rows in part.items()
            },
        }
    return by_category


def _by_mode(records: Sequence[Record], problem_ids: Sequence[str], samples: int) -> dict[str, list[Record]]:
    """The records of each mode, problem by problem: all samples, or the first repeat with the median time of all."""
    place = {problem: i for i, problem in enumerate(problem_ids)}
    groups: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        if record.problem_id in place:
            groups.setdefault(record.mode, {}).setdefault(record.problem_id, []).append(record)
    table = {}
    for mode, problems in groups.items():
        rows: list[Record] = []
        for problem in sorted(problems, key=place.__getitem__):
            repeats = sorted(problems[problem], key=lambda r: r.repeat)
            if samples > 1:
                rows += repeats
                continue
            medians: dict[str, Any] = {"seconds": float(np.median([r.seconds for r in repeats]))}
            if prefill := [r.prefill_s for r in repeats if r.prefill_s is not None]:
                medians["prefill_s"] = float(np.median(prefill))
            rows.append(replace(repeats[0], **medians))
        table[mode] = rows
    return table


def _figures(rows: Sequence[Record], base: dict[str, list[Record]], seed: int, samples: int = 1) -> Figures:
    """All figures of one mode; `base` has the modes outside the sweep on the same problems."""
    n = len(rows)
    shares = _by_problem(rows, samples)
    figures: Figures = {
        "n": n // samples,
        **dict.fromkeys(("accuracy", "accuracy_ci", "accuracy_diff", "accuracy_diff_ci")),
        **dict.fromkeys(("speedup", "speedup_ci", "time_speedup", "time_speedup_ci", "over_lossless")),
        **dict.fromkeys(("over_lossless_ci", "acceptance_rate", "limit_share")),
        **costs(rows),
        "drafter_forwards": sum(r.drafter_forwards or 0 for r in rows) / n,
        "acceptance_length": sum(r.n_tokens for r in rows) / max(1, sum(r.target_forwards for r in rows)),
        "seconds_median": float(np.median([r.seconds for r in rows])),
        "seconds_p90": float(np.percentile([r.seconds for r in rows], 90)),
    }
    if shares is not None:
        figures |= {"accuracy": float(shares.mean()), "accuracy_ci": share_interval(shares, samples)}
    lossless = lossless_of(base)
    own = base.get("target") or base.get(lossless or "")
    if own and shares is not None and (theirs := _by_problem(own, samples)) is not None:
        figures |= {
            "accuracy_diff": float(shares.mean() - theirs.mean()),
            "accuracy_diff_ci": difference_interval(shares, theirs, samples=samples),
        }
    if "target" in base:
        figures |= speedups(rows, base["target"], [r.problem_id for r in rows], seed)
    if lossless:
        over = speedups(rows, base[lossless], [r.problem_id for r in rows], seed)
        figures |= {"over_lossless": over["speedup"], "over_lossless_ci": over["speedup_ci"]}
    if samples > 1:
        texts = [{r.text for r in rows[i : i + samples]} for i in range(0, n, samples)]
        figures["pass_at_k"] = None if shares is None else float((shares > 0).mean())
        figures["distinct"] = sum(map(len, texts)) / n
    if "draft" in base:
        figures["limit_share"] = figures["tokens_per_s"] / _limit_rate(base["draft"])
    if rows[0].draft_tokens is not None:
        figures["acceptance_rate"] = acceptance_rate(rows)
        if rows[0].mode.startswith("parse"):
            semantic = sum((r.accepted_tokens or 0) - (r.exact_tail_tokens or 0) for r in rows)
            figures["semantic_acceptance"] = semantic / max(1, sum(r.draft_tokens or 0 for r in rows))
            figures["token_exact_acceptance"] = _token_exact(base.get("draft"))
    return figures


def _by_problem(rows: Sequence[Record], samples: int) -> NDArray[np.float64] | None:
    """Shares of right samples of each problem, [n]; None: not checked."""
    if any(r.correct is None for r in rows):
        return None
    return np.array([bool(r.correct) for r in rows], dtype=np.float64).reshape(-1, samples).mean(1)


def speedups(
    ours: Sequence[AnswerFigures], theirs: Sequence[AnswerFigures], problems: Sequence[Hashable], seed: int
) -> Figures:
    """Ratios of tokens/s and of seconds per answer, with paired intervals that resample problems.

    Args:
        ours, theirs: one answer a row, those of row i to `problems[i]`, which may come several times (samples).
    """
    places = {problem: i for i, problem in enumerate(dict.fromkeys(problems))}
    place = [places[problem] for problem in problems]
    tokens, seconds, their_tokens, their_seconds = (
        np.bincount(place, values)
        for rows in (ours, theirs)
        for values in ([r.n_tokens for r in rows], [r.seconds for r in rows])
    )
    answers = np.bincount(place)
    return {
        "speedup": sum(tokens) / sum(seconds) / (sum(their_tokens) / sum(their_seconds)),
        "speedup_ci": rate_ratio_interval(tokens, seconds, their_tokens, their_seconds, seed=seed),
        "time_speedup": sum(their_seconds) / sum(seconds),
        "time_speedup_ci": rate_ratio_interval(answers, seconds, answers, their_seconds, seed=seed),
    }


def _limit_rate(draft: Sequence[Record]) -> float:
    """Tokens per second of the limit: the draft model alone plus one target forward over prompt and draft."""
    return sum(r.n_tokens for r in draft) / sum(r.seconds + (r.prefill_s or 0.0) for r in draft)


def _token_exact(draft: Sequence[Record] | None) -> float | None:
    """Share of the draft tokens before the first that differs from the target's greedy choice."""
    if draft is None:
        return None
    return sum(r.token_exact_tokens or 0 for r in draft) / max(1, sum(r.n_tokens for r in draft))
