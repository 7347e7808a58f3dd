"""Recipe `validity`: train adapter and head, choose the threshold, export.

`accelerate launch recipes/train.yaml`
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import compress, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import set_seed

import parse_infer
from data_tools.labels.rows import read_rows
from parse_infer import tracking
from parse_infer.calibration.held_out import prompt_hash
from parse_infer.errors import ParseError
from parse_infer.judge.adapter import ValidityConfig
from parse_infer.judge.adapter_files import PROMISE
from parse_infer.judge.probe.head import Probe, ValidityHead, verbalizer_ids
from parse_infer.models.fingerprint import describe_target
from parse_infer.models.loading import LanguageModel, load_language_model
from parse_infer.text.cuts import CutPolicy
from parse_train import checkpoints, training_run
from parse_train.training_config import IGNORED
from parse_train.validity.build_info import BuildInfo, read_build_info
from parse_train.validity.config import JudgeTrainingConfig, ValidityTrainingConfig
from parse_train.validity.data import Encoder, ValidityCollator, ValidityDataset, load_datasets, problem_names
from parse_train.validity.export import export_adapter
from parse_train.validity.figures import acceptance_figure, png, reliability_diagram
from parse_train.validity.metrics import ScoredDrafts, domain_metrics, headline_metrics
from parse_train.validity.model import ValidityModel
from parse_train.validity.pass_risk import RiskControl, choose_threshold, one_of_each
from parse_train.validity.platt_scaling import fit_probabilities
from parse_train.validity.request_risk import calibrate_requests
from parse_train.validity.trainer import ValidityTrainer


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


def take_settings(config: JudgeTrainingConfig, build: BuildInfo) -> None:
    """Let settings of the build replace settings that the recipe leaves open."""
    own = CutPolicy.from_dict(config.cut_policy or build.cut_policy)
    if build.cut_policy and own != CutPolicy.from_dict(build.cut_policy) and config.process_index == 0:
        print(
            "note: cut_policy is not that of the labels; risk_alpha bounds passes with the cuts of the labels only",
            file=sys.stderr,
        )
    config.cut_policy = config.cut_policy or build.cut_policy
    config.template_options = config.template_options or build.template_options


def begin(
    config: JudgeTrainingConfig, models: Sequence[str | None], train: ValidityDataset, counts: dict[str, int]
) -> checkpoints.Start:
    """Print the counts, find the checkpoint to resume from, and start the tracking of the run.

    Args:
        models: names of target and draft model.
    """
    if config.process_index == 0:
        print(", ".join(f"{name} {value}" for name, value in counts.items()))
    start = checkpoints.prepare(config, len(train), checkpoints.digest(train.examples))
    training_run.start(config, models, resumed=start.checkpoint is not None)
    for what, data in (("drafts", config.data), ("held-out-drafts", config.eval_data)):
        if data:
            training_run.log_artifact(config, models, "dataset", what, data, counts)
    return start


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
    embeddings: Any = lm.model.get_input_embeddings()
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
        lora_rank=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        lora_target_modules=config.lora_target_modules,
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
    label = {"kind": "hard", **label, "class_weighting": config.class_weighting}
    return ValidityConfig(
        probe_ids=(),  # `export_adapter` knows the probe
        probe_text=config.probe_text,
        target=target,
        verbalizer=None if config.token_rank else _words(config),
        cut_policy=CutPolicy.from_dict(config.cut_policy).to_dict(),
        label=label,
        provenance=provenance,
    )


def served_drafts(config: JudgeTrainingConfig, evaluation: ValidityDataset) -> list[bool]:
    """Return, for each held-out draft, whether its temperature is `risk_temperature`, that of the drafts to serve.

    Raises:
        ValueError: no held-out draft has this temperature.
    """
    wanted = config.risk_temperature
    found = {example.temperature for example in evaluation.examples}
    if wanted is not None and wanted not in found:
        raise ParseError(
            f"risk_temperature is {wanted:g}, but the held-out drafts were sampled at "
            f"{', '.join(sorted(str(t) for t in found))}: choose one of these, or leave the key out"
        )
    return [wanted is None or example.temperature == wanted for example in evaluation.examples]


def finish(
    config: JudgeTrainingConfig,
    trainer: ValidityTrainer,
    evaluation: ValidityDataset,
    facts: ValidityConfig,
    tokenizer: Any,
    learnt: Collection[str] = (),
) -> None:
    """Evaluate on held-out problems, choose the threshold, and export.

    Args:
        tokenizer: of the target, for the texts of the tracker's table.
        learnt: `prompt_hash` of every training prompt.
    """
    raw = trainer.score(evaluation)
    if config.process_index == 0:
        chosen = served_drafts(config, evaluation)
        served = raw.select(chosen)
        owners = problem_names([(e.problem, prompt_hash(e.prompt)) for e in compress(evaluation.examples, chosen)])
        fitted = fit_probabilities(served, owners)
        drafts = fitted.of_drafts(raw)
        # The threshold grid must not depend on the drafts, so choose the threshold on raw validities.
        independent = served.select(one_of_each(owners, config.seed))
        risk = choose_threshold(independent, config.risk_alpha, config.risk_delta)
        risk = replace(risk, threshold=fitted.of_threshold(risk.threshold))
        metrics = headline_metrics(drafts, risk.threshold, config.risk_alpha)
        if risk.of_whole_drafts:
            metrics.pop("best_first_error_f1", None)
        if fitted.changes:  # scale and shift were fitted on these drafts; ece_served is cross-validated
            del metrics["ece"], metrics["brier"]
        metrics |= {"ece_served_before": fitted.ece_before, "ece_served": fitted.ece}
        domains = [example.domain for example in compress(evaluation.examples, chosen)]
        metrics |= domain_metrics(fitted.of_drafts(served), domains)
        chosen_point = (risk.false_accept_rate, risk.acceptance_rate) if risk.accepts else None
        figures = {
            "reliability": reliability_diagram(fitted.left_out(served)),
            "reliability_before": reliability_diagram(served),
            "acceptance": acceptance_figure({"trained head": drafts}, config.risk_alpha, chosen_point),
        }
        state = trainer.state  # what was run, which max_steps and interruptions decide too
        run = {"epochs": round(state.epoch or 0.0, 4), "steps": state.global_step}
        facts = replace(facts, provenance={**facts.provenance, **run})
        folder = export_adapter(
            str(config.adapter_dir), trainer.model.exported(facts, learnt), metrics, risk, figures, fitted.to_dict()
        )
        pictures = {f"eval/{name}": png(figures[name]) for name in ("reliability", "acceptance")}
        tracking.log_images(pictures, trainer.state.global_step)
        if config.artifacts != "none":
            tracking.log_table("eval/drafts", *scored_table(drafts, evaluation, tokenizer))
        # The names of the evaluations during the training, whose last figures these replace.
        tracking.summarise({f"eval/{name}": value for name, value in metrics.items()})
        chosen_threshold = {"threshold": risk.threshold, "bound": risk.bound}
        tracking.summarise(chosen_threshold | {"scale": fitted.scale, "shift": fitted.shift, **run})
        print(report(metrics, config.risk_alpha, risk))
        for domain, n in sorted(Counter(filter(None, domains)).items()):
            if f"auroc_{domain}" in metrics:
                print(f"{domain}: AUROC {metrics[f'auroc_{domain}']:.3f} on {n} drafts")
        print(f"adapter exported to {folder}")
    trainer.accelerator.wait_for_everyone()
    trainer.end()


def scored_table(
    scored: ScoredDrafts, evaluation: ValidityDataset, tokenizer: Any, limit: int = 100
) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and rows of a table of held-out drafts: a row for each segment of at most `limit` drafts."""
    columns = ["draft", "text", "validity", "label"]
    rows: list[list[Any]] = []
    for i in np.linspace(0, len(scored.labels) - 1, min(limit, len(scored.labels))).astype(int):
        ids, begin = evaluation.examples[i].draft_ids, 0
        for end, validity, label in zip(scored.cuts[i], scored.scores[i], scored.labels[i], strict=True):
            if label == IGNORED:
                break
            rows.append([int(i), str(tokenizer.decode(ids[begin:end])), float(validity), bool(label)])
            begin = end
    return columns, rows


def report(metrics: Mapping[str, float], alpha: float, risk: RiskControl) -> str:
    """Return the main figures of the held-out drafts, and a sentence about the chosen threshold."""
    names = {
        "auroc": "AUROC",
        "auprc": "AUPRC",
        "auprc_error": "AUPRC (errors)",
        "best_first_error_f1": "first-error F1",
        "acceptance_at_risk": f"acceptance at {alpha:.0%} false accepts",
    }
    figures = ", ".join(f"{title} {metrics[key]:.3f}" for key, title in names.items() if key in metrics)
    if not risk.accepts:
        return f"trained head: {figures}\nWARNING: {risk.warning()}"
    return (
        f"trained head: {figures}\n"
        f"threshold {risk.threshold:.4f}: on {risk.n_drafts} held-out drafts, one per problem, it accepts "
        f"{risk.acceptance_rate:.1%} of the tokens, with false accepts in {risk.false_accept_rate:.1%} of the "
        f"drafts; at most {risk.bound:.1%} at confidence {1 - risk.delta:g} ({PROMISE})"
    )


def _words(config: ValidityTrainingConfig) -> tuple[str, str]:
    return config.verbalizer_yes, config.verbalizer_no
