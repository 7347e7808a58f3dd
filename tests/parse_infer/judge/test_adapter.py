"""The exported adapter: saved equals loaded, belongs to one target, and a damaged folder is a clear error."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from parse_infer.judge.adapter import ValidityAdapter, ValidityConfig
from parse_infer.judge.adapter_files import (
    CARD,
    CONFIG,
    HEAD,
    PEFT_CONFIG,
    PEFT_WEIGHTS,
    PROMISE,
    model_card,
    read_adapter,
)
from parse_infer.judge.logprob_head import LogprobHead, LogprobHeadConfig
from parse_infer.models.fingerprint import describe_target, fingerprint, same_weights
from parse_infer.models.names import hub_id

FILES = {PEFT_CONFIG, PEFT_WEIGHTS, HEAD, CONFIG, CARD}


@pytest.fixture
def target(make_model):
    return make_model("llama_gqa")


@pytest.fixture
def folder(target, random_adapter, tmp_path):
    return random_adapter(target, stream=True).save_pretrained(tmp_path / "adapter")


def test_a_second_stream_needs_the_weights_it_was_trained_on(target, folder):
    config = json.loads((folder / CONFIG).read_text())
    del config["target"]["fingerprint"]
    (folder / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ValueError, match="has no fingerprint of the target: export the adapter again"):
        ValidityAdapter.from_pretrained(folder, target)


def test_saved_equals_loaded(target, random_adapter, random_ids, tmp_path):
    adapter = random_adapter(target, stream=True)
    adapter.config.metrics = {"auroc": 0.93}
    folder = adapter.save_pretrained(tmp_path / "deep" / "adapter")
    assert {path.name for path in folder.iterdir()} == FILES
    assert [path.name for path in folder.parent.iterdir()] == ["adapter"]  # no temporary folder stays
    loaded = ValidityAdapter.from_pretrained(str(folder), target)
    assert loaded.config == adapter.config
    assert loaded.tensors.keys() == adapter.tensors.keys()
    tokens, corrected = torch.tensor([random_ids(8)]), []
    for one in (adapter, loaded):
        with torch.no_grad(), one.lora.applied(2):
            states = target.base_model(tokens).last_hidden_state
        corrected.append(one.head.correct(torch.zeros(1, 8), torch.zeros(1, 8, 8), states[..., None, :], tokens >= 0))
    assert torch.equal(*corrected) and corrected[0].abs().max() > 0.1
    assert not any(p.requires_grad for p in loaded.head.parameters())
    card = (folder / CARD).read_text()
    assert "auroc | 0.93" in card and "LlamaForCausalLM" in card
    assert (
        "library_name: peft\n" in card
        and "- parse-engine\n- speculative-decoding\n- lora\n" in card
        and "and a second stream" in card
    )


def test_a_fingerprint_is_of_all_that_judges(target, folder):
    loaded = ValidityAdapter.from_pretrained(folder, target)
    assert loaded.fingerprint == read_adapter(folder).fingerprint  # the same over servers
    name = min(loaded.tensors)
    others = [
        replace(loaded, tensors=loaded.tensors | {name: loaded.tensors[name] + 1}),
        replace(loaded, config=replace(loaded.config, probability={"scale": 2.0, "shift": 0.0})),
        replace(loaded, peft_config=loaded.peft_config | {"lora_alpha": 1}),
        replace(loaded, head=LogprobHead(LogprobHeadConfig(k=3, width=8, text_size=4, buckets=64))),
    ]
    assert len({loaded.fingerprint, *(other.fingerprint for other in others)}) == 5
    stricter = replace(loaded, config=replace(loaded.config, threshold=0.9))  # a default: its calibration stays valid
    assert stricter.fingerprint == loaded.fingerprint


def test_without_a_second_stream_nothing_is_said_of_peft(target, random_adapter, tmp_path):
    adapter = random_adapter(target)
    folder = adapter.save_pretrained(tmp_path / "adapter")
    assert {path.name for path in folder.iterdir()} == {CONFIG, HEAD, CARD}
    card = (folder / CARD).read_text()
    assert "peft" not in card and "lora" not in card and "second stream" not in card
    loaded = ValidityAdapter.from_pretrained(folder, target)
    assert loaded.lora is None and loaded.config == adapter.config


def test_saving_again_replaces_the_adapter(target, random_adapter, folder):
    changed = random_adapter(target, seed=5)
    changed.config.threshold = 0.25
    changed.save_pretrained(folder)
    assert ValidityAdapter.from_pretrained(folder, target).config.threshold == 0.25
    assert [path.name for path in folder.parent.iterdir()] == ["adapter"]


def test_saving_never_replaces_something_else(target, random_adapter, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="is no adapter folder"):
        random_adapter(target).save_pretrained(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_failed_save_leaves_the_old_adapter(target, random_adapter, folder):
    broken = random_adapter(target, seed=5)
    broken.config.provenance = {"model": object()}  # no JSON
    with pytest.raises(TypeError):
        broken.save_pretrained(folder)
    assert ValidityAdapter.from_pretrained(folder, target).config.provenance == {}
    assert [path.name for path in folder.parent.iterdir()] == ["adapter"]


def test_an_adapter_without_an_update_cannot_be_saved(target, random_adapter, tmp_path):
    adapter = random_adapter(target, stream=True)
    adapter.tensors = {}
    with pytest.raises(ValueError, match="without its peft configuration and weights"):
        adapter.save_pretrained(tmp_path / "adapter")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", sorted(FILES - {CARD}))
def test_a_missing_file_is_named(target, folder, name):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{re.escape(name)} is missing"):
        ValidityAdapter.from_pretrained(folder, target)


@pytest.mark.parametrize("name", sorted(FILES - {CARD}))
@pytest.mark.parametrize("keep", [0, 40])
def test_a_half_written_file_is_named(target, folder, name, keep):
    path = folder / name
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=f"{re.escape(name)} is damaged"):
        ValidityAdapter.from_pretrained(folder, target)


def test_a_folder_that_is_not_there(target, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no adapter folder"):
        ValidityAdapter.from_pretrained(str(tmp_path / "nowhere"), target)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="give the folder of the adapter"):
        ValidityAdapter.from_pretrained(str(tmp_path / "file"), target)


def test_an_unknown_hub_id(target, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="someone/no-such-adapter is neither a local adapter folder nor"):
        ValidityAdapter.from_pretrained("someone/no-such-adapter", target)


def test_a_target_of_another_shape_is_refused_by_name(make_model, folder):
    other = make_model("qwen3")
    other.config._name_or_path = "Acme/Other-8B"
    with pytest.raises(ValueError, match=r"'LlamaForCausalLM' and does not fit 'Acme/Other-8B'.*model_type llama"):
        ValidityAdapter.from_pretrained(folder, other)


def test_a_target_with_other_weights_is_refused_by_name(make_model, folder):
    other = make_model("llama_gqa", seed=3)
    other.config._name_or_path = "Acme/Other-8B"
    with pytest.raises(ValueError, match="'LlamaForCausalLM'; 'Acme/Other-8B' has the same shape but other weights"):
        ValidityAdapter.from_pretrained(folder, other)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"schema_version": 99}, "schema version 99"),
        ({"logprobs": None}, "no logprobs: .* reads hidden states; train it again with recipes/train.yaml$"),
        ({"logprobs": []}, "has a damaged logprobs"),
        ({"stream": {"head": {}}}, "has an incomplete stream"),
        ({"stream": None}, "does not match validity_config.json"),
        ({"target": None}, "no target"),
        ({"target": {"parameters": 1}}, "no name of its target"),
        ({"target": "x"}, "damaged target"),
        ({"stream": 5}, "damaged stream"),
        ({"probability": 5}, "damaged probability"),
        ({"probability": {"scale": None, "shift": 0}}, "needs a scale above 0"),
        ({"cut_policy": None}, "damaged cut_policy"),
    ],
)
def test_a_wrong_configuration_is_named(target, folder, change, sentence):
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=sentence):
        ValidityAdapter.from_pretrained(folder, target)


def test_a_head_of_another_shape_is_named(target, folder, random_adapter, make_model, tmp_path):
    other = random_adapter(target)
    other.head = LogprobHead(LogprobHeadConfig(k=5))
    wrong = other.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="validity head"):
        ValidityAdapter.from_pretrained(wrong, target)


def test_unknown_configuration_keys_are_left_for_later_versions(target, folder):
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | {"colour": "blue"}))
    assert ValidityAdapter.from_pretrained(folder, target).config.threshold == 0.5


def test_the_configuration_survives_json():
    values = {"head": asdict(LogprobHeadConfig()), "reference": {"ids": [1, 2], "logprobs": [-1.0]}}
    config = ValidityConfig(target={"name": "t"}, logprobs=values, risk={"alpha": 0.05})
    assert ValidityConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.slow
def test_a_fingerprint_survives_the_number_type_and_the_disk(target, tmp_path, dtype):
    print_of_target = fingerprint(target)
    target.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert same_weights(print_of_target, fingerprint(loaded))
    assert same_weights(fingerprint(loaded), fingerprint(loaded.float()))


def test_a_fingerprint_tells_fine_tuned_weights_apart(make_model, target):
    tuned = make_model("llama_gqa")
    with torch.no_grad():
        for parameter in tuned.model.layers.parameters():
            parameter.mul_(1.02)
    assert not same_weights(fingerprint(target), fingerprint(tuned))
    assert not same_weights(fingerprint(target), "None")


def test_a_target_is_named_without_its_path(target):
    for path, name in (("/home/me/models/big/", "big"), ("Acme/Big-8B", "Acme/Big-8B"), ("./x", "x"), ("", None)):
        target.config._name_or_path = path
        assert describe_target(target)["name"] == (name or "LlamaForCausalLM")


@pytest.mark.parametrize("change", [{"head": {}}, {"head": None}, {"reference": {"ids": [], "logprobs": []}}])
def test_incomplete_settings_of_a_judge_on_log_probabilities_are_refused(make_model, random_adapter, change):
    values = json.loads(json.dumps(random_adapter(make_model("llama")).config.to_dict()))
    values["logprobs"] |= {"reference": {"ids": [1, 2], "logprobs": [-1.0]}, **change}
    with pytest.raises(ValueError, match="has incomplete logprobs: export the adapter again"):
        ValidityConfig.from_dict(values)


@pytest.mark.parametrize(
    ("name", "base"),
    [("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"), ("final", None), ("zoo:target", None), ("runs/target/final", None)],
)
def test_a_card_names_a_base_model_of_the_hub_only(name: str, base: str | None) -> None:
    target = {"name": name, "model_type": "llama", "num_hidden_layers": 2}
    data = ModelCard(model_card({"target": target})).data
    assert data.base_model == base and data.pipeline_tag == "text-generation" and data.license is None


def test_a_folder_that_looks_like_a_hub_id_is_no_base_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "target").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_id("runs/target") is None and hub_id("runs/other") == "runs/other"


@pytest.mark.parametrize(
    ("threshold", "drafts", "scope"),
    [
        (0.7, 90, f" ({PROMISE})"),
        (0.7, 270, f" ({PROMISE}; 270 drafts of 90 problems counted as independent, so the bound is too low)"),
        (0.8, 90, f" (not of the threshold above; {PROMISE})"),
    ],
)
def test_a_card_says_what_its_risk_covers(threshold: float, drafts: int, scope: str) -> None:
    config = {
        "target": {"name": "final", "model_type": "llama", "num_hidden_layers": 2},
        "threshold": threshold,
        "risk": {"threshold": 0.7, "n_drafts": drafts},
        "provenance": {"eval_problems": 90},
    }
    assert f'"n_drafts": {drafts}}}{scope}\n' in model_card(config)
