"""Load models, tokenizers and decoders by name, from any supported format.

`parse_infer.models.names` lists the forms of a name. Loading dequantises a GGUF file and merges a LoRA into its base.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import is_accelerate_available, logging

from parse_infer.errors import ModelError
from parse_infer.files import first_sentence, lies_below, replacing_folder
from parse_infer.models.architecture import embedding_weight
from parse_infer.models.attention import enable_split_attention
from parse_infer.models.cpu.int8_linear import round_to_int8
from parse_infer.models.cpu.prepacked_linear import pack_linears
from parse_infer.models.decoder import Decoder
from parse_infer.models.devices import multiplies_in_16_bits
from parse_infer.models.gguf_file import dequantised
from parse_infer.models.leftovers import check_leftovers, check_quantisation
from parse_infer.models.lora import Lora, is_adapter, is_lora, not_a_model, read_lora
from parse_infer.models.names import cache_folder, is_gguf, resolve
from parse_infer.text.chat_template import check_options
from parse_infer.text.tokenizer_spec import TokenizerSpec, check_vocabulary


@dataclass
class LanguageModel(TokenizerSpec):
    """A loaded model with its tokenizer, its decoder (which owns the KV cache) and its limits."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the chat template, for example `{"enable_thinking": False}`."""
    torch_compile: bool = False
    """On a GPU, compile the short forwards (`parse_infer.models.cuda_graphs`)."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, PreTrainedModel):
            raise ModelError(
                f"{self.name!r} is a {type(self.model).__name__}, not a model of transformers: of a peft model pass "
                "model.merge_and_unload()"
            )
        if not isinstance(self.tokenizer, PreTrainedTokenizerBase):
            raise ModelError(f"the tokenizer of {self.name!r} is a {type(self.tokenizer).__name__}: load it too")
        if self.model.training:
            raise ModelError(
                f"{self.name!r} is in training mode, where dropout changes its answers: call model.eval()"
            )
        check_vocabulary(self)
        self.eos_ids: set[int] = end_tokens(self.model.generation_config, self.tokenizer)
        self.window: int = context_window(self.model.config)
        self.decoder = Decoder(self.model, self.eos_ids, self.torch_compile)

    @property
    def generation(self) -> GenerationConfig | None:
        return self.model.generation_config

    @property
    def n_embeddings(self) -> int:
        return len(embedding_weight(self.model))


@dataclass
class RemoteModelSpec(TokenizerSpec):
    """A model that a server runs, without its weights.

    Attributes:
        size: number of embedded tokens.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    eos_ids: set[int]
    window: int
    size: int
    template_options: Mapping[str, Any] = field(default_factory=dict)
    generation: GenerationConfig | None = None

    def __post_init__(self) -> None:
        check_vocabulary(self)

    @property
    def n_embeddings(self) -> int:
        return self.size


def load_language_model(
    name: str | Path,
    *,
    role: Literal["target", "draft"],
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    template_options: Mapping[str, Any] | None = None,
    trainable: bool = False,
    torch_compile: bool = False,
    revision: str | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    quantization_config: object = None,
) -> LanguageModel:
    """Load weights and tokenizer to `device` (None: the GPU if available, else the CPU).

    The dtype "auto" is the dtype of the saved weights, or float32 on a CPU that is slow in 16 bits. "int8" is for
    draft models on a CPU: linear layers in 8 bits, the rest in float32. A target gets the split attention that
    verification passes need. A large model on a CPU gets faster linear layers without gradient, unless it is
    `trainable`. `torch_compile` is for decoding on a GPU (`LanguageModel`). Raises ValueError or OSError with one
    sentence for missing, incomplete or unsupported files; no model runs with weights that were not loaded. A target
    whose chat template does not read one of the `template_options` is refused; a draft model ignores the option.
    `revision` (of a model on the Hub), `device_map` (instead of `device`) and `quantization_config` are
    transformers' own.
    """
    if device is not None and device_map is not None:
        raise ModelError(f"device is {str(device)!r} and device_map {device_map!r}: give one of them")
    place, eight_bits = _device(device), dtype == "int8"
    if eight_bits and role == "target":
        raise ModelError("a target in int8 would be another model: int8 is for draft models")
    if isinstance(quantization_config, str):
        raise ModelError(f"quantization_config is {quantization_config!r}; give a configuration of transformers")
    if eight_bits and quantization_config is not None:
        raise ModelError("dtype is 'int8' and quantization_config was given too: give one of them")
    if torch_compile and place.type != "cuda":
        raise ModelError(f"torch_compile is for decoding on a GPU, not on {place}: leave it out")
    numbers = torch.float32 if eight_bits else _dtype(dtype)
    if numbers == "auto" and not multiplies_in_16_bits(place):
        numbers = torch.float32
    source = _open(name, revision)
    _check_folder(source.base)
    if quantization_config is not None and source.loras:
        raise ModelError(f"{source.name!r} is a LoRA, which cannot be merged into weights of a quantization_config.")
    _config(source, trust_remote_code)  # before the tokenizer, which would be blamed for a wrong one
    tokenizer = _tokenizer(source, trust_remote_code)
    if role == "target":
        check_options(tokenizer, template_options or {})
    chosen = {"device_map": device_map, "quantization_config": quantization_config}
    chosen = {key: value for key, value in chosen.items() if value is not None}
    model = _weights(source, numbers, trust_remote_code, place, **chosen).eval()
    if model.device != place and not chosen:
        model.to(place)  # type: ignore[arg-type]
    if role == "target":
        enable_split_attention(model)
    if eight_bits:
        round_to_int8(model)
    elif not trainable and not chosen:
        pack_linears(model)
    return LanguageModel(str(name), model, tokenizer, template_options or {}, torch_compile)


def load_weights(
    name: str | Path, dtype: str | torch.dtype = "auto", trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a model as transformers' `from_pretrained` returns it. Raises as `load_language_model` does."""
    return _weights(_open(name), _dtype(dtype), trust_remote_code)


def load_tokenizer(name: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a tokenizer; a folder without weights suffices. Raises as `load_language_model` does."""
    return _tokenizer(_open(name), trust_remote_code)


def load_served_model(
    name: str | Path,
    *,
    role: Literal["target", "draft"] = "target",
    trust_remote_code: bool = False,
    template_options: Mapping[str, Any] | None = None,
) -> RemoteModelSpec:
    """Load everything except the weights. Raises as `load_language_model` does."""
    source = _open(name)
    _check_folder(source.base)
    config, tokenizer = load_config(name, trust_remote_code), _tokenizer(source, trust_remote_code)
    if role == "target":
        check_options(tokenizer, template_options or {})
    try:
        generation = GenerationConfig.from_pretrained(source.base)
    except OSError:  # the file is optional
        generation = GenerationConfig.from_model_config(config)
    size = config.get_text_config(decoder=True).vocab_size
    return RemoteModelSpec(
        str(name),
        tokenizer,
        end_tokens(generation, tokenizer),
        context_window(config),
        size,
        template_options or {},
        generation,
    )


def load_config(name: str | Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """Load a model's configuration. Raises as `load_language_model` does."""
    return _config(_open(name), trust_remote_code)


def _config(source: _Source, trust_remote_code: bool) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(
            source.base, trust_remote_code=trust_remote_code, revision=source.revision or "main"
        )
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        raise OSError(f"The configuration of {source.name!r} cannot be loaded: {first_sentence(error)}") from error


def weights_folder(name: str | Path) -> Path | str:
    """Return the folder or Hub name of a model's complete weights, for other programs such as vLLM.

    The function dequantises a GGUF file and merges a LoRA once, and caches the result beside the GGUF copies. The name
    of a merged copy depends on the LoRA's content and on path, size and time of the base's files. Raises as
    `load_language_model` does.
    """
    source = _open(name)
    _check_folder(source.base)
    if not source.loras:
        return source.base
    digest = hashlib.sha256(str(source.base).encode())
    for lora in source.loras:
        for file in sorted(path for path in lora.folder.iterdir() if path.is_file()):
            digest.update(file.name.encode() + file.read_bytes())
    for file in sorted(source.base.glob("*.safetensors")) if isinstance(source.base, Path) else ():
        digest.update(f"{file.stat().st_size} {file.stat().st_mtime_ns}".encode())
    folder = cache_folder("merged") / digest.hexdigest()[:16]
    if not folder.is_dir():
        model, tokenizer = _weights(source, "auto", False), _tokenizer(source, False)
        with replacing_folder(folder) as beside:
            model.save_pretrained(beside)
            tokenizer.save_pretrained(beside)
    return folder


def find_model(name: str | Path) -> tuple[Path | str, list[Lora]]:
    """Resolve a name to the base's folder, GGUF file or Hub name, and its LoRAs, the outermost first.

    Reads a few small files and downloads nothing. Raises ValueError or OSError if the name is no language model.
    """
    place, loras = resolve(name), list[Lora]()
    while isinstance(place, Path) and is_lora(place):
        if any(lora.folder.samefile(place) for lora in loras):
            raise ModelError(f"The LoRA {place} names itself as its base: its adapter_config.json must name a model.")
        loras.append(read_lora(place))
        place = resolve(loras[-1].base)
    if isinstance(place, Path) and is_adapter(place):
        raise not_a_model(place)
    return place, loras


def end_tokens(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return all end tokens: the tokenizer's and those of the generation config (chat models have two)."""
    ids: set[int] = set()
    configured = generation.eos_token_id if generation is not None else None
    for value in (configured, tokenizer.eos_token_id):
        ids.update([] if value is None else [value] if isinstance(value, int) else value)
    return ids


def context_window(config: PretrainedConfig) -> int:
    """Return the context window, `sys.maxsize` if the config names none.

    With LongRoPE (Phi-3 and later) the result is the original window. A longer context changes the rotation of all
    keys, which invalidates cached keys.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        original = getattr(text, "original_max_position_embeddings", None)
        return int(original or rope.get("original_max_position_embeddings") or text.max_position_embeddings)
    window = getattr(text, "max_position_embeddings", None)
    return sys.maxsize if window is None else int(window)


def same_tokenizer(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> bool:
    """Whether both tokenizers have the same vocabulary and segmentation, so that token ids are interchangeable.

    The function compares the segmentation of one sample text. Tokenizers with the same vocabulary decode token ids to
    the same text even if they segment other texts differently.
    """
    sample = "Natalia sold 48/2 = 24 clips in May, for $3.50 each.\n\n  Überall, 数学: {x²} #### 1,072\t<b>"
    # Compare the vocabularies last, because building a large dictionary is slow.
    return len(a) == len(b) and (
        a.encode(sample, add_special_tokens=False) == b.encode(sample, add_special_tokens=False)
        and a.get_vocab() == b.get_vocab()
    )


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # torch raises AssertionError if built without the device
        raise ModelError(
            f"The device {str(device)!r} is not available here: use 'cpu', or 'cuda' with a GPU."
        ) from error
    if place.type == "meta":
        raise ModelError("The device 'meta' holds no weights: use 'cpu', or 'cuda' with a GPU.")
    return place


def _dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if dtype == "auto":
        return dtype
    named = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), None)
    if not (isinstance(named, torch.dtype) and named.is_floating_point and named.itemsize >= 2):
        raise ModelError(f"dtype is {dtype!r}; it must be 'auto', 'float32', 'bfloat16' or 'float16'.")
    return named


@dataclass(frozen=True)
class _Source:
    """Base folder or Hub name for transformers, its revision there, and the LoRAs to merge, the outermost first."""

    name: str
    base: Path | str
    loras: list[Lora]
    revision: str | None = None

    @property
    def shown(self) -> str:
        """The name for messages, with the place of the weights if it differs."""
        if str(self.base) == self.name:
            return repr(self.name)
        if isinstance(self.base, Path):
            return f"{self.name!r} (in {self.base})"
        return f"{self.name!r} ({self.base}{'' if self.loras else '; see python -m tools.public_pair'})"


def _open(name: str | Path, revision: str | None = None) -> _Source:
    """Resolve a model name, and dequantise a GGUF file to a folder."""
    base, loras = find_model(name)
    if revision is not None and (loras or isinstance(base, Path)):
        raise ModelError(
            f"revision is {revision!r}, but {str(name)!r} is on this machine: a revision is one of a model on the "
            "Hugging Face Hub."
        )
    if isinstance(base, str) and is_gguf(base):
        base = _fetch(base, revision)
    if isinstance(base, Path) and base.is_file():
        base = dequantised(base)
    return _Source(str(name), base, loras, revision)


def _fetch(name: str, revision: str | None) -> Path:
    """Download one file, "owner/repository/file.gguf", through the Hub's cache."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    owner, repository, file = name.split("/", 2)
    try:
        return Path(hf_hub_download(f"{owner}/{repository}", file, revision=revision))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise FileNotFoundError(
            f"{name!r} is neither a local file nor available on the Hugging Face Hub ({first_sentence(error)})"
        ) from error


def _check_folder(folder: Path | str) -> None:
    if isinstance(folder, str):  # on the Hub
        return
    config = folder / "config.json"
    if not config.is_file():
        for file in sorted(folder.glob("*.gguf")):
            raise FileNotFoundError(f"{str(folder)!r} holds GGUF files: name one of them, for example {str(file)!r}.")
        if below := lies_below(folder, "config.json", "adapter_config.json"):
            raise FileNotFoundError(f"{str(folder)!r} is not the folder of the model{below}.")
        raise FileNotFoundError(
            f"{str(folder)!r} is not a model folder: config.json is missing (interrupted download or save?)."
        )
    for file in (config, folder / "generation_config.json"):
        try:
            content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        except ValueError as error:
            raise ModelError(
                f"{str(file)!r} is not valid JSON ({error}): save or download the model again."
            ) from error
        if not isinstance(content, dict):
            raise ModelError(f"{str(file)!r} holds no JSON object: save or download the model again.")


def _tokenizer(source: _Source, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer and chat template of the outermost LoRA that has one, else the base's."""
    template, place = None, source.base
    for lora in source.loras:
        template = template or lora.chat_template
        if lora.has_tokenizer:
            place = lora.folder
            break
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            place, trust_remote_code=trust_remote_code, revision=source.revision or "main"
        )
        tokenizer("")  # drops the file's truncation and padding now, as a later call may not while others tokenize
    except Exception as error:  # each tokenizer backend has exceptions of its own
        raise OSError(f"The tokenizer of {source.shown} cannot be loaded: {first_sentence(error)}") from error
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def _weights(
    source: _Source,
    dtype: str | torch.dtype,
    trust_remote_code: bool,
    device: torch.device | None = None,
    **chosen: object,
) -> PreTrainedModel:
    """Load the weights directly to `device` if possible, else to the CPU, where LoRAs are merged; `chosen` are further
    arguments of transformers' `from_pretrained`."""
    _check_folder(source.base)
    if not source.loras:
        model = _base_weights(source, dtype, trust_remote_code, device, **chosen)
    else:
        # Round last: load the base in its stored dtype, or in float32 if requested.
        stored = dtype if dtype == torch.float32 else "auto"
        model = _base_weights(source, stored, trust_remote_code, None, **chosen)
        for lora in reversed(source.loras):
            lora.merge_into(model)
        if isinstance(dtype, torch.dtype):
            _round(model, dtype)
    if isinstance(source.base, Path) and str(source.base) != source.name:
        # Model cards and records name the model as the user did, not by a local folder.
        model.config._name_or_path = source.name
    return model


def _base_weights(
    source: _Source,
    dtype: str | torch.dtype,
    trust_remote_code: bool,
    device: torch.device | None = None,
    **chosen: object,
) -> PreTrainedModel:
    check_quantisation(_config(source, trust_remote_code), source.shown)
    # Load straight to a GPU, without a copy in host memory. transformers needs accelerate for this.
    direct = device is not None and device.type != "cpu" and is_accelerate_available()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # hides the page-long report on missing tensors; see the error below
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.base,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            revision=source.revision or "main",
            output_loading_info=True,
            **{"device_map": {"": device} if direct else None, **chosen},
        )
    except (SafetensorError, UnpicklingError, EOFError) as error:
        # torch advises to load a damaged file as a program.
        reason = first_sentence(error) if isinstance(error, SafetensorError) else f"{type(error).__name__}."
        raise ModelError(
            f"The weights of {source.shown} are damaged or incomplete ({reason}) "
            f"Delete the files and download or save the model again."
        ) from error
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        reason = first_sentence(error)
        if "ignore_mismatched_sizes" in reason:  # its report is hidden, see above
            reason = "the shapes of its tensors are not those of config.json."
        raise OSError(f"The model {source.shown} cannot be loaded: {reason}") from error
    finally:
        logging.set_verbosity(verbosity)
    model, report = loaded
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ModelError(f"{source.name!r} is a LoRA on the Hugging Face Hub: download it and name its folder.")
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"The weights of {source.shown} are incomplete: {len(missing)} tensors are missing, the first is "
            f"{missing[0]!r}; download or save the model again."
        )
    check_leftovers(model, report["unexpected_keys"], source.shown)
    return model


def _round(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Round the parameters only; `model.to(dtype)` would also round the frequencies of rotary embeddings."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
