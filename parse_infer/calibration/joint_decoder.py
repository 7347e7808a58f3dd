"""Joint decoding of a target and its draft model: many answers at once, token by token, for their texts alone.

The draft model proposes one token, which the judge keeps or the target replaces. So an answer has the text that blocks
of any length would give it, at the cost of a forward of the target for each token, shared by all answers of the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parse_infer.errors import ModelError
from parse_infer.judge.carried import Carried
from parse_infer.judge.judge import Reading, Scorer, looks_ahead
from parse_infer.judge.token_logprobs import TokenLogprobs, read_logprobs
from parse_infer.models.batch_decoder import Batch, BatchDecoder, BatchRow
from parse_infer.models.loading import LanguageModel, same_tokenizer
from parse_infer.models.token_sampling import distribution, draw, random_generator
from parse_infer.settings.sampling import Sampling
from parse_infer.text.prompts import Prompt


@dataclass(frozen=True)
class JointRow:
    """One prompt and random seed at several thresholds, whose answers share their common beginning.

    Attributes:
        sampling: of the target; drafts are greedy. A sampled row needs a seed.
    """

    prompt: Prompt
    thresholds: tuple[float, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)


@dataclass
class _Branch:
    """An answer at the thresholds whose decisions have been the same so far: `places` in the row's thresholds.

    Attributes:
        since: tokens that the target has written since the last draft token that was kept.
        kept: number of draft tokens that were kept.
    """

    row: int
    places: list[int]
    carried: Carried = field(default_factory=Carried)
    since: list[int] = field(default_factory=list)
    kept: int = 0


@dataclass(frozen=True)
class JointAnswer:
    """An answer at one threshold: its tokens, with the end token, and how many of them the draft model wrote."""

    ids: list[int]
    kept: int


class JointDecoder:
    """Decodes rows with `target`, `draft` and the judge `scorer`. In float32 each answer equals that of the engine.

    Args:
        batch_size: number of answers at a time; thresholds that part add more.

    Raises:
        ValueError: models with different tokens, or a judge that needs more than the tokens so far.
    """

    def __init__(self, target: LanguageModel, draft: LanguageModel, scorer: Scorer, batch_size: int = 32) -> None:
        if not scorer.by_token or scorer.first_tokens or looks_ahead(scorer):
            raise ModelError("this judge needs more than the tokens up to the one that it scores")
        if not same_tokenizer(target.tokenizer, draft.tokenizer):
            raise ModelError("draft model and target have different tokens")
        self._target, self._draft, self._scorer, self._size = target, draft, scorer, batch_size

    @torch.inference_mode()
    def answers(self, rows: Sequence[JointRow]) -> list[list[JointAnswer]]:
        """The answers of each row, one for each of its thresholds."""
        found: list[list[JointAnswer | None]] = [[None] * len(row.thresholds) for row in rows]
        models = (self._target, self._draft)
        decoders = [BatchDecoder(lm.model, lm.eos_ids, self._size, lm.decoder.fast) for lm in models]
        prompts = list({id(row.prompt): row.prompt for row in rows}.values())
        places = {id(prompt): i for i, prompt in enumerate(prompts)}
        contexts = [d.prefill([lm.render(p) for p in prompts]) for d, lm in zip(decoders, models, strict=True)]
        batches = [decoder.batch() for decoder in decoders]
        waiting = deque(enumerate(rows))
        branches: list[_Branch] = []  # by slot
        while waiting or branches:
            busy = sum(not run.ended for run in batches[0].runs)
            arriving = [waiting.popleft() for _ in range(min(max(0, self._size - busy), len(waiting)))]
            for batch, decoder, context in zip(batches, decoders, contexts, strict=True):
                lengths = [len(context.ids[places[id(row.prompt)]]) for _, row in arriving]
                starts = [
                    decoder.run(context, BatchRow(places[id(row.prompt)], length, row.max_new_tokens))
                    for length, (_, row) in zip(lengths, arriving, strict=True)
                ]
                slots = batch.add(starts)
            for slot, (i, row) in zip(slots, arriving, strict=True):
                branch = _Branch(i, [*range(len(row.thresholds))])
                branches[slot : slot + 1] = [branch]
            self._step(batches, branches, rows)
            for slot, run in enumerate(batches[0].runs):
                if run.ended and branches[slot].places:
                    branch = branches[slot]
                    for place in branch.places:
                        found[branch.row][place] = JointAnswer(run.written, branch.kept)
                    branch.places = []
                    batches[1].runs[slot].ended = True
            if sum(run.ended for run in batches[0].runs) * 8 >= len(branches):
                branches = [branch for branch in branches if branch.places]
                for batch in batches:
                    batch.compact()
        return [[answer for answer in answers if answer is not None] for answers in found]

    def _step(self, batches: Sequence[Batch], branches: list[_Branch], rows: Sequence[JointRow]) -> None:
        """Write one token of every answer; where the thresholds disagree about it, the answer becomes two."""
        target, draft = batches
        proposed = draft.logits().argmax(-1)
        logits = target.logits()
        found = read_logprobs(logits, proposed, lambda scores: scores, max(1, self._scorer.k))
        tokens = proposed.tolist()
        forks: list[tuple[int, int, _Branch]] = []
        for slot, branch in enumerate(branches):
            if not branch.places:
                continue
            row = rows[branch.row]
            one = TokenLogprobs(*(part[slot : slot + 1] for part in _parts(found)))
            verdict = self._scorer.score(Reading([tokens[slot]], None, branch.since, one), branch.carried)
            keeps = [place for place in branch.places if verdict.validity[0] >= row.thresholds[place]]
            rest = [place for place in branch.places if place not in keeps]
            n = len(target.runs[slot].written)
            if rest:
                own = self._own(logits[slot], row.sampling, n)
                rejected = _Branch(branch.row, rest, branch.carried, [*branch.since, own], branch.kept)
                if keeps:
                    forks.append((slot, own, rejected))
                else:
                    branches[slot], tokens[slot] = rejected, own
            if keeps:
                branch.places, branch.since, branch.kept = keeps, [], branch.kept + 1
                if verdict.scores is not None:
                    branch.carried = verdict.scores.carried(n + 1, 1)
        for batch in batches:
            slots = batch.add([batch.fork(slot) for slot, _, _ in forks])
        for slot, (_, own, rejected) in zip(slots, forks, strict=True):
            if slot < len(branches):
                branches[slot], tokens[slot] = rejected, own
            else:
                branches.append(rejected)
                tokens.append(own)
        for batch in batches:
            batch.write(tokens)

    def _own(self, logits: Tensor, sampling: Sampling, place: int) -> int:
        """The target's own token, by the random numbers that the engine has at this place of an answer."""
        if sampling.greedy:
            return int(logits.argmax())
        generator = random_generator(sampling, logits.device, "target", place)
        return int(draw(distribution(logits, sampling), generator))


def _parts(found: TokenLogprobs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return found.ids, found.own, found.top_ids, found.top
