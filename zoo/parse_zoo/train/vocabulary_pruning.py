"""Pruning of a byte-level BPE to a subset of its tokens.

A draft model with a few thousand tokens of its target's vocabulary has a small output layer, and each of its tokens is
a token of the target (as with EAGLE's d2t). Merges keep their order, and a kept token keeps all merges that produce
it. Byte-pair encoding always applies the earliest matching merge, so a word of kept tokens is split exactly as by the
base tokenizer. Other words are split into smaller kept tokens.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from parse_infer.errors import ParseError

Merges = Mapping[tuple[str, str], int]


def pruned(base: Tokenizer, counts: Mapping[int, int], specials: Collection[str], vocab_size: int) -> Tokenizer:
    """Return `base` with its most frequent tokens only; all other settings are unchanged.

    Args:
        base: a byte-level BPE.
        counts: number of occurrences of each token id of `base` in the training text.
        specials: added tokens of `base` to keep at any count, in addition to the template's special tokens.
        vocab_size: upper bound. Bytes and `specials` come first, then tokens by count, each with the tokens of its
            merges; a token that does not fit is skipped.

    Returns:
        A tokenizer whose ids have the same order as in `base`.

    Raises:
        ValueError: `base` is not a byte-level BPE, or bytes and special tokens exceed `vocab_size`.
    """
    description = json.loads(base.to_str())
    model = description["model"]
    if model["type"] != "BPE" or model.get("byte_fallback") or "ByteLevel" not in json.dumps(description["decoder"]):
        raise ParseError("the base tokenizer is not a byte-level BPE, so it cannot be pruned")
    vocabulary: dict[str, int] = model["vocab"]
    pairs = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    ranks = {pair: rank for rank, pair in enumerate(pairs)}
    in_template = json.dumps(description["post_processor"])
    added = {
        token["content"]: token["id"]
        for token in description["added_tokens"]
        if token["content"] in specials or json.dumps(token["content"]) in in_template
    }
    bytes_ = {byte for byte in pre_tokenizers.ByteLevel.alphabet() if byte in vocabulary}
    kept = bytes_ | set(added)
    if len(kept) > vocab_size:
        raise ParseError(f"vocab_size is {vocab_size}, but bytes and special tokens alone are {len(kept)}")
    all_added = {token["id"] for token in description["added_tokens"]}
    by_id = {id_: token for token, id_ in vocabulary.items() if id_ not in all_added}
    for id_ in sorted((i for i in counts if i in by_id), key=lambda i: (-counts[i], i)):
        parts = derivation(by_id[id_], ranks) | {by_id[id_]}
        if len(kept | parts) <= vocab_size:
            kept |= parts
    ids = vocabulary | added
    new_ids = {token: new for new, token in enumerate(sorted(kept, key=lambda token: ids[token]))}
    model["vocab"] = {token: new_ids[token] for token in new_ids if token in vocabulary}
    model["merges"] = [list(pair) for pair in pairs if {*pair, "".join(pair)} <= kept]
    description["added_tokens"] = [
        token | {"id": new_ids[token["content"]]} for token in description["added_tokens"] if token["content"] in added
    ]
    _renumber(description["post_processor"], new_ids)
    return Tokenizer.from_str(json.dumps(description))


def derivation(token: str, ranks: Merges) -> set[str]:
    """Return every token that byte-pair encoding produces from the single characters up to `token`."""
    parts, made = list(token), set()
    while len(parts) > 1:
        pairs = list(pairwise(parts))
        best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
        if best not in ranks:
            break  # the tokenizer looks up this token as a whole, or never produces it
        at = pairs.index(best)
        parts[at : at + 2] = ["".join(best)]
        made.add(parts[at])
    return made


def _renumber(post_processor: Any, new_ids: Mapping[str, int]) -> None:
    """Replace the ids of a template's special tokens, in place."""
    if post_processor is None or post_processor["type"] == "ByteLevel":
        return
    if post_processor["type"] == "Sequence":
        for processor in post_processor["processors"]:
            _renumber(processor, new_ids)
    elif post_processor["type"] == "TemplateProcessing":
        for special in post_processor["special_tokens"].values():
            special["ids"] = [new_ids[token] for token in special["tokens"]]
    else:
        raise ParseError(f"a base tokenizer with the post-processor {post_processor['type']} cannot be pruned")


def special_tokens(names: Iterable[str], named: Collection[str], templates: Iterable[str]) -> set[str]:
    """Return the added tokens in `names` that have a role (`named`, such as the end token) or occur in a template."""
    texts = list(templates)
    return {name for name in names if name in named or any(name in text for text in texts)}
