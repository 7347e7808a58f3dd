"""Start and end of a judge's training: settings of the build, tracking, evaluation, threshold and export."""

from __future__ import annotations

import html
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress

import numpy as np
from transformers import PreTrainedTokenizerBase

from parse_infer import tracking
from parse_infer.calibration.held_out import prompt_hash
from parse_infer.errors import ParseError
from parse_infer.judge.adapter import ValidityConfig
from parse_infer.judge.adapter_files import PROMISE
from parse_infer.models.names import resolve
from parse_infer.text.cuts import CutPolicy
from parse_train import checkpoints, training_run
from parse_train.judge.build_info import BuildInfo
from parse_train.judge.config import JudgeTrainingConfig
from parse_train.judge.data import ValidityDataset, problem_names
from parse_train.judge.export import export_adapter
from parse_train.judge.figures import acceptance_figure, png, reliability_diagram
from parse_train.judge.logprob.config import LogprobTrainingConfig
from parse_train.judge.metrics import ScoredDrafts, domain_metrics, headline_metrics
from parse_train.judge.pass_risk import RiskControl, choose_threshold, one_of_each
from parse_train.judge.platt_scaling import fit_probabilities
from parse_train.judge.trainer import ValidityTrainer
from parse_train.training_config import IGNORED


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
    config: LogprobTrainingConfig,
    models: Sequence[str | None],
    train: ValidityDataset,
    counts: dict[str, int],
    frozen: Iterable[object] = (),
) -> checkpoints.Start:
    """Print the counts, find the checkpoint to resume from, and start the tracking of the run.

    Args:
        models: names of target and draft model.
        frozen: what the training builds on and a checkpoint does not hold: weights and numbers.
    """
    if config.process_index == 0:
        print(", ".join(f"{name} {value}" for name, value in counts.items()))
    start = checkpoints.prepare(config, len(train), checkpoints.data_digest([*train.examples, *frozen]))
    training_run.start(config, models, resumed=start.checkpoint is not None)
    for what, data in (("drafts", config.data), ("held-out-drafts", config.eval_data)):
        if data:
            training_run.log_artifact(config, models, "dataset", what, data, counts, used=True)
    if config.start_from:
        training_run.log_artifact(config, models, "model", "logprob-adapter", resolve(config.start_from), used=True)
    return start


def served_drafts(config: JudgeTrainingConfig, evaluation: ValidityDataset) -> list[bool]:
    """Return, for each held-out draft, whether its temperature is `risk_temperature`, that of the drafts to serve.

    Raises:
        ValueError: no held-out draft has this temperature.
    """
    requested = config.risk_temperature
    available = {example.temperature for example in evaluation.examples}
    if requested is not None and requested not in available:
        raise ParseError(
            f"risk_temperature is {requested:g}, but the held-out drafts were sampled at "
            f"{', '.join(sorted(str(t) for t in available))}: choose one of these, or leave the key out"
        )
    return [requested is None or example.temperature == requested for example in evaluation.examples]


def finish(
    config: JudgeTrainingConfig,
    trainer: ValidityTrainer,
    evaluation: ValidityDataset,
    facts: ValidityConfig,
    tokenizer: PreTrainedTokenizerBase,
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
            tracking.log_page("eval/drafts", scored_page(drafts, evaluation, tokenizer))
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


def scored_page(
    scored: ScoredDrafts, evaluation: ValidityDataset, tokenizer: PreTrainedTokenizerBase, limit: int = 100
) -> str:
    """Return an HTML table of at most `limit` held-out drafts, spread over all.

    A segment is green, yellow or red by its validity, and underlined from the first error on.
    """
    rows = ["<tr><th>draft<th>right<th>lowest validity<th>text"]
    for i in np.linspace(0, len(scored.labels) - 1, min(limit, len(scored.labels))).astype(int):
        ids, real, begin, parts = evaluation.examples[i].draft_ids, scored.labels[i] != IGNORED, 0, []
        validities, labels = scored.scores[i][real], scored.labels[i][real] == 1
        for end, validity, right in zip(scored.cuts[i][real], validities, labels, strict=True):
            line = "" if right else ";border-bottom:2px solid"
            style = f"background:hsl({120 * validity:.0f} 80% 80%){line}"
            text = html.escape(str(tokenizer.decode(ids[begin:end])))
            parts.append(f'<span style="{style}" title="validity {validity:.3f}">{text}</span>')
            begin = end
        facts = f"<tr><td>{i}<td>{'yes' if labels.all() else 'no'}<td>{validities.min():.3f}"
        rows.append(f'{facts}<td style="white-space:pre-wrap">{"".join(parts)}')
    return f'<table style="font-family:sans-serif;text-align:left" cellpadding="6">{"".join(rows)}</table>'


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
