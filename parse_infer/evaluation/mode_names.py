"""The modes of a benchmark by name: which there are, what each needs, and what each is called where people read it.

A name is a key of `MODES`; sizes stand behind "assisted" ("assisted:tokens=8:confidence=0.3"), token drafters behind
the modes of `GUIDED` ("target+draft:tokens=12", "parse+eagle3", "parse+draft+lookup"; the last one speeds up the
draft model), what follows a rejected draft behind the PARSE modes ("parse:hand_back", else as the benchmark's settings
say), or that the target may answer alone ("parse:adaptive"), the threshold of a sweep behind "@" ("parse@0.5").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import get_args

from parse_infer.evaluation.assisted import AssistantSettings
from parse_infer.settings import Resume
from parse_infer.speculation.registry import check_token_drafter, split_name
from parse_infer.suggest import suggestion

MODES = {
    "target": "the target alone",
    "draft": "the draft model alone",
    "parse": "PARSE as it comes: trained adapter, the draft model guesses what the target writes",
    "parse-zero-shot": "PARSE with the same guesses, the target itself asked whether each prefix is right",
    "sequential": "one segment at a time, each verified before the next (SpecReason), PARSE's judge and guesses",
    "assisted": "transformers' assisted generation with the same draft model",
    "transformers": "the target alone in transformers' own decode loop",
}
GUIDED = {"target": 1, "parse": 2}  # the most token drafters behind a mode
ADAPTIVE = "adaptive"
NOBODY = "none"  # parse+none: what the target writes is guessed by nobody but the rejected draft
SPECULATION = "target+draft"
DEFAULT_MODES = ("target", "draft", SPECULATION, "assisted", "sequential", "parse", "parse-zero-shot")
SWEPT = ("parse", "parse-zero-shot")  # modes that a sweep runs at every threshold
NEEDS_ADAPTER = ("parse", "sequential")
DRAFTING = ("parse", "parse-zero-shot", "sequential", "assisted")  # modes that accept or reject a draft

_TITLES = {
    "target": "target alone",
    "draft": "draft model alone",
    "parse": "**PARSE**",
    "parse-zero-shot": "PARSE, zero-shot judge",
    "sequential": "sequential verification (SpecReason style)",
    "assisted": "transformers' assisted generation",
    "transformers": "target alone, transformers' loop",
}


def base_of(name: str) -> str:
    """The key of `MODES` that a name begins with."""
    return re.split("[@+:]", name)[0]


def resume_of(name: str) -> Resume | None:
    """What follows a rejected draft, where the name says so."""
    said = _way(name)
    return said if said in get_args(Resume) else None  # type: ignore[return-value]


def is_adaptive(name: str) -> bool:
    """Whether the target answers alone while that is measured to be faster."""
    return _way(name) == ADAPTIVE


def _way(name: str) -> str:
    """What stands behind the ":" of a PARSE mode and is known; else nothing."""
    base, _, said = re.split("[@+]", name)[0].partition(":")
    return said if base in SWEPT and said in (*get_args(Resume), ADAPTIVE) else ""


def drafters_of(name: str) -> list[str]:
    """The token drafters behind a name."""
    return name.split("+")[1:]


def check_modes(names: Iterable[str]) -> tuple[str, ...]:
    """The names without repetitions; ValueError for one that is no mode, with the closest one, and for none at all."""
    chosen = tuple(dict.fromkeys(name.strip() for name in names if name.strip()))
    for name in chosen:
        base, drafters = name.split("+")[0], drafters_of(name)
        base = base.removesuffix(f":{_way(name)}")
        if 0 < len(drafters) <= GUIDED.get(base, 0) and all(drafters):
            continue
        if name.startswith("assisted:"):
            AssistantSettings.parse(name)
        elif drafters or base not in MODES:
            known = [*MODES, *(f"{mode}:{way}" for mode in SWEPT for way in (*get_args(Resume), ADAPTIVE))]
            raise ValueError(f"unknown mode {name!r}; {suggestion(name, known)}")
    if not chosen:
        raise ValueError(f"no mode to run; modes: {', '.join(MODES)}")
    return chosen


def check_guides(names: Sequence[str], target: str, draft: str | None) -> None:
    """Raises ValueError for a token drafter that these models (by name) cannot have; runs before they are loaded."""
    for name in names:
        for place, drafter in enumerate(drafters_of(name)):
            if (base_of(name), place, drafter) == ("parse", 0, NOBODY):
                continue
            model, has_draft = (target, draft is not None) if place == 0 else (str(draft), False)
            check_token_drafter(f"the token drafter of mode {name!r}", drafter, model, has_draft)


def needs(names: Sequence[str]) -> tuple[bool, bool]:
    """Whether these modes need a draft model, and whether they need an adapter."""
    bases = {base_of(name) for name in names}
    guides = {split_name(drafter)[0] for name in names for drafter in drafters_of(name)}
    return bool(bases & {*DRAFTING, "draft"} or "draft" in guides), bool(bases & {*NEEDS_ADAPTER})


def describe(name: str) -> str:
    """What a mode is, in a few words."""
    base, drafters = base_of(name), drafters_of(name)
    if not drafters:
        return ", ".join([MODES[base], *name.split(":")[1:]])
    parts = ["the target" if base == "target" else "PARSE with the trained adapter"]
    parts += [_way(name)] if _way(name) else []
    for owner, drafter in zip(("the target's", "the draft model's"), drafters, strict=False):
        parts.append(f"{owner} tokens guessed by {'nobody' if drafter == NOBODY else drafter}")
    return ", ".join(parts)


def title(name: str) -> str:
    """What a mode is called in a table of the documentation; Markdown."""
    base, drafters = base_of(name), [_in_words(drafter) for drafter in drafters_of(name)]
    if base == "target" and drafters:
        return f"target + {drafters[0]}, lossless speculation"
    if drafters:
        guesses = [f"{drafter} guesses for {who}" for drafter, who in zip(drafters, _WHO, strict=False)]
        return ", ".join([f"PARSE{_bracket(_way_in_words(name))}", *guesses])
    sizes = name.split(":")[1:] if base == "assisted" else _way_in_words(name)
    return f"{_TITLES[base]}{_bracket(sizes)}"


_WHO = ("the target", "the draft model")


def _way_in_words(name: str) -> list[str]:
    return [f"resume={resume_of(name)}"] if resume_of(name) else [ADAPTIVE] if is_adaptive(name) else []


def _in_words(drafter: str) -> str:
    kind, *sizes = drafter.split(":")
    names = {"draft": "draft model", NOBODY: "nobody"}
    return f"{names.get(kind, kind)}{_bracket(sizes)}"


def _bracket(sizes: Sequence[str]) -> str:
    return f" ({', '.join(size.replace('=', ' ') for size in sizes)})" if sizes else ""
