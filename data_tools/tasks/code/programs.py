"""Read programs in prompts and completions."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from functools import lru_cache

from data_tools.tasks.code.blocks import CodeBlock, code_blocks, prose_before
from data_tools.tasks.code.python_text import parse, valid_statements

_DEFINITION = re.compile(r"^[ \t]*(?:async def|def|class) ", re.MULTILINE)
_FIRST_LINE = re.compile(r"^(?:from [\w.]+ import|import \w|(?:async )?def \w+\(|class \w|@\w)", re.MULTILINE)
_FUTURE = re.compile(r"^from __future__ import .*$\n?", re.MULTILINE)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def read_program(prompt: str, completion: str) -> str | None:
    """Return the program that a completion gives, after the prompt's code; None without valid Python.

    The program is all fenced blocks, in order: helpers, imports and the function may stand in several, and a later
    definition replaces an earlier one, unless it is a stub. Without a definition in blocks, a block or the text
    continues the prompt's code, or stands for itself. What is no valid Python is left out. Of the last statement of a
    text that was cut off, the longest valid beginning counts."""
    programs = [program for program in _programs(prompt, completion) if program.strip()]
    return next((program for program in programs if _answers(prompt, program)), programs[0] if programs else None)


def main_function(prompt: str, program: str) -> str:
    """Return the name of the last function that the prompt begins, else the first it mentions, else the last."""
    known = functions(program)
    begun = list(functions(prompt_code(prompt)[1]))[-1:]
    mentioned = [name for name in known if re.search(rf"\b{name}\b", prompt)]
    last = [name for name in reversed(known) if name != "main" and not name.startswith("test")]  # helpers come first
    return next((name for name in [*begun, *mentioned, *last] if name in known), "")


def functions(program: str) -> dict[str, _Function]:
    """Return the functions on the top level, each as first defined, because that is where the prompt has its hints."""
    tree = parse(program)
    found: dict[str, _Function] = {}
    for node in tree.body if tree else ():
        if isinstance(node, _Function):
            found.setdefault(node.name, node)
    return found


@lru_cache(maxsize=64)
def prompt_code(prompt: str) -> tuple[str, str]:
    """Return the code at the end of a prompt: its last fenced block, or all from its first line of Python.

    The second text is the same without lines at the end that are no complete Python."""
    first = _FIRST_LINE.search(prompt)
    begun = prompt if first and parse(prompt) else prompt[first.start() :] if first else ""
    begun = next((block.code for block in code_blocks(prompt)[::-1] if _DEFINITION.search(block.code)), begun)
    lines = begun.splitlines(keepends=True)
    while lines and parse("".join(lines)) is None:
        lines.pop()
    return begun, "".join(lines)


def _programs(prompt: str, completion: str) -> Iterator[str]:
    """Yield the ways to read a program, the most likely first."""
    begun, whole = prompt_code(prompt)
    blocks = code_blocks(completion)
    yield _joined(whole, *(block.statements for block in blocks))
    for block in [*blocks, CodeBlock(prose_before(completion), closed=False)]:
        yield valid_statements(begun + block.code, cut=not block.closed)
        yield _joined(whole, block.statements)
        for body in _bodies(block.code, _indent(begun)):
            yield valid_statements(f"{begun.rstrip()}\n{body}", cut=not block.closed)


def _bodies(code: str, indent: str) -> list[str]:
    """Return a body with the indentation that its first line, or each line, has lost. The likelier comes first."""
    rest = [line for line in code.splitlines() if line.strip()][1:]
    bodies = [indent + code.lstrip(), textwrap.indent(textwrap.dedent(code.lstrip("\n")), indent)]
    return bodies if rest and rest[0][0].isspace() else bodies[::-1]


def _joined(*parts: str) -> str:
    """Join parts of a program, without stubs of functions that an earlier part has.

    Imports from `__future__`, which must be first, move to the front."""
    solved: set[str] = set()  # names of functions that are no stubs
    kept = []
    for part in parts:
        lines, tree = part.split("\n"), parse(part)
        own = [node for node in (tree.body if tree else ()) if isinstance(node, _Function)]
        for node in reversed(own):
            if node.name in solved and _is_stub(node):
                del lines[min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1 : node.end_lineno]
        solved |= {node.name for node in own if not _is_stub(node)}
        kept.append("\n".join(lines))
    text = "\n".join(part for part in kept if part.strip())
    return "".join(f"{line.strip()}\n" for line in _FUTURE.findall(text)) + _FUTURE.sub("", text)


def _answers(prompt: str, program: str) -> bool:
    """Whether the program completes what the prompt begins, or defines anything where the prompt begins nothing."""
    begun, whole = prompt_code(prompt)
    given = set(map(ast.unparse, _definitions(whole).values()))
    own = [node for node in _definitions(program).values() if ast.unparse(node) not in given and not _is_stub(node)]
    found = {node.name for node in own}
    names = re.findall(r"^(?:async def|def|class) (\w+)", begun, re.MULTILINE)
    return names[-1] in found if names else bool(found)


def _definitions(program: str) -> dict[str, _Function | ast.ClassDef]:
    """Return the functions and classes on the top level, each as last defined."""
    tree = parse(program)
    return {node.name: node for node in (tree.body if tree else ()) if isinstance(node, _Function | ast.ClassDef)}


def _is_stub(node: ast.stmt) -> bool:
    """Whether a function has no body but a docstring, `pass`, `...` or `raise NotImplementedError`."""
    if not isinstance(node, _Function):
        return False
    return all(
        isinstance(each, ast.Pass)
        or (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
        or (isinstance(each, ast.Raise) and "NotImplementedError" in ast.unparse(each))
        for each in node.body
    )


def _indent(begun: str) -> str:
    """Return the indentation of the last function's body that the prompt begins."""
    return next(
        (line[: len(line) - len(line.lstrip())] for line in begun.splitlines()[::-1] if re.match(r"[ \t]+\S", line)),
        "    ",
    )
