"""Values of prefixes: the share of target rollouts from a prefix that end with a right answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data_tools.labels.drafts import render
from data_tools.labels.writers import RowDecoder
from data_tools.tasks.task import Problem, Task
from parse_infer.models.batch_decoder import Row
from parse_infer.models.detokenizer import decode
from parse_infer.models.language import Language
from parse_infer.models.sampling import Sampling, seed_of


@dataclass(frozen=True)
class Place:
    """A prefix of a draft whose value is wanted: the first `length` tokens of draft `draft`."""

    draft: int
    length: int


class PrefixValues:
    """Values for the drafts of one group of problems; everything known about the group is used.

    The prompts are prefilled once, the drafts behind them once. Equal prefixes of different drafts share their value.
    A greedy rollout is also the rollout of every longer prefix that lies on its path, so those cost nothing.

    Args:
        target: the model that rolls out.
        decoder: lets it write, wherever it runs.
        task, problems: the checker, and the group. A rollout that does not end within its budget does not count.
        sampling, n_rollouts: how rollouts are sampled, and how many there are per prefix.
        max_new_tokens: budget of a rollout.
        seed: start of all seeds.

    Attributes:
        target_values: value of each problem's bare prompt.
        rollouts: rollouts decoded so far.
    """

    def __init__(
        self,
        target: Language,
        decoder: RowDecoder,
        task: Task,
        problems: Sequence[Problem],
        *,
        sampling: Sampling,
        n_rollouts: int,
        max_new_tokens: int,
        seed: int,
    ) -> None:
        self.target, self.decoder, self.task, self.problems = target, decoder, task, list(problems)
        self.sampling, self.n_rollouts, self.max_new_tokens, self.seed = sampling, n_rollouts, max_new_tokens, seed
        self.rollouts = 0
        self._drafts: list[tuple[int, list[int]]] = []  # problem and token ids
        self._known: dict[tuple[int, tuple[int, ...]], float] = {}
        self._paths: list[list[tuple[list[int], float]]] = [[] for _ in self.problems]  # finished greedy answers
        self._prompts = decoder.prefill([render(target, problem) for problem in self.problems])
        self._contexts = self._prompts
        wanted = [(i, ()) for i in range(len(self.problems))]
        self._roll_out(wanted, [(i, len(ids)) for i, ids in enumerate(self._prompts.ids)])
        self.target_values = [self._known[key] for key in wanted]

    def add_drafts(self, drafts: Sequence[tuple[int, Sequence[int]]]) -> None:
        """The drafts that `values` will be asked about: (index of the problem, token ids that prefixes may reach)."""
        self._drafts = [(problem, list(ids)) for problem, ids in drafts]
        self._contexts = self.decoder.extend(
            self._prompts, [problem for problem, _ in self._drafts], [ids for _, ids in self._drafts]
        )

    def values(self, places: Sequence[Place]) -> list[float]:
        """The value of each prefix."""
        keys = [self._key(place) for place in places]
        missing: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        for place, key in zip(places, keys, strict=True):
            if key not in self._known and key not in missing and not self._on_known_path(key):
                missing[key] = (place.draft, len(self._prompts.ids[key[0]]) + place.length)
        self._roll_out(list(missing), list(missing.values()))
        return [self._known[key] for key in keys]

    def _key(self, place: Place) -> tuple[int, tuple[int, ...]]:
        problem, ids = self._drafts[place.draft]
        return problem, tuple(ids[: place.length])

    def _on_known_path(self, key: tuple[int, tuple[int, ...]]) -> bool:
        problem, prefix = key
        for path, value in self._paths[problem]:
            if tuple(path[: len(prefix)]) == prefix:
                self._known[key] = value
                return True
        return False

    def _roll_out(self, keys: Sequence[tuple[int, tuple[int, ...]]], starts: Sequence[tuple[int, int]]) -> None:
        """Find out the values of `keys`; `starts` has the context of each, and how many of its tokens it covers."""
        rows = []
        for (problem, prefix), (context, length) in zip(keys, starts, strict=True):
            room = max(0, min(self.max_new_tokens, self.target.window - length))
            for repeat in range(self.n_rollouts):
                seed = seed_of(self.seed, self.problems[problem].id, "rollout", *prefix, "repeat", repeat)
                sampling = Sampling(self.sampling.temperature, self.sampling.top_p, self.sampling.top_k, seed)
                rows.append(Row(context, length, room, sampling))
        written = self.decoder.decode(self._contexts, rows)
        self.rollouts += len(rows)
        for i, (problem, prefix) in enumerate(keys):
            answers = [[*prefix, *ids] for ids in written[i * self.n_rollouts : (i + 1) * self.n_rollouts]]
            value = sum(self._right(problem, answer) for answer in answers) / self.n_rollouts
            self._known[problem, prefix] = value
            if self.sampling.greedy and answers[0] and answers[0][-1] in self.target.eos_ids:
                self._paths[problem].append((answers[0], value))

    def _right(self, problem: int, answer: list[int]) -> bool:
        return is_right(self.target, self.task, self.problems[problem], answer)


def is_right(target: Language, task: Task, problem: Problem, answer: Sequence[int]) -> bool:
    """Whether these target tokens are a complete answer (they end with an end token) and a right one."""
    if not answer or answer[-1] not in target.eos_ids:
        return False
    found = task.check(problem, decode(target.tokenizer, answer))
    if found is None:
        raise ValueError(
            f"task {task.name} cannot tell whether problem {problem.id} is answered right (check_with none?): labels "
            "need references"
        )
    return found
