"""The errors of the packages as a page: each class with its docstring, and the sentences of its `raise` statements."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("parse_infer", "data_tools", "parse_train")
# In this order; classes of these modules, and two of Python's own.
CLASSES = {
    "SettingsError": "parse_infer.errors",
    "PromptError": "parse_infer.errors",
    "ChatTemplateError": "parse_infer.errors",
    "ModelError": "parse_infer.errors",
    "CalibrationError": "parse_infer.errors",
    "ServerError": "parse_infer.errors",
    "RequestRejected": "parse_infer.backends.pool.client",
    "TransientServerError": "parse_infer.backends.pool.client",
    "ApiError": "parse_infer.serve.errors",
    "ParseError": "parse_infer.errors",
    "FileNotFoundError": "builtins",
    "OSError": "builtins",
}
OWN_WORDS = {
    "ParseError": "Options, recipes and data without a class of their own. The base of the first six classes.",
    "FileNotFoundError": "A file or folder that does not exist.",
    "OSError": "A damaged or unreadable file, or a server that does not respond.",
}


@cache
def sentences() -> dict[str, list[tuple[str, str]]]:
    """Return the (sentence, path) of every `raise` of a known class, by class; … stands for a value."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
                texts = sorted((text for argument in node.exc.args for text in _texts(argument)), key=len)
                if node.exc.func.id in CLASSES and texts and any(letter.isalpha() for letter in texts[-1]):
                    found[node.exc.func.id].setdefault(texts[-1], path.relative_to(ROOT).as_posix())
    return {name: list(found[name].items()) for name in CLASSES}


def errors_page() -> str:
    lines = []
    for name, rows in sentences().items():
        text = OWN_WORDS.get(name) or inspect.getdoc(getattr(importlib.import_module(CLASSES[name]), name)) or ""
        lines += [
            f"## {name}",
            "",
            text.partition("\n\n")[0],
            "",
            "| sentence | way out | raised in |",
            "|---|---|---|",
        ]
        for sentence, path in rows:
            cause, way_out = _split(sentence)
            lines.append(f"| {escape(cause)} | {escape(way_out)} | `{path}` |")
        lines.append("")
    return "\n".join(lines)


def escape(text: str) -> str:
    """A text in a cell of a table, without meaning for Markdown."""
    text = " ".join(text.split()).replace("\\", "\\\\").replace("<", "&lt;")
    return "".join(f"\\{letter}" if letter in "|*_[" else letter for letter in text)


def _split(sentence: str) -> tuple[str, str]:
    """Cause and way out: what follows the last colon or semicolon, if it says something."""
    place = max(sentence.rfind(": "), sentence.rfind("; "))
    cause, way_out = sentence[:place], sentence[place + 2 :]
    return (cause, way_out) if place > 0 and way_out.strip("….") else (sentence, "")


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield the texts that an argument may have: two of a condition."""
    if isinstance(node, ast.IfExp):
        yield from _texts(node.body)
        yield from _texts(node.orelse)
    elif isinstance(node, ast.BinOp):
        yield "".join(max(_texts(side), key=len, default="…") for side in (node.left, node.right))
    elif isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
