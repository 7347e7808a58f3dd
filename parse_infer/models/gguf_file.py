"""GGUF files as model folders: dequantise a file once with transformers and cache the result as safetensors.

The copy holds float32. A 4-bit weight is a product and a sum of float16 numbers, which neither bfloat16 nor float16
holds exactly. A smaller copy would therefore differ from the model that transformers loads from the same file.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from packaging.version import Version
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from parse_infer.errors import ModelError
from parse_infer.files import first_sentence, read_json, replacing_folder, write_json
from parse_infer.models.architecture import embedding_weight
from parse_infer.models.gguf_config import completed
from parse_infer.models.names import cache_folder
from parse_infer.optional_dependencies import EXTRAS, install

_FORMAT = 2  # format version of the copies, part of their names
_NEEDED = ("gguf", "accelerate")  # packages that transformers needs to read a GGUF file
_EXTRA = EXTRAS["gguf"]
_TRANSFORMERS = "5.18"  # earlier versions read byte-level tokenizers of Llama files as SentencePiece


def dequantised(file: Path) -> Path:
    """Return the folder with a GGUF file's weights in float32, its configuration and its tokenizer.

    The first call creates the copy; later calls, also in other processes, reuse it. The copy's name depends on the
    file's content and on the transformers version. A moved file keeps its copy; a new version creates a new one.

    Raises:
        ValueError: the file is damaged or incomplete, or transformers cannot read it.
        OSError: a package is missing, or the copy cannot be written.
    """
    with file.open("rb") as content:
        if content.read(4) != b"GGUF":
            raise ModelError(f"{file} is no GGUF file, or is incomplete: download it again")
    cache, name = cache_folder("gguf"), re.sub(r"[^\w.-]", "_", file.stem)[:80]
    folder = cache / f"{name}-{_digest(file)}"
    if folder.is_dir():
        return folder
    if Version(Version(transformers.__version__).base_version) < Version(_TRANSFORMERS):
        raise ModelError(
            f"transformers {transformers.__version__} reads the tokenizers of some GGUF files wrongly; use "
            f"{_TRANSFORMERS} or later: {install(_EXTRA)}"
        )
    if any(find_spec(package) is None for package in _NEEDED):
        raise OSError(
            f"Reading {file} needs the packages {' and '.join(_NEEDED)}, and one of them is missing: "
            + install(_EXTRA)
        )
    n_weights = _check(file)
    try:
        with _alone_in(cache):
            if not folder.is_dir():  # another process may have created the folder meanwhile
                _check_space(cache, 4 * n_weights)
                model, tokenizer = _read(file)
                with replacing_folder(folder) as beside:
                    model.save_pretrained(beside)
                    tokenizer.save_pretrained(beside)
                    if (beside / "tokenizer.json").is_file():  # not every tokenizer has a fast version
                        _drop_unknown_tokens(beside / "tokenizer.json", model)
    except (OSError, SafetensorError) as error:  # safetensors raises its own error for a full disk
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_sentence(error)
        raise OSError(
            f"The dequantised weights of {file} cannot be kept in {cache} ({reason.rstrip('.')}): set PARSE_CACHE to "
            f"a writable folder with {4 * n_weights / 1e9:.1f} GB of free space."
        ) from error
    return folder


def _digest(file: Path) -> str:
    """Hash the whole content, at half a gigabyte per second; the copy to be read next is several times as large."""
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256")
    digest.update(f"{_FORMAT} transformers {transformers.__version__}".encode())
    return digest.hexdigest()[:16]


def _check(file: Path) -> int:
    """Return the number of weights. Raise ValueError unless the file is complete and a language model on its own."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        kind, parts = (reader.fields.get(key) for key in ("general.type", "split.count"))
        what, n_files = kind.contents() if kind else "model", parts.contents() if parts else 1
        n_weights = sum(tensor.n_elements for tensor in reader.tensors)
    except Exception as error:  # the reader may raise any exception for missing bytes
        raise ModelError(
            f"{file} is damaged or incomplete ({first_sentence(error).rstrip('.')}): download it again"
        ) from error
    if what != "model":
        raise ModelError(f"{file} holds a GGUF {what}, which is no language model on its own")
    if n_files > 1:
        raise ModelError(f"{file} is one of {n_files} parts of a model: join them with llama-gguf-split --merge first")
    return n_weights


@contextmanager
def _alone_in(cache: Path) -> Iterator[None]:
    """Lock the cache for one conversion, since two would need twice the memory. Remove partial folders of killed
    processes."""
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / ".lock"):
        for left in cache.glob(".*.partial"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _check_space(cache: Path, needed: int) -> None:
    free = shutil.disk_usage(cache).free
    if free < needed:
        raise OSError(f"{free / 1e9:.1f} GB are free there")


def _read(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model (float32) and tokenizer. Raise ValueError if transformers cannot read the file or tensors lack."""
    source: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            file.parent,
            **source,
            config=completed(AutoConfig.from_pretrained(file.parent, **source), file),
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    except ModelError:
        raise
    except Exception as error:  # transformers may raise any exception for an unusual file
        raise ModelError(f"The model {file} cannot be loaded: {first_sentence(error)}") from error
    finally:
        logging.set_verbosity(verbosity)
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(f"{file} is incomplete: {len(missing)} tensors are missing, the first is {missing[0]!r}")
    return _unquantised(model), tokenizer


def _drop_unknown_tokens(path: Path, model: PreTrainedModel) -> None:
    """Drop added tokens beyond the embedding: transformers adds GPT-2's <|endoftext|> to every byte-level vocabulary,
    also to those without the token (Llama 3)."""
    n_tokens = len(embedding_weight(model))
    content = read_json(path, "convert again")
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < n_tokens]
    write_json(path, content)


def _unquantised(model: PreTrainedModel) -> PreTrainedModel:
    """Move the weights to a model that can be saved: transformers refuses to save a model from a GGUF file."""
    config = deepcopy(model.config)
    config.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    return plain
