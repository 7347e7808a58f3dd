"""The functions that build a backend, and a check of their keyword options by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

from parse_infer.errors import SettingsError
from parse_infer.suggest import suggestion

BACKENDS = ("local", "vllm")


def builder(backend: str) -> Callable[..., Any]:
    """Return `load_backend` or `connect_backend`; raise SettingsError for an unknown name."""
    if backend not in BACKENDS:
        raise SettingsError(f"backend is {backend!r}; it must be one of: {', '.join(BACKENDS)}.")
    if backend == "vllm":
        from parse_infer.backends.servers.backend import connect_backend

        return connect_backend
    from parse_infer.backends.local.backend import load_backend

    return load_backend


def check_options(names: Iterable[str], build: Callable[..., Any], own: Sequence[str]) -> None:
    """Raise SettingsError for an option that `build` does not have.

    Args:
        own: further options of the caller.
    """
    known = list(dict.fromkeys([*own, *_arguments(build)]))
    for name in names:
        if name in known:
            continue
        for backend in BACKENDS:
            if build is not builder(backend) and name in _arguments(builder(backend)):
                raise SettingsError(
                    f"{name!r} is an option of the backend {backend!r} only: omit it, or give backend."
                )
        raise SettingsError(f"{name!r} is not an option; {suggestion(name, known)}")


def _arguments(build: Callable[..., Any]) -> list[str]:
    """Names of the arguments of `build`; in the place of `**options`, the fields of `ServerOptions`."""
    parameters = inspect.signature(build).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    if len(names) == len(parameters):
        return names
    from parse_infer.backends.servers.options import ServerOptions

    return [*names, *(field.name for field in fields(ServerOptions))]
