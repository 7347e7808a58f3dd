"""The proposer that vLLM asks, over made-up batches."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from parse_infer.vllm_plugin import rejected_drafts
from parse_infer.vllm_plugin.options import REJECTED_DRAFTS, SETTINGS
from parse_infer.vllm_plugin.rejected_drafts import RejectedDrafts

V = 100  # a token of the probe, as everything above
CONTEXT = [1, 2, 3, 4]
DRAFT = [10, 11, 12, 13, 14, 15, 16]


class Batch:
    """Requests of a server, stepped together."""

    def __init__(self, most: int = 8) -> None:
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=3),
            model_config=SimpleNamespace(hf_config=SimpleNamespace(**{SETTINGS: {"vocab_size": V}})),
            scheduler_config=SimpleNamespace(max_num_seqs=most),
        )
        self.proposer = RejectedDrafts(config)

    def step(self, *requests: tuple[list[int], list[int]]) -> list[list[int]]:
        """Guesses for requests, given as what they had and what this step adds."""
        tokens = np.full((len(requests) + 1, 50), 77, dtype=np.int32)  # what other requests have left
        for row, (before, new) in enumerate(requests):
            tokens[row, : len(before) + len(new)] = before + new
        sizes = np.array([len(before) + len(new) for before, new in requests] + [0], dtype=np.int32)
        return self.proposer.propose([new for _, new in requests], sizes, tokens, slot_mappings=None)


def verification(cut: int, draft: list[int] = DRAFT) -> tuple[list[int], list[int]]:
    return CONTEXT + draft[:cut] + [V, V + 7], [0]


def test_the_class_is_where_vllm_looks_for_it():
    module, _, name = REJECTED_DRAFTS["model"].rpartition(".")
    assert (module, name) == (RejectedDrafts.__module__, RejectedDrafts.__name__)
    assert rejected_drafts.RejectedDrafts.load_model(Batch().proposer, None) is None


def test_what_goes_on_from_a_cut_is_guessed_from_the_rest_of_the_draft():
    batch = Batch()
    assert batch.step(verification(2), verification(7), verification(4)) == [[], [], []]
    # Accepted up to 2, the target writes as the draft does at first, then something else, then as the draft again.
    row = CONTEXT + DRAFT[:2]
    assert batch.step((row, [12])) == [[13, 14, 15]]
    assert batch.step(([*row, 12], [13, 14, 50])) == [[]]
    assert batch.step(([*row, 12, 13, 14, 50], [15, 16])) == [[]], "the draft ends there"
    assert batch.step(([*row, 12, 13, 14, 50, 15, 16], [13])) == [[]], "a token alone says nothing"
    assert batch.step(([*row, 12, 13, 14, 50, 15, 16, 13], [14])) == [[15, 16]]


def test_requests_may_change_places_and_wait():
    batch = Batch()
    other = [20, 21, 22, 23, 24, 25, 26]
    batch.step(verification(7), verification(7, other))
    mine, theirs = CONTEXT + DRAFT[:1], CONTEXT + other[:2]
    assert batch.step((mine, [11]), (theirs, [22])) == [[12, 13, 14], [23, 24, 25]]
    plain = ([5, 6, 7], [8])
    assert batch.step(plain, ([*theirs, 22], [23]), ([*mine, 11], [12])) == [[], [24, 25, 26], [13, 14, 15]]
    assert batch.step(([*mine, 11, 12], [13]), ([5, 6, 7, 8, 9], [])) == [[14, 15, 16], []]


def test_a_step_that_vllm_leaves_out_ends_no_guesses():
    batch = Batch()
    batch.step(verification(7))
    row = CONTEXT + DRAFT[:1]
    assert batch.step((row, [11])) == [[12, 13, 14]]
    assert batch.step(([*row, 11, 12, 13], [14])) == [[15, 16]]


def test_only_a_request_that_goes_on_from_a_cut_is_guessed_for():
    batch = Batch()
    # A text under way that happens to begin a draft by now was not rejected from it.
    batch.step((CONTEXT[:3], [4]))
    batch.step((CONTEXT, [10]), verification(7))
    assert batch.step((CONTEXT + DRAFT[:1], [11])) == [[]]
    elsewhere = ([*CONTEXT, 10, 99], [12])
    behind = (CONTEXT + DRAFT + [17], [18])
    assert batch.step(elsewhere, behind, ([1, 2], [])) == [[], [], []]
    for _ in range(2):  # several may go on from one draft
        assert batch.step((CONTEXT + DRAFT[:1], [11]), ([9], [9])) == [[12, 13, 14], []]


def test_of_a_draft_that_grows_the_longest_part_counts_and_few_are_kept(monkeypatch: pytest.MonkeyPatch):
    batch = Batch(most=2)
    for cut in (2, 4, 7, 4):
        batch.step(verification(cut))
    assert len(batch.proposer._read) == 1
    batch.step(verification(3, [30, 31, 32]), verification(3, [40, 41, 42]))
    assert batch.step(([*CONTEXT, 10], [11]), ([*CONTEXT, 30], [31])) == [[], [32]], "the first of three is forgotten"
    now = rejected_drafts.time.monotonic()
    monkeypatch.setattr(rejected_drafts.time, "monotonic", lambda: now + 60)
    assert batch.step(([*CONTEXT, 40], [41])) == [[]], "and so is what is old"
