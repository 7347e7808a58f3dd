"""What training relies on: gradient in adapter and head alone, and the same validities as at inference."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from parse_infer.judge.adapter import ValidityAdapter, ValidityConfig
from parse_infer.judge.adapter_files import HEAD
from parse_infer.judge.probe.head import Probe, ValidityHead
from parse_infer.judge.probe.packing import probe_positions
from parse_infer.judge.verifier import Verifier
from parse_infer.judge.zero_shot import ZeroShotJudge
from parse_infer.models.decoder import Decoder
from parse_infer.models.fingerprint import describe_target
from parse_infer.text.cuts import Segmenter
from parse_train.judge.data import ValidityDataset
from parse_train.judge.export import export_adapter
from parse_train.judge.pass_risk import RiskControl
from parse_train.judge.probe.activated_lora import LoraOptions
from parse_train.judge.probe.config import ValidityTrainingConfig
from parse_train.judge.probe.data import ValidityCollator, ValidityExample
from parse_train.judge.probe.draft_states import DraftStates, StateStore
from parse_train.judge.probe.model import ValidityModel
from parse_train.judge.probe.train import build_model, describe, frequent_tokens
from tests.conftest import MOE_ARCHITECTURES
from tests.parse_infer.language_models import language_model
from tools.step_cost import back_propagate_throughout

PROBE = Probe((256, 63), "?!")
CLOSING = Probe((258, 63), "!?", closes_turn=True)
NONE = Probe((), "")  # token doubt alone
REPOSITORY = Path(__file__).parents[4]


def trained(
    target: PreTrainedModel,
    probe: Probe = PROBE,
    vocabulary: Tensor | None = None,
    dropout: float = 0.0,
    state_store_gib: float = 0.0,
) -> ValidityModel:
    """A model whose adapter and head really do something, as after training."""
    head = ValidityHead(target.config.hidden_size, 3, vocabulary, probe=bool(probe.ids))
    if head.weight is not None:
        head.weight = ValidityHead.from_verbalizer(target, 67, 73).weight
    model = ValidityModel(
        target, probe, head, end_ids={258}, lora=LoraOptions(4, 8, dropout), state_store_gib=state_store_gib
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        model.head.bias.fill_(0.3)
        out = model.head.tokens.out
        out.weight.copy_(torch.randn(out.weight.shape, generator=generator) * 0.2)
        out.bias.zero_()
    return model


def facts_of(
    target: dict[str, Any],
    verbalizer: tuple[str, str],
    cut_policy: dict[str, Any],
    label: dict[str, Any] | None = None,
    provenance: dict[str, Any] | None = None,
) -> ValidityConfig:
    known = {"label": label or {}, "provenance": provenance or {}}
    return ValidityConfig((), "", target, verbalizer=verbalizer, cut_policy=cut_policy, **known)


@pytest.fixture
def examples(random_ids: Callable[..., list[int]]) -> list[ValidityExample]:
    """Three drafts of unequal length and number of cuts, longer than the sliding window of the tests."""
    shapes = [(9, [3, 8, 15]), (5, [6]), (12, [2, 20])]
    return [
        ValidityExample(
            random_ids(n, seed=i), random_ids(cuts[-1], seed=10 + i), cuts, [True] * len(cuts), [1.0] * len(cuts)
        )
        for i, (n, cuts) in enumerate(shapes)
    ]


@pytest.fixture
def batch(examples: list[ValidityExample]) -> dict[str, Tensor]:
    return ValidityCollator(pad_id=258)(examples)


def loss_of(model: ValidityModel, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["input_ids"], batch["visible"], batch["cuts"])["logits"]
    return logits[batch["visible"] > 0].tanh().sum()


def test_gradient_reaches_adapter_and_head_only(model: PreTrainedModel, batch: dict[str, Tensor]) -> None:
    validity = trained(model)
    loss_of(validity.train(), batch).backward()
    for name, parameter in validity.named_parameters():
        learns = "lora_" in name or name.startswith("head.")
        assert parameter.requires_grad == learns, name
        if learns:
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
        else:
            assert parameter.grad is None, name


def test_back_propagating_through_the_context_changes_no_gradient(
    model: PreTrainedModel, batch: dict[str, Tensor]
) -> None:
    validity = trained(model)
    gradients = []
    for backprop in (False, True):
        back_propagate_throughout(validity, backprop)
        validity.zero_grad()
        loss = loss_of(validity, batch)
        loss.backward()
        gradients.append([loss] + [p.grad.clone() for p in validity.parameters() if p.grad is not None])
    for cached, packed in zip(*gradients, strict=True):
        torch.testing.assert_close(cached, packed, rtol=1e-3, atol=1e-5)


def test_checkpointed_layers_change_no_gradient(model: PreTrainedModel, batch: dict[str, Tensor]) -> None:
    """The second run of a layer reads the same context, with the same adapter and dropout, and keeps far less."""
    validity = trained(model, dropout=0.3).train()
    gradients, saved = [], [0, 0]
    for recomputes in (0, 1):
        if recomputes:
            validity.activation_checkpointing_enable()
        validity.zero_grad()
        torch.manual_seed(0)

        def keep(tensor: Tensor, recomputes: int = recomputes) -> Tensor:
            saved[recomputes] += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = loss_of(validity, batch)
        loss.backward()
        gradients.append([loss.detach()] + [p.grad.clone() for p in validity.parameters() if p.grad is not None])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain)
    assert saved[1] < saved[0] / 3


def test_without_a_probe_the_target_runs_once_for_each_draft(
    model: PreTrainedModel, batch: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stored gives the logits that computing it anew gives, whatever batch a draft comes in."""
    inputs = {name: batch[name] for name in ("input_ids", "visible", "cuts")}
    anew = trained(model, NONE).eval()
    stored = trained(model, NONE, state_store_gib=1.0).eval()
    little = trained(model, NONE, state_store_gib=4e-6).eval()  # too little for all
    runs: list[int] = []
    for each in (anew, stored, little):
        each.head.load_state_dict(anew.head.state_dict())
        compute = each.context_hidden
        monkeypatch.setattr(each, "context_hidden", lambda ids, of=compute: (runs.append(len(ids)), of(ids))[1])
    expected = anew(**inputs)["logits"]
    last = {name: tensor[-2:] for name, tensor in inputs.items()}
    for each, again_read in ((stored, range(1)), (little, range(1, len(expected)))):
        first = each(**last)["logits"]  # in another batch before
        runs.clear()
        again = each(**inputs)["logits"]
        torch.testing.assert_close(again, expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(first, expected[-2:], rtol=0, atol=1e-4)
        assert sum(runs) >= len(expected) - 2
        runs.clear()
        torch.testing.assert_close(each(**inputs)["logits"], again, rtol=0, atol=1e-4)
        assert sum(runs) in again_read
    stored.train()
    stored(**inputs)["logits"][inputs["visible"] > 0].sum().backward()
    assert stored.head.tokens is not None and stored.head.tokens.expected.weight.grad is not None


@pytest.mark.parametrize(
    ("probe", "vocabulary"),
    [(PROBE, None), (CLOSING, None), (NONE, None), (PROBE, torch.arange(2, 259, 3)), (NONE, torch.arange(2, 259, 3))],
    ids=["open", "closing", "none", "part of the vocabulary", "none, part of the vocabulary"],
)
@pytest.mark.parametrize("backprop", [False, True])
def test_training_and_inference_agree(
    model: PreTrainedModel,
    architecture: str,
    make_model: Callable[..., PreTrainedModel],
    examples: list[ValidityExample],
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    probe: Probe,
    vocabulary: Tensor | None,
    backprop: bool,
) -> None:
    """The exported adapter in a `Verifier` gives the validities of the training forward, also of finished drafts and
    where the draft repeats the target's own choices; without a probe in blocks too."""
    decoder = Decoder(make_model(architecture), ())
    decoder.seek(examples[2].context_ids)
    examples[2].draft_ids[:9] = decoder.decode(9)
    for example in examples[:2]:
        example.draft_ids[-1] = tokenizer.eos_token_id
    batch = ValidityCollator(pad_id=258)(examples)
    facts = facts_of(describe_target(model), ("C", "I"), {"kind": "step"})
    validity = trained(model, probe, vocabulary)
    back_propagate_throughout(validity, backprop)
    with torch.no_grad():
        expected = validity.eval()(batch["input_ids"], batch["visible"], batch["cuts"])["logits"]
    export_adapter(tmp_path / "adapter", validity.exported(facts), {"auroc": 0.9})

    target = make_model(architecture)  # loaded anew: nothing of the training is left in it
    adapter = ValidityAdapter.from_pretrained(tmp_path / "adapter", target)
    assert adapter.probe == probe
    verifier = Verifier(Decoder(target, {258}), adapter, Segmenter(tokenizer))
    for i, example in enumerate(examples):
        verifier.decoder.seek(example.context_ids)
        found = verifier.verify(example.draft_ids, example.cuts).validity
        logits = expected[i, : len(found)]
        torch.testing.assert_close(
            torch.tensor(found).logit().clamp(max=8.0), logits.clamp(max=8.0), rtol=0, atol=1e-3
        )
        if verifier.scorer.by_token:
            verifier.decoder.seek(example.context_ids)
            block = verifier.verify_block(example.draft_ids).validity
            assert [block[cut - 1] for cut in example.cuts] == pytest.approx(found, abs=1e-4)
    spread = expected[batch["visible"] > 0]
    assert spread.max() - spread.min() > 0.5  # the comparison is not one of constants


def test_a_rounded_adapter_is_judged_by_as_it_was_measured(
    make_model: Callable[..., PreTrainedModel],
    examples: list[ValidityExample],
    batch: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> None:
    """Exported in bfloat16, half the size, with the validities that training has measured after rounding."""
    target = make_model("llama")
    facts = facts_of(describe_target(target), ("C", "I"), {"kind": "step"})
    validity = trained(target).eval()
    exact = export_adapter(tmp_path / "exact", validity.exported(facts), {}) / "adapter_model.safetensors"
    with torch.no_grad():
        before = validity(batch["input_ids"], batch["visible"], batch["cuts"])["logits"]
        validity.round_adapter(torch.bfloat16)
        expected = validity(batch["input_ids"], batch["visible"], batch["cuts"])["logits"]
    assert not torch.equal(before, expected)
    folder = export_adapter(tmp_path / "rounded", validity.exported(facts), {})
    assert (folder / "adapter_model.safetensors").stat().st_size < 0.6 * exact.stat().st_size

    again = make_model("llama")
    verifier = Verifier(Decoder(again, {258}), ValidityAdapter.from_pretrained(folder, again), Segmenter(tokenizer))
    verifier.decoder.seek(examples[0].context_ids)
    found = verifier.verify(examples[0].draft_ids, examples[0].cuts).validity
    torch.testing.assert_close(torch.tensor(found).logit(), expected[0, : len(found)], rtol=0, atol=1e-4)


def test_token_doubt_alone_is_what_an_empty_probe_text_trains(
    make_model: Callable[..., PreTrainedModel],
    tokenizer: PreTrainedTokenizerFast,
    batch: dict[str, Tensor],
    tmp_path: Path,
) -> None:
    """The head alone learns, the target stays unwrapped, and what is exported has neither probe nor verbalizer."""
    options: dict[str, Any] = {"target": "t", "data": "d", "output_dir": "o", "use_cpu": True, "probe_text": ""}
    with pytest.raises(ValueError, match="probe_text is empty and token_rank is 0"):
        ValidityTrainingConfig(**options, token_rank=0)
    config = ValidityTrainingConfig(**options, token_rank=4)
    lm = language_model(make_model("llama"), tokenizer, "t")
    facts = describe(config, lm, {}, {})
    validity = build_model(config, lm).train()
    loss_of(validity, batch).backward()
    learning = {name for name, parameter in validity.named_parameters() if parameter.requires_grad}
    assert all(name.startswith("head.") for name in learning) and "head.weight" not in learning
    assert all(p.grad is not None for name, p in validity.named_parameters() if name in learning)
    assert set(validity.state_dict()) == learning and validity.base is lm.model
    adapter = ValidityAdapter.from_pretrained(
        export_adapter(tmp_path / "a", validity.exported(facts), {}), make_model("llama")
    )
    assert adapter.config.verbalizer is None and "lora_rank" not in adapter.config.provenance


def test_the_most_frequent_tokens_of_the_training_drafts(
    make_model: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    drafts = [[5, 5, 9], [5, 9, 7], [30]]
    rows = ValidityDataset([ValidityExample([1], draft, [len(draft)], [True], [1.0]) for draft in drafts])
    lm = language_model(make_model("llama"), tokenizer, "t")
    assert frequent_tokens(rows, lm, 0) is None
    assert frequent_tokens(rows, lm, 3).tolist() == [5, 9, tokenizer.eos_token_id]
    part = frequent_tokens(rows, lm, 1000)
    assert part.tolist() == [5, 7, 9, 30, tokenizer.eos_token_id], "there are no more"
    config = ValidityTrainingConfig(target="t", data="d", output_dir="o", use_cpu=True, surprise_vocab_size=1000)
    facts = describe(config, lm, {}, {})
    folder = export_adapter(tmp_path / "a", build_model(config, lm, part).exported(facts), {})
    adapter = ValidityAdapter.from_pretrained(folder, make_model("llama"))
    assert adapter.config.surprise_vocab_size == 5 and adapter.head.tokens.vocabulary.tolist() == part.tolist()
    with pytest.raises(ValueError, match="surprise_vocab_size is -1; it must be at least 0"):
        ValidityTrainingConfig(target="t", data="d", output_dir="o", use_cpu=True, surprise_vocab_size=-1)
    files = load_file(folder / HEAD)
    save_file(files | {"tokens.vocabulary": torch.tensor([5, 7, 9, 30, 5000])}, folder / HEAD)
    with pytest.raises(ValueError, match="part of the vocabulary has tokens outside the target's vocabulary"):
        ValidityAdapter.from_pretrained(folder, make_model("llama"))


def test_a_probe_that_closes_the_turn_does_not_show_the_end_twice(
    make_model: Callable[..., PreTrainedModel], examples: list[ValidityExample]
) -> None:
    """It sees a finished draft as one that stops just before its end token; the tokens' doubt counts that token."""
    example = examples[0]
    finished = ValidityExample(
        example.context_ids, [*example.draft_ids, 258], [*example.cuts[:-1], 16], example.labels, example.weights
    )

    def agree(validity: ValidityModel) -> bool:
        with torch.no_grad():
            batches = [ValidityCollator()([draft]) for draft in (finished, example)]
            one, other = (validity(b["input_ids"], b["visible"], b["cuts"])["logits"][0, -1] for b in batches)
        return torch.allclose(one, other, rtol=1e-4, atol=1e-5)

    for probe in (CLOSING, Probe(CLOSING.ids, CLOSING.text)):
        validity = trained(make_model("llama"), probe).eval()
        assert not agree(validity)
        validity.head.tokens = None
        assert agree(validity) == probe.closes_turn


def test_training_finds_out_whether_the_probe_closes_the_turn(
    make_model: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast
) -> None:
    for text, closes in (("<|end|><|user|>?", True), ("<|user|><|end|>", False)):
        config = ValidityTrainingConfig(target="t", data="d", output_dir="o", probe_text=text, use_cpu=True)
        assert build_model(config, language_model(make_model("llama"), tokenizer, "t")).probe.closes_turn == closes


def test_the_update_is_pefts_activated_lora(
    make_model: Callable[..., PreTrainedModel], examples: list[ValidityExample], tmp_path: Path
) -> None:
    """peft itself, given the exported folder and the offset of the probe, computes the same hidden state."""
    facts = facts_of(describe_target(make_model("llama")), ("C", "I"), {})
    validity = trained(make_model("llama"))
    validity.head.tokens = None  # it reads no update
    export_adapter(tmp_path / "adapter", validity.exported(facts), {})
    peft_model = PeftModel.from_pretrained(make_model("llama"), tmp_path / "adapter").eval()
    example = examples[0]
    ids = torch.tensor([example.context_ids + example.draft_ids + list(PROBE.ids)])
    hidden = {}
    norm = peft_model.get_base_model().model.norm
    handle = norm.register_forward_hook(lambda _, __, output: hidden.update(last=output[:, -1]))
    with torch.no_grad():
        peft_model(input_ids=ids, alora_offsets=[len(PROBE.ids)])
        expected = validity.head(hidden["last"])[0]
        batch = ValidityCollator()([example])
        ours = validity.eval()(batch["input_ids"], batch["visible"], batch["cuts"])["logits"][0, -1]
    handle.remove()
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


def test_the_context_is_the_base_targets(
    model: PreTrainedModel, architecture: str, make_model: Callable[..., PreTrainedModel], batch: dict[str, Tensor]
) -> None:
    """Adapter off: hidden states of prompt and draft are the untouched target's."""
    validity, base = trained(model), make_model(architecture)
    ours = validity.context_hidden(batch["input_ids"])
    with torch.no_grad():
        own = getattr(base, base.base_model_prefix)(input_ids=batch["input_ids"], past_key_values=DynamicCache())
    torch.testing.assert_close(ours, own.last_hidden_state, rtol=1e-4, atol=1e-4)


def test_padding_changes_nothing(
    make_model: Callable[..., PreTrainedModel], examples: list[ValidityExample], batch: dict[str, Tensor]
) -> None:
    validity = trained(make_model("llama_gqa")).eval()
    with torch.no_grad():
        together = validity(batch["input_ids"], batch["visible"], batch["cuts"])["logits"]
        for i, example in enumerate(examples):
            alone = ValidityCollator()([example])
            logits = validity(alone["input_ids"], alone["visible"], alone["cuts"])["logits"][0]
            torch.testing.assert_close(together[i, : len(example.cuts)], logits, rtol=1e-4, atol=1e-5)
    assert probe_positions(batch["visible"], 2).shape == (3, 6)


def test_the_untrained_head_is_the_verbalizer(
    make_model: Callable[..., PreTrainedModel],
    examples: list[ValidityExample],
    batch: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Before training, with the zero-shot judge's probe, the model is the zero-shot judge."""
    target = make_model("llama")
    judge = ZeroShotJudge(target, tokenizer)
    verifier = Verifier(Decoder(make_model("llama"), {258}), judge, Segmenter(tokenizer))
    validity = ValidityModel(target, judge.probe, judge.head.requires_grad_(True), lora=LoraOptions(4))
    with torch.no_grad():
        logits = validity.eval()(batch["input_ids"], batch["visible"], batch["cuts"])["logits"]
    for example, row in zip(examples, logits, strict=True):
        verifier.decoder.seek(example.context_ids)
        found = torch.tensor(verifier.verify(example.draft_ids, example.cuts).validity)
        torch.testing.assert_close(row[: len(found)].sigmoid(), found, rtol=1e-4, atol=1e-5)


def test_beside_token_doubt_the_probe_starts_at_zero(
    make_model: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast, batch: dict[str, Tensor]
) -> None:
    """Alone it starts as the comparison of the verbalizer's words. Both starts learn."""
    for token_rank in (0, 4):
        config = ValidityTrainingConfig(target="t", data="d", output_dir="o", use_cpu=True, token_rank=token_rank)
        lm = language_model(make_model("llama"), tokenizer, "t")
        assert (describe(config, lm, {}, {}).verbalizer is None) == bool(token_rank)
        validity = build_model(config, lm).train()
        assert validity.head.weight is not None
        assert bool(validity.head.weight.any()) == (token_rank == 0)
        optimizer = torch.optim.AdamW([p for p in validity.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(validity, batch).backward()
            optimizer.step()
        assert validity.head.weight.any()
        assert all(p.any() for name, p in validity.named_parameters() if "lora_B" in name)


def test_the_state_is_adapter_and_head(make_model: Callable[..., PreTrainedModel], batch: dict[str, Tensor]) -> None:
    one, other = (
        trained(make_model("llama")),
        ValidityModel(make_model("llama"), PROBE, ValidityHead(32, token_rank=3), lora=LoraOptions(4, 8)),
    )
    state = one.state_dict()
    assert all("lora_" in name or name.startswith("head.") for name in state)
    assert set(state) == {name for name, p in one.named_parameters() if p.requires_grad}
    other.load_state_dict(state)  # strict: the frozen target is not missed
    with torch.no_grad():
        expected = one.eval()(batch["input_ids"], batch["visible"], batch["cuts"])["logits"]
        torch.testing.assert_close(
            other.eval()(batch["input_ids"], batch["visible"], batch["cuts"])["logits"], expected
        )
    with pytest.raises(RuntimeError, match=r"head.weight"):
        other.load_state_dict({name: value for name, value in state.items() if name != "head.weight"})


def test_dropout_is_the_adapters_alone(make_model: Callable[..., PreTrainedModel], batch: dict[str, Tensor]) -> None:
    target = make_model("llama", attention_dropout=0.5)
    validity = trained(target, dropout=0.5).train()
    first, second = (validity(batch["input_ids"], batch["visible"], batch["cuts"])["logits"] for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(validity.context_hidden(batch["input_ids"]), validity.context_hidden(batch["input_ids"]))
    validity.eval()
    first, second = (validity(batch["input_ids"], batch["visible"], batch["cuts"])["logits"] for _ in range(2))
    assert torch.equal(first, second)


def test_the_exported_folder_says_what_it_is(make_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    from parse_train.judge.figures import reliability_diagram
    from parse_train.judge.metrics import ScoredDrafts

    target = make_model("llama")
    facts = facts_of(describe_target(target), ("C", "I"), {"kind": "step"}, {"kind": "hard"}, {"data": "d"})
    risk = RiskControl(0.7, 0.05, 0.1, 0.04, 0.03, 0.6, 300)
    figure = reliability_diagram(ScoredDrafts.from_rows([[0.9, 0.2]], [[True, False]], [[2, 4]]))
    for _ in range(2):  # an adapter that is there is replaced
        folder = export_adapter(
            tmp_path / "adapter", trained(make_model("llama")).exported(facts), {"auroc": 0.9}, risk, {"r": figure}
        )
    assert {path.name for path in folder.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "validity_head.safetensors",
        "validity_config.json",
        "README.md",
        "r.png",
    }
    config = ValidityAdapter.from_pretrained(folder, make_model("llama")).config
    assert (config.threshold, config.metrics["auroc"], config.probe_ids) == (0.7, 0.9, PROBE.ids)
    assert config.risk is not None and config.risk["alpha"] == 0.05
    card = (folder / "README.md").read_text()
    assert "![r](r.png)" in card and "one verification pass over one whole draft" in card

    class Broken(Figure):
        def savefig(self, *_: Any, **__: Any) -> None:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):  # an export that fails leaves the adapter as it was
        export_adapter(folder, trained(make_model("llama")).exported(facts), {"auroc": 0.1}, risk, {"r": Broken()})
    assert (folder / "README.md").read_text() == card
    assert (folder / "r.png").is_file()


@pytest.mark.parametrize(
    ("probe", "vocabulary"),
    [(PROBE, None), (NONE, None), (PROBE, torch.arange(2, 259, 3))],
    ids=["probe", "none", "part of the vocabulary"],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_it_trains_with_all_parameters_in_bfloat16(
    make_model: Callable[..., PreTrainedModel],
    batch: dict[str, Tensor],
    probe: Probe,
    vocabulary: Tensor | None,
    autocast: bool,
) -> None:
    """As DeepSpeed casts them: the logits are in float32, and those of a float32 model but for rounding."""
    validity = trained(make_model("llama"), probe, vocabulary).train()
    real = batch["visible"] > 0
    inputs = {name: batch[name] for name in ("input_ids", "visible", "cuts")}
    with torch.no_grad():
        expected = validity(**inputs)["logits"][real]
        for parameter in validity.parameters():
            parameter.data = parameter.data.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = validity(**inputs)["logits"][real]
    assert logits.dtype == torch.float32
    distance = (logits - expected).abs().max() / (expected.max() - expected.min())
    assert distance < 0.15, f"{logits} against {expected}"
    logits.tanh().sum().backward()
    for name, parameter in validity.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and 0 < parameter.grad.abs().max() < torch.inf, name


@pytest.mark.parametrize("architecture", MOE_ARCHITECTURES)
def test_layers_that_see_flattened_tokens_are_refused_before_training(
    architecture: str,
    make_model: Callable[..., PreTrainedModel],
    tokenizer: PreTrainedTokenizerFast,
    batch: dict[str, Tensor],
) -> None:
    """Experts do: the last tokens of their input are no probe's. The sentence names them, and its way out works."""
    options: dict[str, Any] = {
        "target": "t",
        "data": "d",
        "output_dir": "o",
        "use_cpu": True,
        "lora_rank": 4,
        "token_rank": 0,
    }
    config = ValidityTrainingConfig(**options)
    with pytest.raises(ValueError, match=r"mixture of experts") as refused:
        build_model(config, language_model(make_model(architecture), tokenizer, "t"))
    sentence = str(refused.value)
    assert "model.layers.*.mlp." in sentence and "\n" not in sentence, sentence
    found = re.search(r"lora_target_modules: \[(.*)\]", sentence)
    assert found is not None, sentence
    config.lora_target_modules = found[1].split(", ")
    assert {*config.lora_target_modules} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    validity = build_model(config, language_model(make_model(architecture), tokenizer, "t")).train()
    gradients = []
    for backprop in (False, True):
        back_propagate_throughout(validity, backprop)
        validity.zero_grad()
        loss_of(validity, batch).backward()
        gradients.append({n: p.grad.clone() for n, p in validity.named_parameters() if p.grad is not None})
    assert any("lora_B" in name and gradient.abs().max() > 0 for name, gradient in gradients[0].items())
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-5)


def test_stored_states_are_those_of_the_same_draft() -> None:
    """The same tokens with a draft that begins elsewhere are another draft."""
    store, row, computed = StateStore(1 << 20), torch.arange(6), []

    def states(start: int) -> DraftStates:
        def compute(missing: list[int]) -> list[DraftStates]:
            computed.extend(start for _ in missing)
            return [
                DraftStates(torch.zeros(n, 4), torch.zeros(n, 3), torch.zeros(n)) for n in [6 - start] * len(missing)
            ]

        return store([row], [start], compute)[0]

    assert [len(states(start).before) for start in (2, 3, 2, 3)] == [4, 3, 4, 3]
    assert computed == [2, 3]
