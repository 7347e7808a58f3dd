"""The packed layout, against its definition written out token by token."""

from __future__ import annotations

import pytest
import torch

from parse_infer.judge.packing import probe_mask, probe_positions, readout_index
from tests.parse_infer.dense_mask import dense_mask

LAYOUTS = [
    # visible, probe length, keys in front of the probes
    ([[2, 4, 6, 8]], 1, 8),
    ([[5, 9, 12]], 3, 12),
    ([[3, 7, 9], [1, 2, 5]], 2, 9),  # a batch; the second row has padding on the right
]


def defined_mask(visible: list[list[int]], probe_len: int, n_keys: int, window: int | None) -> torch.Tensor:
    """The sentence of the contract, one entry at a time."""
    k = len(visible[0])
    mask = torch.zeros(len(visible), 1, k * probe_len, n_keys + k * probe_len, dtype=torch.bool)
    for b, row in enumerate(visible):
        for probe, seen in enumerate(row):
            for i in range(probe_len):
                position = seen + i
                for j in range(seen):
                    mask[b, 0, probe * probe_len + i, j] = window is None or position - j < window
                for j in range(i + 1):
                    key = n_keys + probe * probe_len + j
                    mask[b, 0, probe * probe_len + i, key] = window is None or i - j < window
    return mask


@pytest.mark.parametrize("window", [None, 1, 2, 4, 100])
@pytest.mark.parametrize(("visible", "probe_len", "n_keys"), LAYOUTS)
def test_probe_mask_is_its_definition(visible, probe_len, n_keys, window):
    mask = probe_mask(torch.tensor(visible), probe_len, n_keys, window)
    assert torch.equal(mask, defined_mask(visible, probe_len, n_keys, window))


@pytest.mark.parametrize(("visible", "probe_len", "n_keys"), LAYOUTS)
def test_every_probe_token_sees_something(visible, probe_len, n_keys):
    for window in (None, 1, 3):
        assert probe_mask(torch.tensor(visible), probe_len, n_keys, window).any(-1).all()  # an empty row would be NaN


def test_positions_continue_from_the_cut():
    assert probe_positions(torch.tensor([[2, 4], [7, 1]]), 3).tolist() == [[2, 3, 4, 4, 5, 6], [7, 8, 9, 1, 2, 3]]


def test_readout_is_each_probes_last_token():
    assert readout_index(3, 2).tolist() == [1, 3, 5]
    assert readout_index(0, 2).tolist() == []


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("past", [0, 5])
def test_dense_mask_is_causal_above_the_probe_rows(past, window):
    causal, visible = 6, torch.tensor([[past + 2, past + 6]])
    mask = dense_mask(past, causal, visible, 2, window)
    assert mask.shape == (1, 1, causal + 4, past + causal + 4)
    for row in range(causal):
        for key in range(past + causal + 4):
            position = past + row
            allowed = key <= position and (window is None or position - key < window)
            assert mask[0, 0, row, key] == (allowed and key < past + causal)
    assert torch.equal(mask[:, :, causal:], probe_mask(visible, 2, past + causal, window))
