"""Joint decoding of a target and its draft model: many answers at once, token by token, for their texts alone.

The draft model proposes one token, which a rule keeps or the target replaces. So an answer has the text that blocks of
any length would give it, at the cost of a forward of the target for each token, shared by all answers of the batch.
Answers under several rules and thresholds are decoded once until their texts differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parse_infer.errors import ModelError
from parse_infer.judge.rules.rule import RuleJudge
from parse_infer.judge.token_logprobs import read_logprobs
from parse_infer.models.attention import enable_split_attention
from parse_infer.models.batch_decoder import Batch, BatchDecoder, BatchRow
from parse_infer.models.loading import LanguageModel, same_tokenizer
from parse_infer.models.token_sampling import distribution, draw, random_generator
from parse_infer.settings.sampling import Sampling
from parse_infer.text.detokenizer import Detokenizer
from parse_infer.text.prompts import Prompt

_GROUP = 4  # batches whose prompts are prefilled together: the last answers of a group decode in a smaller one


@dataclass(frozen=True)
class JointRow:
    """One prompt and random seed at several operating points.

    Attributes:
        points: rules, by their number, and thresholds.
        sampling: of the target; drafts are greedy. A sampled row needs a seed.
    """

    prompt: Prompt
    points: tuple[tuple[int, float], ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)


@dataclass
class JointAnswer:
    """An answer at one point: its tokens, with the end token, and how many proposals were not kept."""

    ids: list[int] = field(default_factory=list)
    rejected: int = 0


@dataclass
class _Branch:
    """An answer of some of a row's points.

    Attributes:
        places: of these points in the row; none: the answer has ended.
        text: the answer so far.
        inside: the target has begun a character, and goes on, as in `speculate`.
    """

    row: int
    places: list[int]
    text: Detokenizer
    inside: bool = False


class JointDecoder:
    """Decodes rows with `target`, `draft` and rules. In float32 each answer equals that of the engine, and where the
    target writes everything, a sampled one has its distribution.

    Args:
        batch_size: maximum number of concurrent answers, even if those of a row differ from the start. It bounds the
            memory. A single row may exceed it.

    Raises:
        ValueError: models with different tokens, or a judge whose verdict depends on more than one token.
    """

    def __init__(
        self, target: LanguageModel, draft: LanguageModel, judges: Sequence[object], batch_size: int = 32
    ) -> None:
        self._rules: list[RuleJudge] = []
        for judge in judges:
            if not isinstance(judge, RuleJudge) or judge.looks_ahead:
                raise ModelError("this judge reads more than one token: give a rule such as min_p")
            self._rules.append(judge)
        if not same_tokenizer(target.tokenizer, draft.tokenizer):
            raise ModelError("draft model and target have different tokens")
        enable_split_attention(draft.model)  # shared keys and values are not copied
        self._models, self._size = (target, draft), batch_size

    def answers(self, rows: Sequence[JointRow]) -> Iterator[list[JointAnswer]]:
        """Yield the answers of each row in order, one for each of its points."""
        size = max(1, _GROUP * self._size // max((len(row.points) for row in rows), default=1))
        for start in range(0, len(rows), size):
            yield from self._group(rows[start : start + size])

    @torch.inference_mode()
    def _group(self, rows: Sequence[JointRow]) -> list[list[JointAnswer]]:
        """The answers of rows whose prompts are prefilled together."""
        found = [[JointAnswer() for _ in row.points] for row in rows]
        prompts = {id(row.prompt): row.prompt for row in rows}
        contexts = dict(zip(prompts, range(len(prompts)), strict=True))
        ends = self._models[0].eos_ids
        decoders = [BatchDecoder(lm.model, ends, self._size, lm.decoder.fast) for lm in self._models]
        prefilled = [
            decoder.prefill([lm.render(prompt) for prompt in prompts.values()])
            for decoder, lm in zip(decoders, self._models, strict=True)
        ]
        batches = [decoder.batch() for decoder in decoders]  # with the same slots
        waiting = deque(enumerate(rows))
        branches: list[_Branch] = []  # by slot
        while waiting or branches:
            running = sum(len(branch.places) for branch in branches)
            arriving = []
            while waiting and (not running or running + len(waiting[0][1].points) <= self._size):
                arriving.append(waiting.popleft())
                running += len(arriving[-1][1].points)
            slots: list[int] = []
            for batch, decoder, context in zip(batches, decoders, prefilled, strict=True):
                starts = [(contexts[id(row.prompt)], row.max_new_tokens) for _, row in arriving]
                slots = batch.add([decoder.run(context, BatchRow(i, len(context.ids[i]), n)) for i, n in starts])
            for slot, (i, row) in zip(slots, arriving, strict=True):
                text = Detokenizer(self._models[0].tokenizer)
                branches[slot : slot + 1] = [_Branch(i, [*range(len(row.points))], text)]
            self._step(batches, branches, rows, found)
            for slot, run in enumerate(batches[0].runs):
                if run.ended:
                    for place in branches[slot].places:
                        found[branches[slot].row][place].ids = run.written
                    branches[slot].places = []
            # Removing slots copies all keys and values, and answers that split need free slots.
            if not waiting and 2 * sum(not branch.places for branch in branches) >= len(branches):
                branches = [branch for branch in branches if branch.places]
                for batch in batches:
                    batch.compact()
        return found

    def _step(
        self,
        batches: Sequence[Batch],
        branches: list[_Branch],
        rows: Sequence[JointRow],
        found: Sequence[Sequence[JointAnswer]],
    ) -> None:
        """Write one token of every answer; where its points disagree about it, the answer becomes two."""
        target, draft = batches
        proposed, logits = draft.logits().argmax(-1), target.logits()
        read = read_logprobs(logits, proposed, lambda scores: scores, max(rule.k for rule in self._rules))
        validity = [rule.validity_of_each(read.first(rule.k)).tolist() for rule in self._rules]
        tokens = proposed.tolist()
        forks: list[tuple[int, int, _Branch]] = []
        for slot, branch in enumerate(branches):
            row, inside = rows[branch.row], branch.inside
            rejected = [p for p in branch.places if inside or validity[row.points[p][0]][slot] < row.points[p][1]]
            branch.inside = False
            if not rejected:
                continue
            for place in rejected:
                found[branch.row][place].rejected += 1
            own = self._own(logits[slot], row.sampling, len(target.runs[slot].written))
            ahead = branch.text.fork()
            ahead.add([own])
            if own == tokens[slot] and ahead.complete:  # drawn, and so the same answer
                continue
            if len(rejected) < len(branch.places):
                branch.places = [place for place in branch.places if place not in rejected]
                forks.append((slot, own, _Branch(branch.row, rejected, branch.text.fork(), not ahead.complete)))
            else:
                tokens[slot], branch.inside = own, not ahead.complete
        slots: list[int] = []
        for batch in batches:
            slots = batch.add([batch.fork(slot) for slot, _, _ in forks])
        for slot, (_, own, branch) in zip(slots, forks, strict=True):
            branches[slot : slot + 1], tokens[slot : slot + 1] = [branch], [own]
        for branch, token in zip(branches, tokens, strict=True):
            branch.text.add([token])
        for batch in batches:
            batch.write(tokens)

    def _own(self, logits: Tensor, sampling: Sampling, place: int) -> int:
        """The target's own token, by the random numbers that the engine has at this place of an answer."""
        if sampling.greedy:
            return int(logits.argmax())
        generator = random_generator(sampling, logits.device, "target", place)
        return int(draw(distribution(logits, sampling), generator))
