"""The dialects of all known engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parse_infer.backends.servers.dialects.dialect import Dialect
from parse_infer.backends.servers.dialects.llama_cpp import LlamaCpp
from parse_infer.backends.servers.dialects.ollama import Ollama
from parse_infer.backends.servers.dialects.sglang import SGLang
from parse_infer.backends.servers.dialects.vllm import VLLM

DEFAULT = VLLM()
DIALECTS: list[Dialect] = [DEFAULT, SGLang(), LlamaCpp(), Ollama()]


def identify(card: Mapping[str, Any]) -> Dialect:
    """Return the dialect of the server that lists this model; an unknown engine is tried as vLLM."""
    return next((dialect for dialect in DIALECTS if dialect.identifies(card)), DEFAULT)
