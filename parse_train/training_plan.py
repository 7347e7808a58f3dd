"""Memory and time of a recipe, computed from the models' configurations: `python -m parse_train RECIPE --plan`.

No weights are loaded. All figures are those of one GPU and of a batch of the longest rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from data_tools.labels.build_config import BuildConfig
from data_tools.labels.rows import read_rows
from data_tools.recipe_parser import parse_recipe, read_recipe
from parse_infer.errors import ParseError
from parse_infer.files import first_sentence
from parse_infer.judge.logprob_head import LogprobHead
from parse_infer.judge.token_logprobs import TokenTexts
from parse_infer.models.loading import load_served_model
from parse_train.counting import Counted, count
from parse_train.heads import train_eagle, train_medusa
from parse_train.heads.training import HeadModel, HeadTrainingConfig
from parse_train.judge.build_info import read_build_info
from parse_train.judge.logprob.config import LogprobTrainingConfig
from parse_train.judge.logprob.model import LogprobModel
from parse_train.judge.stream.config import StreamTrainingConfig
from parse_train.judge.stream.model import StreamModel
from parse_train.judge.stream.train import build_model
from parse_train.outlines import BANDWIDTH, PROMPT_TOKENS, cache_per_token, depth_of, outline, size, writing_seconds
from parse_train.recipe import load_recipe
from parse_train.self_generated_data import SelfGeneratedConfig
from parse_train.train_draft_model import DraftModelTrainingConfig

SPEED = 400e12  # assumed operations per second: 40 % of what an H100 does in bfloat16
_DEPTHS = 2, 4  # layers that are counted; more layers continue the line


@dataclass(frozen=True)
class TrainingPlan:
    """Memory (bytes) and operations of a recipe on one GPU.

    Attributes:
        batch: what one step reads.
        weights: bytes of the frozen models.
        trained: bytes of the trained parameters; AdamW keeps twice as many.
        step: counts of one step; None for a build, which trains nothing.
        rows: training rows of an epoch; None if unknown.
        answering: peak bytes while the models write answers first; 0: they write none.
        writing: what the models write, and the seconds it takes.
    """

    batch: str
    weights: float
    trained: float = 0
    step: Counted | None = None
    rows_per_step: int = 1
    rows: int | None = None
    epochs: float = 1
    answering: float = 0
    writing: tuple[tuple[str, float], ...] = ()

    @property
    def memory(self) -> float:
        """Largest number of bytes at once; the GPU's runtime and fragmentation take more."""
        training = self.weights + 3 * self.trained + self.step.peak if self.step else 0
        return max(training, self.answering)

    def lines(self) -> list[str]:
        """The plan as text, largest memory last."""
        rows = [("models, frozen", self.weights)]
        if self.step is not None:
            rows += [
                ("trained parameters and AdamW", 3 * self.trained),
                ("saved for the backward pass", self.step.saved),
                ("cache and intermediate results", self.step.peak - self.step.saved),
            ]
        if self.answering:
            rows.append(("answers, written first", self.answering))
        rows.append(("memory of one GPU", self.memory))
        return [self.batch, *(f"  {name:<32}{_gb(size):>10}" for name, size in rows), *self._time()]

    def _time(self) -> list[str]:
        lines = [f"  {what} take {_duration(s)} at {BANDWIDTH / 1e9:,.0f} GB/s" for what, s in self.writing]
        if self.step is None:
            return lines
        each = self.step.flops / self.rows_per_step
        rows = 1000 if self.rows is None else self.rows
        length = _duration(each * rows * self.epochs / SPEED)
        known = f"{rows:,} rows" if self.rows is not None else "every 1,000 rows"
        return [
            *lines,
            f"  {self.step.flops / 1e12:.4g} TFLOP a step of {self.rows_per_step} rows; at {SPEED / 1e12:.0f} TFLOP/s "
            f"{known} take {length} in {self.epochs:g} epochs on one GPU",
        ]


def load_config_of(path: str | Path, overrides: Sequence[str]) -> object:
    """Read the configuration of a training recipe, or of a recipe of `parse-data build`, which has no key `recipe`."""
    if "recipe" in read_recipe(path):
        return load_recipe(path, overrides)[1]
    return parse_recipe(path, overrides, [BuildConfig], "parse-data build")[0]


def plan_training(config: object) -> TrainingPlan:
    """Compute the plan of a recipe.

    Raises:
        ValueError: a kind of recipe or model without a plan.
        OSError: a model's configuration or tokenizer cannot be loaded.
    """
    for kind, compute in _PLANS.items():
        if isinstance(config, kind):
            try:
                return compute(config)
            except RuntimeError as error:
                raise ParseError(
                    "the plan counts dense models only, and these layers choose their tokens by content, as a mixture "
                    f"of experts does ({first_sentence(error)})"
                ) from error
    raise ParseError(f"--plan does not know the recipe's configuration {type(config).__name__}: train a few steps")


def along_layers(n: int, measure: Callable[[int], Counted]) -> Counted:
    """Return `measure(n)` for a model of n layers, from two shallow models if n is larger."""
    few, more = _DEPTHS
    if n <= more:
        return measure(n)
    return measure(few).extrapolated(measure(more), (n - few) / (more - few))


def _stream(config: StreamTrainingConfig) -> TrainingPlan:
    target = config.target or read_build_info(config.data).target["name"]
    b, t, n = config.per_device_train_batch_size, config.max_length, PROMPT_TOKENS
    texts = TokenTexts(None, (0,), config.buckets)  # type: ignore[arg-type]  # reads no text

    def model_of(layers: int | None, recomputes: bool = False) -> StreamModel:
        lm = outline(target, config.target_dtype, layers)
        with torch.device("meta"):
            model = build_model(config, lm, LogprobHead(config.head), texts).train()
        if recomputes:
            model.activation_checkpointing_enable()
        return model

    def measure(layers: int, recomputes: bool = False) -> Counted:
        model = model_of(layers, recomputes)

        def step() -> Tensor:
            visible, each = torch.full((b, 1), n), torch.zeros(b, t)
            states = model.states(torch.zeros(b, n, dtype=torch.long), visible, torch.zeros(b, t, dtype=torch.long))
            return model.head.correct(each, torch.zeros(b, t, config.width), states, each == 0).sum()

        return count(model, step, config.wants_bf16)

    whole = model_of(None)
    learnt = [p for p in whole.parameters() if p.requires_grad]
    frozen = [p for p in whole.parameters() if not p.requires_grad]
    rows = sum(1 for _ in read_rows(config.data)) if Path(config.data).exists() else None
    depth = depth_of(target)
    counted = along_layers(depth, measure)
    if config.activation_checkpointing:  # one layer at a time is run again, and the cache of the prompt is kept
        again = along_layers(depth, partial(measure, recomputes=True))
        other = counted.peak - counted.saved + b * n * cache_per_token(target, config.target_dtype)
        counted = Counted(again.saved, again.saved + counted.saved / depth + other, again.flops)
    what = f"{b} drafts a step, {t} tokens each, behind prompts of {n}"
    return TrainingPlan(what, size(frozen), size(learnt), counted, b, rows, config.num_train_epochs)


def _logprob(config: LogprobTrainingConfig) -> TrainingPlan:
    b, k = config.per_device_train_batch_size, config.k
    tokens = TokenTexts(None, (0,), config.buckets)  # type: ignore[arg-type]  # reads no text of an end token
    model = LogprobModel(LogprobHead(config.head), tokens, 0.0, 0.0).train()

    def measure(t: int) -> Counted:
        def step() -> Tensor:
            ids, cuts = torch.zeros(b, t, dtype=torch.long), torch.full((b, 1), t)
            return model(torch.zeros(b, t), torch.zeros(b, t, k), ids, ids, cuts)["logits"].sum()

        return count(model, step, config.wants_bf16, content=True)

    few, more, t = 64, 128, config.max_length
    counted = measure(few).extrapolated(measure(more), (t - few) / (more - few))
    rows = sum(1 for _ in read_rows(config.data)) if Path(config.data).exists() else None
    what = f"{b} drafts a step, {t} tokens each; no model is loaded"
    return TrainingPlan(what, 0, size([*model.parameters()]), counted, b, rows, config.num_train_epochs)


def _head(config: HeadTrainingConfig) -> TrainingPlan:
    spec = load_served_model(config.model, template_options=config.template_options)
    lm: Any = SimpleNamespace(
        model=outline(config.model, config.model_dtype),
        tokenizer=spec.tokenizer,
        name=config.model,
        window=spec.window,
    )
    frozen = size([*lm.model.parameters()])
    with torch.device("meta"):
        if isinstance(config, train_eagle.EagleTrainingConfig):
            head = train_eagle.make_head(lm, config)
            model: HeadModel = train_eagle.EagleModel(lm, head, config.steps, config.step_decay, config.depth_share)
        else:
            assert isinstance(config, train_medusa.MedusaTrainingConfig)
            model = train_medusa.MedusaModel(lm, train_medusa.make_head(lm, config), config.steps, config.step_decay)
    b, t = config.per_device_train_batch_size, PROMPT_TOKENS + config.max_answer_tokens
    both = nn.ModuleList([model, lm.model])  # the model is no part of the head's module

    def step() -> Tensor:
        ids = torch.zeros(b, t, dtype=torch.long)
        return model(ids, ids)["loss"]  # type: ignore[no-any-return]

    learnt = [p for p in model.parameters() if p.requires_grad]
    trained = size(learnt)
    counted = count(both, step, config.wants_bf16)
    answering = frozen + config.batch_size * t * cache_per_token(config.model, config.model_dtype)
    rows, epochs, written = config.n_problems, config.num_train_epochs, _written(config)
    return TrainingPlan(_answers(b, t), frozen, trained, counted, b, rows, epochs, answering, written)


def _draft_model(config: DraftModelTrainingConfig) -> TrainingPlan:
    b, t = config.per_device_train_batch_size, PROMPT_TOKENS + config.max_answer_tokens

    def model_of(layers: int | None) -> nn.Module:
        modules = config.lora_target_modules
        lora = LoraConfig(
            task_type="CAUSAL_LM",
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            target_modules="all-linear" if modules == ["all-linear"] else modules,
        )
        with torch.device("meta"):
            model = get_peft_model(outline(config.draft, config.draft_dtype, layers), lora).train()
        if config.activation_checkpointing:  # as transformers' Trainer does
            model.activation_checkpointing_enable()
            model.enable_input_require_grads()
        return model

    def measure(layers: int) -> Counted:
        model = model_of(layers)

        def step() -> Tensor:
            ids = torch.zeros(b, t, dtype=torch.long)
            return model(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]

        return count(model, step, config.wants_bf16)

    whole = model_of(None)
    frozen = size([p for p in whole.parameters() if not p.requires_grad])
    learnt = size([p for p in whole.parameters() if p.requires_grad])
    target = size([*outline(config.model, config.model_dtype).parameters()])
    answering = frozen + target + config.batch_size * t * cache_per_token(config.model, config.model_dtype)
    counted = along_layers(depth_of(config.draft), measure)
    rows, epochs, written = config.n_problems, config.num_train_epochs, _written(config)
    return TrainingPlan(_answers(b, t), frozen, learnt, counted, b, rows, epochs, answering, written)


def _build(config: BuildConfig) -> TrainingPlan:
    """Weights of both models, and the target's keys and values of a full batch of rollouts or drafts."""
    models = ((config.target, config.dtype), (config.draft, config.dtype))
    weights = sum(size([*outline(*model).parameters()]) for model in models)
    t = PROMPT_TOKENS + config.max_draft_tokens + (config.max_rollout_tokens if config.prefix_labels else 0)
    cache = config.batch_size * t * max(cache_per_token(*model) for model in models)
    what = f"{config.batch_size} answers at a time, {t} tokens with prompts of {PROMPT_TOKENS}"

    def written(what: str, model: str, tokens: int) -> tuple[str, float]:
        seconds = writing_seconds(model, config.dtype, 1000, config.batch_size, tokens)
        return f"every 1,000 {what} of {tokens} tokens", seconds

    writing = [written("drafts", config.draft, config.max_draft_tokens)]
    if config.asks_target:
        writing.append(written("rollouts", config.target, config.max_rollout_tokens))
    return TrainingPlan(what, weights, answering=weights + cache, writing=tuple(writing))


def _written(config: SelfGeneratedConfig) -> tuple[tuple[str, float], ...]:
    """The answers on which a recipe trains."""
    n, tokens = config.n_problems + config.n_eval_problems, config.max_answer_tokens
    seconds = writing_seconds(config.model, config.model_dtype, n, config.batch_size, tokens)
    return ((f"{n:,} answers of {tokens} tokens", seconds),)


def _answers(b: int, t: int) -> str:
    return f"{b} answers a step, {t} tokens with prompts of {PROMPT_TOKENS}"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return "less than a second"
    if seconds < 60:
        return f"{seconds:.1f} seconds"
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"


_PLANS: dict[type, Callable[[Any], TrainingPlan]] = {
    StreamTrainingConfig: _stream,  # before its base class
    LogprobTrainingConfig: _logprob,
    HeadTrainingConfig: _head,
    DraftModelTrainingConfig: _draft_model,
    BuildConfig: _build,
}
