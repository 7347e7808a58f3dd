"""The tokens that one model of this process writes."""

from __future__ import annotations

from collections.abc import Iterator

from parse_infer.models.loading import LanguageModel
from parse_infer.models.token_sampling import random_generator
from parse_infer.request.output import Source
from parse_infer.request.request import Request
from parse_infer.token_drafters.decode import speculative_decode
from parse_infer.token_drafters.proposer import TokenProposer


def written(
    model: LanguageModel, request: Request, proposer: TokenProposer | None, role: Source, place: int = 0
) -> Iterator[int]:
    """Yield tokens of `model` for the rest of the answer. The consumer adds each token to the answer; the consumer's
    work is not timed.

    Args:
        place: number of the answer's tokens so far, or anything else that differs between the runs of an answer.
    """
    sampling, decoder, answer = request.sampling, model.decoder, request.answer
    # Each role and place has its own random numbers, so that the noise behind a rejected token is not reused.
    generator = random_generator(sampling, decoder.device, role, place)
    field = "resume_s" if role == "target" else "draft_s"
    while answer.remaining_tokens > 0:  # one decode until `min_tokens`, then one up to each end token
        budget, banned = answer.required or answer.remaining_tokens, answer.banned_ids
        tokens = speculative_decode(decoder, proposer, budget, sampling, generator, banned)
        while True:
            with request.timed(field):
                token = next(tokens, None)
            if token is None:
                break
            yield token
        decoder.seek(request.context)  # drop tokens read after an ignored end token
