"""Several heads on one model: each guesses what it guesses alone, and one that is gone leaves nothing behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from parse_infer.models.attention import enable_split_attention
from parse_infer.models.loading import LanguageModel
from parse_infer.settings.sampling import Sampling
from parse_infer.token_drafters.decode import speculative_decode
from parse_infer.token_drafters.eagle import EagleDrafter
from parse_infer.token_drafters.medusa import MedusaDrafter
from parse_infer.token_drafters.proposer import TokenProposer, TokenTree
from tests.parse_infer.language_models import language_model
from tests.parse_infer.token_drafters.test_eagle import make_head
from tests.parse_infer.token_drafters.test_medusa import make_heads

Attach = Callable[[LanguageModel], TokenProposer]


def eagle(layers: tuple[int, ...], parallel: bool = False) -> Attach:
    return lambda lm: EagleDrafter(make_head(lm, parallel, layers=layers), lm, tokens=3, top_k=1)


def medusa(lm: LanguageModel) -> TokenProposer:
    return MedusaDrafter(make_heads(lm), lm, top_k=1)


PAIRS = {
    "eagle3, then medusa": (eagle((0, 1, 2)), medusa),
    "medusa, then eagle3": (medusa, eagle((0, 1, 2))),
    "equal width, other layers": (eagle((0, 1, 2)), eagle((2, 1, 0))),
    "one layer each": (eagle((1,), parallel=True), medusa),
}


@pytest.fixture(params=[True, False], ids=["fast", "transformers"])
def make_lm(request, make_model, tokenizer) -> Callable[[], LanguageModel]:
    def make() -> LanguageModel:
        model = make_model("llama_gqa")
        enable_split_attention(model)
        lm = language_model(model, tokenizer, "target")
        assert lm.decoder.fast is not None
        if not request.param:
            lm.decoder.fast = None
        return lm

    return make


def guesses(lm: LanguageModel, drafter: TokenProposer, prompt: list[int]) -> list[TokenTree]:
    """Every guess on the way to 12 tokens."""
    found: list[TokenTree] = []

    class Noting:
        forwards = 0

        def propose(self, *arguments) -> TokenTree:
            found.append(drafter.propose(*arguments))
            return found[-1]

    lm.decoder.seek(prompt)
    list(speculative_decode(lm.decoder, Noting(), 12, Sampling()))
    return [TokenTree(list(guess.tokens), list(guess.parents)) for guess in found]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.slow
def test_each_head_proposes_what_it_proposes_alone(make_lm, random_ids, pair):
    """Turn by turn on prompts that share their beginning; the second one is attached when the first is at work."""
    shared = random_ids(20)
    prompts = [[*shared, *random_ids(9, seed=n)] for n in range(3)]
    alone = []
    for attach in PAIRS[pair]:
        lm = make_lm()
        drafter = attach(lm)
        alone.append([guesses(lm, drafter, prompt) for prompt in prompts])
    lm = make_lm()
    drafters = [PAIRS[pair][0](lm)]
    assert guesses(lm, drafters[0], prompts[0]) == alone[0][0]
    drafters.append(PAIRS[pair][1](lm))
    for n, prompt in enumerate(prompts):
        for which in (1, 0) if n % 2 else (0, 1):
            assert guesses(lm, drafters[which], prompt) == alone[which][n], f"head {which + 1}, prompt {n}"
    assert any(guess.tokens for guess in alone[0][0]) and alone[0] != alone[1], "the heads must have something to say"


@pytest.mark.slow
def test_a_removed_head_leaves_no_state(make_lm, random_ids):
    lm = make_lm()
    staying, leaving = medusa(lm), eagle((0, 1, 2))(lm)
    wanted = guesses(lm, staying, random_ids(20))
    gone = weakref.ref(leaving)
    del leaving
    gc.collect()
    assert gone() is None
    before = sum(t.numel() for t in gc.get_objects() if type(t) is torch.Tensor and t.shape[-1:] == (96,))
    for n in range(4):
        assert guesses(lm, staying, random_ids(20)) == wanted
        lm.decoder.seek(random_ids(300, seed=n))
        lm.decoder.forward()
    after = sum(t.numel() for t in gc.get_objects() if type(t) is torch.Tensor and t.shape[-1:] == (96,))
    assert after <= before, "states of three layers are still kept"
