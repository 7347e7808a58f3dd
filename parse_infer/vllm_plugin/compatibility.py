"""Supported vLLM versions and model architectures."""

from __future__ import annotations

from parse_infer.errors import ServerError

VERSIONS = ("0.32",)
ARCHITECTURES = {f"{name}ForCausalLM": f"Parse{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}
"""Class in `models` for each architecture name of transformers."""


def is_known(version: str) -> bool:
    """Whether the plugin was tested with this vLLM version; it relies on unstable interfaces."""
    return version.removeprefix("v").startswith(tuple(f"{known}." for known in VERSIONS))


def check_version(version: str) -> None:
    """Raise ValueError unless `is_known`."""
    if not is_known(version):
        raise ServerError(
            f"this is vLLM {version}, but the PARSE plugin supports only vLLM {' and '.join(VERSIONS)}: install "
            "that version, for example with constraints-vllm.txt"
        )
