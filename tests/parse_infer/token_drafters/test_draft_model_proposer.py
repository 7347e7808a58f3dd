"""A draft model's chains: what they are, and what a token of one costs besides its forward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from parse_infer.backends.local.describe import describe_drafter
from parse_infer.decoding.block_length import FIRST, BlockLength, Costs
from parse_infer.models.decoder import Decoder
from parse_infer.models.loading import LanguageModel
from parse_infer.models.token_map import token_map
from parse_infer.models.token_sampling import distribution, draw, random_generator
from parse_infer.settings.sampling import Sampling
from parse_infer.token_drafters import draft_model_proposer
from parse_infer.token_drafters.decode import speculative_decode
from parse_infer.token_drafters.draft_model_proposer import DraftModelProposer
from parse_infer.token_drafters.proposer import TokenTree
from tests.parse_infer.language_models import language_model, reduced_pair, resembling

EOS = 258


@pytest.fixture(params=["same tokens", "fewer tokens"])
def pair(request, make_model, tokenizer) -> tuple[LanguageModel, LanguageModel]:
    """Target and draft model."""
    if request.param == "fewer tokens":
        return reduced_pair(make_model)
    target = make_model("llama")
    draft = language_model(resembling(make_model, target, 0.1), tokenizer, "draft")
    return language_model(target, tokenizer, "target"), draft


def plainly(
    draft: LanguageModel, target: LanguageModel, ids: Sequence[int], limit: int, confidence: float, sampling: Sampling
) -> tuple[list[int], list[torch.Tensor]]:
    """The chain by a forward over the whole context for each token, and what each token was drawn from."""
    generator = random_generator(sampling, draft.decoder.device)
    tokens = token_map(draft.tokenizer, target.tokenizer)
    context = [i for token in ids for i in tokens.from_target(token)]
    chain, drawn = [], []
    while len(chain) < limit:
        with torch.no_grad():
            logits = draft.model(torch.tensor([context])).logits[0, -1]
        logits = logits[list(tokens.draft_ids)] if not tokens.is_identity else logits
        q = logits.softmax(-1) if sampling.greedy else distribution(logits, sampling)
        choice = int(q.argmax() if sampling.greedy else draw(q, generator))
        drawn.append(q)
        context.append(tokens.draft_ids[choice])
        chain.append(tokens.target_ids[choice])
        if context[-1] in draft.eos_ids or q[choice] < confidence:
            break
    return chain, drawn


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3), Sampling(0.7, top_k=5, seed=4)], ids=str)
def test_chains_are_those_of_whole_forwards(pair, sampling):
    """Over contexts that grow, shrink and change, as the guided model's does."""
    target, draft = pair
    ids, lengths = torch.randint(0, 250, (60,), generator=torch.Generator().manual_seed(1)).tolist(), set()
    known = list(token_map(draft.tokenizer, target.tokenizer).target_ids)
    for confidence in (0.0, 0.02, 0.04, 0.05, 0.07, 0.25):
        drafter = DraftModelProposer(draft, target, 6, confidence)
        for context in (ids[:20], ids[:23], ids[:23], ids[:12], ids[:12] + ids[30:50], ids, ids[:1]):
            guess = drafter.propose(context, 5, sampling, random_generator(sampling, draft.decoder.device))
            expected, drawn = plainly(draft, target, context, 5, confidence, sampling)
            assert list(guess.tokens) == expected, (context, confidence)
            lengths.add(len(expected))
            if sampling.greedy:
                assert guess.drawn_from is None
            else:
                q = torch.stack(drawn)
                torch.testing.assert_close(guess.drawn_from[:, known], q[:, : len(known)], atol=1e-5, rtol=1e-4)
    assert len(lengths) > 1, "no chain ends in doubt"


def test_without_sizes_a_chain_ends_where_it_stops_paying(pair, monkeypatch):
    target, draft = pair
    ids = torch.randint(0, 250, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    drafter = DraftModelProposer(draft, target)
    chain, drawn = plainly(draft, target, ids, 6, 0.0, Sampling())
    limit = math.prod(BlockLength().survival_of(float(q.max())) for q in drawn[:5]) * 1.001
    monkeypatch.setattr(BlockLength, "end_after", lambda self, survival: survival < limit)
    assert list(drafter.propose(ids, 40, Sampling(), None).tokens) == chain[:5] != chain
    assert len(drafter.propose(ids, 2, Sampling(), None).tokens) == 2
    # The first chain is short, as long as nobody knows what a token costs; then none takes too long.
    monkeypatch.setattr(BlockLength, "end_after", lambda self, survival: False)
    assert len(drafter.propose(ids, 40, Sampling(), None).tokens) == FIRST
    for length in drafter._lengths.values():
        monkeypatch.setattr(length, "costs", Costs(0.01, 0.01, 0.01))
    monkeypatch.setattr(BlockLength, "longest", 3)
    assert list(drafter.propose(ids, 40, Sampling(), None).tokens) == chain[:3]

    drawn = Sampling(1.0)
    generator = torch.Generator().manual_seed(0)
    assert len(drafter.propose(ids, 40, drawn, generator).tokens) == 3
    monkeypatch.setattr(BlockLength, "end_after", None)  # random numbers of a seed must not depend on measured times
    sampling = Sampling(1.0, seed=3)
    assert drafter.propose(ids, 40, sampling, random_generator(sampling, "cpu")).tokens
    fixed = DraftModelProposer(draft, target, tokens=4, confidence=0.0)
    assert list(fixed.propose(ids, 40, Sampling(), None).tokens) == chain[:4]
    kind = {"kind": "DraftModelProposer", "greedy": 0}
    assert describe_drafter(drafter) == kind | {"tokens": None, "confidence": None}
    assert describe_drafter(fixed) == kind | {"tokens": 4, "confidence": 0.0}


def test_a_greedy_drafter_of_sampled_answers_proposes_first_choices_and_draws_nothing(pair):
    """Their probability at the request's temperature ends the chain, as it is how often they are kept."""
    target, draft = pair
    ids = torch.randint(0, 250, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    chain, _ = plainly(draft, target, ids, 6, 0.0, Sampling())
    sampling, generator = Sampling(0.7, top_k=5), torch.Generator().manual_seed(0)
    state = generator.get_state()
    guess = DraftModelProposer(draft, target, 6, 0.0, greedy=1).propose(ids, 6, sampling, generator)
    assert (list(guess.tokens), guess.drawn_from) == (chain, None) and torch.equal(generator.get_state(), state)
    drawn = DraftModelProposer(draft, target, 6, 0.0).propose(ids, 6, sampling, generator)
    assert list(drawn.tokens) != chain and len(drawn.drawn_from) == 6
    assert DraftModelProposer(draft, target, greedy=1).propose(ids, 6, sampling, generator).drawn_from is None
    first = float(plainly(draft, target, ids, 1, 0.0, sampling)[1][0].max())
    for limit, more in ((first * 0.999, True), (first * 1.001, False)):
        doubtful = DraftModelProposer(draft, target, 6, min(limit, 1.0), greedy=1)
        assert (len(doubtful.propose(ids, 6, sampling, generator).tokens) > 1) == more
    with pytest.raises(ValueError, match="greedy is 2; it must be 0 or 1"):
        DraftModelProposer(draft, target, greedy=2)


def test_reads_are_noted_and_the_model_writes_alone_while_chains_do_not_pay(pair, monkeypatch):
    target, draft = pair
    ids = torch.randint(0, 250, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    target.decoder.seek(ids)
    expected = list(target.decoder.decode(60))
    drafter, noted, alone = DraftModelProposer(draft, target), [], []
    note, note_alone = BlockLength.note, BlockLength.note_alone

    def spied(self, confidences, accepted, rejected, draft_s, read_s, read, added):
        assert rejected == (accepted < len(confidences)) and added == 1 and draft_s > 0 and read_s > 0
        noted.append((len(confidences), accepted, read))
        note(self, confidences, accepted, rejected, draft_s, read_s, read, added)

    def spied_alone(self, seconds, tokens):
        assert 0 < seconds < 1e6
        alone.append(tokens)
        note_alone(self, seconds, tokens)

    monkeypatch.setattr(BlockLength, "note", spied)
    monkeypatch.setattr(BlockLength, "note_alone", spied_alone)
    monkeypatch.setattr(BlockLength, "next_pause", lambda self: 4)
    drafter._note_alone(drafter._lengths[True], 0, 1e6, 300)  # the prompt of an answer begun in a pause is no token
    target.decoder.seek(ids)
    assert list(speculative_decode(target.decoder, drafter, 60)) == expected
    assert alone and set(alone) == {4}
    assert len(noted) >= len(alone) and all(read == n + 1 for n, _, read in noted[1:])
    gained = sum(accepted + 1 for _, accepted, _ in noted) + sum(alone)
    assert abs(gained - len(expected)) <= 6  # the first chain and the last pause


def test_the_read_of_a_prompt_is_not_what_a_token_costs(pair, monkeypatch):
    target, draft = pair
    ids = torch.randint(0, 250, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    drafter, noted = DraftModelProposer(draft, target), []
    monkeypatch.setattr(BlockLength, "end_after", lambda self, survival: False)
    monkeypatch.setattr(BlockLength, "note", lambda self, *block, added: noted.append(block))
    clock = itertools.chain([0.0, 100.0], itertools.count(101.0))
    monkeypatch.setattr(draft_model_proposer, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    tree = drafter.propose(ids, 5, Sampling(), None)
    tree.on_read(0, 1.0, 6)
    (_, _, _, draft_s, _, _), n = noted[0], len(tree.tokens)
    assert draft_s == n > 1


class HostReads:
    """Counts how often the host waits for a value."""

    NAMES = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in self.NAMES:
            monkeypatch.setattr(torch.Tensor, name, self._counting(getattr(torch.Tensor, name)))

    def _counting(self, read):
        def counting(tensor, *args):
            self.count += 1
            return read(tensor, *args)

        return counting


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3)], ids=str)
def test_a_token_costs_one_synchronisation_and_no_look_at_the_context(make_model, tokenizer, monkeypatch, sampling):
    target, small = make_model("qwen3"), make_model("qwen3")  # its step for one token reads nothing back
    lm, draft = language_model(target, tokenizer, "target"), language_model(small, tokenizer, "draft")
    ids = torch.randint(0, 250, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    seeks, seek, transfers, tensor = [], Decoder.seek, [], torch.tensor
    found: list[TokenTree] = []
    for tokens in (2, 9):
        drafter = DraftModelProposer(draft, lm, tokens, confidence=0.0)
        draft.decoder.seek([])
        generator = random_generator(sampling, draft.decoder.device)
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "seek", lambda decoder, context: [seeks.append(1), seek(decoder, context)])
            patch.setattr(torch, "tensor", lambda *args, **kwargs: [transfers.append(1), tensor(*args, **kwargs)][1])
            reads = HostReads(patch)
            found.append(drafter.propose(ids, 20, sampling, generator))
        assert len(found[-1].tokens) == tokens
        assert reads.count == tokens, f"{reads.count} reads for {tokens} tokens"
        assert (len(seeks), len(transfers)) == (1, 1)
        seeks.clear()
        transfers.clear()
    assert list(found[1].tokens[:2]) == list(found[0].tokens)


def test_an_id_that_only_the_target_embeds_stops_proposals_until_it_is_gone(make_model, tokenizer):
    """Padding ids, which differ between the sizes of a family."""
    lm = language_model(make_model("llama", vocab_size=280), tokenizer, "target")
    draft = language_model(make_model("llama"), tokenizer, "draft")
    drafter, ids = DraftModelProposer(draft, lm, 3, 0.0), list(range(20, 40))
    expected = list(drafter.propose(ids, 3, Sampling(), None).tokens)
    before = draft.decoder.forwards
    for context in ([*ids, 270], [*ids, 270, 5], [270]):
        assert not drafter.propose(context, 3, Sampling(), None).tokens
    assert draft.decoder.forwards == before
    assert list(drafter.propose(ids, 3, Sampling(), None).tokens) == expected
