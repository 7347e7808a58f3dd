"""Labels for groups of problems: drafts, cuts, rollouts from the prefixes, and one row per draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from data_tools.labels.backends import Writer, load_writer
from data_tools.labels.build_config import BuildConfig
from data_tools.labels.drafts import DraftSampler, SampledDraft, readable, segment_texts
from data_tools.labels.own_answers import OwnAnswers
from data_tools.labels.prefix_search import PrefixSearch
from data_tools.labels.rollout_counts import NO_ROLLOUTS, RolloutCounts
from data_tools.labels.rollouts import Place, PrefixRollouts, has_right_answer, is_right
from data_tools.labels.sequential_test import Tally
from data_tools.tasks.task import Problem, Task
from parse_infer.text.cuts import Segmenter
from parse_infer.text.detokenizer import decode


@dataclass
class _Case:
    """One draft and its label search."""

    problem: int
    draft: SampledDraft
    cuts: list[int]
    search: PrefixSearch

    @property
    def needs_rollouts(self) -> bool:
        return bool(self.search.pending())

    @property
    def open_ids(self) -> list[int]:
        """The draft tokens up to the last prefix that may need rollouts."""
        return self.draft.ids[: self.cuts[self.search.n_open - 1]]

    def labelled(self) -> list[tuple[int, bool, float | None, float]]:
        """Return (cut, label, value, confidence) of each labelled prefix, in order."""
        result = self.search.result()
        return [
            (cut, label, value, confidence)
            for cut, label, value, confidence in zip(
                self.cuts, result.labels, result.values, result.confidence, strict=True
            )
            if label is not None
        ]


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
        warned: whether `note` got a warning of cut rollouts.
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
        self.counts, self.begun, self.warned = NO_ROLLOUTS, False, False
        self.segmenter = Segmenter(self.target.tokenizer, config.policy)
        self.decoder = target.decoder(self.target.eos_ids)
        self.sampler = DraftSampler(draft, self.target, config.draft_sampling, config.max_draft_tokens, config.seed)

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
            rollouts = PrefixRollouts(self.target, self.decoder, self.task, problems, config)
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
            if not self.warned and (warning := self.counts.warning(config.max_rollout_tokens)):
                self.warned = True
                self.note(warning)
        return [self._row(case, problems[case.problem], prompts[case.problem]) for case in cases], counts

    async def _search(self, open_cases: Sequence[_Case], rollouts: PrefixRollouts) -> None:
        rollouts.add_drafts([(case.problem, case.open_ids) for case in open_cases])
        while pending := [(i, *each) for i, case in enumerate(open_cases) for each in case.search.pending()]:
            self.activity(f"{len(pending)} prefixes")
            tallies = await rollouts.tallies([Place(i, open_cases[i].cuts[k], total) for i, k, total in pending])
            for (i, k, _), tally in zip(pending, tallies, strict=True):
                open_cases[i].search.record(k, tally)

    def _case(self, index: int, problem: Problem, draft: SampledDraft, prompt: Tally) -> _Case:
        cuts = self.segmenter.cuts(draft.ids)  # the last one is the whole draft
        cuts = self.config.policy.even_subset(cuts) if self.config.prefix_labels else cuts[-1:]
        own_answer = self._own_answer(problem, draft)
        search = PrefixSearch(len(cuts), self.config.label_rule(prompt), own_answer, self.config.exhaustive)
        return _Case(index, draft, cuts, search)

    def _own_answer(self, problem: Problem, draft: SampledDraft) -> bool | None:
        """Whether the draft's answer is right; None where that is open.

        Without labels of prefixes a draft that was cut off is wrong unless its text has the right answer already: it
        has used its budget without answering."""
        if draft.finished:
            return is_right(self.target, self.task, problem, draft.ids)
        if self.config.prefix_labels or has_right_answer(self.task, problem, decode(self.target.tokenizer, draft.ids)):
            return None
        return False

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
