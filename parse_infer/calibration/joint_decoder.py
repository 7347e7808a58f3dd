"""Joint decoding of a target and its draft model: many answers at once, token by token, for their texts alone.

The draft model proposes one token, which a judge keeps or the target replaces. So an answer has the text that blocks
of any length would give it, at the cost of a forward of the target for each token, shared by all answers of the batch.
Answers under several judges and thresholds are decoded once until their texts differ. With a reduced vocabulary, one
target token may be several draft tokens: the target waits while the draft model reads them.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from parse_infer.calibration.joint_judges import REJECTED, JointJudge, Memory, joint_judge
from parse_infer.calibration.joint_tokens import DraftTokens
from parse_infer.judge.token_logprobs import TokenLogprobs, joined, read_logprobs
from parse_infer.models.attention import enable_split_attention
from parse_infer.models.batch_decoder import Batch, BatchDecoder, BatchRow, Contexts
from parse_infer.models.loading import LanguageModel
from parse_infer.models.token_sampling import distribution, draw, random_generator
from parse_infer.settings.sampling import Sampling
from parse_infer.text.detokenizer import Detokenizer
from parse_infer.text.prompts import Prompt

_GROUP = 4  # batches whose prompts are prefilled together: the last answers of a group decode in a smaller one


@dataclass(frozen=True)
class JointRow:
    """One prompt and random seed at several operating points.

    Attributes:
        points: judges, by their number, and thresholds.
        sampling: of the target; drafts are greedy. A sampled row needs a seed.
    """

    prompt: Prompt
    points: tuple[tuple[int, float], ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)

    def max_answers(self, places: Collection[int] | None = None) -> int:
        """Into how many answers these of its points, or all, may split: those that accept nothing have one answer."""
        points = self.points if places is None else [self.points[place] for place in places]
        accepting = sum(threshold <= 1 for _, threshold in points)
        return accepting + (accepting < len(points))


@dataclass
class JointAnswer:
    """An answer at one point: its tokens, with the end token, and how many of them the target wrote."""

    ids: list[int] = field(default_factory=list)
    rejected: int = 0


@dataclass
class _Branch:
    """An answer of some of a row's points.

    Attributes:
        places: of these points in the row; none: the answer has ended.
        text: the answer so far.
        memories: what the judge of each place remembers; nothing where the threshold accepts nothing.
        inside: the target has begun a character, and goes on, as in `speculate`.
        unread: draft tokens of this text that the draft model has yet to read.
        alone: the draft model cannot continue, or no point accepts anything, and the target writes the rest.
    """

    row: int
    places: list[int]
    text: Detokenizer
    memories: dict[int, Memory | None]
    inside: bool = False
    unread: list[int] = field(default_factory=list)
    alone: bool = False

    def fork(self, places: list[int]) -> _Branch:
        return replace(self, places=places, text=self.text.fork(), memories={**self.memories}, unread=[*self.unread])


class JointDecoder:
    """Decodes rows with `target`, `draft` and judges. In float32 each answer equals that of the engine, or has the
    same distribution: where a sampling target writes several tokens in a row, or any in an engine without token
    drafter, its random numbers are others.

    Args:
        batch_size: maximum number of concurrent answers, even if those of a row differ from the start. It bounds the
            memory. A single row may exceed it.

    Raises:
        ValueError: models with different tokens, or a judge whose verdict depends on other tokens (`joint_judge`).
    """

    def __init__(
        self, target: LanguageModel, draft: LanguageModel, judges: Sequence[object], batch_size: int = 32
    ) -> None:
        self._judges = [joint_judge(judge, target) for judge in judges]
        self._k = max(judge.k for judge in self._judges)
        self._tokens = DraftTokens(draft, target)
        enable_split_attention(draft.model)  # shared keys and values are not copied
        self._models, self._size = (target, draft), batch_size

    @property
    def first_tokens(self) -> int:
        """Tokens that the first block of the engine's answers must have, if the draft goes on."""
        return max(judge.first_tokens for judge in self._judges)

    def answers(self, rows: Sequence[JointRow]) -> Iterator[list[JointAnswer] | None]:
        """Yield the answers of each row in order, one for each of its points. None: the draft ends before a head can
        tell whether it is usual (`UsualDrafts`), and the engine would go on to look at the next draft."""
        most = max((row.max_answers() for row in rows), default=1)
        size = max(1, min(_GROUP * self._size // most, self._size))  # the prompts of a group lie in one padded cache
        for start in range(0, len(rows), size):
            yield from self._group(rows[start : start + size])

    @torch.inference_mode()
    def _group(self, rows: Sequence[JointRow]) -> list[list[JointAnswer] | None]:
        """The answers of rows whose prompts are prefilled together."""
        found = [[JointAnswer() for _ in row.points] for row in rows]
        prompts = {id(row.prompt): row.prompt for row in rows}
        contexts = dict(zip(prompts, range(len(prompts)), strict=True))
        target, draft = self._models
        decoders = [
            BatchDecoder(lm.model, ends, self._size, lm.decoder.fast)
            for lm, ends in ((target, target.eos_ids), (draft, ()))
        ]
        own = [self._tokens.prompt(prompt) for prompt in prompts.values()]
        judged = {contexts[id(row.prompt)] for row in rows if any(threshold <= 1 for _, threshold in row.points)}
        fits = [number in judged and len(ids) < draft.window for number, ids in enumerate(own)]
        prefilled = [
            decoders[0].prefill([target.render(prompt) for prompt in prompts.values()]),
            decoders[1].prefill([ids if fit else ids[:1] for ids, fit in zip(own, fits, strict=True)]),
        ]
        budgets = {contexts[id(row.prompt)]: row.max_new_tokens for row in rows}
        usual = self._usual(decoders, prefilled, fits, budgets)
        told = [None not in each for each in zip(*usual, strict=True)]
        batches = [decoder.batch() for decoder in decoders]  # with the same slots
        waiting = deque((i, row) for i, row in enumerate(rows) if told[contexts[id(row.prompt)]])
        branches: list[_Branch] = []  # by slot
        while waiting or branches:
            running = sum(rows[branch.row].max_answers(branch.places) for branch in branches)
            arriving = []
            while waiting and (not running or running + waiting[0][1].max_answers() <= self._size):
                arriving.append(waiting.popleft())
                running += arriving[-1][1].max_answers()
            slots: list[int] = []
            for batch, decoder, context, lm in zip(batches, decoders, prefilled, self._models, strict=True):
                runs = []
                for _, row in arriving:
                    number = contexts[id(row.prompt)]
                    length = len(context.ids[number])
                    # A draft model's run ends with the target's.
                    budget = min(row.max_new_tokens, lm.window - length) if lm is target else sys.maxsize
                    runs.append(decoder.run(context, BatchRow(number, length, budget)))
                slots = batch.add(runs)
            for slot, (i, row) in zip(slots, arriving, strict=True):
                number = contexts[id(row.prompt)]
                begin = [judge.begin(bool(known[number])) for judge, known in zip(self._judges, usual, strict=True)]
                memories = {p: begin[judge] for p, (judge, _) in enumerate(row.points)}
                places, text = [*range(len(row.points))], Detokenizer(target.tokenizer)
                branches[slot : slot + 1] = [_Branch(i, places, text, memories, alone=not fits[number])]
            self._step(batches, branches, rows, found)
            for slot, run in enumerate(batches[0].runs):
                if run.ended:
                    for place in branches[slot].places:
                        found[branches[slot].row][place].ids = run.written
                    branches[slot].places, batches[1].runs[slot].ended = [], True
            # Removing slots copies all keys and values, and answers that split need free slots.
            if not waiting and 2 * sum(not branch.places for branch in branches) >= len(branches):
                branches = [branch for branch in branches if branch.places]
                for batch in batches:
                    batch.compact()
        return [each if told[contexts[id(row.prompt)]] else None for each, row in zip(found, rows, strict=True)]

    def _step(
        self,
        batches: Sequence[Batch],
        branches: list[_Branch],
        rows: Sequence[JointRow],
        found: Sequence[Sequence[JointAnswer]],
    ) -> None:
        """Write one token of every answer; where its points disagree about it, the answer becomes two."""
        target, draft = batches
        drafting = any(branch.places and not branch.alone for branch in branches)
        drafted = draft.logits().argmax(-1).tolist() if drafting else [0] * len(branches)
        logits = target.logits()
        tokens: list[int | None] = [
            None if branch.alone or branch.unread or not branch.places else self._tokens.proposal(token)
            for branch, token in zip(branches, drafted, strict=True)
        ]
        proposed = torch.tensor([token or 0 for token in tokens], device=logits.device)
        read = read_logprobs(logits, proposed, lambda scores: scores, self._k)
        verdicts = self._verdicts(branches, rows, tokens, read, target)
        forks: list[tuple[int, int, _Branch]] = []
        written: list[tuple[_Branch, list[int], int]] = []
        for slot, branch in enumerate(branches):
            if branch.unread:
                continue
            row, rejected = rows[branch.row], list[int]()
            for place in branch.places:
                judge, threshold = row.points[place]
                validity, memory = verdicts[judge].get((slot, id(branch.memories[place])), (REJECTED, None))
                if threshold > 1 or not validity >= threshold:  # as NaN
                    rejected.append(place)
                else:
                    branch.memories[place] = memory
            branch.inside = False
            if not rejected:
                continue
            for place in rejected:
                found[branch.row][place].rejected += 1
            own = self._own(logits[slot], row.sampling, len(target.runs[slot].written))
            ahead = branch.text.fork()
            ahead.add([own])
            if own == tokens[slot] and ahead.complete:  # drawn, and so the same answer
                written.append((branch, rejected, own))
            elif len(rejected) < len(branch.places):
                branch.places = [place for place in branch.places if place not in rejected]
                forks.append((slot, own, replace(branch.fork(rejected), inside=not ahead.complete)))
                written.append((forks[-1][2], rejected, own))
            else:
                tokens[slot], branch.inside = own, not ahead.complete
                written.append((branch, rejected, own))
        self._read(rows, written)
        slots: list[int] = []
        for batch in batches:
            slots = batch.add([batch.fork(slot) for slot, _, _ in forks])
        for slot, (_, own, branch) in zip(slots, forks, strict=True):
            branches[slot : slot + 1], tokens[slot : slot + 1] = [branch], [own]
        read_next: list[int | None] = []
        for branch, run, token in zip(branches, draft.runs, tokens, strict=True):
            if token is not None and branch.places:
                branch.text.add([token])
                branch.unread = [*self._tokens.of(token)]
                branch.alone |= self._tokens.ends(branch.unread)
                branch.alone |= run.position + 1 + len(branch.unread) >= self._models[1].window
            if branch.alone:
                branch.unread = []
            read_next.append(branch.unread.pop(0) if branch.unread else None)
        target.write(tokens)
        draft.write(read_next)

    def _verdicts(
        self,
        branches: Sequence[_Branch],
        rows: Sequence[JointRow],
        tokens: Sequence[int | None],
        read: TokenLogprobs,
        target: Batch,
    ) -> list[dict[tuple[int, int], tuple[float, Memory | None]]]:
        """By judge, the validity of each proposed token after each memory, and the memory if it is accepted; keys are
        slots and memories."""
        asked: list[dict[tuple[int, int], Memory | None]] = [{} for _ in self._judges]
        for slot, branch in enumerate(branches):
            if tokens[slot] is None or branch.inside:
                continue
            for place in branch.places:
                judge, threshold = rows[branch.row].points[place]
                if threshold <= 1:
                    asked[judge][slot, id(branch.memories[place])] = branch.memories[place]
        verdicts = []
        for each, some in zip(self._judges, asked, strict=True):
            part = read.part(torch.tensor([slot for slot, _ in some], dtype=torch.long, device=read.ids.device))
            states = partial(self._states, target, tokens, [slot for slot, _ in some], each.layers)
            answers = each.judge(part.first(each.k), [*some.values()], states) if some else ([], [])
            verdicts.append(dict(zip(some, zip(*answers, strict=True), strict=True)))
        return verdicts

    def _states(
        self,
        target: Batch,
        tokens: Sequence[int | None],
        slots: Sequence[int],
        layers: Sequence[int],
        chosen: Sequence[int],
    ) -> Tensor:
        """What the target's layers read at the proposed tokens of the chosen ones of these slots, which may repeat."""
        places = dict.fromkeys(slots[i] for i in chosen)
        found = target.states({slot: cast("int", tokens[slot]) for slot in places}, layers)
        rows = dict(zip(places, range(len(places)), strict=True))
        return found[[rows[slots[i]] for i in chosen]]

    def _read(self, rows: Sequence[JointRow], written: Sequence[tuple[_Branch, list[int], int]]) -> None:
        """Let the judges of these places of branches read a token that the target has written."""
        new: list[dict[tuple[int, int], Memory | None]] = [{} for _ in self._judges]
        for branch, places, own in written:
            for place in places:
                judge, threshold = rows[branch.row].points[place]
                if threshold <= 1:
                    new[judge][own, id(branch.memories[place])] = branch.memories[place]
        for each, some in zip(self._judges, new, strict=True):
            if some:
                some |= zip(some, each.read([own for own, _ in some], [*some.values()]), strict=True)
        for branch, places, own in written:
            for place in places:
                judge, threshold = rows[branch.row].points[place]
                if threshold <= 1:
                    branch.memories[place] = new[judge][own, id(branch.memories[place])]

    def _usual(
        self,
        decoders: Sequence[BatchDecoder],
        prefilled: Sequence[Contexts],
        fits: Sequence[bool],
        budgets: Mapping[int, int],
    ) -> list[list[bool | None]]:
        """By judge, whether it can judge the draft model's answer to each prompt, by what the target says of its first
        tokens; None: there are too few to tell."""
        if not self.first_tokens:
            return [[True] * len(fits)] * len(self._judges)
        beginnings: dict[int, TokenLogprobs | None] = {}
        asked = [i for i, fit in enumerate(fits) if fit]
        for start in range(0, len(asked), self._size):
            some = asked[start : start + self._size]
            beginnings |= zip(some, self._beginnings(decoders, prefilled, {i: budgets[i] for i in some}), strict=True)

        def known(judge: JointJudge, i: int) -> bool | None:
            if not judge.first_tokens or i not in beginnings:  # nothing is drafted for this prompt
                return True
            draft = beginnings[i]
            return None if draft is None else judge.usual(draft)

        return [[known(judge, i) for i in range(len(fits))] for judge in self._judges]

    def _beginnings(
        self, decoders: Sequence[BatchDecoder], prefilled: Sequence[Contexts], budgets: Mapping[int, int]
    ) -> list[TokenLogprobs | None]:
        """What the target says of the draft model's first tokens after these prompts; None: the target has none of
        them."""
        parts: list[list[TokenLogprobs]] = [[] for _ in budgets]
        target, draft = batches = [decoder.batch() for decoder in decoders]
        for batch, decoder, context, lm in zip(batches, decoders, prefilled, self._models, strict=True):
            runs = []
            for i, budget in budgets.items():
                length = len(context.ids[i])
                runs.append(decoder.run(context, BatchRow(i, length, min(budget, lm.window - length))))
            batch.add(runs)
        going = [True] * len(budgets)
        for _ in range(self.first_tokens):
            drafted, logits = draft.logits().argmax(-1).tolist(), target.logits()
            tokens = [self._tokens.proposal(token) if go else None for go, token in zip(going, drafted, strict=True)]
            ids = torch.tensor([token or 0 for token in tokens], device=logits.device)
            read = read_logprobs(logits, ids, lambda scores: scores, self._k)
            target.write(tokens)
            draft.write([None if token is None else own for token, own in zip(tokens, drafted, strict=True)])
            for slot, token in enumerate(tokens):
                if token is not None:
                    parts[slot].append(read.part(torch.tensor([slot], device=ids.device)))
                ended = target.runs[slot].ended or draft.runs[slot].ended
                going[slot] &= token is not None and not ended
        return [joined(part) if part else None for part in parts]

    def _own(self, logits: Tensor, sampling: Sampling, place: int) -> int:
        """The target's own token, by the random numbers that the engine has at this place of an answer."""
        if sampling.greedy:
            return int(logits.argmax())
        generator = random_generator(sampling, logits.device, "target", place)
        return int(draw(distribution(logits, sampling), generator))
