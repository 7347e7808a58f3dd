"""Backends that generate many rows per call, in this process or through a server, behind one interface."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import transformers

from parse_infer.errors import ModelError
from parse_infer.judge.token_logprobs import TokenLogprobs, read_logprobs
from parse_infer.models.architecture import output_layer
from parse_infer.models.attention import enable_split_attention
from parse_infer.models.batch_decoder import BatchDecoder, BatchRow, Contexts
from parse_infer.models.fingerprint import describe_target
from parse_infer.models.loading import LanguageModel, load_language_model
from parse_infer.text.tokenizer_spec import TokenizerSpec

if TYPE_CHECKING:
    from data_tools.labels.build_config import BuildConfig

Role = Literal["target", "draft"]


class RowDecoder(Protocol):
    """Interface of `LocalDecoder`, for a local or a served model."""

    @property
    def eos_ids(self) -> Collection[int]:
        """Tokens that end a row; a row includes its end token."""

    def prefill(self, sequences: Sequence[Sequence[int]]) -> Contexts:
        """Return contexts from which rows can start."""

    def extend(self, contexts: Contexts, parents: Sequence[int], suffixes: Sequence[Sequence[int]]) -> Contexts:
        """Return the new contexts `contexts[parents[i]] + suffixes[i]`."""

    async def write(self, contexts: Contexts, rows: Sequence[BatchRow]) -> list[list[int]]:
        """Return the new tokens of every row, end token included. A row without end token has `max_new_tokens`."""


class LocalDecoder(BatchDecoder):
    """A `BatchDecoder` as `RowDecoder`; its coroutine never suspends, as `run_sync` requires."""

    async def write(self, contexts: Contexts, rows: Sequence[BatchRow]) -> list[list[int]]:
        return self.decode(contexts, rows)


class Writer(Protocol):
    """A model and a factory of its decoders."""

    groups_at_once: int
    """Groups of problems to label concurrently: 1 for a local model, at least 2 for a served one."""
    drafts_at_once: int
    """Drafts to read before their log-probabilities are saved."""

    @property
    def model(self) -> TokenizerSpec: ...

    def decoder(self, end_ids: Collection[int]) -> RowDecoder:
        """Return a decoder whose rows end with one of `end_ids`."""

    def describe(self) -> dict[str, Any]:
        """Return the result of `describe_target`; the fingerprint of a served model omits the weights."""

    def read(self, drafts: Sequence[tuple[list[int], list[int]]], k: int) -> list[TokenLogprobs]:
        """Return the log-probabilities of each draft's tokens with the k first choices, for pairs of context and
        draft."""

    def describe_reads(self) -> dict[str, Any]:
        """Return what affects log-probabilities: engine, its version, dtype and quantisation."""

    async def close(self) -> None:
        """Release what the decoders hold in this event loop."""


class LocalWriter:
    """A model in this process, which decodes `batch_size` rows at a time."""

    groups_at_once = 1

    def __init__(self, model: LanguageModel, batch_size: int) -> None:
        self.model, self.batch_size = model, batch_size
        with suppress(ModelError):  # without it, every step copies the keys and values that query heads share
            enable_split_attention(model.model)
        # A CPU reads batches at half the speed. One by one, drafts share the cache of their prompt.
        self.read_batch = 1 if model.model.device.type == "cpu" else batch_size
        self.drafts_at_once = 16 * self.read_batch

    def decoder(self, end_ids: Collection[int]) -> LocalDecoder:
        return LocalDecoder(self.model.model, end_ids, self.batch_size, self.model.decoder.fast)

    def describe(self) -> dict[str, Any]:
        return describe_target(self.model.model)

    @torch.inference_mode()
    def read(self, drafts: Sequence[tuple[list[int], list[int]]], k: int) -> list[TokenLogprobs]:
        model, reads = self.model.model, {}
        output, device = output_layer(model), model.device
        if self.read_batch == 1:
            decoder = self.model.decoder
            for i in sorted(range(len(drafts)), key=lambda i: drafts[i][0]):
                context, draft = drafts[i]
                if decoder.ids[: len(context)] != context:
                    decoder.seek([])  # rounding must not depend on another prompt with the same beginning
                decoder.seek(context)
                before = decoder.forward(draft).hidden[:-1]
                reads[i] = read_logprobs(before, torch.tensor(draft, device=device), output, k)
            return [reads[i] for i in range(len(drafts))]
        order = sorted(range(len(drafts)), key=lambda i: sum(map(len, drafts[i])))  # little padding
        for start in range(0, len(order), self.read_batch):
            some = order[start : start + self.read_batch]
            longest = max(sum(map(len, drafts[i])) for i in some)
            ids = torch.zeros(len(some), longest, dtype=torch.long)  # padding on the right, which no token sees
            for row, i in zip(ids, some, strict=True):
                row[: sum(map(len, drafts[i]))] = torch.tensor([*drafts[i][0], *drafts[i][1]])
            backbone = getattr(model, model.base_model_prefix)
            states = backbone(input_ids=ids.to(device), use_cache=False).last_hidden_state
            for row, i in zip(states, some, strict=True):
                context, draft = drafts[i]
                before = row[len(context) - 1 : len(context) - 1 + len(draft)]
                reads[i] = read_logprobs(before, torch.tensor(draft, device=device), output, k)
        return [reads[i] for i in range(len(drafts))]

    def describe_reads(self) -> dict[str, Any]:
        model = self.model.model
        quantization = getattr(model.config, "quantization_config", None)
        method = None if quantization is None else str(getattr(quantization, "quant_method", "unknown"))
        dtype = str(model.dtype).removeprefix("torch.")
        return {"engine": "transformers", "version": transformers.__version__, "dtype": dtype, "quantization": method}

    async def close(self) -> None:
        pass


def load_writer(config: BuildConfig, role: Role) -> Writer:
    """Load the target or the draft model of a build.

    Raises:
        ValueError, OSError: the model cannot be loaded, or the server is unusable; the message is one sentence.
    """
    if config.backend == "openai":
        from data_tools.labels.served.writer import ServedWriter  # aiohttp is an optional dependency

        return ServedWriter(config, role)
    model = load_language_model(
        getattr(config, role),
        role=role,
        device=config.device,
        dtype=(role == "draft" and config.draft_dtype) or config.dtype,
        trust_remote_code=config.trust_remote_code,
        template_options=config.template_options,
    )
    return LocalWriter(model, config.batch_size)
