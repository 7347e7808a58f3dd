"""The functions that build a backend, and a check of their keyword options by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from parse_infer.errors import SettingsError
from parse_infer.suggest import suggestion

BACKENDS = ("local", "vllm")


def builder(backend: str) -> tuple[Callable[..., Any], type[Any]]:
    """Return the function that builds a backend, and the dataclass of its options.

    Raises SettingsError for an unknown name.
    """
    if backend not in BACKENDS:
        raise SettingsError(f"backend is {backend!r}; it must be one of: {', '.join(BACKENDS)}.")
    if backend == "vllm":
        from parse_infer.backends.servers.connect import connect_backend
        from parse_infer.backends.servers.options import ServerOptions

        return connect_backend, ServerOptions
    from parse_infer.backends.local.load import load_backend
    from parse_infer.backends.local.options import LocalOptions

    return load_backend, LocalOptions


def check_backend_options(names: Iterable[str], backend: str) -> None:
    """Raise SettingsError for a keyword that `ParseEngine.from_pretrained` does not have with this backend."""
    known = _known(backend)
    for name in names:
        if name in known:
            continue
        for other in BACKENDS:  # whose packages may be missing
            if other != backend and name in _known(other):
                raise SettingsError(f"{name!r} is an option of the backend {other!r} only: omit it, or give backend.")
        raise SettingsError(f"{name!r} is not an option; {suggestion(name, known)}")


def _known(backend: str) -> list[str]:
    own = ("target", "draft", "adapter", "backend", "threshold")
    return [*own, *(field.name for field in fields(builder(backend)[1]))]


def check_arguments(names: Iterable[str], build: Callable[..., Any], own: Iterable[str]) -> None:
    """Raise SettingsError for a keyword that is neither an argument of `build` nor in `own`."""
    known = [*own, *inspect.signature(build).parameters]
    for name in names:
        if name not in known:
            raise SettingsError(f"{name!r} is not an option; {suggestion(name, known)}")
