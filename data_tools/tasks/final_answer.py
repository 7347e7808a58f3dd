"""The final answer that a completion states."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

_HASHES = re.compile(r"#{4,}[ \t]*([^\n]*?)(?:[ \t]#{4,})?[ \t]*$", re.MULTILINE)
_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*\{|\s+([^\s{}$\\.,]+))")
_BETWEEN_BOXES = re.compile(r"[\s$\\().*]*(?:,|;|,?\s*\\?(?:text\{)?\s*(?:and|or)\s*\}?)[\s$\\().*]*")
_SAYS = r"(?:is|was|are|would be|should be|must be|will be|has to be|equals|comes (?:out )?to)\b"
_CUE = re.compile(
    r"\banswers?\b(?:\s+(?:to|for|of|in)\b[^.:\n]{1,80}?)??[\s*_`\"]*"
    rf"(?::|=|→|[-–—](?=\s)|(?<=\s){_SAYS})"
    r"(?![\s*_:]*(?:correct|incorrect|wrong|valid|verified|consistent|reasonable)\b)[\s*_:]*",
    re.IGNORECASE,
)
_TITLE = re.compile(  # a line that is only "Final answer"
    r"^[#*_> \t]*(?:(?:the|my|final|correct) )*answer[ \t*_:#]*\n\s*", re.IGNORECASE | re.MULTILINE
)
_LEAD = re.compile(
    r"^(?:therefore|thus|then|hence|simply|just|clearly|indeed|now|given by|equal to|exactly|as follows|=)\b[\s,:]*",
    re.IGNORECASE,
)
# What a `####` line is that text follows.
_NUMBERED = re.compile(r"(?:step|part|case)\b|(?:\d+|[ivx]+)[.)]\s+[A-Za-z*]", re.IGNORECASE)
_ANSWERS = re.compile(
    r"[\s*_$\\({\[`]*(?:(?:boxed|text\w*|math\w*)\{)?\s*(?:[-−–]|negative|minus|[$€£])*\s*\\?[$.]?\d"  # a number
    r"|[\s*_$({\[`]*\(?[A-Ja-j](?:[\s.):\]}*_$`,]*$|[.):\]*_`]+\s)"  # the letter of an option
    r"|.*[:=<>≤≥]\s*[-$€£\\*]*\d|\s*\$|\s*\\[(\[]|.*\banswer\b.*\w\W*$",
    re.IGNORECASE,
)
_TOPIC = re.compile(
    r"(?:solution|verif|check|conclu|expla|summary|note|analy|calculat|reason|approach|method|given|find|identify|comput"
    r"|determin|understand|interpret|proof|remark|work|result|problem|question|break|overview|setup|set up|detail"
    r"|final|therefore|key|answer|context|background|let|how|why|what|total\b)",
    re.IGNORECASE,
)
_CLOSING = re.compile(
    r"\W*(?:I hope|hope|let me|feel free|please|thank|if you|expla|because|note|this|that|reason|is there|you can"
    r"|here'?s)",
    re.IGNORECASE,
)
_CLAUSE_END = re.compile(
    r"(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bDr)(?<!\bSt)(?<!\bMt)(?<!\bvs)(?<!\b[A-Z])[.!?][*_\"”)]*\s+(?=[A-Z*(])"
    r"|(?<![\s,])[\s,]*\b(?:because|since|due to)\b"  # from the first space only: a run of them is read once
)


@dataclass(frozen=True)
class FinalAnswer:
    """A final answer as it stands, and what marks it; without a mark the whole completion."""

    text: str
    mark: Literal["hashes", "box", "cue", "none"]


def final_answer(completion: str, topics: bool = True) -> FinalAnswer:
    """Return what the last `####` or box with content states; without either, what follows the last "answer is".

    A `####` that text follows may begin a heading, so it counts only before a number, a letter, mathematics, or a
    closing remark. With `topics=False` any text counts that does not read like a heading."""
    marked: list[tuple[int, FinalAnswer]] = [(at, FinalAnswer(text, "box")) for at, text in _boxes(completion)]
    marked += [(at, FinalAnswer(text, "hashes")) for at, text in _hashes(completion, topics)]
    if marked:
        answer = max(marked, key=lambda one: one[0])[1]
        inner = _cue(answer.text)
        return answer if inner is None else FinalAnswer(inner, answer.mark)
    said = _cue(completion)
    return FinalAnswer(completion, "none") if said is None else FinalAnswer(said, "cue")


def first_clause(answer: str) -> str:
    """Return a sentence's first statement, without the reasons and sentences that follow."""
    return _CLAUSE_END.split(answer, maxsplit=1)[0]


def _hashes(completion: str, topics: bool) -> Iterator[tuple[int, str]]:
    for match in _HASHES.finditer(completion):
        line, rest = match[1], completion[match.end() :].strip()
        if line.strip(" \t*_#") and (not rest or not _is_heading(line, rest, topics)):
            yield match.start(), line


def _is_heading(line: str, rest: str, topics: bool) -> bool:
    words = line.lstrip("*_ ")
    if _NUMBERED.match(words):
        return True
    if _ANSWERS.match(line):
        return False
    if _TOPIC.match(words) or words.rstrip("*_ ").endswith(":"):
        return True
    return topics and not _CLOSING.match(rest)


def _boxes(completion: str) -> Iterator[tuple[int, str]]:
    """Yield the place and content of each box that is closed and not empty; boxes in one list together."""
    end, listed, closing = -1, "", _closing_braces(completion)
    for match in _BOX.finditer(completion):
        close = match.end() if match[1] else closing.get(match.end() - 1)
        content = match[1] or completion[match.end() : close]
        if close is None or not content.strip():
            continue
        linked = match.start() > end >= 0 and _BETWEEN_BOXES.fullmatch(completion[end : match.start()])
        listed = f"{listed}, {content}" if linked else content
        end = close + (not match[1])
        yield match.start(), listed


def _closing_braces(text: str) -> dict[int, int]:
    """Return the place of the closing brace for that of each opening one."""
    closing, opened = {}, []
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            closing[opened.pop()] = match.start()
    return closing


def _cue(text: str) -> str | None:
    """Return the rest of the line after the last cue that has one."""
    ends = sorted((match.end() for cue in (_CUE, _TITLE) for match in cue.finditer(text)), reverse=True)
    said = ((text[:end], text[end:].partition("\n")[0].strip()) for end in ends)
    lines = (re.sub(r"^[-•+]\s+", "", line) if "\n" in before[-3:] else line for before, line in said)  # no minus
    return next((_LEAD.sub("", line, count=1) for line in lines if line.strip("*_.")), None)
