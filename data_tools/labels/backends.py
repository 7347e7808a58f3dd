"""Models that write many rows at once, in this process or behind a server. The builder never asks which."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from parse_infer.models.batch_decoder import BatchDecoder, Contexts, Row
from parse_infer.models.fingerprint import describe_target
from parse_infer.models.loading import LanguageModel, load_language_model
from parse_infer.models.tokenizer_spec import TokenizerSpec

if TYPE_CHECKING:
    from data_tools.labels.build_config import BuildConfig

Role = Literal["target", "draft"]


class RowDecoder(Protocol):
    """What a `BatchDecoder` does, wherever the model runs."""

    @property
    def eos_ids(self) -> Collection[int]:
        """Tokens that end a row (they are part of it)."""

    def prefill(self, sequences: Sequence[Sequence[int]]) -> Contexts:
        """Contexts that rows may start from."""

    def extend(self, contexts: Contexts, parents: Sequence[int], suffixes: Sequence[Sequence[int]]) -> Contexts:
        """New contexts: `contexts[parents[i]] + suffixes[i]`."""

    def decode(self, contexts: Contexts, rows: Sequence[Row]) -> list[list[int]]:
        """New tokens of every row, end token included; a row without one has used up its `max_new_tokens`."""


class Writer(Protocol):
    """A model, and the way to let it write."""

    @property
    def model(self) -> TokenizerSpec: ...

    def decoder(self, end_ids: Collection[int]) -> RowDecoder:
        """A decoder whose rows end with one of `end_ids`."""

    def describe(self) -> dict[str, Any]:
        """What `describe_target` says; weights that nobody can look at are left out of the fingerprint."""


class LocalWriter:
    """A model of this process.

    Args:
        batch_size: rows decoded at a time.
    """

    def __init__(self, model: LanguageModel, batch_size: int) -> None:
        self.model, self.batch_size = model, batch_size

    def decoder(self, end_ids: Collection[int]) -> BatchDecoder:
        return BatchDecoder(self.model.model, end_ids, self.batch_size, self.model.decoder.fast)

    def describe(self) -> dict[str, Any]:
        return describe_target(self.model.model)


def load_writer(config: BuildConfig, role: Role, note: Callable[[str], None]) -> Writer:
    """The target or the draft model of a build, ready to write.

    Args:
        note: told what the user should know while it writes.

    Raises:
        ValueError, OSError: one sentence about a model that cannot be loaded, or a server that will not do.
    """
    if config.backend == "openai":
        from data_tools.labels.served.writer import ServedWriter  # its client is an extra

        return ServedWriter.connect(config, role, note)
    model = load_language_model(
        getattr(config, role),
        role=role,
        device=config.device,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
        template_options=config.template_options,
    )
    return LocalWriter(model, config.batch_size)
