"""Recipe `stream`: train a correction of a judge on log-probabilities by hidden states of the target.

`accelerate launch recipes/train.yaml`
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
from accelerate.state import AcceleratorState
from transformers import PreTrainedModel, set_seed

from data_tools.recipe_parser import read_recipe
from parse_infer import tracking
from parse_infer.calibration.held_out import prompt_hash
from parse_infer.errors import ParseError
from parse_infer.judge.adapter import ValidityConfig
from parse_infer.judge.adapter_files import read_adapter
from parse_infer.judge.logprob_head import NO_DOUBT, LogprobHead, LogprobHeadConfig
from parse_infer.judge.stream.head import StreamHead, StreamHeadConfig
from parse_infer.judge.token_logprobs import TokenTexts
from parse_infer.models.architecture import text_config
from parse_infer.models.loading import load_language_model
from parse_infer.models.names import resolve
from parse_train import checkpoints, training_run
from parse_train.judge.logprob.config import LogprobTrainingConfig
from parse_train.judge.logprob.data import LogprobCollator, LogprobExample, load_datasets
from parse_train.judge.logprob.model import LogprobModel
from parse_train.judge.logprob.train import check_data, describe, first_head, usual_drafts
from parse_train.judge.logprob.train import main as train_first
from parse_train.judge.request_risk import calibrate_requests
from parse_train.judge.stream.config import StreamTrainingConfig
from parse_train.judge.stream.data import StreamCollator
from parse_train.judge.stream.lora import LoraOptions
from parse_train.judge.stream.model import StreamModel
from parse_train.judge.trainer import ValidityTrainer
from parse_train.judge.training import begin, finish, served_drafts
from parse_train.recipe import load_recipe

_AT_ONCE = 64  # drafts


def main(config: StreamTrainingConfig) -> None:
    """Run the recipe; every process of a distributed run must call this function."""
    first_rung(config)
    set_seed(config.seed)
    build, reads = check_data(config)
    trunk, learnt = first_head(config)
    train, evaluation, counts = load_datasets(config, trunk.config.k, learnt)
    served_drafts(config, evaluation)  # reject a wrong temperature before the training
    target = load_language_model(
        config.target or build.target["name"],
        role="target",
        device=config.device,
        dtype=config.target_dtype,
        template_options=config.template_options,
        trainable=True,
    )
    build.check_target(target.model, config.data)
    facts = describe(config, build, target, reads, usual_drafts(config, train), counts)
    settings = ("lora_rank", "lora_alpha", "hidden_layers", "stream_dropout")
    facts = replace(
        facts,
        stream={"start_from": config.start_from},
        provenance=facts.provenance | {name: getattr(config, name) for name in settings},
    )
    texts = TokenTexts(target.tokenizer, target.eos_ids, trunk.config.buckets)
    floor, read = choose_floor(trunk, train.examples, texts, config.sure_share)
    if config.process_index == 0:
        print(f"{read:.0%} of the drafts have a token that may be corrected, of more doubt than {floor:.2f}")
    facts.provenance["corrected_drafts"] = round(read, 4)
    model = build_model(config, target.model, trunk, texts, floor)
    models = build.target["name"], build.draft.get("name")
    start = begin(config, models, train, counts, [*trunk.state_dict().values(), round(floor, 4)])
    collator = StreamCollator(target.render, target.tokenizer.pad_token_id or 0)
    trainer = ValidityTrainer(model, config, train, evaluation, data_collator=collator)
    checkpoints.train(trainer, start)
    learnt |= {prompt_hash(example.prompt) for example in train.examples}
    model.round_adapter(getattr(torch, config.adapter_dtype))
    finish(config, trainer, evaluation, facts, target.tokenizer, learnt)
    trainer.end()
    del target, model, trainer  # free memory for the calibration; collect the Trainer's reference cycles
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    calibrate_requests(config, build)
    training_run.log_artifact(config, models, "model", f"{config.kind}-adapter", str(config.adapter_dir))
    tracking.finish()


def first_rung(config: StreamTrainingConfig) -> None:
    """Train the judge on log-probabilities if `start_from` is its recipe; then take its adapter and its sizes.

    Raises:
        ValueError, FileNotFoundError: no such recipe or adapter, or one of another kind.
    """
    assert config.start_from is not None
    if config.start_from.endswith((".yaml", ".yml")):
        same = (
            "data",
            "more_data",
            "eval_data",
            "eval_share",
            "max_length",
            "min_wrong_drafts",
            "seed",
            "report_to",
            "project",
            "artifacts",
            "use_cpu",
        )
        given = {key: getattr(config, key) for key in same} | {"output_dir": f"{config.output_dir}/logprob"}
        given |= {key: value for key, value in asdict(config.head).items() if value != getattr(type(config), key)}
        given["report_to"] = config.report_to or "none"
        if config.resume_from_checkpoint == "restart":
            given["resume_from_checkpoint"] = "restart"
        options = [
            part for key, value in given.items() if value not in (None, []) for part in (f"--{key}", *_words(value))
        ]
        kind = read_recipe(config.start_from).get("recipe", LogprobTrainingConfig.kind)
        if kind != LogprobTrainingConfig.kind:
            raise ParseError(f"start_from {config.start_from} is a recipe of kind {kind}, not logprob")
        _, first = load_recipe(config.start_from, options)
        assert isinstance(first, LogprobTrainingConfig)
        load_datasets(config, 1)  # too few drafts, before anything is trained
        train_first(first, last=False)
        AcceleratorState._reset_state()  # accelerate keeps the first Trainer's number type for all later ones
        config.start_from = str(first.adapter_dir)
    else:
        read_adapter(resolve(config.start_from))  # a wrong name is a mistake of its own
    facts = ValidityConfig.from_dict(read_adapter(resolve(config.start_from)).validity_config)
    if facts.logprobs is not None:
        for key, value in asdict(LogprobHeadConfig(**facts.logprobs["head"])).items():  # at first without sharpness: 1
            setattr(config, key, value)


def _words(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else [str(value)]


@torch.no_grad()
def choose_floor(
    trunk: LogprobHead, drafts: Sequence[LogprobExample], texts: TokenTexts, share: float
) -> tuple[float, float]:
    """Return the doubt above which tokens are corrected (`StreamTrainingConfig.sure_share`), and the share of the
    drafts that have such a token. Held-out drafts have no part in it: they tell how well the judge does."""
    reader, collate, most = LogprobModel(trunk, texts).eval(), LogprobCollator(), []
    for start in range(0, len(drafts), _AT_ONCE):
        part = collate(drafts[start : start + _AT_ONCE])
        features = reader.features(part["own"], part["top"], part["ids"], part["first"])
        doubt, _ = trunk(features, part["ids"], part["first"], texts)
        most.append(doubt.masked_fill(part["ids"] == part["first"], NO_DOUBT).amax(-1))  # as in padding
    doubt, wrong = torch.cat(most), torch.tensor([not all(draft.labels) for draft in drafts])
    floor = float(doubt[wrong].quantile(share)) if share and wrong.any() else NO_DOUBT
    return floor, float((doubt > floor).float().mean())


def build_model(
    config: StreamTrainingConfig,
    target: PreTrainedModel,
    trunk: LogprobHead,
    texts: TokenTexts,
    floor: float = NO_DOUBT,
) -> StreamModel:
    """Add a LoRA and a correction, both initially zero, to the target and the trunk."""
    sizes, n = text_config(target), config.hidden_layers
    layers = tuple(sorted({round(i * sizes.num_hidden_layers / n) for i in range(1, n + 1)}))
    head = StreamHeadConfig(sizes.hidden_size, config.stream_size, floor, layers, config.lora_rank > 0)
    return StreamModel(
        target,
        StreamHead(trunk, head),
        texts,
        LoraOptions(config.lora_rank, config.lora_alpha, config.lora_dropout, config.lora_target_modules),
        noise=config.noise,
        certain_share=config.certain_share,
        dropout=config.stream_dropout,
    )
