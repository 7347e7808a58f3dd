"""`parse-data plan`: build a few problems of a recipe, time the models, and print and write the plan."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import cast

from rich.console import Group
from rich.table import Table

from data_tools.labels.backends import LocalWriter, load_writer
from data_tools.labels.build import build
from data_tools.labels.build_config import BuildConfig
from data_tools.labels.build_plan import BuildPlan, Estimate, PredictedSpeedup, make_plan
from data_tools.labels.logprobs import read_drafts
from data_tools.labels.rows import LabelledDraft, read_rows
from data_tools.labels.shards import GroupFolder, reads_of
from parse_infer.decoding.block_length import Costs, costs_of
from parse_infer.errors import ParseError
from parse_infer.evaluation.tables import format_percent, format_times, terminal_table
from parse_infer.files import read_json, write_json
from parse_infer.models.decoder import Decoder
from parse_infer.models.loading import LanguageModel
from parse_infer.models.timing import Step, measure

PLAN = "plan.json"
FIRST_CHOICES = 5  # stored per token where the recipe stores none
_TOKENS = 16  # that the draft model writes, and that the target reads more, in a timed step
_TIMING_S = 8.0


def run_plan(config: BuildConfig, limit: int) -> BuildPlan:
    """Build `limit` problems of the recipe into its own folder, write plan.json there, and return the plan.

    If the folder holds more problems already, the plan covers all of them. The build stores log-probabilities.

    Raises:
        ValueError, OSError: as `build`; also if no draft has a label, or the recipe leaves labels of prefixes out.
    """
    if not config.prefix_labels:
        raise ParseError("a plan needs to know where errors are: add --prefix_labels true and another --output_dir")
    if config.wire != "ids":
        raise ParseError(f"a plan reads log-probabilities, but wire {config.wire} sends texts: set wire to ids")
    before = GroupFolder(config.output_dir, config.split)
    limit = max(min(limit, config.limit or limit), max(before.ends.values(), default=0))
    summary = build(replace(config, limit=limit, logprobs=config.logprobs or FIRST_CHOICES))
    after = GroupFolder(config.output_dir, config.split)
    rows = lowest_temperature(read_rows(after.folder))
    matches = {read.row.where: int(read.logprobs.is_greedy_choice.sum()) for read in read_drafts(after.folder)}
    draft = next((row for row in rows if row.draft_ids), None)
    if draft is None:
        raise ParseError(
            f"no draft of {after.n_problems} problems has a label: choose a target that solves some of the problems, "
            "or sampled rollouts with a larger max_rollouts"
        )
    costs = None
    if config.backend == "local":
        target, small = (cast(LocalWriter, load_writer(config, role)).model for role in ("target", "draft"))
        costs = measure_costs(target, small, [*target.render(draft.prompt), *draft.draft_ids])
    seconds = _seconds_per_problem(before, after, reads=bool(config.logprobs))
    plan = make_plan(config, summary, after.n_problems, rows, matches, costs, seconds)
    write_json(after.folder / PLAN, asdict(plan))
    return plan


def lowest_temperature(rows: Iterable[LabelledDraft]) -> list[LabelledDraft]:
    """Return each problem's first draft at the lowest temperature, the closest to the drafts of inference."""
    found: dict[str, LabelledDraft] = {}
    for row in sorted(rows, key=lambda row: row.temperature or 0.0):
        found.setdefault(row.problem, row)
    return list(found.values())


def measure_costs(target: LanguageModel, draft: LanguageModel, context: Sequence[int]) -> Costs:
    """Time both models after `context` (target tokens), for about 10 seconds.

    If one round takes longer, as with large models on a CPU, one round counts.
    """
    context = list(context[: min(target.window, draft.window) - _TOKENS])
    in_draft = [token % draft.n_embeddings for token in context]  # the time does not depend on the tokens
    writer, reader = draft.decoder, target.decoder

    def at(decoder: Decoder, ids: list[int]) -> Callable[[], None]:
        """Set the context, with all but its last token in the KV cache."""

        def prepare() -> None:
            decoder.seek(ids[:-1])
            if decoder.cached < len(ids) - 1:
                decoder.forward()
            decoder.seek(ids)

        return prepare

    def read(further: list[int]) -> Step:
        return Step(
            f"read {len(further)}",
            at(reader, context),
            lambda: reader.logits(reader.look_ahead(further)).argmax(-1).tolist(),
        )

    steps = [
        Step("write", at(writer, in_draft), lambda: list(writer.decode(_TOKENS, banned_ids=writer.eos_ids))),
        read([]),
        read((context * _TOKENS)[:_TOKENS]),
    ]
    begin = time.perf_counter()
    seconds = measure(steps, 1, reader.device)
    if rounds := min(100, int(_TIMING_S / (time.perf_counter() - begin))):
        seconds = measure(steps, rounds, reader.device)
    write_s, one_s, many_s = (statistics.median(seconds[step.name]) for step in steps)
    return costs_of(write_s / _TOKENS, one_s, many_s, _TOKENS)


def _seconds_per_problem(before: GroupFolder, after: GroupFolder, reads: bool) -> float | None:
    """Return the seconds per problem of the build between two states of a folder, without the loading of models.

    Without new problems, return the last plan's figure, or None.

    Args:
        reads: whether to include the reading of log-probabilities.
    """
    new = {start: end for start, end in after.ends.items() if before.ends.get(start) != end}
    path = after.folder / PLAN
    if not new:
        return read_json(path, "delete the file").get("seconds_per_problem") if path.is_file() else None
    files = [file for start, file in zip(sorted(after.ends), after.files, strict=True) if start in new]
    if reads:
        files = [reads_of(file) for file in files]
    loaded = read_json(after.folder / "build.json", "build into another folder")["models_loaded"]
    return (max(file.stat().st_mtime for file in files) - loaded) / sum(end - start for start, end in new.items())


def plan_tables(plan: BuildPlan, title: str) -> Group:
    """Return the figures, the predicted speed-ups and the notes for a terminal."""
    figures = Table(title=title, show_header=False, title_justify="left")
    for line in _lines(plan):
        figures.add_row(*line)
    cells = [[name, *_cells(of["lossless"]), *_cells(of["perfect_judge"])] for name, of in plan.speedups.items()]
    speedups = terminal_table(
        ("predicted speed-up", "lossless", "block", "perfect judge", "block"),
        cells,
        caption="Over the target alone, without prefill, with the best block length (draft tokens). GPU: a target "
        "forward costs the same for any block. Brackets: 95 % intervals.",
        breaks="(?!)",
    )
    return Group(figures, speedups, *plan.notes)


def _cells(prediction: PredictedSpeedup) -> tuple[str, str]:
    return format_times(prediction.speedup.value, prediction.speedup.interval), str(prediction.block_tokens)


def _lines(plan: BuildPlan) -> list[tuple[str, str]]:
    def percent(each: Estimate | None) -> str:
        return "-" if each is None else format_percent(each.value, each.interval)

    hazard = (plan.hazard.value, *plan.hazard.interval)
    lines = [
        ("problems", f"{plan.problems:,}"),
        ("target right, %", percent(plan.target_right)),
        ("draft model right, %", percent(plan.draft_right)),
        ("both right, %", percent(plan.both_right)),
        ("tokens per draft", f"{plan.tokens_per_draft:.0f}"),
        ("tokens a perfect judge keeps, %", percent(plan.kept)),
        ("errors per 100 draft tokens", "{:.2f} [{:.2f}, {:.2f}]".format(*(100 * each for each in hazard))),
        ("tokens that are the target's greedy choice, %", percent(plan.greedy_match)),
        ("undecided prefixes, %", format_percent(plan.undecided)),
    ]
    if plan.first_segment_errors is not None:
        lines.append(("first errors in the first segment, %", format_percent(plan.first_segment_errors)))
    if costs := plan.costs:
        lines += [
            ("draft token, ms", f"{1e3 * costs.draft_s:.2f}"),
            ("target forward over one token, ms", f"{1e3 * (costs.forward_s + costs.read_s):.2f}"),
            ("each further token in it, ms", f"{1e3 * costs.read_s:.2f}"),
        ]
    if plan.build_hours is not None:
        hours = f"{plan.build_hours:.1f} ({plan.seconds_per_problem:.2f} s per problem)"
        lines.append((f"hours to build {plan.build_problems:,} problems", hours))
    return [*lines, ("drafts with an error from that build", f"{plan.build_drafts_with_error:,}")]
