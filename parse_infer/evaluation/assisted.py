"""Assisted generation of transformers (`model.generate(assistant_model=…)`), with the same two models."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from parse_infer.errors import ParseError
from parse_infer.models.loading import LanguageModel
from parse_infer.models.token_map import TokenMap, token_map
from parse_infer.request.output import Generation, Span, Statistics, Timings
from parse_infer.settings.generation import GenerationSettings
from parse_infer.text.prompts import Prompt

Schedule = Literal["constant", "heuristic"]
_SIZES: dict[str, tuple[str, type]] = {
    "tokens": (r"[1-9]\d*", int),
    "confidence": (r"0(\.\d+)?|1(\.0+)?", float),
    "schedule": ("|".join(get_args(Schedule)), str),
    "ensemble": (r"0\.\d*[1-9]\d*", float),
}


@dataclass(frozen=True)
class AssistantSettings:
    """Settings of the assistant; None: transformers' own default (20 tokens, confidence 0.4, constant)."""

    tokens: int | None = None
    """Largest number of tokens before the target verifies."""
    confidence: float | None = None
    """The assistant stops after a token of lower probability; 0: never. With scikit-learn installed, transformers
    tunes this value within each answer, from this start."""
    schedule: Schedule | None = None
    """"heuristic" changes `tokens` within an answer: two more if all were accepted, else one less."""
    ensemble: float | None = None
    """`assistant_ensemble_weight`: the draft is compared with the likeliest token of a mixture, of which the target's
    distribution is this share and the assistant's the rest. Not lossless."""

    @classmethod
    def parse(cls, name: str) -> AssistantSettings:
        """Parse "assisted:tokens=8:confidence=0.3:schedule=heuristic:ensemble=0.5"; each part is optional.

        Raises ValueError for an unknown key, a value out of range, or an installed transformers without ensembles.
        """
        values: dict[str, Any] = {}
        for part in name.split(":")[1:]:
            key, _, value = part.partition("=")
            pattern, convert = _SIZES.get(key, ("(?!)", str))
            if not re.fullmatch(pattern, value):
                raise ParseError(
                    f"{part!r} in mode {name!r} is none of: tokens=NUMBER, confidence=0 to 1, "
                    f"schedule={' or '.join(get_args(Schedule))}, ensemble=a number between 0 and 1"
                )
            values[key] = convert(value)
        if "ensemble" in values and not hasattr(GenerationConfig(), "assistant_ensemble_weight"):
            raise ParseError(
                f"mode {name!r} needs assistant_ensemble_weight, which transformers {transformers.__version__} lacks: "
                "install a newer one"
            )
        return cls(**values)

    @contextmanager
    def on(self, assistant: PreTrainedModel) -> Iterator[None]:
        """Give the assistant a generation config with these settings inside the block.

        transformers reads them there, and a heuristic schedule also writes them there.
        """
        before = assistant.generation_config
        names = ("num_assistant_tokens", "assistant_confidence_threshold", "num_assistant_tokens_schedule")
        changes = dict(zip(names, (self.tokens, self.confidence, self.schedule), strict=True))
        assistant.generation_config = config = copy.deepcopy(before)
        config.update(**{name: value for name, value in changes.items() if value is not None})
        try:
            yield
        finally:
            assistant.generation_config = before


class TransformersGeneration:
    """Answers by transformers' own loop, assisted by `draft` if given.

    A draft model with a reduced vocabulary assists in the target's vocabulary (`in_target_vocabulary`). A draft model
    with another tokenizer assists through text, as transformers implements it.
    """

    def __init__(
        self, target: LanguageModel, draft: LanguageModel | None = None, assistant: AssistantSettings | None = None
    ) -> None:
        self._target = target
        self._draft = draft
        self._assistant = assistant or AssistantSettings()
        self._options: dict[str, Any] = {}
        self._options["eos_token_id"] = sorted(target.eos_ids) or None
        pad = target.tokenizer.pad_token_id
        self._options["pad_token_id"] = target.end_token if pad is None else pad
        self._draft_model: PreTrainedModel | None = None
        if draft is not None:
            tokens = token_map(draft.tokenizer, target.tokenizer)
            self._draft_model = draft.model
            if tokens is None and self._assistant.ensemble is not None:
                raise ParseError(
                    "assisted:ensemble mixes two distributions over one vocabulary, and the draft model has another"
                )
            if tokens is None:
                self._options |= {"tokenizer": target.tokenizer, "assistant_tokenizer": draft.tokenizer}
            elif not tokens.is_identity:
                self._draft_model = in_target_vocabulary(draft, target, tokens)
            self._options["assistant_model"] = self._draft_model
            if self._assistant.ensemble is not None:  # transformers reads it from the target's settings
                self._options["assistant_ensemble_weight"] = self._assistant.ensemble

    @torch.inference_mode()
    def generate(self, prompt: Prompt, settings: GenerationSettings) -> Generation:
        """Answer one prompt. Of the settings, only `max_new_tokens` and the target's sampling apply.

        Statistics: every draft forward proposes one token; every target forward adds one own token to the accepted
        draft tokens.
        """
        target = self._target
        prompt_ids = target.render(prompt)
        window = min(model.window for model in (target, self._draft) if model is not None)
        budget = max(1, min(settings.max_new_tokens, window - len(prompt_ids)))
        tokens = torch.tensor([prompt_ids], device=target.model.device)
        stats = Statistics()
        draft_model = self._draft_model
        model: Any = target.model  # `generate` comes from a mixin that the base class does not declare
        own = settings.resume_sampling
        sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if not own.greedy:
            sampling = {"do_sample": True, "temperature": own.temperature, "top_p": own.top_p, "top_k": own.top_k}
        drafting = self._assistant.on(draft_model) if draft_model is not None else nullcontext()
        with _counted(model) as target_calls, _counted(draft_model) as draft_calls, drafting:
            output = model.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=budget,
                **sampling,
                **self._options,
            )
        ids = output[0, len(prompt_ids) :].tolist()
        stats.target_forwards, stats.draft_forwards = target_calls[0], draft_calls[0]
        stats.draft_tokens = stats.draft_forwards
        stats.accepted_tokens = min(stats.draft_tokens, max(0, len(ids) - stats.target_forwards))
        ended = bool(ids) and ids[-1] in target.eos_ids
        text = str(target.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        spans = [Span(text, "target", len(ids))]
        return Generation(text, ids, spans, "eos" if ended else "length", stats, Timings())


@contextmanager
def _counted(model: nn.Module | None) -> Iterator[list[int]]:
    """Count the forwards of `model` inside the block."""
    calls = [0]

    def count(module: nn.Module, arguments: object) -> None:
        calls[0] += 1

    handle = model.register_forward_pre_hook(count) if model is not None else None
    try:
        yield calls
    finally:
        if handle is not None:
            handle.remove()


def in_target_vocabulary(draft: LanguageModel, target: LanguageModel, tokens: TokenMap) -> PreTrainedModel:
    """Copy a draft model with a reduced vocabulary: shared layers, and the target's vocabulary.

    Otherwise transformers would assist through text, without special tokens: the draft model would see neither chat
    template nor end token.

    A target token that maps to several draft tokens gets the mean of their embeddings. A target token without a draft
    token gets the logit minus infinity.

    Args:
        tokens: map from the draft model's tokenizer to the target's.
    """
    model = draft.model
    weights = [*model.parameters(), *model.buffers()]
    other = copy.deepcopy(model, {id(tensor): tensor for tensor in weights})
    size = target.model.config.get_text_config(decoder=True).vocab_size
    pieces = [tokens.from_target(token) for token in range(size)]
    other.set_input_embeddings(_embedding(model.get_input_embeddings(), pieces))
    other.set_output_embeddings(_Output(model.get_output_embeddings(), tokens, size, model.device))
    other.config.get_text_config(decoder=True).vocab_size = size
    return other


def _embedding(own: nn.Module, pieces: list[tuple[int, ...]]) -> nn.Embedding:
    """Input embedding [V, H] over the target's vocabulary; zeros for padding."""
    weight: Tensor = own.weight  # type: ignore[assignment]
    device = weight.device
    flat = torch.tensor([piece for token in pieces for piece in token], device=device)
    ends = torch.tensor([len(token) for token in pieces], device=device).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    with torch.no_grad():
        read = own(torch.arange(len(weight), device=device))  # some embedding modules scale their output
        return nn.Embedding.from_pretrained(nn.functional.embedding_bag(flat, read, starts, mode="mean"))


class _Output(nn.Module):
    """Output layer with logits [..., V] over the target's vocabulary."""

    def __init__(self, own: nn.Module, tokens: TokenMap, size: int, device: torch.device) -> None:
        super().__init__()
        self.own, self.size = own, size
        self.of_draft, self.of_target = (
            torch.tensor(ids, device=device) for ids in (tokens.draft_ids, tokens.target_ids)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.own(hidden)
        spread = logits.new_full((*logits.shape[:-1], self.size), -torch.inf)
        spread[..., self.of_target] = logits[..., self.of_draft]
        return spread
