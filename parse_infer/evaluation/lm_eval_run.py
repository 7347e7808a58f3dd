"""The evaluation: lm-eval's tasks answered by the target alone and by PARSE, accuracy beside speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.evaluator import evaluate
from rich.console import Console

from parse_infer.engine import ParseEngine
from parse_infer.evaluation.lm_eval_model import MODES, ParseLM, Record
from parse_infer.evaluation.lm_eval_tables import markdown
from parse_infer.evaluation.lm_eval_tasks import Row, Tasks
from parse_infer.evaluation.results_file import write_results
from parse_infer.evaluation.statistics import difference_interval, rate_ratio_interval
from parse_infer.files import write_text
from parse_infer.models.environment import describe_run
from parse_infer.record_store import RecordStore
from parse_infer.settings import GenerationSettings, Resume

_TOLD = ("results", "groups", "versions", "n-shot", "n-samples")  # of what lm-eval reports, what goes into the results


@dataclass(frozen=True)
class EvalSettings:
    """How the tasks are answered."""

    limit: int | None = None
    """Problems of each task; None: all."""
    max_new_tokens: int | None = None
    """None: the task's own budget, or 256 where it has none (as in lm-eval)."""
    apply_chat_template: bool | None = None
    """Whether prompts are chat messages; None: where the target has a chat template."""
    resume: Resume = GenerationSettings.resume
    confirm_run_unsafe_code: bool = False
    seed: int = 0
    """Of the bootstrap."""

    def __post_init__(self) -> None:
        self.generation()  # names a wrong value
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit is {self.limit}; it must be at least 1")

    def generation(self) -> GenerationSettings:
        return GenerationSettings(max_new_tokens=self.max_new_tokens or 256, resume=self.resume)


def run_eval(
    engine: ParseEngine,
    tasks: Tasks,
    folder: str | Path,
    settings: EvalSettings | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Answer what is not answered yet, and write `results.json` and `results.md` into `folder`.

    Args:
        engine: with a judge and a source of drafts.
        folder: results and records; an interrupted run continues there, and so do other tasks or more problems.

    Returns:
        The content of `results.json`: `{"environment", "tasks": {name: figures}, "lm_eval": {mode: its results}}`.
        Figures of a task: `n` problems; for each of its metrics (in lm-eval's words "metric,filter") the value and the
        standard error of both modes, their difference, and its interval (95 %, paired; None where the
        metric is no mean over problems); `same_text`, the share of answers that are word for word the target's own;
        and for each mode `speed`: tokens/s, seconds and forwards of the target per answer, share of answers that were
        cut off; `speedup` as ratio of tokens/s, `time_speedup` as ratio of seconds, both with paired intervals;
        `acceptance_rate`.

    Raises:
        ValueError: a target without a chat template that is to be applied, a prompt beyond the context window, or a
            folder with an evaluation of other models.
    """
    settings = settings or EvalSettings()
    has_template = engine.target.tokenizer.chat_template is not None
    chat = has_template if settings.apply_chat_template is None else settings.apply_chat_template
    if chat and not has_template:
        raise ValueError(
            f"the tokenizer of {engine.target.name!r} has no chat template: give --no-apply-chat-template"
        )
    environment = {
        **engine.describe_machine(),
        **engine.describe(),
        **engine.describe_drafters(),
        "threshold": engine.threshold,
        "resume": settings.resume,
    }
    store = RecordStore(folder, environment, Record, "measurement")
    lm = ParseLM(engine, store, settings.generation(), settings.max_new_tokens, console)
    found: dict[str, Any] = {}
    asked = []
    for mode in MODES:
        lm.mode = mode
        found[mode] = evaluate(
            lm,
            tasks.for_lm_eval(),
            limit=settings.limit,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            confirm_run_unsafe_code=settings.confirm_run_unsafe_code,
        )
        asked.append(lm.asked)
    if asked[0] != asked[1]:
        raise ValueError("the prompts of a task change from one evaluation to the next: it cannot be compared")
    environment |= {"limit": settings.limit, "max_new_tokens": settings.max_new_tokens, "chat_template": chat}
    answers = {task: [[store.records[key, mode] for key in keys] for mode in MODES] for task, keys in asked[0].items()}
    results = {
        "environment": {**environment, **describe_run()},
        "tasks": {row.name: _figures(row, found, answers, settings.seed) for row in tasks.rows},
        "lm_eval": {mode: {key: _plain(found[mode].get(key)) for key in _TOLD} for mode in MODES},
    }
    write_text(Path(folder) / "results.md", markdown(results))
    write_results(Path(folder) / "results.json", results)
    return results


def _figures(row: Row, found: Mapping[str, Any], answers: Mapping[str, Any], seed: int) -> dict[str, Any]:
    target, parse = ([record for task in row.tasks for record in answers[task][i]] for i in range(len(MODES)))
    counts = [[r.n_tokens for r in rows] for rows in (parse, target)]
    seconds = [[r.seconds for r in rows] for rows in (parse, target)]
    ones = np.ones(len(parse))
    speed = {mode: _speed(rows) for mode, rows in zip(MODES, (target, parse), strict=True)}
    return {
        "lm_eval_task": row.result,
        "n": len(parse),
        "metrics": _metrics(row, found, seed),
        "same_text": float(np.mean([t.text == p.text for t, p in zip(target, parse, strict=True)])),
        "speed": speed,
        "speedup": speed["parse"]["tokens_per_s"] / speed["target"]["tokens_per_s"],
        "speedup_ci": rate_ratio_interval(counts[0], seconds[0], counts[1], seconds[1], seed=seed),
        "time_speedup": sum(seconds[1]) / sum(seconds[0]),
        "time_speedup_ci": rate_ratio_interval(ones, seconds[0], ones, seconds[1], seed=seed),
        "acceptance_rate": sum(r.accepted_tokens for r in parse) / max(1, sum(r.draft_tokens for r in parse)),
    }


def _speed(rows: Sequence[Record]) -> dict[str, float]:
    n, seconds = len(rows), sum(r.seconds for r in rows)
    return {
        "tokens_per_s": sum(r.n_tokens for r in rows) / seconds,
        "seconds_per_answer": seconds / n,
        "tokens_per_answer": sum(r.n_tokens for r in rows) / n,
        "target_forwards": sum(r.target_forwards for r in rows) / n,
        "cut_off": sum(r.finish_reason == "length" for r in rows) / n,
    }


def _metrics(row: Row, found: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Every metric that lm-eval reports, in both modes. A group that it does not average has none."""
    metrics = {}
    told = [found[mode]["results"].get(row.result, {}) for mode in MODES]
    for key, value in told[0].items():
        metric, comma, name = key.partition(",")
        if not comma or metric.endswith("_stderr") or metric == "bypass" or not isinstance(value, (int, float)):
            continue
        values = [float(each[key]) for each in told]
        errors = [each.get(f"{metric}_stderr,{name}") for each in told]
        parts = [_of_problems(found[mode]["samples"], row.tasks, metric, name) for mode in MODES]
        is_mean = all(p and abs(sum(p) / len(p) - v) < 1e-9 for p, v in zip(parts, values, strict=True))
        metrics[key] = {
            **dict(zip(MODES, values, strict=True)),
            "stderr": {m: float(e) if isinstance(e, float) else None for m, e in zip(MODES, errors, strict=True)},
            "difference": values[1] - values[0],
            "difference_ci": difference_interval(parts[1], parts[0], seed=seed) if is_mean else None,
        }
    return metrics


def _of_problems(samples: Mapping[str, Any], tasks: Sequence[str], metric: str, name: str) -> list[float]:
    """A metric problem by problem; [] where it has other values than numbers."""
    found = [sample.get(metric) for task in tasks for sample in samples[task] if sample["filter"] == name]
    return [float(value) for value in found] if all(isinstance(v, (int, float, np.number)) for v in found) else []


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return value.item() if isinstance(value, np.generic) else value
