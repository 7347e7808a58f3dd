"""The option of a multiple-choice question that an answer states."""

from __future__ import annotations

import re

from data_tools.tasks.answer_text import clean
from data_tools.tasks.final_answer import final_answer, first_clause

_MARKS = r"[\"'“”*_`]*"
_NOUN = r"(?:(?:the\s+)?(?:(?:correct|right|best|final|only)\s+)*(?:option|choice|letter|answer|statement)\b:?\s*)"
_LETTER = re.compile(
    rf"{_NOUN}?{_MARKS}(?:[(\[{{<]{{1,2}}\s*{_MARKS}(?P<inside>[A-Ja-j]){_MARKS}\s*[)\]}}>]{{1,2}}"
    r"|[(\[]?(?P<bare>[A-Ja-j])(?![\w*^(#]|['’]\w|\+\+|\s*=(?!>)|\s*\^|\.\w|-[A-Za-z]{2}))",
    re.IGNORECASE,
)
# What follows a letter without brackets that is an answer, not a word or a name.
_FOLLOWS = re.compile(
    rf"{_MARKS}(?:\s*$|\s*[.):\],;!?}}>—/&+|✅✓✔]|\s*\n|\s+[-–=→⇒(\[]|[-–]|\s+(?:because|since|as|due|given|based|according|rather|instead"
    r"|not|but|and|or|over|while|when|by\s+elimination|for\s+(?:sure|the\s+reason)|only|alone|(?:most\s+)?(?:probably|likely)|definitely"
    r"|I\s+(?:think|believe)|(?:best\s+)?(?:fits|works|matches|satisfies|holds|makes)|it\s+is|is\s+(?:it|what|better)"
    r"|(?:is|should\s+be|must\s+be|would\s+be)\s+(?:(?:the|my)\s+)?(?:only|final|correct|right|best|answer|true|most))\b(?!\s+if\b))",
    re.IGNORECASE,
)
_FORM = re.compile(rf"{_MARKS}(?:\s*[.):\]}}]|\s*$)")
_TITLE_FOLLOWS = re.compile(r"\s+(?:[A-Z][a-z]|\d)")  # "B Vitamin A"; "A" and "I" are words, too
_JOIN = r"(?:,?\s*\(?\b(?:and/or|and|or|nor|to|through|versus|vs\.?|as\s+well\s+as)\b|[,/&+;|]|-|–)"
_ALSO = r"(?:(?:maybe|possibly|perhaps|also|option|choice|answer)\s+)*"
_OTHER = r"(?P<{0}>[A-Ja-j])(?![\w'’])"
_RIVAL = re.compile(
    rf"{_MARKS}(?:[)\]}}>.]*{_MARKS}\s*{_JOIN}\s*{_ALSO}{_MARKS}(?:[(\[{{]{_OTHER.format('joined')}[)\]}}]"
    rf"|(?P<plain>[A-J])(?![\w'’]){_MARKS}(?=[)\]}}]?\s*(?:$|[.,;:)\n/&+-]|(?:and|or|are|both|combined|together"
    r"|is\s+(?:also\s+)?(?:correct|right))\b)))"
    rf"|\s*[(\[]{_OTHER.format('beside')}[)\]]|\s+(?P<alone>[A-J])\s*(?:$|[.)]))"
)
_NOT_BUT = re.compile(
    r"\W*(?:(?:definitely|certainly)\s+)?(?:n't|not|neither)\b[^\n]{0,60}?(?:\bbut\b(?:\s+rather)?|[,;.]\s+it\s+is|[,;.]\s+it's)\s*",
    re.IGNORECASE,
)
_SAYS = r"(?:'s|is(?=n't)|is|was|(?:would|should|must|will|has\s+to)\s+be|(?:seems|appears)\s+to\s+be|[:=→–—-])"
_HEDGE = (
    r"(?:(?:therefore|thus|then|clearly|most\s+likely|likely|probably|definitely|certainly|undoubtedly|obviously|actually|of\s+course"
    r"|in\s+fact|either\s+way|indeed|that|it'?s|it\s+is|with|given\s+by)"
    r"\b[\s:,]*)*"
)
_STRONG = re.compile(
    rf"\b(?:answers?|ans|options?|choices?|pick|selection|solution|conclusion|result|response|letter|correct|final)\b\.?{_MARKS}"
    rf"(?:\s+(?:to|for|of|here|from|among|in)\b[^.:\n]{{0,60}}?)?\s*(?:\]?\s*{_SAYS}|\](?=\s))[\s:*_`]*{_HEDGE}"
    rf"|\b(?:ans\.|(?:final|correct|right|best|my)\s+(?:answer|option|choice))\s+(?=[(\[]|[B-HJ]\b)",
    re.IGNORECASE,
)
_VERDICT = re.compile(
    rf"(?<![\w'’])(?:[(\[]?{_OTHER.format('letter')})(?!(?<=[AI])\s+(?!(?:is|was|has|seems|looks|appears|must|would)\b)[a-z]){_MARKS}[)\].:,]*{_MARKS}(?!,?\s*[(\[]?[A-J]\b)(?:(?!\b(?:is|are|was|and|or|but|not)\b)[^.\n]){{0,60}}?\s"
    r"(?:is|was|seems|looks|must\s+be|would\s+be|appears\s+to\s+be|has\s+to\s+be)\s+(?:(?:the|clearly|definitely|therefore|thus|indeed|only|one|most|our|my"
    r"|to\s+be)\s+)*(?:correct|right|best|true|answer|accurate|appropriate|likely)\b(?!\s+(?:if|of)\b)"
)
_DENIED = re.compile(
    rf"{_MARKS}[)\].:]*\s+(?:(?:is|was|can|does)(?:n't|\s*not)\b|cannot\b|(?:is|was|must\s+be)\s+(?:\w+ly\s+)?(?:wrong|incorrect|false)\b)",
    re.IGNORECASE,
)
_UNSURE = re.compile(
    r"(?:\bnot\s+(?:think|believe|say|sure)|n't\s+(?:think|believe|say)|\b(?:doubt|if|whether))\b[^.,;\n]*$",
    re.IGNORECASE,
)
_DOUBT = re.compile(r"\b(?:not|if|whether|[A-J][)\]]?,?\s+(?:and|or|nor))\s+(?:option\s+)?$")
_WEAK = re.compile(
    r"(?:^(?:since|because|by|given)\b[^.\n]*,|\b(?:yes|no|sure|ok(?:ay)?|of\s+course)[.!,]|\b(?:choose|chose|chosen|pick|picked|selects?|selected|choosing|picking|selecting|going\s+with|go\s+with|opt(?:ing)?\s+for|say|guess|think|believe"
    r"|conclude|mark|matches|corresponds\s+to|points?\s+to|leads?\s+to|supports|namely|answer|be|therefore|thus|hence|so|only|is|it's|that's|must\s+be|leaves|leaving|left\s+with|consequently|accordingly|clearly|obviously|definitely|certainly|probably|likely)\b"
    rf"|∴|=+>|→|👉|✅)[\s,:*_]*(?:us\s+)?{_HEDGE}",
    re.IGNORECASE,
)
_NAMED = re.compile(r"\(([A-J])\)|\b(?:option|choice)\s+\(?([A-J])\b")
_NEGATED = re.compile(r"\b(?:not|no|neither|nor|never|wrong|incorrect)\b|n't\b", re.IGNORECASE)
_NEAR = 80  # characters before a cue that may deny it
_SHORT = 6  # words of a line that is a statement rather than a step


def stated_letter(completion: str) -> str | None:
    """Return the letter A to J of the option that a completion chooses; None without one, or with several.

    The final answer decides if it begins with a letter, else the last sentence such as "option B is correct" or "I
    choose B", else the lines that begin with a letter, if it is the same one or a short last line."""
    answer = final_answer(completion)
    if answer.mark != "none":
        text = _text(answer.text)
        if letters := _leading(text, cued=True) or _restated(text):
            return _single(letters)
    text = _text(completion)
    if letters := _last_cued(text, _STRONG, small=True) or _last_cued(text, _WEAK, small=False):
        return _single(letters)
    if answer.mark in ("hashes", "box"):
        return None
    lines = [line for line in text.split("\n") if line]
    leading = {letters for line in lines if (letters := _leading(line))}
    if len(leading) > 1 and len(lines[-1].split()) <= _SHORT:
        return _single(_leading(lines[-1]))
    if not leading and lines:
        return _single(_restated(lines[-1]))
    return _single(leading.pop()) if len(leading) == 1 else None


def choice_letter(answer: str) -> str | None:
    """Return the letter A to J that an answer begins with, such as "(B)", "B.", "**B**" or "B) 12 cm"; else None."""
    return _single(_leading(_text(answer)))


def _single(letters: str) -> str | None:
    return letters if len(letters) == 1 else None


def _text(answer: str) -> str:
    """Clean an answer line by line, as the end of a line separates a letter from what follows."""
    return "\n".join(clean(line, sentence=True) for line in answer.strip().split("\n"))


def _leading(text: str, cued: bool = False) -> str:
    """Return the letters that a text begins with: none, one, or two for rivals."""
    start = re.match(r"(?:(?:Q|[Qq]uestion\s*)?\d+[.):]\s+|[^\w(\[{<\"'“*`]|_)*", text)
    return _letters(text[start.end() if start else 0 :], small=True, cued=cued)


def _restated(text: str) -> str:
    """Return the only letter that a statement names in brackets or as an option, if it ends with it."""
    clause = first_clause(text).rstrip(" .")
    named = list(_NAMED.finditer(clause))
    if len(named) != 1 or clause[named[0].end() :].strip(")]") or _NEGATED.search(clause):
        return ""
    apart = r"\s$" if named[0][1] else r"(?:[,;(]|\bi\.?\s?e\.?,?)\s*$"
    return (named[0][1] or named[0][2]) if re.search(apart, clause[: named[0].start()]) else ""


def _last_cued(text: str, cue: re.Pattern[str], small: bool) -> str:
    """Return the letters after the last cue that has some behind it."""
    cues = [one for one in cue.finditer(text) if not _UNSURE.search(text[max(0, one.end() - _NEAR) : one.end()])]
    candidates = [(one.end(), _letters(text[one.end() :], small)) for one in cues]
    if cue is _STRONG:
        before = ((one, text[max(0, one.start() - _NEAR) : one.start()]) for one in _VERDICT.finditer(text))
        verdicts = [one for one, near in before if not (_DOUBT.search(near) or _UNSURE.search(near))]
        candidates += [
            (one.end(), one["letter"]) for one in verdicts if one["letter"].isupper() or text[one.start()] in "(["
        ]
    return max((one for one in candidates if one[1]), default=(0, ""))[1].upper()


def _letters(text: str, small: bool, cued: bool = False) -> str:
    """Return the letter at the start, and a rival directly behind it; after a cue any capital but A and I decides."""
    text = _NOT_BUT.sub("", text, count=1) if _NOT_BUT.match(text) else text
    match = _LETTER.match(text)
    if not match or _DENIED.match(text, match.end()):
        return ""
    letter, rest = match["inside"] or match["bare"], text[match.end() :]
    if match["bare"]:
        if letter.islower() and not (small and _FORM.match(rest)):
            return ""
        if not _FOLLOWS.match(rest) and (letter in "AI" or not (cued or _TITLE_FOLLOWS.match(rest))):
            return ""
    rival = _RIVAL.match(rest)
    other = next((one for one in rival.groups() if one), "").upper() if rival else ""
    return letter.upper() + (other if other != letter.upper() else "")
