"""Backends that generate many rows per call, in this process or through a server, behind one interface."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from parse_infer.models.batch_decoder import BatchDecoder, Contexts, Row
from parse_infer.models.fingerprint import describe_target
from parse_infer.models.loading import LanguageModel, load_language_model
from parse_infer.models.tokenizer_spec import TokenizerSpec

if TYPE_CHECKING:
    from data_tools.labels.build_config import BuildConfig

Role = Literal["target", "draft"]


class RowDecoder(Protocol):
    """Interface of `BatchDecoder`, for a local or a served model."""

    @property
    def eos_ids(self) -> Collection[int]:
        """Tokens that end a row; a row includes its end token."""

    def prefill(self, sequences: Sequence[Sequence[int]]) -> Contexts:
        """Return contexts from which rows can start."""

    def extend(self, contexts: Contexts, parents: Sequence[int], suffixes: Sequence[Sequence[int]]) -> Contexts:
        """Return the new contexts `contexts[parents[i]] + suffixes[i]`."""

    def decode(self, contexts: Contexts, rows: Sequence[Row]) -> list[list[int]]:
        """Return the new tokens of every row, end token included. A row without end token has `max_new_tokens`."""


class Writer(Protocol):
    """A model and a factory of its decoders."""

    @property
    def model(self) -> TokenizerSpec: ...

    def decoder(self, end_ids: Collection[int]) -> RowDecoder:
        """Return a decoder whose rows end with one of `end_ids`."""

    def describe(self) -> dict[str, Any]:
        """Return the result of `describe_target`; the fingerprint of a served model omits the weights."""


class LocalWriter:
    """A model in this process, which decodes `batch_size` rows at a time."""

    def __init__(self, model: LanguageModel, batch_size: int) -> None:
        self.model, self.batch_size = model, batch_size

    def decoder(self, end_ids: Collection[int]) -> BatchDecoder:
        return BatchDecoder(self.model.model, end_ids, self.batch_size, self.model.decoder.fast)

    def describe(self) -> dict[str, Any]:
        return describe_target(self.model.model)


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
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
        template_options=config.template_options,
    )
    return LocalWriter(model, config.batch_size)
