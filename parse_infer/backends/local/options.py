"""`LocalOptions`: the keyword options of `load_backend`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from parse_infer.backends.options import BackendOptions
from parse_infer.errors import SettingsError

if TYPE_CHECKING:
    from transformers.utils.quantization_config import QuantizationConfigMixin

AUTO = "auto"  # token drafter: the draft model, if all its tokens are tokens of the target


@dataclass(frozen=True)
class LocalOptions(BackendOptions):
    """How the models are loaded.

    Raises SettingsError for an unsupported `attn_implementation`.
    """

    gguf_file: str | None = None
    """As in transformers, the target's file in its folder or repository."""
    target_drafter: str | None = AUTO
    """Token drafter for the tokens that the target writes itself: "lookup", "draft", or the folder or id of a head
    (`parse_infer.token_drafters.registry`). Greedy tokens stay the same (in float32), sampled tokens keep their
    distribution. "auto" selects "draft" if all tokens of the draft model are tokens of the target. None: none."""
    device: str | torch.device | None = None
    dtype: str | torch.dtype = "auto"
    """"auto" is the dtype of the saved weights, or float32 on CPUs that are slow in 16 bits."""
    draft_dtype: str | torch.dtype | None = None
    """Of the draft model; None: `dtype`. "int8", on a CPU, takes half of bfloat16's memory."""
    torch_compile: bool = False
    """On a GPU, compile the decode steps of both models. They get faster, small models most; the first answers take
    up to a minute each (`parse_infer.models.cuda_graphs`)."""
    trust_remote_code: bool = False
    revision: str | None = None
    """Branch, tag or commit of the target on the Hugging Face Hub."""
    draft_revision: str | None = None
    device_map: str | Mapping[str, Any] | None = None
    """As in transformers, the devices of the target's layers, instead of `device` ("auto" divides it among all GPUs).
    The draft model goes to the first of them."""
    quantization_config: QuantizationConfigMixin | dict[str, Any] | None = None
    """As in transformers, such as `BitsAndBytesConfig`. For weights that are stored quantised, the configuration is in
    their folder."""
    draft_quantization_config: QuantizationConfigMixin | dict[str, Any] | None = None
    attn_implementation: str | None = None
    """"sdpa" only. The verification pass has an attention function of its own, which calls PyTorch's kernels, with
    flash attention where a GPU has it."""

    def __post_init__(self) -> None:
        if self.attn_implementation not in (None, "sdpa"):
            raise SettingsError(
                f"attn_implementation is {self.attn_implementation!r}, but the verification pass has an attention "
                "function of its own, which calls PyTorch's kernels, with flash attention where a GPU has it: omit "
                "it, or give 'sdpa'"
            )
