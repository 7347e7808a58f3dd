"""Compare exported adapters and baselines on the same held-out drafts.

`python -m tools.compare_judges recipes/train-probe.yaml --adapters FOLDER [FOLDER …] [--key value …]`

Recipe and overrides determine the held-out drafts, as in the training of the adapters. Each adapter scores draft by
draft, as in the engine. `python -m tools.render_docs` renders the resulting JSON
file as the table `judges`.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from transformers import set_seed

from parse_infer.files import write_json
from parse_infer.judge.adapter import ValidityAdapter
from parse_infer.judge.carried import Carried
from parse_infer.judge.judge import Judge
from parse_infer.judge.probe.head import surprise
from parse_infer.judge.verifier import Verifier
from parse_infer.judge.zero_shot import ZeroShotJudge
from parse_infer.models.decoder import Decoder
from parse_infer.models.environment import describe_machine, describe_run
from parse_infer.models.fingerprint import describe_target
from parse_infer.models.loading import LanguageModel
from parse_infer.models.timing import Step, measure
from parse_infer.text.cuts import Segmenter
from parse_train.judge.data import ValidityDataset
from parse_train.judge.metrics import ScoredDrafts, acceptance_curve
from parse_train.judge.probe.config import ValidityTrainingConfig
from parse_train.judge.probe.data import ValidityExample
from parse_train.judge.probe.train import prepare
from parse_train.judge.training import served_drafts
from tools.baselines import LOG_PROBABILITY, LOWEST_LOG_PROBABILITY, ZERO_SHOT, baseline_scores
from tools.comparison_table import FIGURES, compare_judges, oracle_acceptance
from tools.kl_judge import KL_JUDGE, LARGEST_KL, MEAN_KL, find_kl_judge
from tools.measured_command import run_measurement

COMMAND = "python -m tools.compare_judges"
_PREFILL, _OUTPUT_LAYER = "prefill", "prefill and output layer"
_ANY = Carried(usual=True)  # drafts at higher temperatures are outside the range of those at the lowest
# Judges without probe, whose pass computes the target's probabilities of the draft's tokens. (The KL judge's second
# distribution is a by-product of drafting.)
_BY_TOKEN = (LOG_PROBABILITY, LOWEST_LOG_PROBABILITY, KL_JUDGE, LARGEST_KL, MEAN_KL)


@dataclass
class ComparisonArguments:
    """Options of the comparison."""

    adapters: list[str] = field(
        default_factory=list, metadata={"help": "Folders (or Hub ids) of exported adapters for the recipe's target."}
    )
    acceptance: float | None = field(
        default=None,
        metadata={
            "help": "Acceptance rate (share of draft tokens) at which to compare false accepts; default: that of the "
            "first adapter at its own threshold."
        },
    )
    all_drafts: bool = field(
        default=False,
        metadata={"help": "Compare on all held-out drafts instead of those sampled at risk_temperature."},
    )
    baselines: bool = field(
        default=True,
        metadata={"help": "Also evaluate the zero-shot judge, the target's token probabilities and the KL judge."},
    )
    draft: str | None = field(
        default=None,
        metadata={"help": "Draft model that wrote the data, for the KL judge; default: as recorded by the build."},
    )
    cost_drafts: int = field(default=10, metadata={"help": "Held-out drafts for the timing of passes; 0: none."})
    cost_rounds: int = field(default=5, metadata={"help": "Rounds of timing; judges alternate."})
    out: str | None = field(default=None, metadata={"help": "Result file; default: OUTPUT_DIR/judges.json."})


def compare(config: ValidityTrainingConfig, how: ComparisonArguments) -> dict[str, Any]:
    """Return `{"environment", "acceptance", "oracle_acceptance", "judges": {name: figures}}`.

    Figures are those of `compare_judges`. `cost` and `cost_range` are the median and range of a pass's time relative
    to a plain prefill of the same prompts and drafts (None without timing).

    Raises:
        ValueError, OSError: no adapter, an adapter of another target or data split, or no `acceptance` while the
            first adapter accepts nothing.
    """
    if not how.adapters:
        raise ValueError("name at least one exported adapter: --adapters runs/validity/adapter")
    if how.acceptance is not None and not 0 < how.acceptance < 1:
        raise ValueError(f"acceptance is {how.acceptance}; it must lie between 0 and 1")
    config.report_to = []
    set_seed(config.seed)
    lm, build, _, held_out, counts = prepare(config)
    target = config.target if config.target.startswith("zoo:") else describe_target(lm.model)["name"]
    if how.all_drafts:
        config.risk_temperature = None
    served = served_drafts(config, held_out)
    evaluation = ValidityDataset(
        [example for example, chosen in zip(held_out.examples, served, strict=True) if chosen]
    )
    adapters: dict[str, ValidityAdapter] = {}
    for folder in how.adapters:
        adapter = ValidityAdapter.from_pretrained(folder, lm.model)
        _check_split(folder, adapter.config.provenance, config, counts)
        name = form(adapter)
        adapters[name if name not in adapters else f"{name} ({Path(folder).absolute().parent.name})"] = adapter
    scores = {name: score(adapter, lm, evaluation, name) for name, adapter in adapters.items()}
    first, drafts = next((adapters[name], drafts) for name, drafts in scores.items())
    acceptance = how.acceptance or _kept(drafts, first.config.threshold)
    cost: dict[str, tuple[float, list[float]]] = {}
    if how.cost_drafts:
        rivals: dict[str, Judge] = {ZERO_SHOT: ZeroShotJudge(lm.model, lm.tokenizer)} if how.baselines else {}
        timed = evaluation.examples[:: max(1, len(evaluation) // how.cost_drafts)][: how.cost_drafts]
        cost = pass_costs(lm, {**adapters, **rivals}, timed, how.cost_rounds)
    if how.baselines:
        kl_judge, reason = find_kl_judge(config, build, lm, evaluation, how.draft)
        if reason:
            print(reason)
        scores |= baseline_scores(lm, evaluation, kl_judge)
    problems = [example.problem for example in evaluation.examples]
    judges = compare_judges(scores, problems, acceptance, config.seed)
    for name, figures in judges.items():
        figures["cost"], figures["cost_range"] = cost.get(name, (None, None))
    environment = {
        **describe_machine(config.device),
        "dtype": str(lm.model.dtype).removeprefix("torch."),
        "target": target,
        "data": Path(config.eval_data or config.data).name,
        "temperature": config.risk_temperature,
        "drafts": len(evaluation),
        "problems": len(set(problems)),
    }
    oracle = oracle_acceptance(drafts)
    return {"environment": environment, "acceptance": acceptance, "oracle_acceptance": oracle, "judges": judges}


def form(adapter: ValidityAdapter) -> str:
    """Describe the inputs of a trained head, with the ranks."""
    if adapter.config.logprobs is not None:
        head = adapter.config.logprobs["head"]
        read = f"log-probabilities, k {head['k']}, " + ("texts of tokens" if head["text_size"] else "flags of tokens")
        stream = f"; second stream, LoRA rank {adapter.peft_config.get('r')}" if adapter.config.stream else ""
        return read + stream
    rank, size = str(adapter.config.token_rank), adapter.config.surprise_vocab_size
    if size:
        rank += f" over {size} tokens"
    if not adapter.config.probe_ids:
        return f"token doubt alone, rank {rank}"
    probe = f"LoRA rank {adapter.peft_config.get('r')}"
    if not adapter.config.token_rank:
        return f"probe alone, {probe}"
    return f"probe and token doubt, {probe}, token rank {rank}"


def score(adapter: ValidityAdapter, lm: LanguageModel, dataset: ValidityDataset, title: str) -> ScoredDrafts:
    """Score all drafts, with one verification pass per draft."""
    verifier, found = Verifier(lm.decoder, adapter, Segmenter(lm.tokenizer)), []
    for example in track(dataset.examples, title, transient=True):
        lm.decoder.seek(example.context_ids)
        found.append(verifier.verify(example.draft_ids, example.cuts, _ANY).validity)
    return ScoredDrafts.from_rows(found, [e.labels for e in dataset.examples], [e.cuts for e in dataset.examples])


def pass_costs(
    lm: LanguageModel,
    judges: Mapping[str, Judge],
    examples: Sequence[ValidityExample],
    rounds: int,
) -> dict[str, tuple[float, list[float]]]:
    """Time each judge's pass from an empty cache, relative to a plain prefill: {name: (median, range)} of rounds."""
    decoder = lm.decoder
    steps = [
        _step(_PREFILL, decoder, examples, lambda e: decoder.forward(e.draft_ids).hidden.sum().item()),
        _step(_OUTPUT_LAYER, decoder, examples, lambda e: _read_tokens(decoder, e)),
    ]
    for name, judge in judges.items():
        verifier = Verifier(decoder, judge, Segmenter(lm.tokenizer))
        steps.append(_step(name, decoder, examples, partial(_verify, verifier)))
    seconds = measure(steps, rounds, decoder.device)
    ratios = {name: [s / p for s, p in zip(seconds[name], seconds[_PREFILL], strict=True)] for name in seconds}
    found = {
        name: (round(statistics.median(r), 4), [round(min(r), 4), round(max(r), 4)]) for name, r in ratios.items()
    }
    by_token = found.pop(_OUTPUT_LAYER)
    del found[_PREFILL]
    return found | dict.fromkeys(_BY_TOKEN, by_token)


def _step(
    name: str, decoder: Decoder, examples: Sequence[ValidityExample], read: Callable[[ValidityExample], Any]
) -> Step:
    """Return a step that reads all drafts in sequence, each with its prompt and from an empty cache."""

    def run() -> None:
        for example in examples:
            decoder.seek([])
            decoder.seek(example.context_ids)
            read(example)

    return Step(name, lambda: None, run)


def _verify(verifier: Verifier, example: ValidityExample) -> None:
    verifier.verify(example.draft_ids, example.cuts)


def _read_tokens(decoder: Decoder, example: ValidityExample) -> float:
    before = decoder.forward(example.draft_ids).hidden[:-1]
    ids = torch.tensor(example.draft_ids, device=decoder.device)
    return surprise(before, ids, decoder.logits).features.sum().item()


def _kept(drafts: ScoredDrafts, threshold: float | None) -> float:
    kept = 0.0 if threshold is None else float(acceptance_curve(drafts, [threshold])[1][0])
    if not kept:
        raise ValueError(
            "the first adapter accepts nothing at its own threshold: set --acceptance, the acceptance rate at which "
            "to compare false accepts"
        )
    return round(kept, 4)


def _check_split(
    folder: str, provenance: dict[str, Any], config: ValidityTrainingConfig, counts: dict[str, int]
) -> None:
    """Raise ValueError for an adapter whose training problems differ from those of this recipe."""
    if config.eval_data is not None:
        return
    here = {"seed": config.seed, "train_problems": counts["train_problems"], "eval_problems": counts["eval_problems"]}
    for key, value in here.items():
        if provenance.get(key, value) != value:
            raise ValueError(
                f"{folder} was trained with {key} {provenance[key]}, but this recipe gives {value}, so its training "
                "data may contain these held-out drafts; use the adapter's recipe, or other eval_data"
            )


def text_table(result: dict[str, Any]) -> str:
    """Return a table of the judges for the terminal."""
    heads = {"auroc": "AUROC", "auprc": "AUPRC", "first_error_f1": "first-error F1", "false_accepts": "false accepts"}
    lines = [f"{'judge':<56}" + "".join(f"{head:>16}" for head in (*heads.values(), "cost"))]
    for name, figures in result["judges"].items():
        cells = ["-" if figures[key] is None else f"{figures[key]:.3f}" for key in (*FIGURES, "cost")]
        lines.append(f"{name:<56}" + "".join(f"{cell:>16}" for cell in cells))
    lines.append(
        f"false accepts: share of drafts, at an acceptance rate of {result['acceptance']:.1%} of the tokens (a "
        f"perfect judge accepts {result['oracle_acceptance']:.1%}); cost: a pass relative to a plain prefill"
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print the table, write the result, and return the exit code."""

    def run(config: ValidityTrainingConfig, how: ComparisonArguments, arguments: list[str]) -> None:
        result = compare(config, how)
        result["environment"] |= describe_run([*COMMAND.split(), *arguments])
        path = Path(how.out or f"{config.output_dir}/judges.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, result)
        print(text_table(result))
        print(f"written: {path}")

    example = "recipes/train-probe.yaml --adapters runs/validity/adapter"
    return run_measurement(argv, COMMAND, example, ComparisonArguments, run)


if __name__ == "__main__":
    sys.exit(main())
