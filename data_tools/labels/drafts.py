"""Drafts for labelling: sampled from the draft model in batches and stored as target tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from data_tools.labels.backends import Writer
from data_tools.tasks.task import Problem
from parse_infer.errors import ParseError
from parse_infer.models.batch_decoder import BatchRow
from parse_infer.models.loading import same_tokenizer
from parse_infer.settings.sampling import Sampling, seed_of
from parse_infer.text.detokenizer import Detokenizer, complete_text, encode_continuation
from parse_infer.text.tokenizer_spec import TokenizerSpec


@dataclass(frozen=True)
class SampledDraft:
    """One draft: `ids` are target tokens, including the end token if `finished`."""

    ids: list[int]
    finished: bool
    sampling: Sampling


class DraftSampler:
    """Samples drafts for many problems in one batch.

    Args:
        draft: writes the drafts.
        target: reads the drafts; where its tokenizer differs, drafts are re-tokenized from text.
        settings: one draft per entry and problem; a seed of problem and draft replaces the entry's seed.
        max_new_tokens: length at which a draft is cut off, unfinished.
        seed: base of all seeds.
    """

    def __init__(
        self,
        draft: Writer,
        target: TokenizerSpec,
        settings: Sequence[Sampling],
        max_new_tokens: int,
        seed: int,
    ) -> None:
        self.draft, self.target = draft.model, target
        self.settings, self.max_new_tokens, self.seed = list(settings), max_new_tokens, seed
        self.shares_tokens = same_tokenizer(self.draft.tokenizer, target.tokenizer)
        if self.shares_tokens and self.draft.tokenizer.chat_template is None:  # a base model next to a chat model
            self.draft.tokenizer.chat_template = target.tokenizer.chat_template
        # With a shared tokenizer, the end tokens of both models end a draft.
        end_ids = self.draft.eos_ids | target.eos_ids if self.shares_tokens else self.draft.eos_ids
        self.decoder = draft.decoder(end_ids)

    async def sample(self, problems: Sequence[Problem]) -> list[list[SampledDraft]]:
        """Return the distinct, non-empty drafts of each problem, in the order of `settings`.

        Of equal drafts the one at the lowest temperature stays, so no sampled draft replaces the greedy one.

        Raises:
            ValueError: a prompt is empty or fills a model's context window.
        """
        prompts = [render(self.draft, problem) for problem in problems]
        contexts = self.decoder.prefill(prompts)
        rows, target_limits = [], []
        for i, (problem, prompt) in enumerate(zip(problems, prompts, strict=True)):
            limit = min(self.max_new_tokens, self.draft.window - len(prompt))
            target_limits.append(self.target.window - len(render(self.target, problem)))
            for j, setting in enumerate(self.settings):
                seed = seed_of(self.seed, problem.id, "draft", j)
                sampling = Sampling(setting.temperature, setting.top_p, setting.top_k, seed)
                rows.append(BatchRow(i, len(prompt), limit, sampling))
        drafts: list[list[SampledDraft]] = [[] for _ in problems]
        for row, written in zip(rows, await self.decoder.write(contexts, rows), strict=True):
            ids, finished = self._in_target_tokens(written, target_limits[row.context])
            if ids:
                drafts[row.context].append(SampledDraft(ids, finished, row.sampling))
        return [distinct(of_problem) for of_problem in drafts]

    def _in_target_tokens(self, ids: list[int], limit: int) -> tuple[list[int], bool]:
        """Return at most `limit` target tokens of the draft, and whether they end with the target's end token."""
        ended = bool(ids) and ids[-1] in self.decoder.eos_ids
        body = ids[:-1] if ended else ids
        if not self.shares_tokens:
            text = complete_text(self.draft.tokenizer, body)
            body = encode_continuation(self.target.tokenizer, "", text)
        # An untrained draft model may write ids of padding embeddings that the target does not have.
        usable = next((i for i, token in enumerate(body) if token >= self.target.n_embeddings), len(body))
        end = self.target.end_token
        if ended and end is not None and usable == len(body) < limit:
            return [*body, end], True
        return body[: min(usable, limit)], False


def distinct(drafts: Sequence[SampledDraft]) -> list[SampledDraft]:
    """Return the drafts in their order, of equal ones only the first at the lowest temperature."""
    first: dict[tuple[int, ...], SampledDraft] = {}
    for draft in sorted(drafts, key=lambda draft: draft.sampling.temperature):
        first.setdefault(tuple(draft.ids), draft)
    return [draft for draft in drafts if first[tuple(draft.ids)] is draft]


def render(model: TokenizerSpec, problem: Problem) -> list[int]:
    """Return the token ids of the problem's prompt for `model`; a ValueError names the problem."""
    try:
        return model.render(problem.prompt)
    except ValueError as error:
        raise ParseError(f"problem {problem.id}: {error}") from error


def readable(
    problems: Sequence[Problem], models: Sequence[TokenizerSpec], note: Callable[[str], None], some: bool
) -> list[Problem]:
    """Return the problems whose prompts fit all models, and report every other problem to `note`.

    Raises ValueError where no problem fits and `some` is true, because then the models or options are the likely
    cause.
    """
    kept, reasons = [], []
    for problem in problems:
        try:
            for model in models:
                render(model, problem)
            kept.append(problem)
        except ValueError as error:
            reasons.append(str(error))
    if some and not kept and reasons:
        raise ParseError(reasons[0])
    for reason in reasons:
        note(f"left out: {reason}")
    return kept


def segment_texts(target: TokenizerSpec, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    """Return the texts of the segments, which concatenate to the draft. A split character joins the later segment."""
    return Detokenizer(target.tokenizer).segments([ids[start:end] for start, end in pairwise([0, *cuts])])
