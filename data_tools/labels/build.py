"""`parse-data build`: problems -> drafts -> cuts -> target rollouts -> labels -> a data set with its card."""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from random import Random
from typing import Any, cast

import torch

from data_tools.labels.backends import LocalWriter, Writer, load_writer
from data_tools.labels.build_config import BuildConfig
from data_tools.labels.card import write_card
from data_tools.labels.drafts import AnswerSampler, DraftSampler, SampledDraft, readable, segment_texts
from data_tools.labels.own_answers import OwnAnswers
from data_tools.labels.prefix_search import PrefixSearch
from data_tools.labels.progress import BuildProgress
from data_tools.labels.rollout_counts import NO_ROLLOUTS, RolloutCounts
from data_tools.labels.rollouts import Place, PrefixRollouts, is_right
from data_tools.labels.rows import read_rows
from data_tools.labels.sequential_test import LabelRule, Tally
from data_tools.labels.shards import GroupFolder, rollout_counts
from data_tools.labels.summary import Summary, summarise
from data_tools.tasks.exclude import WithoutPrompts
from data_tools.tasks.registry import load_task
from data_tools.tasks.task import Problem, Split, Task
from parse_infer.engine import ParseEngine
from parse_infer.errors import ParseError
from parse_infer.judge.adapter import ValidityAdapter
from parse_infer.judge.adapter_files import read_adapter
from parse_infer.judge.cuts import Segmenter
from parse_infer.loop import run_sync
from parse_infer.models.loading import LanguageModel
from parse_infer.models.names import resolve
from parse_infer.models.train_problems import train_problems_of
from parse_infer.sampling import seed_of

__all__ = ["BuildConfig", "Labeller", "build"]


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
    if config.adapter:
        read_adapter(resolve(config.adapter))  # a wrong name must not begin a folder
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
        summary = summarise(read_rows(groups.folder))
        summary.rollouts, summary.left_out = rollout_counts(groups.folder), source.left_out
        write_card(groups.folder, config, summary, groups.n_problems)
    if warning := summary.rollouts.warning(config.max_rollout_tokens):
        print(warning, file=sys.stderr)
    return summary


def _no_problem(config: BuildConfig, left_out: int) -> str:
    if left_out:
        return (
            f"all {left_out:,} problems of task {config.task} in its split {config.split} are excluded, or training "
            "problems of the draft model or the target: choose other problems, or align the draft model on fewer"
        )
    return f"task {config.task} has no problem in its split {config.split}"


@dataclass
class _Case:
    """One draft and its label search; `by_token` continues the search inside the first wrong segment.

    Attributes:
        refined: whether `by_token` is wanted.
        start: offset of the first wrong segment. Prefix k of `by_token` has start + k + 1 tokens.
    """

    problem: int
    draft: SampledDraft
    cuts: list[int]
    search: PrefixSearch
    refined: bool = False
    by_token: PrefixSearch | None = None
    start: int = 0

    @property
    def needs_rollouts(self) -> bool:
        return bool(self.search.pending()) or (self.refined and not self.search.foregone)

    @property
    def open_ids(self) -> list[int]:
        """The draft tokens up to the last prefix that may need rollouts."""
        return self.draft.ids if self.refined else self.draft.ids[: self.cuts[self.search.n_open - 1]]

    def refine(self, rule: LabelRule) -> None:
        """Begin the search by tokens, if a segment is wrong and the prefix before it is labelled."""
        labels = self.search.result().labels
        if not self.refined or False not in labels or None in labels[: labels.index(False)]:
            return
        wrong = labels.index(False)
        self.start = self.cuts[wrong - 1] if wrong else 0
        if (n := self.cuts[wrong] - self.start - 1) > 0:
            self.by_token = PrefixSearch(n, rule, own_answer=None)

    def labelled(self) -> list[tuple[int, bool, float | None, float]]:
        """Return (cut, label, value, confidence) of each labelled prefix, in order."""
        result = self.search.result()
        found = [
            (cut, label, value, confidence)
            for cut, label, value, confidence in zip(
                self.cuts, result.labels, result.values, result.confidence, strict=True
            )
            if label is not None
        ]
        if self.by_token is not None:
            finer = self.by_token.result()
            last_valid = max((k for k, label in enumerate(finer.labels) if label), default=None)
            first_wrong = min((k for k, label in enumerate(finer.labels) if label is False), default=None)
            for k in (last_valid, first_wrong):
                if k is not None:
                    found.append((self.start + k + 1, bool(finer.labels[k]), finer.values[k], finer.confidence[k]))
        return sorted(found)


class Labeller:
    """Turns groups of problems into labelled rows.

    Args:
        config: the configuration of the build.
        task: checks answers, unless `config.check_with` is "own_answer".
        target, draft: the two models, local or served.
        activity: called with the name of the current step.
        note: called with each message for the user.

    Attributes:
        counts: the target's rollouts so far, and those cut off.
        begun: whether problems have been labelled before. Until then a group without a readable prompt is an error.
    """

    def __init__(
        self,
        config: BuildConfig,
        task: Task,
        target: Writer,
        draft: Writer,
        activity: Callable[[str], None] = lambda text: None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.config, self.activity, self.note = config, activity, note
        self.task: Task = OwnAnswers(task) if config.check_with == "own_answer" else task
        self.writers, self.target = {"target": target, "draft": draft}, target.model
        self.counts, self.begun = NO_ROLLOUTS, False
        self.segmenter = Segmenter(self.target.tokenizer, config.policy)
        self.decoder = target.decoder(self.target.eos_ids)
        self.sampler: DraftSampler | AnswerSampler = (
            _answers_of_parse(config, cast(LocalWriter, target).model, cast(LocalWriter, draft).model)
            if config.adapter
            else DraftSampler(draft, self.target, config.draft_sampling, config.max_draft_tokens, config.seed)
        )

    @classmethod
    def load(
        cls, config: BuildConfig, task: Task, activity: Callable[[str], None], note: Callable[[str], None]
    ) -> Labeller:
        """Load the models that `config` names."""
        activity("loading the target")
        target = load_writer(config, "target")
        activity("loading the draft model")
        return cls(config, task, target, load_writer(config, "draft"), activity, note)

    def describe_models(self) -> dict[str, dict[str, Any]]:
        return {role: writer.describe() for role, writer in self.writers.items()}

    async def label(self, problems: Sequence[Problem]) -> tuple[list[dict[str, Any]], RolloutCounts]:
        """Return one row per draft, in the order of the problems, and the counts of rollouts.

        A skipped problem has no rows."""
        config = self.config
        models = [writer.model for writer in self.writers.values()]
        problems = readable(problems, models, self.note, some=not self.begun)
        self.begun = True
        prompts = [Tally(0, 0)] * len(problems)
        rollouts: PrefixRollouts | None = None
        if config.asks_target:
            self.activity("target value")
            rollouts = PrefixRollouts(
                self.target,
                self.decoder,
                self.task,
                problems,
                sampling=config.rollout_sampling,
                from_prompt=config.max_rollouts,  # every prefix of every draft is compared with these rollouts
                max_new_tokens=config.max_rollout_tokens,
                seed=config.seed,
            )
            await rollouts.begin()
            problems, prompts = rollouts.problems, rollouts.prompts
        kept = [i for i, tally in enumerate(prompts) if tally.right or not config.drop_unsolved]
        if isinstance(self.task, OwnAnswers):  # without an answer of the target nothing is known
            kept = [i for i in kept if problems[i].reference]

        self.activity("drafts")
        drafts = await self.sampler.sample([problems[i] for i in kept])
        cases = [
            self._case(i, problems[i], draft, prompts[i])
            for i, of_problem in zip(kept, drafts, strict=True)
            for draft in of_problem
        ]
        counts = NO_ROLLOUTS
        if rollouts is not None:
            await self._search([case for case in cases if case.needs_rollouts], rollouts)
            counts = rollouts.counts
            self.counts += counts
        return [self._row(case, problems[case.problem], prompts[case.problem]) for case in cases], counts

    async def _search(self, open_cases: Sequence[_Case], rollouts: PrefixRollouts) -> None:
        rollouts.add_drafts([(case.problem, case.open_ids) for case in open_cases])
        while wanted := [(i, *each) for i, case in enumerate(open_cases) for each in case.search.pending()]:
            self.activity(f"{len(wanted)} prefixes")
            found = await rollouts.tallies([Place(i, open_cases[i].cuts[k], total) for i, k, total in wanted])
            for (i, k, _), tally in zip(wanted, found, strict=True):
                open_cases[i].search.record(k, tally)
        await self._search_by_token(open_cases, rollouts)

    async def _search_by_token(self, cases: Sequence[_Case], rollouts: PrefixRollouts) -> None:
        for case in cases:
            case.refine(self.config.label_rule(rollouts.prompts[case.problem]))
        searches = [(i, case, case.by_token) for i, case in enumerate(cases) if case.by_token is not None]
        while wanted := [(i, case, search, *each) for i, case, search in searches for each in search.pending()]:
            self.activity(f"{len(wanted)} tokens")
            places = [Place(i, case.start + k + 1, total) for i, case, _, k, total in wanted]
            for (_, _, search, k, _), tally in zip(wanted, await rollouts.tallies(places), strict=True):
                search.record(k, tally)

    def _case(self, index: int, problem: Problem, draft: SampledDraft, prompt: Tally) -> _Case:
        cuts = self.segmenter.cuts(draft.ids)  # the last one is the whole draft
        cuts = self.config.policy.even_subset(cuts) if self.config.prefix_labels else cuts[-1:]
        own_answer = is_right(self.target, self.task, problem, draft.ids) if draft.finished else None
        search = PrefixSearch(len(cuts), self.config.label_rule(prompt), own_answer, self.config.exhaustive)
        chosen = Random(seed_of(self.config.seed, problem.id, "token labels")).random() < self.config.token_labels
        return _Case(index, draft, cuts, search, refined=chosen)

    def _row(self, case: _Case, problem: Problem, prompt: Tally) -> dict[str, Any]:
        draft, labelled, facts = case.draft, case.labelled(), problem.metadata
        # A prefix without a label has no cut: its segment joins the next segment, or is dropped at the draft's end.
        cuts = [cut for cut, _, _, _ in labelled]
        ids = draft.ids[: cuts[-1]] if cuts else []
        row = {
            "prompt": problem.prompt,
            "completions": segment_texts(self.target, ids, cuts),
            "labels": [label for _, label, _, _ in labelled],
            "values": [value for _, _, value, _ in labelled],
            "confidence": [round(confidence, 4) for _, _, _, confidence in labelled],
            "undecided": case.search.result().labels.count(None),
            "target_value": prompt.share,
            "n_rollouts": prompt.rollouts,
            "draft_ids": ids,
            "cuts": cuts,
            "finished": draft.finished,
            "draft_correct": bool(case.search.own_answer),
            "task": self.task.name,
            "domain": str(next((facts[key] for key in ("domain", "category") if key in facts), self.task.name)),
            "problem_id": problem.id,
            "reference": problem.reference,
            "target": self.config.target,
            "draft": self.config.draft,
            "temperature": draft.sampling.temperature,
            "seed": draft.sampling.seed,
        }
        return row if self.config.check_with == "task" else row | {"checked_with": self.config.check_with}


def _answers_of_parse(config: BuildConfig, target: LanguageModel, draft: LanguageModel) -> AnswerSampler:
    judge = ValidityAdapter.from_pretrained(resolve(config.adapter), target.model)
    engine = ParseEngine.from_models(target, draft, judge)
    return AnswerSampler(engine, config.thresholds, config.max_draft_tokens)


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
    asked = [(problem.id, problem.prompt, problem.reference if by_reference else None) for problem in problems]
    for row in groups.rows(group.start):
        if (row.get("problem_id"), row.get("prompt"), row.get("reference") if by_reference else None) not in asked:
            raise ParseError(
                f"{groups.folder} was begun with other problems ({row.get('problem_id')!r} was changed or removed): "
                "choose another output_dir"
            )


def _versions() -> dict[str, str]:
    return {"torch": torch.__version__, "transformers": importlib.metadata.version("transformers")}
