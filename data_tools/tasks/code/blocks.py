"""Find the blocks of code in a Markdown text, as models write them."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

from data_tools.tasks.code.python_text import parse, valid_statements

_MARGIN = r"[ \t>]*"  # indentation of a list, and the marks of a quotation
# A line of its own, an entry of a list, or, with at most one word behind the fence, the end of a sentence.
_OPENS = re.compile(
    rf"(?P<margin>{_MARGIN}(?:(?:[-*+]|\d+[.)])[ \t]+)?)(?P<fence>`{{3,}}(?!.*`)|~{{3,}})"
    r"|(?P<sentence>(?:(?!```).)*?)(?P<after>`{3,})[ \t]*[\w+.#-]*[ \t]*$"
)


@dataclass(frozen=True)
class CodeBlock:
    """The code between two fences, without the block's own indentation; `closed` unless the text ends first."""

    code: str
    closed: bool

    @property
    def statements(self) -> str:
        """The code's statements that are valid Python."""
        return valid_statements(textwrap.dedent(self.code), cut=not self.closed)


def code_blocks(text: str) -> list[CodeBlock]:
    """Return the fenced blocks that are not blank, in order.

    A fence has three or more backticks or tildes. It may be indented, stand in a list, or follow prose. A block ends
    at the first fence at which it is valid Python, because a docstring may hold fences, else at its first fence
    that is not as deep as code in a function."""
    lines, found, number = text.split("\n"), [], 0
    while number < len(lines):
        opened = _OPENS.match(lines[number])
        number += 1
        if opened is None:
            continue
        width = len(opened["margin"] or "")
        fence = opened["fence"] or opened["after"]
        body = [re.sub(rf"^[ \t>]{{0,{width}}}", "", line) for line in lines[number:]]
        ends = [(row, "\n".join([*body[:row], last])) for row, last in _ends(body, fence)]
        shallow = [end for end in ends if not re.match(r"\s{4}", body[end[0]])]  # deeper ones stand in docstrings
        end = next((end for end in ends if parse(end[1])), shallow[0] if shallow else None)
        row, code = end or (len(body), "\n".join(body))
        number += row + 1
        if code.strip():
            found.append(CodeBlock(code, closed=end is not None))
    return found


def prose_before(text: str) -> str:
    """Return the text before the first fence."""
    return re.split(r"`{3,}|~{3,}", text, maxsplit=1)[0]


def _ends(body: list[str], fence: str) -> list[tuple[int, str]]:
    """Return the lines at which a block may end, and the code on each before the fence.

    A fence with one word behind it opens a block inside. Code may stand before a fence that ends its line."""
    closes = re.compile(rf"(?P<code>.*?){re.escape(fence)}{fence[0]}*(?P<rest>[^{fence[0]}]*)$")
    found = []
    for row, line in enumerate(body):
        end = closes.match(line)
        if end is None:
            continue
        alone, rest = not end["code"].strip(" \t>"), end["rest"].strip()
        if not rest or (alone and not re.fullmatch(r"[\w+.#-]+", rest)):
            found.append((row, "" if alone else end["code"]))
    return found
