"""Evaluation of the target alone and PARSE on lm-eval's tasks: accuracy and speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.evaluator import evaluate
from numpy.typing import NDArray
from rich.console import Console

from data_tools.tasks.lm_eval.tasks import ResultRow, Tasks
from parse_infer.calibration.record_store import RecordStore
from parse_infer.engine import ParseEngine
from parse_infer.errors import ParseError
from parse_infer.evaluation.lm_eval.model import MODES, EvalRecord, ParseLM
from parse_infer.evaluation.records import acceptance_rate, costs
from parse_infer.evaluation.report import speedups
from parse_infer.evaluation.results_file import write_results
from parse_infer.evaluation.statistics import difference_interval
from parse_infer.evaluation.tables import (
    Table,
    format_percent,
    format_times,
    machine,
    markdown_table,
    terminal_table,
)
from parse_infer.files import write_text
from parse_infer.models.environment import describe_run
from parse_infer.settings.acceptance import describe_threshold
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import Sampling

HEADER = ("task, problems", "metric", "target", "PARSE", "difference", "tokens/s", "speed-up", "accepted, %")
AGREES = "same text"  # share of answers identical to the target's, for tasks without metrics
NOTE = (
    "Metrics are lm-eval's, ± its standard error; brackets: 95 % intervals (paired; Newcombe's for shares, else the "
    "bootstrap over problems). Both modes answered each problem one right after the other. Speed-up: ratio of "
    "tokens/s. Accepted: share of the draft tokens that became part of the answer."
)
_LM_EVAL_KEYS = ("results", "groups", "versions", "n-shot", "n-samples")  # parts of lm-eval's report in results.json


@dataclass(frozen=True)
class EvalSettings:
    """Settings of an evaluation."""

    limit: int | None = None
    """Problems per task; None: all."""
    max_new_tokens: int | None = None
    """Token limit; None: the task's own, or 256 without one (as in lm-eval)."""
    apply_chat_template: bool | None = None
    """Whether prompts are chat messages; None: if the target has a chat template."""
    parse: GenerationSettings = field(default_factory=GenerationSettings)
    """Settings of PARSE; the tasks set `max_new_tokens` and `stop`. The target alone has their `resume_sampling`."""
    confirm_run_unsafe_code: bool = False
    samples: int = 1
    """Evaluations by lm-eval, each with random numbers of its own; metrics are means over them."""
    seed: int = 0
    """Seed of the bootstrap."""

    def __post_init__(self) -> None:
        self.generation()  # validates
        if self.samples < 1 or (self.samples > 1 and self.parse.resume_sampling.greedy):
            raise ParseError(f"samples is {self.samples}; it must be at least 1, and more need a temperature")
        if self.limit is not None and self.limit < 1:
            raise ParseError(f"limit is {self.limit}; it must be at least 1")
        if (seed := self.parse.resume_sampling.seed) is not None:
            raise ParseError(f"the seed of the sampling is {seed}: an evaluation seeds each answer itself")

    def generation(self) -> GenerationSettings:
        return self.parse.override(max_new_tokens=self.max_new_tokens or 256)


def run_eval(
    engine: ParseEngine,
    tasks: Tasks,
    folder: str | Path,
    settings: EvalSettings | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Run the missing answers, and write `results.json` and `results.md` into `folder`.

    Args:
        engine: needs a judge and a source of drafts.
        folder: results and records; an interrupted run, other tasks or more problems continue there.

    Returns:
        The content of `results.json`: `{"environment", "tasks": {name: figures}, "lm_eval": {mode: its results}}`,
        those of lm-eval for the first sample. Figures of a task:
        - `n`: number of problems, which the intervals resample;
        - `metrics`, by lm-eval's "metric,filter": both modes' values and standard errors, their difference, and its
          paired 95 % interval (None if the metric is no mean over problems);
        - `same_text`: share of answers identical to the target's own;
        - `speed` per mode: tokens/s; seconds and target forwards per answer; share of truncated answers;
        - `speedup` (ratio of tokens/s) and `time_speedup` (ratio of seconds), with paired intervals;
        - `acceptance_rate`.

    Raises:
        ValueError: the target lacks a required chat template, a prompt exceeds the context window, or the folder
            holds an evaluation of other models.
    """
    settings = settings or EvalSettings()
    has_template = engine.target.tokenizer.chat_template is not None
    chat = has_template if settings.apply_chat_template is None else settings.apply_chat_template
    if chat and not has_template:
        raise ParseError(
            f"the tokenizer of {engine.target.name!r} has no chat template: give --no-apply-chat-template"
        )
    environment = {
        **engine.describe_machine(),
        **engine.describe(),
        **engine.describe_drafters(),
        "threshold": engine.threshold if settings.parse.threshold is None else settings.parse.threshold,
        "block_tokens": settings.parse.block_tokens,
        "settings": asdict(settings.generation()),
    }
    store = RecordStore(folder, environment, EvalRecord, "measurement")
    lm = ParseLM(engine, store, settings.generation(), settings.max_new_tokens, console)
    evaluations: dict[str, list[Any]] = {mode: [] for mode in MODES}
    requested: dict[str, list[dict[str, list[str]]]] = {mode: [] for mode in MODES}
    for sample in range(settings.samples):
        for mode in MODES:
            lm.sample, lm.mode = sample, mode
            found = evaluate(
                lm,
                tasks.for_lm_eval(),
                limit=settings.limit,
                apply_chat_template=chat,
                fewshot_as_multiturn=chat,
                confirm_run_unsafe_code=settings.confirm_run_unsafe_code,
            )
            evaluations[mode].append(found)
            requested[mode].append(lm.requested)
    if requested[MODES[0]] != requested[MODES[1]]:
        raise ParseError("the prompts of a task differ between the two evaluations, so it cannot be compared")
    environment |= {"limit": settings.limit, "max_new_tokens": settings.max_new_tokens, "chat_template": chat}
    if settings.samples > 1:
        environment["samples"] = settings.samples
    keys_of = {task: [key for each in requested[MODES[0]] for key in each[task]] for task in requested[MODES[0]][0]}
    answers = {task: [[store.records[key, mode] for key in keys] for mode in MODES] for task, keys in keys_of.items()}
    results = {
        "environment": {**environment, **describe_run()},
        "tasks": {row.name: _figures(row, evaluations, answers, settings.seed) for row in tasks.rows},
        "lm_eval": {mode: {key: _plain(evaluations[mode][0].get(key)) for key in _LM_EVAL_KEYS} for mode in MODES},
    }
    write_text(Path(folder) / "results.md", eval_markdown(results))
    write_results(Path(folder) / "results.json", results)
    return results


def _figures(row: ResultRow, evaluations: Mapping[str, Any], answers: Mapping[str, Any], seed: int) -> dict[str, Any]:
    target, parse = ([record for task in row.tasks for record in answers[task][i]] for i in range(len(MODES)))
    problems = [(record.task, record.problem) for record in parse]
    return {
        "lm_eval_task": row.result,
        "n": len(set(problems)),
        "metrics": _metrics(row, evaluations, seed),
        "same_text": float(np.mean([t.text == p.text for t, p in zip(target, parse, strict=True)])),
        "speed": {"target": costs(target), "parse": costs(parse)},
        **speedups(parse, target, problems, seed),
        "acceptance_rate": acceptance_rate(parse),
    }


def _metrics(row: ResultRow, evaluations: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """All metrics of lm-eval in both modes, as means over the samples; {} for a group without aggregated metrics.

    lm-eval's standard errors are those of one sample, so several have none.
    """
    metrics = {}
    results = [[each["results"].get(row.result, {}) for each in evaluations[mode]] for mode in MODES]
    for key, value in results[0][0].items():
        metric, comma, name = key.partition(",")
        if not comma or metric.endswith("_stderr") or metric == "bypass" or not isinstance(value, (int, float)):
            continue
        values = [float(np.mean([each[key] for each in of_mode])) for of_mode in results]
        errors = [of_mode[0].get(f"{metric}_stderr,{name}") if len(of_mode) == 1 else None for of_mode in results]
        found = {
            mode: [_of_problems(each["samples"], row.tasks, metric, name) for each in evaluations[mode]]
            for mode in MODES
        }
        parts = [_means(found[mode]) for mode in MODES]
        binary = all(np.isin(of, (0, 1)).all() for mode in MODES for of in found[mode])
        is_mean = all(p.size and abs(p.mean() - v) < 1e-9 for p, v in zip(parts, values, strict=True))
        metrics[key] = {
            **dict(zip(MODES, values, strict=True)),
            "stderr": {m: float(e) if isinstance(e, float) else None for m, e in zip(MODES, errors, strict=True)},
            "difference": values[1] - values[0],
            "difference_ci": (
                difference_interval(parts[1], parts[0], samples=len(results[0]) if binary else None, seed=seed)
                if is_mean
                else None
            ),
        }
    return metrics


def _of_problems(samples: Mapping[str, Any], tasks: Sequence[str], metric: str, name: str) -> list[float]:
    """A metric's values per problem; [] if some are not numbers."""
    values = [sample.get(metric) for task in tasks for sample in samples[task] if sample["filter"] == name]
    return [float(value) for value in values] if all(isinstance(v, (int, float, np.number)) for v in values) else []


def _means(samples: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Means over the samples of each problem, [n]; [0] if some are not numbers."""
    return np.mean(samples, axis=0) if all(samples) else np.empty(0)


def _plain(value: object) -> object:
    """Convert mappings and NumPy scalars to JSON types."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def eval_rows(results: dict[str, Any]) -> list[list[str]]:
    """Cells under `HEADER`, one row per metric of a task; the first row has the speed."""
    cells = []
    for name, task in results["tasks"].items():
        speed = [
            " → ".join(f"{task['speed'][mode]['tokens_per_s']:.0f}" for mode in ("target", "parse")),
            format_times(task["speedup"], task["speedup_ci"]),
            format_percent(task["acceptance_rate"]),
        ]
        label = name if name == task["lm_eval_task"] else f"{name} ({task['lm_eval_task']})"
        agreement = [AGREES, "", f"{task['same_text']:.3f}", ""]
        metrics = [[key, *_compared(metric)] for key, metric in task["metrics"].items()] or [agreement]
        cells.append([f"{label}, {task['n']}", *metrics[0], *speed])
        cells += [["", *columns, *[""] * len(speed)] for columns in metrics[1:]]
    return cells


def _proposer(drafter: dict[str, Any] | None) -> str:
    if drafter is None:
        return "none"
    sizes = ", ".join(f"{key} {value}" for key, value in drafter.items() if key not in ("kind", "weights"))
    return f"{drafter['kind']} ({sizes})"


def _compared(metric: dict[str, Any]) -> list[str]:
    errors, interval = metric["stderr"], metric["difference_ci"]
    values = [
        f"{metric[mode]:.3f}" + ("" if errors[mode] is None else f" ± {errors[mode]:.3f}")
        for mode in ("target", "parse")
    ]
    around = f" [{interval[0]:+.3f}, {interval[1]:+.3f}]" if interval else ""
    return [*values, f"{metric['difference']:+.3f}{around}"]


def eval_table(results: dict[str, Any]) -> Table:
    """Build a narrow table, with each interval, error and filter on its own line."""
    cells = [[*(cell.replace(",", "\n") for cell in row[:2]), *row[2:]] for row in eval_rows(results)]
    return terminal_table([name.replace(", ", "\n") for name in HEADER], cells, caption=NOTE, breaks=r"(?<![±→]) ")


def eval_markdown(results: dict[str, Any]) -> str:
    """The content of `results.md`."""
    environment = results["environment"]
    models = " and ".join(environment[role]["name"] for role in ("target", "draft") if environment[role])
    samples = f", {environment['samples']} samples a problem" if "samples" in environment else ""
    lines = [
        f"`{environment['command']}`, {environment['date']}: {models}, "
        f"threshold {describe_threshold(environment['threshold'])}, "
        f"block tokens {environment['block_tokens']}, token drafter of the target: "
        f"{_proposer(environment['target_drafter'])}, {Sampling(**environment['settings']['resume_sampling'])}"
        f"{samples}; "
        f"{machine(environment)}, {environment['dtype']}.",
        "",
        *markdown_table(HEADER, eval_rows(results)),
        "",
        NOTE,
    ]
    return "\n".join(lines) + "\n"
