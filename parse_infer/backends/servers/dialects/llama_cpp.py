"""The dialect of llama.cpp's server."""

from __future__ import annotations

from parse_infer.backends.servers.dialects.dialect import Dialect


class LlamaCpp(Dialect):
    """llama.cpp's server, which returns log-probabilities of new tokens only."""

    name = "llama.cpp"
    owner = "llamacpp"
