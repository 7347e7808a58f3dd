"""Recipe `logprob`: train a head on log-probabilities, choose the threshold, export. It loads no model.

`accelerate launch recipes/train-logprob.yaml`
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from transformers import set_seed

from data_tools.labels.logprobs import read_drafts, read_info
from parse_infer import tracking
from parse_infer.calibration.held_out import prompt_hash
from parse_infer.errors import ParseError
from parse_infer.judge.adapter import ValidityConfig, read_head
from parse_infer.judge.adapter_files import read_adapter
from parse_infer.judge.logprob_head import LogprobHead
from parse_infer.judge.token_logprobs import TokenTexts
from parse_infer.judge.usual_drafts import UsualDrafts
from parse_infer.models.loading import load_served_model
from parse_infer.models.names import resolve
from parse_infer.text.cuts import CutPolicy
from parse_infer.text.tokenizer_spec import TokenizerSpec
from parse_train import checkpoints, training_run
from parse_train.judge.build_info import BuildInfo, read_build_info
from parse_train.judge.data import ValidityDataset
from parse_train.judge.logprob.config import LogprobTrainingConfig
from parse_train.judge.logprob.data import LogprobCollator, load_datasets
from parse_train.judge.logprob.model import LogprobModel
from parse_train.judge.request_risk import calibrate_requests
from parse_train.judge.trainer import ValidityTrainer
from parse_train.judge.training import begin, finish, served_drafts, take_settings

_KNOWN_TEXT = 64  # tokens of the text by which a server is recognised, the longest of the first drafts
_CANDIDATES = 100


def main(config: LogprobTrainingConfig, last: bool = True) -> None:
    """Run the recipe; every process of a distributed run must call this function.

    Args:
        last: end the process group, which another training in these processes would need.
    """
    set_seed(config.seed)
    build, reads = check_data(config)
    language = load_served_model(build.target["name"], template_options=config.template_options)
    head, learnt = first_head(config)
    train, evaluation, counts = load_datasets(config, config.k, learnt)
    served_drafts(config, evaluation)  # reject a wrong temperature before the training
    texts = TokenTexts(language.tokenizer, language.eos_ids, config.buckets)
    model = LogprobModel(head, texts, config.noise, config.certain_share)
    facts = describe(config, build, language, reads, usual_drafts(config, train), counts)
    models = build.target["name"], build.draft.get("name")
    start = begin(config, models, train, counts)
    trainer = ValidityTrainer(model, config, train, evaluation, data_collator=LogprobCollator())
    checkpoints.train(trainer, start)
    learnt |= {prompt_hash(example.prompt) for example in train.examples}
    finish(config, trainer, evaluation, facts, language.tokenizer, learnt)
    if last:
        trainer.end()
    calibrate_requests(config, build)
    training_run.log_artifact(config, models, "model", f"{config.kind}-adapter", str(config.adapter_dir))
    tracking.finish()


def check_data(config: LogprobTrainingConfig) -> tuple[BuildInfo, dict[str, Any]]:
    """Return what is known of the build and of its log-probabilities, and let the build's settings replace open ones.

    Raises:
        ValueError, FileNotFoundError: no build, too few first choices, or another target.
    """
    build, reads = read_build_info(config.data), read_info(Path(config.data))
    if not build.target:
        raise ParseError(f"{config.data} has no build.json that names the target: build it with `parse-data build`")
    for data in filter(None, (config.data, *config.more_data, config.eval_data)):
        if config.k > (stored := read_info(Path(data))["k"]):
            raise ParseError(f"k is {config.k}, but {data} stores {stored} first choices per token: lower k")
        if not read_build_info(data).has_target_of(build):
            name = read_build_info(data).target.get("name")
            raise ParseError(f"{data} has labels of another target, {name}: leave it out of more_data and eval_data")
    take_settings(config, build)
    return build, reads


def first_head(config: LogprobTrainingConfig) -> tuple[LogprobHead, set[str]]:
    """Return the head to train, and the problems that it has learnt from.

    Raises:
        ValueError, FileNotFoundError: `start_from` names no adapter on log-probabilities of these sizes.
    """
    if config.start_from is None:
        return LogprobHead(config.head), set()
    files = read_adapter(resolve(config.start_from))
    facts = ValidityConfig.from_dict(files.validity_config)
    if facts.logprobs is None or facts.stream is not None:
        first = (facts.stream or {}).get("start_from")
        raise ParseError(
            f"start_from {config.start_from} is no judge on log-probabilities alone: name {first or 'such an adapter'}"
        )
    for key in ("k", "width", "text_size", "buckets"):
        if (size := facts.logprobs["head"][key]) != getattr(config, key):
            raise ParseError(f"start_from {config.start_from} has {key} {size}, not {getattr(config, key)}: set {key}")
    head = LogprobHead(config.head)
    head.load_state_dict(read_head(config.start_from, facts, files.head).state_dict())
    return head, set(files.train_problems)


def usual_drafts(config: LogprobTrainingConfig, train: ValidityDataset) -> UsualDrafts:
    """Measure the training drafts at the temperature to serve, or the lowest."""
    known = [example.temperature for example in train.examples if example.temperature is not None]
    temperature = min(known, default=None) if config.risk_temperature is None else config.risk_temperature
    return UsualDrafts.of(example.logprobs for example in train.examples if example.temperature == temperature)


def describe(
    config: LogprobTrainingConfig,
    build: BuildInfo,
    language: TokenizerSpec,
    reads: dict[str, Any],
    usual: UsualDrafts,
    counts: dict[str, int],
) -> ValidityConfig:
    """Return the metadata of the adapter folder."""
    settings = ("start_from", "noise", "certain_share", "learning_rate", "seed")
    data = ", ".join((config.data, *config.more_data))
    provenance: dict[str, Any] = {"data": data, **counts, "template_options": config.template_options}
    provenance |= {name: getattr(config, name) for name in settings}
    known = max(islice(read_drafts(config.data), _CANDIDATES), key=lambda draft: len(draft.logprobs.ids))
    own = known.logprobs.own[:_KNOWN_TEXT].tolist()
    context = language.render(known.row.prompt)
    reference = {"ids": [*context, *known.logprobs.ids[: len(own)].tolist()], "logprobs": [round(x, 4) for x in own]}
    return ValidityConfig(
        target=build.target,
        logprobs={"reads": reads, "reference": reference, "usual": usual.to_dict()},
        cut_policy=CutPolicy.from_dict(config.cut_policy).to_dict(),
        label={"kind": "hard", **build.label},
        provenance=provenance,
    )
