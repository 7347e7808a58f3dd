"""The packed pass: K probes in one forward equal K separate passes, and the context stays the target's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, LlamaModel

from parse_infer.judge.packing import probes, readout_index
from parse_infer.judge.verifier import Verifier
from parse_infer.models.decoder import Decoder
from parse_infer.text.cuts import CutPolicy, Segmenter
from tests.parse_infer.language_models import QUESTION_LEN, TokenCount, short_question

EOS = 258


@pytest.fixture
def make_verifier(tokenizer):
    def make(model, judge=None, eos=(EOS,)) -> Verifier:
        judge = judge or short_question(model, tokenizer)
        return Verifier(
            Decoder(model, set(eos)), judge, Segmenter(tokenizer, CutPolicy.from_dict(judge.config.cut_policy))
        )

    return make


@pytest.fixture(params=["questions", "second stream"])
def make_appending(request, make_verifier, random_adapter):
    """`make_verifier` for each kind of tokens behind the draft; the second stream has a LoRA."""

    def make(model) -> Verifier:
        if request.param == "questions":
            return make_verifier(model)
        verifier = make_verifier(model, random_adapter(model, stream=True))
        verifier.scorer.one_pass = True
        return verifier

    return make


@torch.no_grad()
def separate_passes(model, tokenizer, context: list[int], draft: list[int], cuts: list[int]) -> list[float]:
    """One ordinary forward per cut over [context, draft up to the cut, question], no cache: the target's choice."""
    judge, validity = short_question(model, tokenizer), []
    yes, no = tokenizer.encode("CI")
    for cut in cuts:
        tokens = torch.tensor([[*context, *draft[:cut], *judge.probe.ids]])
        hidden = model.base_model(tokens, use_cache=False).last_hidden_state[0, -1]
        logits = model.get_output_embeddings()(hidden)
        validity.append(torch.softmax(logits[[yes, no]], -1)[0].item())
    return validity


@pytest.mark.parametrize("cached", ["empty", "prompt", "part of the prompt"])
def test_packed_equals_separate(model, tokenizer, make_verifier, random_ids, cached):
    verifier = make_verifier(model)
    context, draft = random_ids(30), random_ids(22, seed=1)
    decoder = verifier.decoder
    if cached != "empty":
        decoder.seek(context if cached == "prompt" else context[:19])
        decoder.forward()
    decoder.seek(context)
    before = decoder.forwards
    result = verifier.verify(draft)
    assert decoder.forwards - before == 1
    assert result.cuts == [4, 8, 12, 16, 20, 22]
    model.set_attn_implementation("sdpa")
    expected = separate_passes(model, tokenizer, context, draft, result.cuts)
    assert result.validity == pytest.approx(expected, abs=1e-4)
    assert max(expected) - min(expected) > 0.02  # the cuts differ, so a mix-up would show


def test_a_pass_in_chunks_reads_the_appended_tokens_once(model, make_appending, random_ids):
    """Prompt and draft are read in several forwards, the appended tokens with the last of them."""
    context, draft = random_ids(45), random_ids(38, seed=1)
    whole, chunked = make_appending(model), make_appending(model)
    chunked.decoder.prefill_chunk = 16
    found = []
    for verifier in (whole, chunked):
        verifier.decoder.seek(context)
        with TokenCount(model) as count:
            found.append(verifier.verify(draft))
    appended = len(draft) if whole.judge.config.stream else QUESTION_LEN * len(found[0].cuts)
    assert count.widths == [16] * 5 + [3 + appended]
    assert found[0].cuts == found[1].cuts
    assert found[1].validity == pytest.approx(found[0].validity, abs=1e-5)
    assert torch.allclose(found[1].hidden, found[0].hidden, atol=1e-5, rtol=1e-5)
    assert found[1].is_greedy_choice == found[0].is_greedy_choice
    following = [verifier.decoder.forward([5, 6, 7]).hidden for verifier in (whole, chunked)]
    assert torch.allclose(following[1], following[0], atol=1e-5, rtol=1e-5)


def test_a_head_alone_reads_the_draft_and_nothing_else(model, make_verifier, random_adapter, random_ids):
    verifier = make_verifier(model, random_adapter(model))
    verifier.decoder.seek(random_ids(30))
    with TokenCount(model) as count:
        result = verifier.verify(random_ids(22, seed=1))
    assert count.widths == [52] and result.is_greedy_choice is not None


def test_packed_hidden_states_equal_separate_ones(model, make_verifier, random_adapter, random_ids):
    """Not only through the read-out: every dimension, to 1e-4, and with a LoRA on the appended tokens."""
    verifier = make_verifier(model)
    context, draft, lora = random_ids(30), random_ids(22, seed=1), random_adapter(model, stream=True).lora
    verifier.decoder.seek(context)
    with lora.applied(6):
        behind = probes((7, 9), [33, 41, 52], 52, model.device)
        packed = verifier.decoder.forward(draft, behind).trailing[readout_index(3, 2)]
    for row, seen in enumerate([33, 41, 52]):
        tokens = torch.tensor([[*(context + draft)[:seen], 7, 9]])
        with torch.no_grad(), lora.applied(2):
            alone = model.base_model(tokens, use_cache=False).last_hidden_state[0, -1]
        assert torch.allclose(packed[row], alone, atol=1e-4, rtol=1e-4)


def test_the_context_is_the_base_models(model, make_appending, random_ids):
    """Hidden states and logits at every draft token are those of the bare target."""
    verifier = make_appending(model)
    context, draft = random_ids(30), random_ids(22, seed=1)
    verifier.decoder.seek(context)
    result = verifier.verify(draft)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        output = model(torch.tensor([context + draft]), output_hidden_states=True, use_cache=False)
    assert result.hidden.shape == (23, 32)
    assert torch.allclose(result.hidden, output.hidden_states[-1][0, 29:], atol=1e-5, rtol=1e-5)
    assert torch.allclose(verifier.decoder.logits(result.hidden), output.logits[0, 29:], atol=1e-5, rtol=1e-5)


def test_a_verification_keeps_the_drafts_states_and_no_others(model, make_appending, random_ids):
    """Neither those of a long prompt that the same forward has read, nor those of the appended tokens."""
    verifier = make_appending(model)
    verifier.decoder.seek(random_ids(300))
    hidden = verifier.verify(random_ids(22, seed=1)).hidden
    kept, needed = hidden.untyped_storage().nbytes(), hidden.numel() * hidden.element_size()
    assert kept == needed, f"{kept} bytes are kept alive for {needed}"


def test_resuming_at_a_cut_equals_a_fresh_start(model, make_verifier, random_ids):
    verifier = make_verifier(model, eos=())
    context, draft = random_ids(30), random_ids(22, seed=1)
    decoder = verifier.decoder
    for cut in (0, 5, 12, 22):
        decoder.seek(context)
        result = verifier.verify(draft)
        assert decoder.ids == context + draft and decoder.cached == 52
        decoder.seek(context + draft[:cut])
        decoder.set_next_logits(decoder.logits(result.hidden[cut]))
        before = decoder.forwards
        resumed = list(decoder.decode(8))
        assert decoder.forwards - before == 7  # the first resumed token costs no forward
        fresh = Decoder(model, ())
        fresh.seek(context + draft[:cut])
        assert resumed == list(fresh.decode(8))
        for mine, own in zip(decoder._cache.layers, fresh._cache.layers, strict=True):
            assert mine.length == own.length
            for one, other in zip(mine.buffers, own.buffers, strict=True):
                assert torch.allclose(one[:, :, : mine.length], other[:, :, : mine.length], atol=1e-5, rtol=1e-4)


def test_bfloat16_stays_close_to_float32(make_model, make_verifier, random_ids):
    validity = []
    for dtype in (torch.float32, torch.bfloat16):
        verifier = make_verifier(make_model("llama_gqa", dtype=dtype))
        verifier.decoder.seek(random_ids(30))
        validity.append(verifier.verify(random_ids(22, seed=1)).validity)
    assert validity[1] == pytest.approx(validity[0], abs=0.05)


def test_several_rounds_on_one_cache(model, make_verifier, random_ids):
    """Verify, keep a part, decode a little, verify the next draft: as if each had been done alone."""
    verifier = make_verifier(model, eos=())
    decoder, context = verifier.decoder, random_ids(30)
    for seed in range(3):
        draft = random_ids(13, seed)
        decoder.seek(context)
        found = verifier.verify(draft)
        alone = make_verifier(model)
        alone.decoder.seek(context)
        assert found.validity == pytest.approx(alone.verify(draft).validity, abs=1e-4)
        decoder.seek(context + draft[:8])
        context = context + draft[:8] + list(decoder.decode(3))


def test_greedy_match_counts_the_targets_own_tokens(model, make_verifier, random_ids):
    verifier = make_verifier(model, eos=())
    decoder, context = verifier.decoder, random_ids(30)
    decoder.seek(context)
    own = list(decoder.decode(20))
    for same in (0, 1, 7, 8, 19, 20):
        draft = [*own[:same], *((t + 1) % 256 for t in own[same:])]
        decoder.seek(context)
        result = verifier.verify(draft, cuts=[20])
        assert verifier.greedy_match(draft, result, 0) == same
        if same > 3:
            assert verifier.greedy_match(draft, result, 3) == same - 3
    before = decoder.forwards
    verifier.greedy_match(own, result, 20)
    assert decoder.forwards == before


def test_the_draft_passes_the_output_layer_once(model, make_verifier, random_adapter, random_ids):
    """Logits that the judge has read are not computed again for the greedy match."""
    verifier = make_verifier(model, random_adapter(model))
    context, draft = random_ids(30), random_ids(40, seed=1)
    verifier.decoder.seek(context)
    rows: list[int] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    result = verifier.verify(draft)
    found = [verifier.greedy_match(draft, result, start) for start in range(len(draft))]
    handle.remove()
    assert sum(rows) == len(draft)
    own = verifier.decoder.logits(result.hidden[:-1]).argmax(-1).tolist()
    same = [a == b for a, b in zip(own, draft, strict=True)]
    assert found == [next((i for i, ok in enumerate(same[s:]) if not ok), 40 - s) for s in range(40)]


def test_an_empty_draft_has_nothing_to_verify(make_model, make_verifier, random_ids):
    verifier = make_verifier(make_model("llama"))
    verifier.decoder.seek(random_ids(5))
    result = verifier.verify([])
    assert (result.cuts, result.validity, result.hidden.shape) == ([], [], (0, 32))
    assert verifier.decoder.forwards == 0


def test_cut_zero_judges_the_bare_prompt(model, tokenizer, make_verifier, random_ids):
    verifier = make_verifier(model)
    context, draft = random_ids(9), random_ids(6, seed=1)
    verifier.decoder.seek(context)
    result = verifier.verify(draft, cuts=[0, 6])
    expected = separate_passes(model, tokenizer, context, draft, [0, 6])
    assert result.validity == pytest.approx(expected, abs=1e-4)
    verifier.decoder.seek(context)
    assert verifier.verify([], cuts=[0]).validity == pytest.approx(expected[:1], abs=1e-4)


@pytest.mark.parametrize("cuts", [[3, 3], [4, 2], [-1], [7]])
def test_cuts_out_of_order_or_range_are_named(make_model, make_verifier, random_ids, cuts):
    verifier = make_verifier(make_model("llama"))
    verifier.decoder.seek(random_ids(5))
    with pytest.raises(ValueError, match=r"strictly within 0..6"):
        verifier.verify(random_ids(6), cuts=cuts)


def test_the_pass_leaves_the_modules_untouched(make_model, make_verifier, random_ids):
    verifier = make_verifier(make_model("llama"))
    verifier.decoder.seek(random_ids(5))
    verifier.verify(random_ids(6))
    for module in verifier.decoder.model.modules():
        assert "forward" not in module.__dict__ and not module._forward_hooks and not module._forward_pre_hooks


def test_a_model_that_ignores_position_ids_is_refused(make_model, make_verifier):
    class Ordered(LlamaModel):
        """Derives positions from the order of tokens, as ALiBi models do."""

        def forward(self, *args, position_ids=None, **kwargs):
            return super().forward(*args, **kwargs)

    class OrderedForCausalLM(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.model = Ordered(config)

    donor = make_model("llama")
    model = OrderedForCausalLM(donor.config)
    model.load_state_dict(donor.state_dict())
    with pytest.raises(ValueError, match="OrderedForCausalLM gives other results for packed probes"):
        make_verifier(model.eval())


def test_the_output_layer_runs_only_where_it_is_needed(make_model, make_verifier, random_adapter, random_ids):
    """Over a large vocabulary it costs more than the questions do, which do not need it."""
    model = make_model("llama")
    verifier = make_verifier(model)
    rows: list[int] = []
    handle = model.lm_head.register_forward_hook(lambda m, args, out: rows.append(out.shape[0]))
    verifier.decoder.seek(random_ids(5))
    result = verifier.verify(random_ids(40))
    assert rows == []
    verifier.greedy_match(random_ids(40), result, 0)
    assert rows[0] == 8 and sum(rows) <= 40
    verifier = make_verifier(model, random_adapter(model))
    verifier.decoder.seek(random_ids(5))
    rows.clear()
    verifier.verify(random_ids(300))
    handle.remove()
    assert rows == [256, 44], "the logits of a long draft must not all be there at once"


def test_no_device_synchronisation_per_layer(make_model, make_appending, random_ids):
    """Calls that read a tensor's value on the host, counted for a pass through 2 and through 6 layers."""

    class Reads(torch.overrides.TorchFunctionMode):
        count = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            name = getattr(func, "__name__", "")
            self.count += name in ("item", "tolist", "__bool__", "__int__", "__float__", "nonzero", "cpu", "numpy")
            self.count += name in ("__getitem__", "masked_select") and any(
                isinstance(a, torch.Tensor) and a.dtype == torch.bool for a in args[1:]
            )
            return func(*args, **(kwargs or {}))

    counts = []
    for layers in (2, 6):
        verifier = make_appending(make_model("llama_gqa", num_hidden_layers=layers))
        verifier.decoder.seek(random_ids(20))
        draft = random_ids(10, seed=1)
        with Reads() as reads:
            verifier.verify(draft)
        counts.append(reads.count)
    assert counts[0] == counts[1]
    assert verifier.judge.config.stream or counts == [1, 1]  # the validities themselves


def test_the_pass_needs_no_gradient(make_model, make_verifier, random_ids):
    model = make_model("llama")
    verifier = make_verifier(model)
    verifier.decoder.seek(random_ids(5))
    assert not verifier.verify(random_ids(6)).hidden.requires_grad
    assert isinstance(model.lm_head, nn.Linear)
