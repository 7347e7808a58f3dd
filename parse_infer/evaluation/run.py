"""The benchmark: all modes answer the same problems, interleaved, with a record per answer.

`run_bench` measures and reports; in the same folder it continues an interrupted run, and takes further problems. The
caller provides problems and checker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from parse_infer.calibration.held_out import check_ids, leave_out_learnt
from parse_infer.calibration.record_runner import run_missing
from parse_infer.calibration.record_store import RecordStore
from parse_infer.engine import ParseEngine
from parse_infer.errors import ParseError
from parse_infer.evaluation.excluded_settings import NO_PAUSES, NOT_MEASURED
from parse_infer.evaluation.figure import draw_figure
from parse_infer.evaluation.mode_names import DEFAULT_MODES, SWEPT, check_modes
from parse_infer.evaluation.modes import BenchProblem, Mode, answer, make_modes, problems_digest, timed
from parse_infer.evaluation.records import Record
from parse_infer.evaluation.report import summarise
from parse_infer.evaluation.results_file import write_results
from parse_infer.evaluation.tables import markdown
from parse_infer.files import write_text
from parse_infer.models.environment import describe_run
from parse_infer.settings.acceptance import check_threshold
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import GREEDY, Sampling

THRESHOLDS = (0.05, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class BenchSettings:
    """Settings of a benchmark; a continued run must have the same."""

    modes: tuple[str, ...] = DEFAULT_MODES
    generation: GenerationSettings = field(default_factory=GenerationSettings)
    """Settings of the answers. `max_new_tokens` applies to all modes, the others to PARSE with the trained judge."""
    sampling: Sampling = GREEDY
    """Of the target and of lossless speculation, without seed."""
    draft_temperature: float = 0.0
    """Of drafts that a judge reads, with `top_p` and `top_k` of `sampling`."""
    zero_shot_threshold: float | None = None
    """Threshold of the zero-shot judge; None: 0.5."""
    thresholds: tuple[float, ...] = THRESHOLDS
    """Thresholds of the figure's sweep; () for none."""
    sweep_limit: int = 100
    """The sweep covers this many problems, from the first."""
    repeats: int = 1
    """Runs of every mode on every problem; tables use the median time. Where the target samples, each is a sample."""
    seed: int = 0
    """Seed of the bootstrap (on the command line also of the problem selection)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "modes", check_modes(self.modes))
        object.__setattr__(self, "thresholds", tuple(sorted({float(t) for t in self.thresholds})))
        for name, why in NOT_MEASURED.items():
            value = getattr(self.generation, name)
            if value != getattr(GenerationSettings(), name) and (name, value) != NO_PAUSES:
                raise ParseError(f"a benchmark does not take {name}: {why}")
        if self.sampling.seed is not None:
            raise ParseError(f"the seed of the sampling is {self.sampling.seed}: a benchmark seeds each answer itself")
        self.answers()  # validates
        if self.repeats < 1:
            raise ParseError(f"repeats is {self.repeats}; it must be at least 1")
        if self.sweep_limit < 0:
            raise ParseError(f"sweep_limit is {self.sweep_limit}; it must be at least 0")
        for value in (*self.thresholds, self.zero_shot_threshold):
            if value is not None:
                check_threshold(value)

    def answers(self) -> GenerationSettings:
        """Settings of the answers, with their sampling."""
        drafts = replace(self.sampling, temperature=self.draft_temperature)
        return self.generation.override(resume_sampling=self.sampling, draft_sampling=drafts)


def run_bench(
    engine: ParseEngine,
    problems: Sequence[BenchProblem],
    check: Callable[[Any, str], bool | None],
    folder: str | Path,
    settings: BenchSettings | None = None,
    *,
    task: str = "",
    console: Console | None = None,
) -> dict[str, Any]:
    """Run the missing measurements, and write `results.json`, `results.md` and `figure.png` into `folder`.

    Args:
        engine: has the target, draft model and adapter that the modes need.
        problems: problems with unique ids; the adapter's training problems are dropped, see `leave_out_learnt`.
        check: whether a text answers a problem; None: the problem has no reference.
        folder: results and records. An interrupted run continues there; problems that it has records of are not
            measured again.
        task: name of the problems, for the report.
        console: console of the progress bar (None: standard error).

    Returns:
        The content of `results.json`; see `parse_infer.evaluation.report`.

    Raises:
        ValueError: no problems, duplicate ids, mostly training problems, a mode without its models, or a folder with
            another benchmark.
    """
    settings = settings or BenchSettings()
    check_ids(problems)
    problems = leave_out_learnt(problems, engine.train_problems)
    if len({check(problem, "") is None for problem in problems}) > 1:
        raise ParseError("some problems have references and others have none: run them as two benchmarks")
    modes = make_modes(
        engine,
        settings.modes,
        settings.answers(),
        zero_shot_threshold=settings.zero_shot_threshold,
        thresholds=settings.thresholds if settings.sweep_limit else (),
    )
    environment = {
        **engine.describe_machine(),
        **engine.describe(),
        "task": task,
    }
    drafters = {mode.name: mode.engine.describe_drafters() for mode in modes if mode.engine is not None}
    config = asdict(settings)
    generation = config.pop("generation")
    given = {name for name in generation if name not in NOT_MEASURED or (name, generation[name]) == NO_PAUSES}
    config = {name: value for name, value in generation.items() if name in given} | config
    if not any(name in SWEPT for name in settings.modes):
        config |= {"thresholds": (), "sweep_limit": 0}
    if settings.sampling.greedy:
        del config["sampling"]
    if not settings.draft_temperature:
        del config["draft_temperature"]
    config["chosen_threshold"] = _chosen(engine, settings)
    store = RecordStore(folder, {**config, **environment, "drafters": drafters}, Record)

    def measure(pending: list[tuple[BenchProblem, Mode, int]]) -> Iterator[Record]:
        for mode in {mode.name: mode for _, mode, _ in pending}.values():
            timed(engine, mode, pending[0][0].prompt)  # warm-up
        for problem, mode, repeat in pending:
            yield answer(engine, mode, problem, check, repeat)

    runs = {
        (problems_digest([problem]), mode.name, repeat): (problem, mode, repeat)
        for problem, mode, repeat in schedule(problems, modes, settings.sweep_limit, settings.repeats)
    }
    records = run_missing(store, runs, measure, "bench", console)
    environment |= {"problems": len(problems), "digest": problems_digest(problems), **config, **describe_run()}
    categories = {p.id: category for p in problems if (category := getattr(p, "metadata", {}).get("category"))}
    results = summarise(records, [p.id for p in problems], environment, categories)
    folder = Path(folder)
    draw_figure(results, folder / "figure.png")
    write_text(folder / "results.md", markdown(results))
    write_results(folder / "results.json", results)
    return results


def schedule(
    problems: Sequence[BenchProblem], modes: Sequence[Mode], sweep_limit: int, repeats: int
) -> Iterator[tuple[BenchProblem, Mode, int]]:
    """All runs in order: problem by problem, rotating the modes so that none is always first."""
    for index, problem in enumerate(problems):
        here = [mode for mode in modes if index < sweep_limit or "@" not in mode.name]
        for repeat in range(repeats):
            turn = (index + repeat) % len(here)
            for mode in here[turn:] + here[:turn]:
                yield problem, mode, repeat


def _chosen(engine: ParseEngine, settings: BenchSettings) -> float | None:
    """The threshold of mode "parse"."""
    if engine.backend.judge is None:
        return None
    return engine.threshold if settings.generation.threshold is None else settings.generation.threshold
