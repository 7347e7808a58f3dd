"""Read programs in prompts and completions, and find calls to compare functions by."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice
from random import Random
from typing import Any

_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
_DEFINITION = re.compile(r"^[ \t]*(?:def|class) ", re.MULTILINE)
_FIRST_LINE = re.compile(r"^(?:from [\w.]+ import|import \w|def \w+\(|class \w|@\w)", re.MULTILINE)
_MAX_EXAMPLES, _GENERATED = 20, 20  # calls
_DEEPEST = 4  # brackets of a type hint

_Call = tuple[tuple[Any, ...], dict[str, Any]]


def read_program(prompt: str, completion: str) -> str | None:
    """Return the program that a completion gives, after the prompt's code; None without valid Python.

    The program is the first fenced block with a definition, or the first block. Without a block the completion
    continues the prompt. If that is no valid Python, it ends before its first line without indentation."""
    begun, whole = _code_of(prompt)
    blocks = sorted(_FENCE.findall(completion), key=lambda block: not _DEFINITION.search(block))
    text = completion.partition("```")[0]
    texts = [(before, block) for block in blocks for before in (f"{whole}\n", begun, "")]
    texts += [(begun, text), (begun, re.split(r"\n(?=\S)", text)[0]), (f"{whole}\n", text)]
    programs = (before + code for before, code in texts if code.strip())
    return next((program for program in programs if parse(program)), None)


def main_function(prompt: str, program: str) -> str:
    """Return the name of the last function that the prompt begins, else the first it mentions, else the last."""
    known = _functions(program)
    begun = list(_functions(_code_of(prompt)[1]))[-1:]
    mentioned = [name for name in known if re.search(rf"\b{name}\b", prompt)]
    last = [name for name in reversed(known) if name != "main"]  # helpers come first
    return next((name for name in [*begun, *mentioned, *last] if name in known), "")


def calls_of(prompt: str, program: str) -> tuple[str, ...]:
    """Return calls of the program's main function, each as the repr of (positional, keyword) arguments.

    They are the literal calls in prompt and program, such as doctests, and 20 generated from the type hints. A
    parameter without a hint gets values like those of the first example."""
    if not (name := main_function(prompt, program)):
        return ()
    calls = list(islice(_examples(name, f"{prompt}\n{program}"), _MAX_EXAMPLES))
    parameters = _functions(program)[name].args
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


def parse(code: str) -> ast.Module | None:
    """Return the syntax tree, or None if the code is no valid Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in strings
        try:
            return ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


@lru_cache(maxsize=64)
def _code_of(prompt: str) -> tuple[str, str]:
    """Return the code at the end of a prompt: its last fenced block, or all from its first line of Python.

    The second text is the same without lines at the end that are no complete Python."""
    first = _FIRST_LINE.search(prompt)
    begun = prompt if first and parse(prompt) else prompt[first.start() :] if first else ""
    begun = next((block for block in _FENCE.findall(prompt)[::-1] if _DEFINITION.search(block)), begun)
    lines = begun.splitlines(keepends=True)
    while lines and parse("".join(lines)) is None:
        lines.pop()
    return begun, "".join(lines)


def _functions(program: str) -> dict[str, ast.FunctionDef]:
    """Return the functions on the top level, each as first defined, because that is where the prompt has its hints."""
    tree = parse(program)
    found: dict[str, ast.FunctionDef] = {}
    for node in tree.body if tree else ():
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, node)
    return found


def _examples(name: str, text: str) -> Iterator[_Call]:
    """Yield the arguments of calls whose arguments are literals."""
    for start in re.finditer(rf"\b{name}\(", text):
        rest = text[start.start() :]
        for end in islice(re.finditer(r"\)", rest), _MAX_EXAMPLES):
            if tree := parse(rest[: end.end()]):
                call: Any = getattr(tree.body[0], "value", None)
                try:
                    named = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
                    yield tuple(map(ast.literal_eval, call.args)), named
                except (ValueError, TypeError, AttributeError):  # not literal
                    pass
                break


def _hint(annotation: ast.expr | None, example: tuple[Any, ...]) -> ast.expr:
    """Return the type of a parameter: of its example where there is one and the annotation names no elements."""
    if annotation and (not example or isinstance(annotation, (ast.Subscript, ast.BinOp, ast.Constant))):
        return annotation
    return ast.parse(_type_of(*example), mode="eval").body


def _type_of(value: Any) -> str:
    kind = "None" if value is None else type(value).__name__
    if not isinstance(value, (list, set, tuple, dict)) or not value:
        return kind
    parts = next(iter(value.items())) if isinstance(value, dict) else list(value)
    return f"{kind}[{', '.join(map(_type_of, parts if kind in ('tuple', 'dict') else parts[:1]))}]"


def _draw(hint: ast.expr, random: Random, letters: str) -> Any:
    """Return a random value of a type. Raise KeyError for an unknown type."""

    def of(part: ast.expr) -> Any:
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
