"""The dialect of Ollama."""

from __future__ import annotations

from parse_infer.backends.servers.dialects.dialect import Dialect


class Ollama(Dialect):
    """Ollama, whose completions put a prompt into the model's chat template."""

    name = "Ollama"
    owner = "library"
