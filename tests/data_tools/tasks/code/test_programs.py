"""Programs are found in every form in which models write them, and their examples of use do not fail them."""

from __future__ import annotations

import textwrap

import pytest

from data_tools.tasks.code.blocks import code_blocks
from data_tools.tasks.code.checks import passes_tests
from data_tools.tasks.code.programs import read_program
from data_tools.tasks.code.python_text import parse, valid_statements
from data_tools.tasks.code.sandbox import require_sandbox
from parse_infer.errors import ParseError

try:
    require_sandbox()
except ParseError as refusal:
    pytest.skip(str(refusal), allow_module_level=True)

PROMPT = '''from typing import List


def total(numbers: List[int], start: int = 0) -> int:
    """Return start plus twice each number.

    >>> total([1, 2])
    6
    """
'''
CHAT = f"Complete this function.\n\n```python\n{PROMPT}```\n"
WORDS = "Write a function total(numbers, start=0) that adds twice each number to start."
TESTS = "assert total([1, 2]) == 6\nassert total([], 3) == 3"

FUNCTION = "def total(numbers, start=0):\n    return start + sum(2 * n for n in numbers)\n"
WRONG = FUNCTION.replace("start +", "start -")
STUB = "def total(numbers, start=0):\n    ...\n"
HELPER = "def double(n):\n    return 2 * n\n"
WITH_HELPER = "def total(numbers, start=0):\n    return start + sum(map(double, numbers))\n"
BODY = "    result = start\n    for n in numbers:\n        result += 2 * n\n    return result\n"


def block(code: str, fence: str = "```", language: str = "python") -> str:
    return f"{fence}{language}\n{code}{fence}\n"


def indented(code: str, by: str = "   ") -> str:
    return textwrap.indent(code, by)


def with_docstring(inside: str, indent: str = "    ") -> str:
    lines = indented(f'"""Add.\n\n{inside}"""\n', indent)
    return f"{FUNCTION.partition('    ')[0]}{lines}    return start + 2 * sum(numbers)\n"


IN_DOCSTRING = with_docstring("```python\ntotal([1, 2])\n```\n")

RIGHT = {
    # Cut by the token limit.
    "cut in the next function": f"```python\n{FUNCTION}\n\ndef main():\n    print(total([1,",
    "cut in the next docstring": f'```python\n{FUNCTION}\n\ndef other():\n    """This is\nunfinished',
    "cut in a text": f'```python\n{FUNCTION}\nprint("The result is',
    "cut behind the last return": f"```python\n{FUNCTION}    # done\n    prin(",
    "cut behind a docstring with fences": f"```python\n{IN_DOCSTRING}\ndef other(",
    # Several blocks.
    "imports, helper, function": block("import math\n") + block(HELPER) + block(WITH_HELPER),
    "helper behind": f"{block(WITH_HELPER)}where\n{block(HELPER)}",
    "stub before": f"The signature:\n{block(STUB)}\n{block(FUNCTION)}",
    "stub behind": f"{block(FUNCTION)}\nThe signature was\n{block(STUB)}",
    "corrected": f"{block(WRONG)}Wait, the sign is wrong:\n{block(FUNCTION)}",
    "other languages": block("pip install x\n", language="bash")
    + block(FUNCTION)
    + block('{"a": 1}\n', language="json"),
    "session": block(FUNCTION) + block(">>> total([1, 2])\n6\n"),
    # Fences.
    "in markdown": f"```markdown\nHere:\n{block(FUNCTION)}```\n",
    "in markdown, more behind": f"```markdown\nHere:\n{block(HELPER)}```\nand\n{block(WITH_HELPER)}Done.",
    "four backticks": block(FUNCTION, "````"),
    "in four backticks": f"````markdown\n# Solution\n{block(FUNCTION)}\n````\n",
    "tildes": block(FUNCTION, "~~~"),
    "in a list": f"1. Code:\n\n{indented(block(FUNCTION))}2. Done.",
    "an entry of a list": f"- {indented(block(FUNCTION), '  ')[2:]}",
    "in a quotation": indented(block(FUNCTION), "> "),
    "deeper than its fence": block(indented(FUNCTION, "    ")),
    "behind prose": f"Sure: {block(FUNCTION)}",
    "prose behind": block(FUNCTION).rstrip() + " Hope it helps.",
    "end of the code's line": block(FUNCTION.rstrip()),
    "attributes": block(FUNCTION, language='python title="a.py"'),
    "fences in a docstring": f"{block(IN_DOCSTRING)}Done.",
    "fences in the module's docstring": block(f'"""Doc.\n```\ntotal([1, 2])\n```\n"""\n{FUNCTION}'),
    "inline code": f"Call ```total``` so:\n{block(FUNCTION)}",
    "windows": block(FUNCTION).replace("\n", "\r\n"),
    # No fence.
    "prose, function": f"Here it is.\n\n{FUNCTION}\nIt works because it's simple.",
    "import, function, prose": f"import math\n\n{FUNCTION}\n\nThis adds them up: it's O(n).\n- one\n- other",
    # Bodies.
    "body": BODY,
    "body, prose": f"{BODY}\nThis is it.",
    "first line without indentation": BODY.lstrip(),
    "first line without indentation, prose": f"{BODY.lstrip()}\nThis is it.",
    "no line with indentation": textwrap.dedent(BODY),
    "block of a body": block(BODY),
    "block of a body without indentation": block(BODY.lstrip()),
    # What Python parses and does not compile.
    "return at the top": block("return 5\n") + block(FUNCTION),
    "late future import": block(f"import math\nfrom __future__ import annotations\n{FUNCTION}"),
    "second future import": block(HELPER) + block(f"from __future__ import annotations\n{WITH_HELPER}"),
    # Examples of use.
    "input": block(f"{FUNCTION}\nn = int(input())\nprint(total([n]))\n"),
    "failing assertions": block(f"{FUNCTION}\nfor n in [1, 2]:\n    assert total([n]) == 99\n"),
    "missing file": block(f'data = open("input.txt").read().split()\nfirst = data[0]\n{FUNCTION}'),
    "missing argument": block(f"import sys\n{FUNCTION}path = sys.argv[1]\n"),
    "pytest": block(f"import pytest\n{FUNCTION}\n@pytest.mark.slow\ndef test_total():\n    assert total([]) == 1\n"),
    "unittest": block(f"import unittest\n{FUNCTION}class T(unittest.TestCase):\n    pass\nunittest.main()\n"),
    "many prints": block(f"{FUNCTION}\nfor _ in range(20_000):\n    print('x' * 99)\n"),
    "many prints in the function": block(FUNCTION.replace("    ", "    print('x' * 2_000_000)\n    ")),
    "exit": block(f"{FUNCTION}\nimport sys\nsys.exit(1)\n"),
    "endless": block(f"{FUNCTION}\nwhile True:\n    pass\n"),
    "sleep": block(f"import time\n{FUNCTION}\ntime.sleep(3600)\n"),
    "own module": block(FUNCTION) + block("from solution import total\nprint(total([1]))\n"),
    "unknown module": block(FUNCTION) + block("from my_module import total\n"),
    # Statements that prepare.
    "filled table": block(
        "table = {}\ndef fill():\n    for n in range(9):\n        table[n] = 2 * n\nfill()\n"
        "def total(numbers, start=0):\n    return start + sum(table[n] for n in numbers)\n"
    ),
}
FALSE = {
    "wrong": block(WRONG),
    "corrected wrongly": f"{block(FUNCTION)}No:\n{block(WRONG)}",
    "stub": block(STUB),
    "prose": "I can't do that: it's hard.",
    "nothing": "",
    "empty block": "``````",
    "error inside": block(FUNCTION.replace("numbers)\n", "numbers\n    x = 3\n")),
    "cut too early": f"```python\n{FUNCTION.partition('return')[0]}result = start\n    for n in",
    "other name": block(FUNCTION.replace("total", "tally")),
    "ends the process": block(f"import os\nos._exit(0)\n{FUNCTION}"),
    "constant that the function needs": block(f"FACTOR = 1 / 0\n{FUNCTION.replace('2', 'FACTOR')}"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_is_found(name: str) -> None:
    prompts = (PROMPT, CHAT) if "body" in name or "indentation" in name else (PROMPT, CHAT, WORDS)
    for prompt in prompts:
        assert passes_tests(prompt, TESTS, RIGHT[name]), read_program(prompt, RIGHT[name])


@pytest.mark.parametrize("name", FALSE)
def test_no_other_program_is_right(name: str) -> None:
    for prompt in (PROMPT, CHAT, WORDS):
        assert not passes_tests(prompt, TESTS, FALSE[name])


def test_a_body_that_the_prompt_begins_is_completed() -> None:
    prompt = PROMPT.replace('    """Return', '    import math\n    """Return')
    body = "    return start + 2 * math.floor(sum(numbers))\n"
    assert passes_tests(prompt, TESTS, body) and passes_tests(prompt, TESTS, body.lstrip())


def test_blocks_lose_the_indentation_of_their_fences() -> None:
    text = "- a\n\n    ~~~~py\n    x = 1\n\n      y\n    ~~~~\n\n> ```\n> 1\n> ```\n``` 2 ```\n```\n```py\n3\n```\n"
    found = [(each.code, each.closed) for each in code_blocks(text)]
    assert found == [("x = 1\n\n  y\n", True), ("1\n", True), ("```py\n3\n", True)]


def test_only_statements_that_compile_stay() -> None:
    kept = ["@cache\ndef f(x):\n    return x\n", "if f:\n    1\nelse:\n    2\n", "y = [\n1,\n]"]
    code = f"Intro: it's here\n{kept[0]}- an item\n{kept[1]}return 3\n{kept[2]}"
    assert valid_statements(code) == "".join(kept)
    cut = "def f(x):\n    y = x\n    return (y,"
    assert valid_statements(cut, cut=True) == "def f(x):\n    y = x" and valid_statements(cut) == ""
    assert parse("return 1") is None and parse("x\nfrom __future__ import division") is None and parse("\0") is None
