"""The text of a final answer without its decoration."""

from __future__ import annotations

import re

_SIGNS = str.maketrans(
    dict.fromkeys("\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000\t", " ")
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u200e\u200f", "")
    | dict.fromkeys("−–‐‑‒﹣－", "-")
    | dict.fromkeys("“”„«»＂", '"')
    | dict.fromkeys("‘’‚′", "'")
    | {"％": "%", "＄": "$", "，": ",", "．": ".", "：": ":", "（": "(", "）": ")", "＝": "=", "＋": "+"}
    | {chr(0xFF10 + i): str(i) for i in range(10)}
    | {chr(0xFF21 + i): chr(ord("A") + i) for i in range(26)}
)
_FRACTIONS = dict(
    zip(
        "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞",
        ["1/2", "1/3", "2/3", "1/4", "3/4", "1/5", "2/5", "3/5", "4/5", "1/6", "5/6", "1/8", "3/8", "5/8", "7/8"],
        strict=True,
    )
)
_FRACTION = re.compile(f"(\\d?) ?([{''.join(_FRACTIONS)}])")
_TEXT = r"\\(?:text|math|mbox|hbox|operatorname|boldsymbol|bm|emph|underline|textcolor|color|pmb)[a-z]*\*?"
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"\{,\}|,\s*\\!|\\!,", ","),
        (r"(?<!\\)\\[,;:!> ~]|~|\\(?:quad|qquad|enspace|thinspace|hspace\{[^{}]*\})(?![a-z])", " "),
        (r"\\(?:left|right|displaystyle|textstyle|limits|bigl|bigr|Bigl|Bigr|big|Big)(?![a-z])\.?", ""),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"\\frac\s*(\{[^{}]*\})\s*(\d)", r"\\frac\1{\2}"),
        (r"\{\s*([^{}]*?)\s*\\over\s+([^{}]*?)\s*\}", r"\\frac{\1}{\2}"),
        (r"\\textcolor\{[^{}]*\}|\\color\{[^{}]*\}", ""),
        (r"\\(?:rm|bf|it|tt|sf)(?![a-z])", ""),
    )
)
_INNER_TEXT = re.compile(rf"{_TEXT}\s*\{{([^{{}}]*)\}}")
_EMPHASIS = re.compile(r"(?<![\w*_`])(\*{1,3}|_{1,3}|`{1,3})(?=\S)(.+?)(?<=\S)\1(?![\w*_`])")
_THOUSANDS = re.compile(
    r"(?<![\d.,])(?<![(\[{]\s)(?<![(\[{])(\d{1,3})(?:(?:,\d{3})+|(?:,\d{2})+,\d{3}|(?: \d{3})+"
    r"|(?:'\d{3})+|(?:_\d{3})+)(?![\d]|,\d)"
)
_CONTINENTAL = re.compile(r"(?<![\d.,])\d{1,3}(?:\.\d{3})+,\d+(?![\d.,])")
_TAG = re.compile(r"</?(?:b|i|u|p|em|strong|answer|final_answer)>")
_EDGE = " *_`\"'"


def clean(answer: str, sentence: bool = False) -> str:
    """Return an answer as one line: plain spaces and signs, no emphasis, delimiters, quotes, separators or full stop.

    Applied to references and answers alike. `\\text{…}` becomes its content; `$` remains before an amount of money.

    Args:
        sentence: the answer is the end of a sentence, whose exclamation mark is no factorial.
    """
    text = _TAG.sub(" ", answer.translate(_SIGNS))
    text = _CONTINENTAL.sub(lambda match: match[0].replace(".", "").replace(",", "."), text)
    sentence = sentence and not re.search(r"!\s*(?:\$|\\[)\]])|(?:\d|\b[a-z]|\))!\.", text)
    text = _FRACTION.sub(lambda match: f"{match[1]} {_FRACTIONS[match[2]]}".lstrip(), text)
    text = re.sub(r"(\d)⁄(\d)", r"\1/\2", text)
    text = _without_delimiters(text)
    for pattern, plain in _REWRITES:
        text = pattern.sub(plain, text)
    for _ in range(4):  # nested
        text = _INNER_TEXT.sub(r" \1 ", text)
    text = " ".join(text.replace("\\%", "%").split())
    for _ in range(3):
        text = _EMPHASIS.sub(r"\2", text)
    text = _without_end(text, sentence)
    return _THOUSANDS.sub(lambda match: re.sub(r"[ ,'_]", "", match[0]), text)


def _without_delimiters(text: str) -> str:
    r"""Remove `$`, `\(` and `\[` around mathematics."""
    text = re.sub(r"(?<!\\)\\[()\[\]]|\$\$", " ", text).replace("\\$", "\0")
    dollars = list(re.finditer(r"\$", text))
    amounts = [match for match in dollars if re.match(r"\s*[-+]?\.?\d", text[match.end() :])]
    if len(amounts) < len(dollars) or (len(dollars) % 2 == 0 and re.search(r"\$\S+\$\S", text)):
        text = text.replace("$", " ")  # they come in pairs
    return text.replace("\0", "$")


def _without_end(text: str, sentence: bool) -> str:
    end = ".,;:?" + ("!" if sentence else "")
    while text != (text := text.strip(_EDGE).lstrip("=:;, ").rstrip(end + "…").strip()):
        pass
    return re.sub(r"\s+!$|(?<=[A-Za-z]{2})!+$", "", text)
