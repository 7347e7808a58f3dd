"""Where token doubt starts from, before it has learnt anything."""

from __future__ import annotations

import torch

from parse_infer.verify.head import TokenDoubt, surprise


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
        found.append(TokenDoubt.of_prefixes(each, ends))
    right, wrong = found
    torch.testing.assert_close(right[:2], wrong[:2])
    assert right.max() < 1 < 5 < wrong[2:].min()
