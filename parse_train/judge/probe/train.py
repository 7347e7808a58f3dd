"""Recipe `validity`: train adapter and head, choose the threshold, export.

`accelerate launch recipes/train-probe.yaml`
"""

from __future__ import annotations

import gc
from collections import Counter
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import set_seed

import parse_infer
from data_tools.labels.rows import read_rows
from parse_infer import tracking
from parse_infer.calibration.held_out import prompt_hash
from parse_infer.errors import ParseError
from parse_infer.judge.adapter import ValidityConfig
from parse_infer.judge.probe.head import Probe, ValidityHead, verbalizer_ids
from parse_infer.models.fingerprint import describe_target
from parse_infer.models.loading import LanguageModel, load_language_model
from parse_infer.text.cuts import CutPolicy
from parse_train import checkpoints, training_run
from parse_train.judge.build_info import BuildInfo, read_build_info
from parse_train.judge.data import ValidityDataset
from parse_train.judge.probe.activated_lora import LoraOptions
from parse_train.judge.probe.config import ValidityTrainingConfig
from parse_train.judge.probe.data import Encoder, ValidityCollator, load_datasets
from parse_train.judge.probe.model import ValidityModel
from parse_train.judge.request_risk import calibrate_requests
from parse_train.judge.trainer import ValidityTrainer
from parse_train.judge.training import begin, finish, served_drafts, take_settings


def main(config: ValidityTrainingConfig) -> None:
    """Run the recipe; every process of a distributed run must call this function."""
    set_seed(config.seed)
    lm, build, train, evaluation, counts = prepare(config)
    served_drafts(config, evaluation)  # reject a wrong temperature before the training
    facts = describe(config, lm, counts, build.label)
    model = build_model(config, lm, frequent_tokens(train, lm, config.surprise_vocab_size))
    models = config.target, build.draft.get("name")
    start = begin(config, models, train, counts)
    trainer = ValidityTrainer(model, config, train, evaluation, data_collator=ValidityCollator(pad_id(lm)))
    checkpoints.train(trainer, start)
    learnt = {prompt_hash(example.prompt) for example in train.examples}
    model.round_adapter(getattr(torch, config.adapter_dtype))
    finish(config, trainer, evaluation, facts, lm.tokenizer, learnt)
    del lm, model, trainer  # free memory for the calibration; collect the Trainer's reference cycles
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    calibrate_requests(config, build)
    adapter = str(config.adapter_dir)
    training_run.log_artifact(config, models, "model", f"{config.kind}-adapter", adapter)
    tracking.finish()


def prepare(
    config: ValidityTrainingConfig,
) -> tuple[LanguageModel, BuildInfo, ValidityDataset, ValidityDataset, dict[str, int]]:
    """Load target, build info, training drafts, evaluation drafts and counts for the log."""
    for data, layout in ((config.data, config.layout), (config.eval_data, config.eval_layout or config.layout)):
        if data is not None:
            next(read_rows(data, layout), None)  # a wrong name must not wait for the target
    build = read_build_info(config.data)
    take_settings(config, build)
    lm = load_target(config)
    build.check_target(lm.model, config.data)
    if config.eval_data is not None:
        read_build_info(config.eval_data).check_target(lm.model, config.eval_data)
    train, evaluation, counts = load_datasets(config, encoder_for(config, lm))
    return lm, build, train, evaluation, counts


def load_target(config: ValidityTrainingConfig) -> LanguageModel:
    """Load the target with its tokenizer on this process's device, and check its support for verification."""
    return load_language_model(
        config.target,
        role="target",
        device=config.device,
        dtype=config.target_dtype,
        template_options=config.template_options,
        trainable=True,
    )


def encoder_for(config: ValidityTrainingConfig, lm: LanguageModel) -> Encoder:
    embeddings = cast(nn.Embedding, lm.model.get_input_embeddings())
    return Encoder(
        lm.tokenizer,
        embeddings.num_embeddings,
        separator=config.step_separator,
        end_token=lm.end_token,
        template_options=config.template_options,
    )


def frequent_tokens(train: ValidityDataset, lm: LanguageModel, size: int) -> Tensor | None:
    """Return at most `size` tokens, ascending, int64 [n]: end tokens and the most frequent tokens of drafts.

    Returns None, which means all tokens, for `size` 0.
    """
    if not size:
        return None
    counts = Counter(token for example in train.examples for token in example.draft_ids)
    ends = sorted(lm.eos_ids)[:size]
    often = (token for token, _ in counts.most_common() if token not in lm.eos_ids)
    return torch.tensor(sorted([*ends, *islice(often, size - len(ends))]))


def build_model(config: ValidityTrainingConfig, lm: LanguageModel, vocabulary: Tensor | None = None) -> ValidityModel:
    """Add an adapter (initially zero) and a head to the target.

    Without `probe_text`, the model has no adapter, and its head has token doubt alone. The probe's weights start at 0
    beside token doubt, which learns a better judge, and else from the verbalizer.

    Args:
        vocabulary: vocabulary of the head's `TokenDoubt`.

    Raises:
        ValueError: a probe without tokens, verbalizer words with the same first token, or no such layers to adapt.
    """
    probe_ids = tuple(lm.tokenizer.encode(config.probe_text, add_special_tokens=False))
    if config.probe_text and not probe_ids:
        raise ParseError(f"probe_text {config.probe_text!r} has no token")
    probe = Probe(probe_ids, config.probe_text, closes_turn=bool(probe_ids) and probe_ids[0] in lm.eos_ids)
    if config.token_rank:
        size = lm.model.config.get_text_config(decoder=True).hidden_size
        head = ValidityHead(size, config.token_rank, vocabulary, probe=bool(probe.ids))
    else:
        yes_id, no_id = verbalizer_ids(lm.tokenizer, config.probe_text, _words(config))
        head = ValidityHead.from_verbalizer(lm.model, yes_id, no_id)
    if head.tokens is not None:
        head.tokens.dropout.p = config.token_dropout
    return ValidityModel(
        lm.model,
        probe,
        head,
        end_ids=lm.eos_ids,
        lora=LoraOptions(config.lora_rank, config.lora_alpha, config.lora_dropout, config.lora_target_modules),
        state_store_gib=config.state_store_gib,
    )


def pad_id(lm: LanguageModel) -> int:
    """Return a token id for padding, which no model output depends on."""
    return lm.tokenizer.pad_token_id or 0


def describe(
    config: ValidityTrainingConfig, lm: LanguageModel, counts: dict[str, int], label: dict[str, Any]
) -> ValidityConfig:
    """Return the metadata of the adapter folder; call this function before wrapping the target."""
    target = describe_target(lm.model)
    if config.target.startswith("zoo:"):
        target["name"] = config.target
    settings = ("lora_rank", "lora_alpha", "token_rank", "token_dropout", "learning_rate", "seed")
    provenance: dict[str, Any] = {"data": config.data, **counts, "template_options": config.template_options}
    provenance |= {name: getattr(config, name) for name in settings}
    if not config.probe_text:
        del provenance["lora_rank"], provenance["lora_alpha"]
    provenance["parse_engine"] = parse_infer.__version__
    label = {"kind": "hard", **label}
    return ValidityConfig(
        probe_ids=(),  # `export_adapter` knows the probe
        probe_text=config.probe_text,
        target=target,
        verbalizer=None if config.token_rank else _words(config),
        cut_policy=CutPolicy.from_dict(config.cut_policy).to_dict(),
        label=label,
        provenance=provenance,
    )


def _words(config: ValidityTrainingConfig) -> tuple[str, str]:
    return config.verbalizer_yes, config.verbalizer_no
