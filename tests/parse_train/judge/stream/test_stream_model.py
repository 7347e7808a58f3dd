"""The second stream as a module for training: gradients, dropout, rounding, padding, and the layers it refuses."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from matplotlib.figure import Figure
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from parse_infer.judge.adapter import ValidityAdapter, ValidityConfig
from parse_infer.judge.logprob_head import LogprobHead, LogprobHeadConfig
from parse_infer.judge.stream.head import StreamHead, StreamHeadConfig
from parse_infer.judge.stream.lora import StreamLoRA
from parse_infer.judge.token_logprobs import TokenTexts
from parse_infer.judge.verifier import Verifier
from parse_infer.models.decoder import Decoder
from parse_infer.models.fingerprint import describe_target
from parse_infer.text.cuts import Segmenter
from parse_train.judge.export import export_adapter
from parse_train.judge.figures import reliability_diagram
from parse_train.judge.metrics import ScoredDrafts
from parse_train.judge.pass_risk import RiskControl
from parse_train.judge.stream.lora import LoraOptions
from parse_train.judge.stream.model import StreamModel
from tests.conftest import MOE_ARCHITECTURES

MakeModel = Callable[..., PreTrainedModel]


@pytest.fixture
def stream_of(tokenizer: PreTrainedTokenizerFast) -> Callable[..., StreamModel]:
    """`stream_of(target, learnt=True, layers=(), second=True)`: the module around a target, with random LoRA and
    correction if `learnt`."""

    def make(
        target: PreTrainedModel, learnt: bool = True, layers: tuple[int, ...] = (), second: bool = True, **lora: Any
    ) -> StreamModel:
        torch.manual_seed(1)
        trunk = LogprobHead(LogprobHeadConfig(k=3, width=8, text_size=4, buckets=64))
        head = StreamHead(trunk, StreamHeadConfig(target.config.hidden_size, 8, -30.0, layers, second))
        model = StreamModel(target, head, TokenTexts(tokenizer, (258,), 64), LoraOptions(4, 8, **lora))
        if learnt:
            torch.nn.init.normal_(model.head.out.weight)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.3)
        return model

    return make


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Three drafts of 9, 14 and 5 tokens after prompts of 6, 3 and 11, longer together than a sliding window."""
    numbers = torch.Generator().manual_seed(0)
    lengths, prompts = torch.tensor([9, 14, 5]), torch.tensor([6, 3, 11])
    ids, context = (torch.randint(1, 250, (3, n), generator=numbers) for n in (14, 11))
    first = (ids + 1) % 250
    padding = torch.arange(14) >= lengths[:, None]
    ids, first = ids.masked_fill(padding, 0), first.masked_fill(padding, 0)
    top = (3 * torch.randn(3, 14, 3, generator=numbers)).log_softmax(-1).sort(-1, descending=True).values - 0.2
    cuts = torch.stack([lengths // 2, lengths], dim=-1)
    own = top[..., 0] - 2
    return {
        "own": own,
        "top": top,
        "ids": ids,
        "first": first,
        "cuts": cuts,
        "context": context,
        "visible": prompts[:, None],
    }


def gradients(model: StreamModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    model(**batch)["logits"].tanh().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("layers", "second"), [((), True), ((1, 2), False), ((0, 2), True)])
def test_gradient_reaches_lora_and_correction_only(
    model: PreTrainedModel, stream_of: Any, batch: Any, layers: tuple[int, ...], second: bool
) -> None:
    stream = stream_of(model, layers=layers, second=second)
    assert any("lora_" in name for name, _ in stream.named_parameters()) == second
    found = gradients(stream.train(), batch)
    for name, parameter in stream.named_parameters():
        learns = "lora_" in name or (name.startswith("head.") and ".trunk." not in name)
        assert parameter.requires_grad == learns == (name in found), name
        assert not learns or found[name].abs().max() > 0, name


def test_checkpointed_layers_change_no_gradient(model: PreTrainedModel, stream_of: Any, batch: Any) -> None:
    """The second run of a layer reads the same prompt, with the same LoRA and dropout, and keeps far less."""
    stream, found, saved = stream_of(model, dropout=0.3, layers=(1, 2)).train(), [], [0, 0]
    for recomputes in (0, 1):
        if recomputes:
            stream.activation_checkpointing_enable()

        def keep(tensor: Tensor, recomputes: int = recomputes) -> Tensor:
            saved[recomputes] += tensor.nbytes
            return tensor

        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found.append(gradients(stream, batch))
    for name, plain in found[0].items():
        torch.testing.assert_close(found[1][name], plain, msg=lambda m, n=name: f"{n}: {m}")
    assert saved[1] < saved[0] / 2


def test_padding_changes_nothing(model: PreTrainedModel, stream_of: Any, batch: Any) -> None:
    stream = stream_of(model).eval()
    with torch.no_grad():
        together = stream(**batch)["logits"]
        for row, (n, m) in enumerate(zip((6, 3, 11), (9, 14, 5), strict=True)):
            alone = {key: value[row : row + 1] for key, value in batch.items()}
            alone["context"] = alone["context"][:, :n]
            alone |= {key: alone[key][:, :m] for key in ("own", "top", "ids", "first")}
            torch.testing.assert_close(stream(**alone)["logits"][0], together[row], rtol=1e-4, atol=1e-4)


def test_the_prompt_is_read_without_the_lora(model: PreTrainedModel, stream_of: Any, batch: Any) -> None:
    """The states of the second stream are those of one ordinary forward whose LoRA is on at the draft alone, and
    those of the layers are without it."""
    base = copy.deepcopy(model)
    stream = stream_of(model, layers=(1, 2)).eval()
    with torch.no_grad():
        found = stream.states(batch["context"], batch["visible"], batch["ids"])
    exported = stream.exported(ValidityConfig({}, {}, {}))
    lora = StreamLoRA.from_peft(exported.peft_config, exported.tensors, base)
    for row, (n, m) in enumerate(zip((6, 3, 11), (9, 14, 5), strict=True)):
        tokens = torch.cat([batch["context"][row, :n], batch["ids"][row, :m]])[None]
        with torch.no_grad():
            expected = list(base.base_model(tokens, use_cache=False, output_hidden_states=True).hidden_states[1:3])
            with lora.applied(m):
                expected.append(base.base_model(tokens, use_cache=False).last_hidden_state)
        expected = torch.cat(expected)[:, -m:].transpose(0, 1)
        torch.testing.assert_close(found[row, :m], expected, rtol=1e-4, atol=1e-4)


def test_the_state_is_lora_and_correction(make_model: MakeModel, stream_of: Any, batch: Any) -> None:
    one, other = stream_of(make_model("llama")), stream_of(make_model("llama"), learnt=False)
    state = one.state_dict()
    assert set(state) == {name for name, p in one.named_parameters() if p.requires_grad}
    other.load_state_dict(state)  # strict: neither the frozen target nor the trunk is missed
    with torch.no_grad():
        assert torch.equal(other.eval()(**batch)["logits"], one.eval()(**batch)["logits"])
    with pytest.raises(RuntimeError, match=r"head.out.weight"):
        other.load_state_dict({name: value for name, value in state.items() if name != "head.out.weight"})


def test_dropout_is_the_loras_alone(make_model: MakeModel, stream_of: Any, batch: Any) -> None:
    for learnt in (True, False):  # a LoRA that changes nothing, and so drops nothing
        stream = stream_of(make_model("llama", attention_dropout=0.5), learnt, dropout=0.5).train()
        with torch.no_grad():
            states = [stream.states(batch["context"], batch["visible"], batch["ids"]) for _ in range(2)]
            assert torch.equal(*states) == (not learnt)
            assert torch.equal(*(stream.eval()(**batch)["logits"] for _ in range(2)))


@pytest.mark.parametrize("autocast", [False, True])
def test_it_trains_with_all_parameters_in_bfloat16(
    make_model: MakeModel, stream_of: Any, batch: Any, autocast: bool
) -> None:
    """As DeepSpeed casts them: the logits are in float32, and those of a float32 model but for rounding."""
    stream = stream_of(make_model("llama")).train()
    with torch.no_grad():
        expected = stream(**batch)["logits"]
        for parameter in stream.parameters():
            parameter.data = parameter.data.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = stream(**batch)["logits"]
    assert logits.dtype == torch.float32
    distance = (logits - expected).abs().max() / (expected.max() - expected.min())
    assert distance < 0.15, f"{logits} against {expected}"
    logits.tanh().sum().backward()
    for name, parameter in stream.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and 0 < parameter.grad.abs().max() < torch.inf, name


def facts_of(target: PreTrainedModel) -> ValidityConfig:
    known = {"reads": {"k": 3}, "reference": {"ids": [1, 2], "logprobs": [-1.0]}}
    return ValidityConfig(describe_target(target), known, {"start_from": "runs/logprob/adapter"})


def test_a_rounded_lora_judges_as_it_was_measured(
    make_model: MakeModel, stream_of: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Exported in bfloat16, half the size, with the weights that training has measured after rounding."""
    stream, facts = stream_of(make_model("llama")), facts_of(make_model("llama"))
    trunk = copy.deepcopy(stream.head.trunk.state_dict())
    exact = export_adapter(tmp_path / "exact", stream.exported(facts), {})
    stream.head.trunk.bfloat16()  # as DeepSpeed does
    stream.round_adapter(torch.bfloat16)
    assert all(torch.equal(weight, trunk[name]) for name, weight in stream.head.trunk.state_dict().items())
    folder = export_adapter(tmp_path / "rounded", stream.exported(facts), {})
    sizes = [(each / "adapter_model.safetensors").stat().st_size for each in (exact, folder)]
    assert sizes[1] < 0.6 * sizes[0]
    found = []
    for each in (exact, folder):
        target = make_model("llama")
        verifier = Verifier(
            Decoder(target, {258}), ValidityAdapter.from_pretrained(each, target), Segmenter(tokenizer)
        )
        verifier.decoder.seek([5, 6, 7])
        found.append(verifier.verify_block([*range(40, 60)]).validity)
    assert found[0] != found[1] and found[0] == pytest.approx(found[1], abs=0.05)
    tensors = ValidityAdapter.from_pretrained(folder, make_model("llama")).tensors
    weights = dict(stream.target.named_parameters())
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor.float(), weights[f"{name.removesuffix('.weight')}.default.weight"]), name


def test_the_exported_folder_says_what_it_is(make_model: MakeModel, stream_of: Any, tmp_path: Path) -> None:
    facts, adapter = facts_of(make_model("llama")), stream_of(make_model("llama"))
    risk = RiskControl(0.7, 0.05, 0.1, 0.04, 0.03, 0.6, 300)
    figure = reliability_diagram(ScoredDrafts.from_rows([[0.9, 0.2]], [[True, False]], [[2, 4]]))
    for _ in range(2):  # an adapter that is there is replaced
        folder = export_adapter(tmp_path / "adapter", adapter.exported(facts), {"auroc": 0.9}, risk, {"r": figure})
    peft = {"adapter_config.json", "adapter_model.safetensors"}
    assert {path.name for path in folder.iterdir()} == peft | {
        "validity_head.safetensors",
        "validity_config.json",
        "README.md",
        "r.png",
    }
    config = ValidityAdapter.from_pretrained(folder, make_model("llama")).config
    assert (config.threshold, config.metrics["auroc"]) == (0.7, 0.9)
    assert config.risk is not None and config.risk["alpha"] == 0.05
    card = (folder / "README.md").read_text()
    assert "![r](r.png)" in card and "(one verification pass over one whole draft per problem; " in card
    front = ModelCard(card).data
    assert front.library_name == "peft" and front.pipeline_tag == "text-generation" and "lora" in front.tags

    class Broken(Figure):
        def savefig(self, *_: Any, **__: Any) -> None:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):  # an export that fails leaves the adapter as it was
        export_adapter(folder, adapter.exported(facts), {"auroc": 0.1}, risk, {"r": Broken()})
    assert (folder / "README.md").read_text() == card
    assert (folder / "r.png").is_file()


@pytest.mark.parametrize("architecture", MOE_ARCHITECTURES)
def test_layers_that_see_flattened_tokens_are_refused_before_training(
    architecture: str, make_model: MakeModel, stream_of: Any, batch: Any
) -> None:
    """Experts do: the last tokens of their input are not the stream's. The sentence names them and what to adapt."""
    with pytest.raises(ValueError, match=r"mixture of experts") as refused:
        stream_of(make_model(architecture))
    sentence = str(refused.value)
    assert "model.layers.*.mlp." in sentence and "\n" not in sentence, sentence
    found = re.search(r"lora_target_modules: \[(.*)\]", sentence)
    assert found is not None, sentence
    modules = found[1].split(", ")
    assert {*modules} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    learnt = gradients(stream_of(make_model(architecture), target_modules=modules).train(), batch)
    assert any("lora_B" in name and gradient.abs().max() > 0 for name, gradient in learnt.items())
