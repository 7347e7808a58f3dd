"""The zero-shot judge: its question, its read-out, and its validity at each cut."""

from __future__ import annotations

import pytest
import torch

from parse_infer.judge.verifier import Verifier
from parse_infer.judge.zero_shot import ZeroShotJudge, chat_suffix, preference, verbalizer_ids
from parse_infer.models.architecture import output_layer
from parse_infer.models.decoder import Decoder
from parse_infer.text.cuts import CutPolicy, Segmenter


@pytest.fixture
def make_verifier(tokenizer):
    def make(model, judge) -> Verifier:
        segmenter = Segmenter(tokenizer, CutPolicy.from_dict(judge.config.cut_policy))
        return Verifier(Decoder(model, {tokenizer.eos_token_id}), judge, segmenter)

    return make


def test_packed_equals_separate(model, tokenizer, make_verifier):
    """Its validity is the target's own choice between the two words at each prefix."""
    judge = ZeroShotJudge(model, tokenizer)
    verifier = make_verifier(model, judge)
    context = tokenizer.encode("<|user|>How many?<|assistant|>")
    draft = tokenizer.encode("2 + 3 = 5\nso 5.\n#### 5")
    verifier.decoder.seek(context)
    result = verifier.verify(draft)
    assert [tokenizer.decode(draft[:c]) for c in result.cuts][:2] == ["2 + 3 = 5\n", "2 + 3 = 5\nso 5.\n"]
    yes, no = tokenizer.encode("CI")
    for cut, validity in zip(result.cuts, result.validity, strict=True):
        text = tokenizer.decode(context + draft[:cut]) + judge.probe.text
        with torch.no_grad():
            hidden = model.base_model(torch.tensor([tokenizer.encode(text)])).last_hidden_state[0, -1]
            logits = model.get_output_embeddings()(hidden)
        assert validity == pytest.approx(torch.softmax(logits[[yes, no]], -1)[0].item(), abs=1e-4)


def test_suffix_ends_the_answer_and_asks(tokenizer):
    assert chat_suffix(tokenizer, "Right?") == "<|end|><|user|>Right?<|assistant|>"


def test_shows_the_end_token_once(make_model, tokenizer, make_verifier):
    model = make_model("llama")
    judge = ZeroShotJudge(model, tokenizer)
    verifier = make_verifier(model, judge)
    context, draft = tokenizer.encode("<|user|>?<|assistant|>"), tokenizer.encode("5")
    validity = []
    for ids in (draft, [*draft, tokenizer.eos_token_id]):
        verifier.decoder.seek(context)
        validity.append(verifier.verify(ids).validity[-1])
    assert validity[0] == pytest.approx(validity[1], abs=1e-5)


def test_without_a_chat_template_asks_in_plain_text(make_model, tokenizer):
    class Plain:
        chat_template = None
        encode = tokenizer.encode

    judge = ZeroShotJudge(make_model("llama"), Plain(), question="Right?")
    assert judge.probe.text == "\n\nRight?\nAnswer: " and not judge.probe.closes_turn


def test_a_template_that_hides_the_draft_is_refused(make_model, tokenizer):
    class Forgetful:
        chat_template = "…"
        encode = tokenizer.encode

        def apply_chat_template(self, messages, **_):
            return messages[-1]["content"]

    with pytest.raises(ValueError, match="drops earlier turns"):
        ZeroShotJudge(make_model("llama"), Forgetful())


def test_the_read_out_is_the_choice_between_two_tokens(model, random_ids):
    weight, bias = preference(model, 3, 4)
    with torch.no_grad():
        states = model.base_model(torch.tensor([random_ids(9)])).last_hidden_state[0]
        logits = model.get_output_embeddings()(states)
    expected = torch.softmax(logits[:, [3, 4]], -1)[:, 0]
    assert torch.allclose(torch.sigmoid(states @ weight + bias), expected, atol=1e-5)


@pytest.mark.parametrize("scale", [{"logit_scale": 0.25}, {"logits_scaling": 4.0}, {}])
def test_the_read_out_has_the_models_scale_and_bias(make_model, scale):
    model = make_model("llama", **scale)
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-3, 3, 260))
    weight, bias = preference(model, 3, 200)
    states = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    logits = output_layer(model)(states)
    assert torch.allclose(states @ weight + bias, logits[:, 3] - logits[:, 200], atol=1e-5)


def test_words_need_different_first_tokens(make_model, tokenizer):
    assert verbalizer_ids(tokenizer, "Is it? ", ("Yes", "No")) == tuple(tokenizer.encode("YN"))
    with pytest.raises(ValueError, match="begin with the same token"):
        ZeroShotJudge(make_model("llama"), tokenizer, words=("Right", "Rong"))


def test_a_fingerprint_is_of_target_question_and_words(make_model, tokenizer):
    models = [make_model("llama"), make_model("llama", seed=1)]
    judges = [ZeroShotJudge(model, tokenizer) for model in models]
    judges += [ZeroShotJudge(models[0], tokenizer, **other) for other in ({"question": "?"}, {"words": ("yes", "no")})]
    assert len({judge.fingerprint for judge in judges}) == 4
    assert judges[0].fingerprint == ZeroShotJudge(models[0], tokenizer).fingerprint
