"""Every question in help, docstrings, examples and pages is one that the embedded pair knows and answers right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from parse_infer.engine import ParseEngine

REPOSITORY = Path(__file__).parents[1]
SOURCES = (
    "README.md",
    "docs/**/*.md",
    "zoo/**/*.md",
    "deploy/*",
    "recipes/**/*.yaml",
    "examples/*.py",
    "parse_*/**/*.py",
    "parse_infer/serve/page/*",
    "data_tools/**/*.py",
    "zoo/parse_zoo/**/*.py",
    "tools/*.py",
    ".ci/run",
)
# In quotation marks or in an element of HTML: a capital letter, a number, a question mark, no ellipsis.
QUESTION = re.compile(r"""["'>]([A-Z][^"'<>\n…]*\d[^"'<>\n…]*\?)["'<]""")
# The known text of adapters is read, never answered; requests that end at once warm a server up.
NOT_ASKED = {"parse_infer/judge/logprob_head.py", "data_tools/labels/served/writer.py"}
ANSWERS = {
    "A boy has 6 stickers. His brother has 3 fewer. How many do they have together?": "9",
    "A pie has 60 pieces. If Emma can eat 4 pieces a day while Ava can eat 2 times as much, how many days will the "
    "pie last?": "5",
    "The Scavenger hunt team hid 170 toys. The Garcia twins each found 13 toys. All the other toys except 12 were "
    "found by their friends. How many toys did the friends find?": "132",
}


def documented() -> dict[str, str]:
    """The questions, and a place of each."""
    found = {}
    for path in (path for pattern in SOURCES for path in REPOSITORY.glob(pattern) if path.is_file()):
        place = str(path.relative_to(REPOSITORY))
        if place not in NOT_ASKED and path.suffix not in (".png", ".safetensors"):
            text = re.sub(r'"\s*\n\s*"', "", path.read_text(encoding="utf-8"))  # strings side by side
            found |= dict.fromkeys(QUESTION.findall(text), place)
    return found


def test_every_question_has_an_answer_here() -> None:
    found = documented()
    assert not {question: place for question, place in found.items() if question not in ANSWERS}
    assert found.keys() == ANSWERS.keys()


@pytest.fixture(scope="module")
def engine() -> ParseEngine:
    return ParseEngine.from_pretrained("zoo:target", "zoo:draft", "zoo:adapter", device="cpu", dtype="float32")


@pytest.mark.parametrize("settings", [{}, {"risk": 0.05}, {"mode": "exact"}, {"block_tokens": "whole"}], ids=str)
@pytest.mark.parametrize("question", ANSWERS)
def test_every_question_is_known_and_answered_right(engine: ParseEngine, question: str, settings: dict) -> None:
    answer = engine.generate(question, **settings)
    assert answer.text.endswith(f"\n#### {ANSWERS[question]}"), answer.text
    assert answer.fallback is None and answer.stats.accepted_tokens


@pytest.mark.slow
def test_the_answer_on_the_readme_is_todays(engine: ParseEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """All but its last line, which varies with the machine's speed."""
    page = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    code, printed = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", page, re.DOTALL).groups()
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[:-1] == printed.splitlines()[:-1]
