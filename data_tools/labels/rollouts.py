"""Target rollouts from prefixes of drafts, and counts of their right answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from data_tools.labels.backends import RowDecoder
from data_tools.labels.build_config import BuildConfig
from data_tools.labels.drafts import render
from data_tools.labels.own_answers import OwnAnswers
from data_tools.labels.rollout_counts import NO_ROLLOUTS, RolloutCounts
from data_tools.labels.sequential_test import Tally
from data_tools.tasks.task import Problem, Task
from parse_infer.errors import ParseError
from parse_infer.models.batch_decoder import BatchRow
from parse_infer.settings.sampling import Sampling, seed_of
from parse_infer.text.detokenizer import decode
from parse_infer.text.tokenizer_spec import TokenizerSpec

_Prefix = tuple[int, tuple[int, ...]]  # problem and token ids of the draft


@dataclass(frozen=True)
class Place:
    """The prefix of `length` tokens of a draft, by index, and the number of requested rollouts."""

    draft: int
    length: int
    rollouts: int


class PrefixRollouts:
    """Rollouts for the drafts of one group of problems, each decoded at most once.

    Call `begin` first. Prompts are prefilled once, and so are the drafts after them. Equal prefixes share rollouts.
    A greedy rollout also serves every longer prefix on its path.

    Args:
        target: the model that writes the rollouts.
        decoder: decodes for the target, local or served.
        task, problems: the checker, and the group. A rollout without end token within `max_rollout_tokens` decides
            nothing. `OwnAnswers` gets its references from the rollouts from the bare prompts.
        config: the number of rollouts, their sampling, length and seed.

    Attributes:
        problems: the group, with the references that decide.
        prompts: for each problem, the tally of rollouts from its bare prompt.
        counts: the rollouts decoded so far, and those cut off.
    """

    def __init__(
        self,
        target: TokenizerSpec,
        decoder: RowDecoder,
        task: Task,
        problems: Sequence[Problem],
        config: BuildConfig,
    ) -> None:
        self.target, self.decoder, self.task, self.problems = target, decoder, task, list(problems)
        self.config, self.sampling = config, config.rollout_sampling
        self.counts = NO_ROLLOUTS
        self._drafts: list[tuple[int, list[int]]] = []  # problem and token ids
        self._right: dict[_Prefix, list[bool | None]] = {}  # whether each rollout is right, in order; None: cut off
        # Finished greedy answers: number of draft tokens before the rollout, the answer, and whether it is right.
        self._paths: list[list[tuple[int, list[int], bool]]] = [[] for _ in self.problems]
        self._prompts = decoder.prefill([render(target, problem) for problem in self.problems])
        self._contexts = self._prompts
        self.prompts: list[Tally] = []

    async def begin(self) -> None:
        """Decode the rollouts from the bare prompts, and set `problems` and `prompts`."""
        target, task = self.target, self.task
        n = self.config.max_rollouts  # every prefix of every draft is compared with these rollouts
        written = await self._decode({(i, ()): (i, len(ids), n) for i, ids in enumerate(self._prompts.ids)})
        if isinstance(task, OwnAnswers):
            texts: list[list[str]] = [[] for _ in self.problems]
            for (i, _), answer in written:
                if (text := finished_text(target, answer)) is not None:
                    texts[i].append(text)
            self.problems = [task.with_reference(*one) for one in zip(self.problems, texts, strict=True)]
        self._check(written)
        self.prompts = [self._tally((i, ()), n) for i in range(len(self.problems))]
        self.counts += RolloutCounts(unanswered=sum(not tally.total for tally in self.prompts))

    def add_drafts(self, drafts: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Prefill the drafts for `tallies`: (index of the problem, token ids up to the longest prefix)."""
        self._drafts = [(problem, list(ids)) for problem, ids in drafts]
        self._contexts = self.decoder.extend(
            self._prompts, [problem for problem, _ in self._drafts], [ids for _, ids in self._drafts]
        )

    async def tallies(self, places: Sequence[Place]) -> list[Tally]:
        """Count the first `rollouts` rollouts from each prefix, and decode the missing rollouts."""
        keys = [self._key(place) for place in places]
        missing: dict[_Prefix, tuple[int, int, int]] = {}
        for place, key in zip(places, keys, strict=True):
            known = len(self._right.get(key, ()))
            requested = missing[key][2] if key in missing else known
            if place.rollouts > requested and not self._on_known_path(key):
                missing[key] = (place.draft, len(self._prompts.ids[key[0]]) + place.length, place.rollouts)
        self._check(await self._decode(missing))
        return [self._tally(key, place.rollouts) for place, key in zip(places, keys, strict=True)]

    def _key(self, place: Place) -> _Prefix:
        problem, ids = self._drafts[place.draft]
        return problem, tuple(ids[: place.length])

    def _tally(self, key: _Prefix, rollouts: int) -> Tally:
        right = self._right[key][:rollouts]  # extra rollouts of one draft must not change the labels of another
        return Tally(right.count(True), len(right) - right.count(None), right.count(None))

    def _on_known_path(self, key: _Prefix) -> bool:
        problem, prefix = key
        for start, path, right in self._paths[problem]:
            # A shorter prefix lies in the draft, not on the rollout's path.
            if start <= len(prefix) and tuple(path[: len(prefix)]) == prefix:
                self._right[key] = [right]
                return True
        return False

    async def _decode(self, missing: Mapping[_Prefix, tuple[int, int, int]]) -> list[tuple[_Prefix, list[int]]]:
        """Decode missing rollouts of prefixes: {prefix: (context, its length in context tokens, total rollouts)}.

        Return each prefix with an answer, the tokens of prefix and rollout."""
        rows, owners = [], []
        for key, (context, length, rollouts) in missing.items():
            problem, prefix = key
            limit = max(0, min(self.config.max_rollout_tokens, self.target.window - length))
            for repeat in range(len(self._right.get(key, ())), rollouts):
                seed = seed_of(self.config.seed, self.problems[problem].id, "rollout", *prefix, "repeat", repeat)
                sampling = Sampling(self.sampling.temperature, self.sampling.top_p, self.sampling.top_k, seed)
                rows.append(BatchRow(context, length, limit, sampling))
                owners.append(key)
        written = await self.decoder.write(self._contexts, rows)
        return [(key, [*key[1], *ids]) for key, ids in zip(owners, written, strict=True)]

    def _check(self, written: Sequence[tuple[_Prefix, list[int]]]) -> None:
        for key, answer in written:
            problem, prefix = key
            right = is_right(self.target, self.task, self.problems[problem], answer)
            self._right.setdefault(key, []).append(right)
            self.counts += RolloutCounts(rollouts=1, cut=right is None)
            if self.sampling.greedy and right is not None:
                self._paths[problem].append((len(prefix), answer, right))


def finished_text(target: TokenizerSpec, answer: Sequence[int]) -> str | None:
    """Return the text of these target tokens, or None if they do not end with an end token."""
    return decode(target.tokenizer, answer) if answer and answer[-1] in target.eos_ids else None


def is_right(target: TokenizerSpec, task: Task, problem: Problem, answer: Sequence[int]) -> bool | None:
    """Whether these target tokens contain a right answer; None without an end token, as their budget cut them off."""
    text = finished_text(target, answer)
    return None if text is None else has_right_answer(task, problem, text)


def has_right_answer(task: Task, problem: Problem, text: str) -> bool:
    """Check the text; raise ValueError if the task has no reference for that."""
    right = task.check(problem, text)
    if right is None:
        raise ParseError(
            f"task {task.name} cannot check the answer to problem {problem.id} (check_with none?): labels need "
            "references, or the recipe key check_with: own_answer"
        )
    return right
