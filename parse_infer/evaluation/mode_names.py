"""Names of benchmark modes: validation, required models and display texts.

A name begins with a key of `MODES`. These suffixes may follow:
- sizes of "assisted": "assisted:tokens=8:confidence=0.3";
- the token drafter of the modes in `SPECULATING`: "target+draft:tokens=12", "parse+FOLDER";
- options of the judge of the modes in `RULE_MODES`: "parse-fly:entropy=0.5:window=4";
- a length of blocks, "adaptive" or "stream" for PARSE: "parse:whole", "parse:32" (default: the benchmark's setting),
  "parse:adaptive", "parse:stream", "parse-fly:window=4:32";
- the threshold of a sweep: "parse@0.5".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from parse_infer.errors import ParseError
from parse_infer.evaluation.assisted import AssistantSettings
from parse_infer.judge.registry import RULES, find_rule
from parse_infer.settings.generation import BlockTokens
from parse_infer.suggest import suggestion
from parse_infer.token_drafters.registry import check_token_drafter, split_name

RULE_MODES = {f"parse-{name.replace('_', '-')}": name for name in RULES}
"""Modes with a judge without training, and its name in the registry."""
MODES = {
    "target": "the target alone",
    "draft": "the draft model alone",
    "parse": "PARSE with its defaults: trained adapter, the draft model as token drafter",
    **{mode: f"PARSE without training: {RULES[name].summary}" for mode, name in RULE_MODES.items()},
    "sequential": "verifies each segment before drafting the next (SpecReason), with PARSE's judge and token drafter",
    "assisted": "transformers' assisted generation with the same draft model",
    "transformers": "the target alone in transformers' own decode loop",
}
SPECULATING = ("target", "parse")  # modes that take a token drafter
ADAPTIVE = "adaptive"
STREAM = "stream"
LENGTHS = ("auto", "whole")  # of blocks, besides numbers
NO_DRAFTER = "none"  # parse+none: no token drafter for the target, except the rejected draft
SPECULATION = "target+draft"
DEFAULT_MODES = ("target", "draft", SPECULATION, "assisted", "sequential", "parse", "parse-min-p", "parse-zero-shot")
SWEPT = ("parse", *RULE_MODES)  # modes that a sweep runs at every threshold
NEEDS_ADAPTER = ("parse", "sequential")
DRAFTING = (*SWEPT, "sequential", "assisted")  # modes that accept or reject a draft


def lossless_of(modes: Collection[str]) -> str | None:
    """The first of these modes that is lossless speculation with the draft model, the one of adaptive sizes before
    others."""
    return SPECULATION if SPECULATION in modes else next((m for m in modes if m.split(":")[0] == SPECULATION), None)


def base_of(name: str) -> str:
    """The mode's key in `MODES`."""
    return re.split("[@+:]", name)[0]


def block_tokens_of(name: str) -> BlockTokens | None:
    """The length of blocks in a name, if any."""
    said = _variant(name)
    return int(said) if said.isdecimal() else said if said in LENGTHS else None  # type: ignore[return-value]


def is_adaptive(name: str) -> bool:
    """Whether the target answers alone while that measures faster."""
    return _variant(name) == ADAPTIVE


def is_stream(name: str) -> bool:
    """Whether the answer is streamed: its first block is short."""
    return _variant(name) == STREAM


def _variant(name: str) -> str:
    """The known suffix after ":" of a PARSE mode, or ""."""
    base, *sizes = _sizes(name)
    said = sizes[-1] if sizes else ""
    return said if base in SWEPT and (said in (*LENGTHS, ADAPTIVE, STREAM) or (said.isdecimal() and int(said))) else ""


def judge_of(name: str) -> str | None:
    """The judge without training of a mode, as `find_rule` reads it; None: the adapter or none."""
    base, *sizes = _sizes(name)
    if base not in RULE_MODES:
        return None
    return f"{RULE_MODES[base]}:{','.join(size for size in sizes if size != _variant(name))}"


def _sizes(name: str) -> list[str]:
    """The mode's key in `MODES`, then the parts after each ":", without threshold and token drafter."""
    return re.split("[@+]", name)[0].split(":")


def drafter_of(name: str) -> str | None:
    """The token drafter in a name, if any."""
    return name.partition("+")[2] or None


def check_modes(names: Iterable[str]) -> tuple[str, ...]:
    """Drop repetitions.

    Raises ValueError for an unknown mode or token drafter, with the closest known name, or for no mode.
    """
    chosen = tuple(dict.fromkeys(name.strip() for name in names if name.strip()))
    for name in chosen:
        base, plus, drafter = name.partition("+")
        base = base.removesuffix(f":{_variant(name)}")
        if base in SPECULATING and drafter and "+" not in drafter:
            if (base, drafter) != ("parse", NO_DRAFTER):
                check_token_drafter(f"the token drafter of mode {name!r}", drafter, has_draft=True)
            continue
        if name.startswith("assisted:"):
            AssistantSettings.parse(name)
        elif not plus and "=" in name and base_of(name) in RULE_MODES:
            find_rule(judge_of(name))
        elif plus or base not in MODES:
            known = [*MODES, *(f"{mode}:{variant}" for mode in SWEPT for variant in (*LENGTHS, ADAPTIVE, STREAM))]
            raise ParseError(f"unknown mode {name!r}; {suggestion(name, known)}")
    if not chosen:
        raise ParseError(f"no mode to run; modes: {', '.join(MODES)}")
    return chosen


def needs(names: Sequence[str]) -> tuple[bool, bool]:
    """Whether these modes need a draft model, and an adapter."""
    bases = {base_of(name) for name in names}
    drafters = {split_name(drafter_of(name) or "")[0] for name in names}
    return bool(bases & {*DRAFTING, "draft"} or "draft" in drafters), bool(bases & {*NEEDS_ADAPTER})


def describe_mode(name: str) -> str:
    """Describe a mode in one line."""
    base, drafter = base_of(name), drafter_of(name)
    if drafter is None:
        return ", ".join([MODES[base], *name.split(":")[1:]])
    parts = ["the target" if base == "target" else "PARSE with the trained adapter"]
    parts += [_variant(name)] if _variant(name) else []
    return ", ".join([*parts, _describe_drafter(drafter)])


def _describe_drafter(drafter: str) -> str:
    return "no token drafter" if drafter == NO_DRAFTER else f"{drafter} proposes for the target"
