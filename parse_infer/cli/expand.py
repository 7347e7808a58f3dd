"""Commands whose options come from the fields of a dataclass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable

Command = Callable[..., None]
KIND = inspect.Parameter.KEYWORD_ONLY


def expand_parameter(
    name: str, offered: Iterable[inspect.Parameter], build: Callable[..., object]
) -> Callable[[Command], Command]:
    """Replace a command's parameter `name` by the `offered` options; `build(**values)` makes its value."""
    offered = list(offered)

    def expand(command: Command) -> Command:
        @functools.wraps(command)
        def run(**values: object) -> None:
            chosen = {option.name: values.pop(option.name) for option in offered}
            command(**values, **{name: build(**chosen)})

        signature = inspect.signature(command, eval_str=True)
        parameters = [p.replace(kind=KIND) for p in signature.parameters.values() if p.name != name]
        parameters += offered
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return expand
