"""Where token doubt starts from, before it has learnt anything."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parse_infer.judge.probe.head import TokenDoubt, surprise


def test_a_fresh_doubt_says_how_far_a_token_lies_below_the_targets_own_choice() -> None:
    """A draft of the target's own choices holds; one token that is ten nats worse does not."""
    torch.manual_seed(0)
    hidden, written = torch.randn(12, 16), torch.randn(12, 16)
    logits = torch.randn(12, 50)
    own = logits.argmax(-1)
    logits[torch.arange(12), own] += 10
    other = own.clone()
    other[7] = (own[7] + 1) % 50
    doubt = TokenDoubt(16, 4)
    ends, found = torch.tensor([4, 7, 8, 12]), []
    for tokens in (own, other):
        features = surprise(hidden, tokens, lambda states: logits).features
        each = doubt(hidden, written, features)
        torch.testing.assert_close(each, -features[:, 2] - 3, rtol=0, atol=0.5)
        found.append(TokenDoubt.pool_over_prefixes(each, ends))
    right, wrong = found
    torch.testing.assert_close(right[:2], wrong[:2])
    assert right.max() < 1 < 5 < wrong[2:].min()


class Operations(TorchDispatchMode):
    """Counts what a GPU would be given, and the largest tensor that is made."""

    count = largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.count += 1
        self.largest = max(self.largest, out.numel() if isinstance(out, torch.Tensor) else 0)
        return out


def compare(tokens: int, vocabulary: int, device: str) -> Operations:
    weight = torch.zeros(vocabulary, 8, device=device)
    hidden, ids = torch.zeros(tokens, 8, device=device), torch.zeros(tokens, dtype=torch.int64, device=device)
    with torch.no_grad(), Operations() as done:
        surprise(hidden, ids, lambda states: states @ weight.T)
    return done


def test_only_a_cpu_reads_logits_in_parts_that_fit_its_cache() -> None:
    """Elsewhere each part costs a dozen launches, and memory alone bounds it. ("meta" has shapes and no numbers.)"""
    elsewhere, here = compare(8192, 150_000, "meta"), compare(256, 150_000, "cpu")
    assert elsewhere.count < 500, f"{elsewhere.count} operations for a draft of 8,192 tokens"
    assert elsewhere.largest <= 512 * 150_000, "a part takes more than 300 MB in float32"
    assert here.count > 256 // 128 * 15


def test_the_parts_change_nothing() -> None:
    torch.manual_seed(0)
    hidden, weight, tokens = torch.randn(1000, 8), torch.randn(50, 8), torch.randint(50, (1000,))
    found = [surprise(hidden, tokens, lambda states: states @ weight.T, rows=rows) for rows in (7, 128, 512, 1000)]
    for other in found[1:]:
        torch.testing.assert_close(other.features, found[0].features)
        assert torch.equal(other.is_greedy_choice, found[0].is_greedy_choice)
