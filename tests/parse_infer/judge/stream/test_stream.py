"""A judge on hidden states: one packed pass, a second pass, blocks and an ordinary forward judge alike."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from parse_infer.backends.servers.connect import _judge
from parse_infer.judge.adapter import ValidityAdapter
from parse_infer.judge.adapter_files import read_adapter
from parse_infer.judge.carried import Carried
from parse_infer.judge.logprob_head import pool_doubt
from parse_infer.judge.token_logprobs import TokenTexts, read_logprobs
from parse_infer.judge.transfer import transfer_adapter
from parse_infer.judge.verifier import Verifier
from parse_infer.models.architecture import output_layer
from parse_infer.models.decoder import Decoder
from parse_infer.text.cuts import Segmenter

FORMS = {"stream": {}, "layers": {"layers": (1, 2), "second": False}, "both": {"layers": (0, 2)}}
CONTEXT, DRAFT = [5, 9, 31, 7], [random.Random(3).randrange(1, 250) for _ in range(40)]


@pytest.fixture
def make_verifier(tokenizer, random_adapter):
    def make(model, one_pass: bool, judge=None, form: str = "stream") -> Verifier:
        judge = judge or random_adapter(model, stream=True, **FORMS[form])
        verifier = Verifier(Decoder(model, ()), judge, Segmenter(tokenizer))
        verifier.scorer.one_pass = one_pass
        verifier.decoder.seek(CONTEXT)
        return verifier

    return make


@torch.inference_mode()
def by_definition(model, judge, tokenizer) -> list[float]:
    """The logit after each token, from ordinary forwards without a cache, the LoRA on the draft alone."""
    tokens, n = torch.tensor([CONTEXT + DRAFT]), len(DRAFT)
    base = model.base_model(tokens, use_cache=False, output_hidden_states=True)
    found = read_logprobs(base.last_hidden_state[0, -n - 1 : -1], torch.tensor(DRAFT), output_layer(model), k=3)
    read = [base.hidden_states[layer][0, -n:] for layer in judge.head.stream.layers]
    if judge.lora:
        with judge.lora.applied(n):
            read.append(model.base_model(tokens, use_cache=False).last_hidden_state[0, -n:])
    states = torch.stack(read, dim=1)
    texts = TokenTexts(tokenizer, (), judge.head.config.buckets)
    doubted = judge.head.doubted(found.features[None], found.ids[None], found.top_ids[None, :, 0], texts)
    doubt, hidden, where = (part[0] for part in doubted)
    each = judge.head.correct(doubt, hidden, states, where)
    doubt = pool_doubt(each.masked_fill(found.is_greedy_choice, -torch.inf), 1.0)
    return (judge.head.bias - doubt).tolist()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("one_pass", [True, False])
def test_a_pass_equals_ordinary_forwards(model, make_verifier, tokenizer, one_pass, form):
    verifier = make_verifier(model, one_pass, form=form)
    found = verifier.verify_block(DRAFT).scores.logits.tolist()
    expected = by_definition(model, verifier.judge, tokenizer)
    assert found == pytest.approx(expected, abs=1e-4)
    assert verifier.scorer.second_passes == (not one_pass and form != "layers")
    trunk = ValidityAdapter(verifier.judge.config, verifier.judge.head.trunk)
    alone = make_verifier(model, one_pass, trunk).verify_block(DRAFT).scores.logits.tolist()
    assert max(abs(a - b) for a, b in zip(found, alone, strict=True)) > 0.1  # the states have a say


@pytest.mark.parametrize("one_pass", [True, False])
def test_the_pass_leaves_the_context_as_it_is(model, make_verifier, one_pass):
    verifier = make_verifier(model, one_pass)
    decoder, plain = verifier.decoder, Decoder(model, ())
    state = verifier.verify(DRAFT, [10, 40]).state(10)
    decoder.seek([*CONTEXT, *DRAFT[:10]])
    decoder.set_next_logits(decoder.logits(state))
    plain.seek([*CONTEXT, *DRAFT[:10]])
    assert list(decoder.decode(12)) == list(plain.decode(12))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("one_pass", [True, False])
def test_blocks_have_the_verdicts_of_whole_drafts(model, make_verifier, one_pass, form):
    """Blocks end anywhere, and tokens of the target's own lie between two of them."""
    verifier = make_verifier(model, one_pass, form=form)
    first = verifier.verify_block(DRAFT[:13])
    carried = first.scores.carried(13, 13)
    verifier.decoder.seek([*CONTEXT, *DRAFT[:13]])
    own = list(verifier.decoder.decode(3))
    verifier.decoder.seek([*CONTEXT, *DRAFT[:13], *own])
    second = verifier.verify_block(DRAFT[13:30], carried, own).validity
    again = make_verifier(model, not one_pass, verifier.judge)
    whole = again.verify_block([*DRAFT[:13], *own, *DRAFT[13:30]]).validity
    # The target's own tokens are certain in the second block, and in the whole draft its first choices.
    assert first.validity == pytest.approx(whole[:13], abs=1e-4)
    again.decoder.seek([*CONTEXT, *DRAFT[:13], *own])
    assert again.verify_block(DRAFT[13:30], carried, own).validity == pytest.approx(second, abs=1e-4)


def test_a_draft_without_doubt_needs_no_second_pass(make_model, make_verifier):
    model = make_model("llama")
    verifier = make_verifier(model, one_pass=False)
    own = list(verifier.decoder.decode(20))
    verifier.decoder.seek(CONTEXT)
    verdict = verifier.verify_block(own)
    assert min(verdict.validity) == 1.0 and verifier.scorer.second_passes == 0
    verifier.decoder.seek(CONTEXT)
    verifier.verify_block([*own[:10], (own[10] + 1) % 250])
    assert verifier.scorer.second_passes == 1


@pytest.mark.parametrize("form", FORMS)
def test_long_prompts_are_read_in_chunks(make_model, make_verifier, form):
    """Of a chunk with a part of the draft, the states of just this part are read."""
    model = make_model("llama_gqa")
    whole = make_verifier(model, True, form=form)
    expected = whole.verify_block(DRAFT).scores.logits.tolist()
    chunked = make_verifier(model, True, whole.judge)
    chunked.decoder.prefill_chunk = 3
    assert chunked.verify_block(DRAFT).scores.logits.tolist() == pytest.approx(expected, abs=1e-4)


def test_untrained_it_judges_as_its_trunk(make_model, make_verifier, random_adapter):
    model = make_model("qwen3")
    judge = random_adapter(model, stream=True)
    torch.nn.init.zeros_(judge.head.out.weight)
    trunk = ValidityAdapter(judge.config, judge.head.trunk)
    found, alone = (make_verifier(model, True, one).verify_block(DRAFT).validity for one in (judge, trunk))
    assert found == alone


@pytest.mark.parametrize("form", FORMS)
def test_a_saved_judge_scores_alike(make_model, make_verifier, random_adapter, tmp_path, form):
    model = make_model("llama_gqa")
    judge = random_adapter(model, stream=True, **FORMS[form])
    folder = judge.save_pretrained(tmp_path / "judge")
    assert (folder / "adapter_model.safetensors").exists() == (form != "layers")
    loaded = ValidityAdapter.from_pretrained(folder, model)
    assert loaded.fingerprint == read_adapter(folder).fingerprint
    found, before = (make_verifier(model, True, one).verify_block(DRAFT).validity for one in (loaded, judge))
    assert found == before
    other = make_model("llama_gqa", seed=1)
    with pytest.raises(ValueError, match="has the same shape but other weights"):
        ValidityAdapter.from_pretrained(folder, other)


def test_servers_and_other_targets_get_the_judge_it_was_trained_from(make_model, random_adapter, tokenizer, tmp_path):
    model = make_model("llama_gqa")
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    folder = random_adapter(model, stream=True).save_pretrained(tmp_path / "judge")
    language = SimpleNamespace(tokenizer=tokenizer, eos_ids=())
    with pytest.raises(ValueError, match="which servers do not return: use the adapter it was trained from"):
        _judge(tmp_path / "target", read_adapter(folder), None, language, 100)
    with pytest.raises(ValueError, match="transfer the one it was trained from, 'runs/logprob/adapter'"):
        transfer_adapter(folder, tmp_path / "target", tmp_path / "transferred")


def test_a_draft_of_no_token_is_valid(make_model, make_verifier):
    verifier = make_verifier(make_model("llama"), one_pass=True)
    assert verifier.verify([], [0]).validity == [1.0]
    assert verifier.scorer.score(SimpleNamespace(draft=(), cuts=None, written=()), Carried()).validity == []
