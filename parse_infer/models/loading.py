"""From names to loaded parts: a model with its tokenizer and decoder, and the folder behind a name.

A name is a Hugging Face id, a local folder, or one of the embedded models: "zoo:target", "zoo:draft", "zoo:adapter".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from parse_infer.models.attention import enable_split_attention
from parse_infer.models.decoder import Decoder
from parse_infer.models.packed_linear import pack_linears
from parse_infer.models.prompts import Prompt, render_prompt
from parse_infer.suggest import suggestion

ZOO = Path(__file__).parents[1] / "zoo"
_ZOO_NAMES = ("target", "draft", "adapter")


@dataclass
class LanguageModel:
    """One model with all that is needed to let it write: tokenizer, decoder (which owns the cache), limits."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Switches of the chat template, for example `{"enable_thinking": False}`."""

    def __post_init__(self) -> None:
        check_vocabulary(self)
        self.eos_ids: set[int] = end_tokens(self.model, self.tokenizer)
        self.window: int = context_window(self.model)
        self.decoder = Decoder(self.model, self.eos_ids)

    @property
    def n_embeddings(self) -> int:
        """Number of tokens the model embeds, which may be more than its tokenizer knows (padding)."""
        return cast("torch.Tensor", self.model.get_input_embeddings().weight).shape[0]

    @property
    def end_token(self) -> int | None:
        """The token that stands for "the answer ends here" where this library writes one itself."""
        preferred = self.tokenizer.eos_token_id
        return preferred if preferred in self.eos_ids else min(self.eos_ids, default=None)

    def render(self, prompt: Prompt) -> list[int]:
        """Token ids of the prompt in this model's own chat template.

        Raises ValueError if it is empty or leaves no room for an answer in the context window.
        """
        ids = render_prompt(self.tokenizer, prompt, self.template_options)
        if len(ids) >= self.window:
            raise ValueError(
                f"The prompt has {len(ids)} tokens for {self.name!r}, whose context window is {self.window}: "
                f"shorten it or use a model with a longer window."
            )
        return ids


def load_language_model(
    name: str | Path,
    *,
    role: Literal["target", "draft"],
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    template_options: Mapping[str, Any] | None = None,
    trainable: bool = False,
) -> LanguageModel:
    """Load weights and tokenizer, put them on `device` (None: the GPU if there is one, else the CPU).

    A target gets the split attention that verification passes need. A large model on a CPU gets linear layers that
    are faster and have no gradient, unless it is `trainable`. Raises ValueError or OSError
    with one sentence for anything that is missing, incomplete or unsupported: a model is never run with weights it did
    not load.
    """
    place, numbers = _device(device), _dtype(dtype)
    path = resolve(name)
    if isinstance(path, Path):
        _check_folder(path)
    tokenizer = _load_tokenizer(name, path, trust_remote_code)
    model = _load_weights(name, path, numbers, trust_remote_code).eval()
    model.to(place)  # type: ignore[arg-type]
    if role == "target":
        enable_split_attention(model)
    if not trainable:
        pack_linears(model)
    return LanguageModel(str(name), model, tokenizer, template_options or {})


def resolve(name: str | Path) -> Path | str:
    """The local folder behind a name, or the Hugging Face id itself where it is none.

    Raises ValueError for an unknown zoo name, FileNotFoundError for a folder that does not exist.
    """
    text = str(name)
    if text.startswith("zoo:"):
        part = text.removeprefix("zoo:")
        if part not in _ZOO_NAMES:
            names = [f"zoo:{name}" for name in _ZOO_NAMES]
            raise ValueError(f"{text!r} is not an embedded model; {suggestion(text, names)}")
        folder = ZOO / part
        if not folder.is_dir():
            raise FileNotFoundError(f"{text!r} is not part of this installation (no folder {folder}); reinstall it.")
        return folder
    folder = Path(text).expanduser()
    if text and folder.is_dir():
        return folder
    if isinstance(name, Path) or text.startswith(("/", "./", "../", "~")) or text.count("/") > 1 or not text:
        raise FileNotFoundError(f"There is no folder {text!r}: give an existing folder or a Hugging Face id.")
    return text


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every token that ends an answer: the tokenizer's and those of the generation config (chat models have two)."""
    ids: set[int] = set()
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    for value in (configured, tokenizer.eos_token_id):
        ids.update([] if value is None else [value] if isinstance(value, int) else value)
    return ids


def context_window(model: PreTrainedModel) -> int:
    """Positions the model was made for, `sys.maxsize` where its config names none."""
    window = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return sys.maxsize if window is None else int(window)


def check_vocabulary(lm: LanguageModel) -> None:
    """ValueError if the tokenizer can produce a token that the model has no embedding for."""
    highest = max(lm.tokenizer.get_vocab().values(), default=0)
    if highest >= lm.n_embeddings:
        raise ValueError(
            f"The tokenizer of {lm.name!r} goes up to token {highest}, but the model embeds only "
            f"{lm.n_embeddings} tokens: they do not belong together."
        )


def same_tokenizer(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> bool:
    """True if token ids of one can be used as token ids of the other: same vocabulary, same segmentation.

    The segmentation is compared on a sample text; two tokenizers with the same vocabulary that split it alike differ
    at most in texts neither of them decodes differently.
    """
    sample = "Natalia sold 48/2 = 24 clips in May, for $3.50 each.\n\n  Überall, 数学: {x²} #### 1,072\t<b>"
    # The vocabularies last: a dictionary of a large one takes its time.
    return len(a) == len(b) and (
        a.encode(sample, add_special_tokens=False) == b.encode(sample, add_special_tokens=False)
        and a.get_vocab() == b.get_vocab()
    )


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        raise ValueError(
            f"The device {str(device)!r} is not available here: use 'cpu', or 'cuda' with a GPU."
        ) from error


def _dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if dtype == "auto" or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype is {dtype!r}; it must be 'auto', 'float32', 'bfloat16' or 'float16'.")
    return found


def _check_folder(folder: Path) -> None:
    config = folder / "config.json"
    if not config.is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} is not a model folder: config.json is missing (interrupted download or save?)."
        )
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(config)!r} is not valid JSON ({error}): save or download the model again.") from error


def _load_tokenizer(name: str | Path, path: Path | str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # each tokenizer backend has exceptions of its own
        raise OSError(f"The tokenizer of {str(name)!r} cannot be loaded: {_sentence(error)}") from error


def _load_weights(
    name: str | Path, path: Path | str, dtype: str | torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its report on missing tensors is a page; the sentence below says it
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
        )
    except SafetensorError as error:
        raise ValueError(
            f"The weights of {str(name)!r} are damaged or incomplete ({_sentence(error)}) "
            f"Delete them and download or save the model again."
        ) from error
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise OSError(f"The model {str(name)!r} cannot be loaded: {_sentence(error)}") from error
    finally:
        logging.set_verbosity(verbosity)
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"The weights of {str(name)!r} are incomplete: {len(missing)} tensors are missing, the first is "
            f"{missing[0]!r}; download or save the model again."
        )
    return model


def _sentence(error: Exception) -> str:
    """The first sentence of a library's error, which may be a page long."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    return first if first.endswith((".", "?", "!")) else first + "."
