"""`parse-data build`: problems -> drafts -> cuts -> target rollouts -> labels -> a data set with its card."""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import cast

import torch

from data_tools.labels.backends import Writer, load_writer
from data_tools.labels.build_config import BuildConfig
from data_tools.labels.card import write_card
from data_tools.labels.labeller import Labeller
from data_tools.labels.progress import BuildProgress
from data_tools.labels.rows import read_rows
from data_tools.labels.shards import GroupFolder, rollout_counts
from data_tools.labels.summary import Summary, summarise_labels
from data_tools.tasks.exclude import WithoutPrompts
from data_tools.tasks.registry import load_task
from data_tools.tasks.task import Problem, Split, Task
from parse_infer.decoding.loop import run_sync
from parse_infer.errors import ParseError
from parse_infer.files import read_json
from parse_infer.models.train_problems import train_problems_of

__all__ = ["BuildConfig", "build"]


def build(config: BuildConfig) -> Summary:
    """Run or resume the build, and return the counts of the finished data set.

    After an interruption (also by kill -9) the same call resumes the build and writes the same rows as an
    uninterrupted build, without loss or repetition.

    Raises:
        ValueError, OSError: one sentence about an error of the configuration, a model, the task or the folder.
    """
    task = load_task(config.task, **config.task_options)
    if config.check_with == "task" and getattr(task, "check_with", None) == "none":
        raise ParseError(
            f"task {task.name} with check_with none does not check answers: labels need references, or the recipe key "
            "check_with: own_answer"
        )
    source = WithoutPrompts(task, train_problems_of(config.draft) | train_problems_of(config.target))
    numbered = _groups(
        source.problems(cast(Split, config.split), config.seed, config.limit), config.problems_per_group
    )
    groups = GroupFolder(config.output_dir, config.split)
    with groups.held(config.identity(), {"versions": _versions()}):  # before models take minutes to load
        held = max(groups.ends.values(), default=0)
        if config.limit is not None and config.limit < held:
            raise ParseError(
                f"{config.output_dir} already holds {held} problems, more than the limit of {config.limit}; raise the "
                "limit, or choose another output_dir"
            )
        missing = _missing(groups, numbered, by_reference=config.check_with == "task")
        first = next(missing, None)  # a task that reads long before its first problem has a bar of its own
        labeller = None if first is None else _label(config, task, chain([first], missing), groups)
        if not groups.ends:
            raise ParseError(_no_problem(config, source.left_out))
        if config.logprobs:
            from data_tools.labels.logprobs import add_logprobs  # pyarrow is an optional dependency

            def target() -> Writer:
                return load_writer(config, "target") if labeller is None else labeller.writers["target"]

            add_logprobs(groups.folder, target, config.logprobs)
        summary = summarise_labels(read_rows(groups.folder))
        summary.rollouts, summary.left_out = rollout_counts(groups.folder), source.left_out
        write_card(groups.folder, config, summary, groups.n_problems)
    warning = summary.rollouts.warning(config.max_rollout_tokens)
    if warning and not (labeller and labeller.warned):
        print(warning, file=sys.stderr)
    return summary


def read_again(folder: Path, k: int, dtype: str | None = None, device: str | None = None) -> None:
    """Let the target read the drafts of a finished build, without its task and draft model.

    Args:
        k: number of the target's first choices to store per token.
        dtype: of the target; None: the build's.

    Raises:
        ValueError, OSError: one sentence about the folder, or a target with other weights than the build's.
    """
    from data_tools.labels.logprobs import add_logprobs  # pyarrow is an optional dependency

    config = BuildConfig.of_folder(folder)
    groups = GroupFolder(folder, config.split)
    with groups.held(read_json(folder / "build.json", "build again")["config"]):

        def target() -> Writer:
            writer = load_writer(replace(config, dtype=dtype or config.dtype, device=device), "target")
            groups.note_models({"target": writer.describe()})
            return writer

        add_logprobs(folder, target, k)


def _no_problem(config: BuildConfig, left_out: int) -> str:
    if left_out:
        return (
            f"all {left_out:,} problems of task {config.task} in its split {config.split} are excluded, or training "
            "problems of the draft model or the target: choose other problems, or align the draft model on fewer"
        )
    return f"task {config.task} has no problem in its split {config.split}"


def _groups(problems: Iterator[Problem], size: int) -> Iterator[tuple[range, list[Problem]]]:
    """Yield groups of `size` problems with the range of their indices."""
    start = 0
    while group := list(islice(problems, size)):
        yield range(start, start + len(group)), group
        start += len(group)


def _missing(
    groups: GroupFolder, numbered: Iterator[tuple[range, list[Problem]]], by_reference: bool
) -> Iterator[tuple[range, list[Problem]]]:
    """Yield the groups without rows, and check that finished rows belong to their problems."""
    for group, problems in numbered:
        _check_same_problems(groups, group, problems, by_reference)
        if not groups.has(group):
            yield group, problems


def _label(
    config: BuildConfig, task: Task, missing: Iterator[tuple[range, list[Problem]]], groups: GroupFolder
) -> Labeller:
    """Load the models, label and write the groups, and return the labeller.

    With servers, groups overlap, so that none waits for another's last rollout."""
    with BuildProgress(config.output_dir, total=config.limit, done=groups.n_problems) as progress:
        labeller = Labeller.load(config, task, progress.activity, progress.note)
        labeller.begun = bool(groups.ends)
        groups.note_models(labeller.describe_models())
        _label_with(labeller, missing, groups, progress)
    return labeller


def _label_with(
    labeller: Labeller,
    missing: Iterator[tuple[range, list[Problem]]],
    groups: GroupFolder,
    progress: BuildProgress,
) -> None:
    async def work() -> None:
        for group, problems in missing:
            rows, counts = await labeller.label(problems)
            groups.write(group, rows, counts)
            progress.advance(groups.n_problems, len(rows), labeller.counts.rollouts)

    at_once = max(writer.groups_at_once for writer in labeller.writers.values())
    if at_once == 1:
        run_sync(work())  # without an event loop, an interrupt ends the work at once
        return

    async def overlapping() -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(at_once):
                    tasks.create_task(work())
        finally:
            for writer in labeller.writers.values():
                await writer.close()

    try:
        asyncio.run(overlapping())
    except ExceptionGroup as failures:  # the first failure cancelled the other groups
        raise failures.exceptions[0] from None


def _check_same_problems(groups: GroupFolder, group: range, problems: Sequence[Problem], by_reference: bool) -> None:
    """Raise ValueError unless the finished rows of a group belong to its problems.

    Args:
        by_reference: compare references too, which are the task's own.
    """
    known = [(problem.id, problem.prompt, problem.reference if by_reference else None) for problem in problems]
    for row in groups.rows(group.start):
        if (row.get("problem_id"), row.get("prompt"), row.get("reference") if by_reference else None) not in known:
            raise ParseError(
                f"{groups.folder} was begun with other problems ({row.get('problem_id')!r} was changed or removed): "
                "choose another output_dir"
            )


def _versions() -> dict[str, str]:
    return {"torch": torch.__version__, "transformers": importlib.metadata.version("transformers")}
