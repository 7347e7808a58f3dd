"""Which vLLM the plugin knows, and which models."""

from __future__ import annotations

VERSIONS = ("0.32",)
ARCHITECTURES = {f"{name}ForCausalLM": f"Parse{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}
"""The class in `models` for each architecture that transformers names."""


def is_known(version: str) -> bool:
    """Whether the plugin was tested with a vLLM of this version: what it relies on is no stable interface."""
    return version.removeprefix("v").startswith(tuple(f"{known}." for known in VERSIONS))


def check_version(version: str) -> None:
    """ValueError unless `is_known`."""
    if not is_known(version):
        raise ValueError(
            f"this is vLLM {version}, and the PARSE plugin knows vLLM {' and '.join(VERSIONS)} only: install "
            "that, for example with constraints-vllm.txt"
        )
