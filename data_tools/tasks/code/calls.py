"""Find calls to compare functions by."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from random import Random
from typing import Any

from data_tools.tasks.code.programs import functions, main_function
from data_tools.tasks.code.python_text import parse

_MAX_EXAMPLES, _GENERATED = 20, 20  # calls
_DEEPEST = 4  # brackets of a type hint

_Call = tuple[tuple[Any, ...], dict[str | None, Any]]


def calls_of(prompt: str, program: str) -> tuple[str, ...]:
    """Return calls of the program's main function, each as the repr of (positional, keyword) arguments.

    They are the literal calls in prompt and program, such as doctests, and 20 generated from the type hints. A
    parameter without a hint gets values like those of the first example."""
    if not (name := main_function(prompt, program)):
        return ()
    calls = list(islice(_examples(name, f"{prompt}\n{program}"), _MAX_EXAMPLES))
    parameters = functions(program)[name].args
    example = calls[0][0] if calls else ()
    letters = "".join(re.findall(r"'([^']+)'", repr(calls))) or "abcAB 12"
    try:
        hints = [
            _hint(parameter.annotation, example[i : i + 1])
            for i, parameter in enumerate([*parameters.posonlyargs, *parameters.args])
        ]
        if any(ast.unparse(hint).count("[") > _DEEPEST for hint in hints):
            return tuple(dict.fromkeys(map(repr, calls)))  # the values would be too large
        random = Random(name)
        calls += [(tuple(_draw(hint, random, letters) for hint in hints), {}) for _ in range(_GENERATED)]
    except (LookupError, ValueError, TypeError, SyntaxError, RecursionError, MemoryError):  # a type without values
        pass
    return tuple(dict.fromkeys(map(repr, calls)))


def _examples(name: str, text: str) -> Iterator[_Call]:
    """Yield the arguments of calls whose arguments are literals."""
    for start in re.finditer(rf"\b{name}\(", text):
        rest = text[start.start() :]
        for end in islice(re.finditer(r"\)", rest), _MAX_EXAMPLES):
            if tree := parse(rest[: end.end()]):
                call = getattr(tree.body[0], "value", None)
                if isinstance(call, ast.Call):
                    with suppress(ValueError, TypeError):  # not literal
                        named = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
                        yield tuple(map(ast.literal_eval, call.args)), named
                break


def _hint(annotation: ast.expr | None, example: tuple[Any, ...]) -> ast.expr:
    """Return the type of a parameter: of its example where there is one and the annotation names no elements."""
    if annotation and (not example or isinstance(annotation, (ast.Subscript, ast.BinOp, ast.Constant))):
        return annotation
    return ast.parse(_type_of(*example), mode="eval").body


def _type_of(value: object) -> str:
    kind = "None" if value is None else type(value).__name__
    if not isinstance(value, (list, set, tuple, dict)) or not value:
        return kind
    parts = next(iter(value.items())) if isinstance(value, dict) else list(value)
    return f"{kind}[{', '.join(map(_type_of, parts if kind in ('tuple', 'dict') else parts[:1]))}]"


def _draw(hint: ast.expr, random: Random, letters: str) -> object:
    """Return a random value of a type. Raise KeyError for an unknown type."""

    def of(part: ast.expr) -> object:
        return _draw(part, random, letters)

    if isinstance(hint, ast.Constant):
        return None if hint.value is None else of(ast.parse(str(hint.value), mode="eval").body)
    if isinstance(hint, ast.BinOp):
        return of(random.choice([hint.left, hint.right]))
    inside = getattr(hint, "slice", None) or ast.Name("int")
    parts = inside.elts if isinstance(inside, ast.Tuple) else [inside]
    kind = ast.unparse(hint.value if isinstance(hint, ast.Subscript) else hint).rpartition(".")[2].lower()
    if kind == "tuple" and ast.unparse(parts[-1]) == "...":
        return tuple(of(parts[0]) for _ in range(random.randint(0, 5)))
    values: dict[str, Callable[[], Any]] = {
        "int": lambda: random.choice([random.randint(-5, 10), random.randint(0, 100)]),
        "float": lambda: round(random.uniform(-5, 10), 2),
        "bool": lambda: random.random() < 0.5,
        "str": lambda: "".join(random.choices(letters, k=random.randint(0, 8))),
        "any": lambda: random.randint(-5, 10),
        "none": lambda: None,
        "optional": lambda: random.choice([None, of(parts[0])]),
        "union": lambda: of(random.choice(parts)),
        "tuple": lambda: tuple(map(of, parts)),
        "list": lambda: [of(parts[0]) for _ in range(random.randint(0, 5))],
        "set": lambda: {of(parts[0]) for _ in range(random.randint(0, 5))},
        "dict": lambda: {of(parts[0]): of(parts[-1]) for _ in range(random.randint(0, 5))},
    }
    return values[{"sequence": "list", "iterable": "list", "mapping": "dict"}.get(kind, kind)]()
