"""A smaller byte-level BPE inside an existing one: fewer tokens, each of them a token of the base tokenizer.

A draft model with a few thousand words of its target's vocabulary has a small output layer, and each token that it
writes is a token of the target (as EAGLE's d2t). Merges keep their order, and a kept token keeps all the merges that
make it: a word made of kept tokens is then split exactly as by the base tokenizer, because byte-pair encoding always
takes the earliest merge that fits and none of those is missing. Other words fall into smaller kept tokens.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

Merges = Mapping[tuple[str, str], int]


def pruned(base: Tokenizer, counts: Mapping[int, int], specials: Collection[str], vocab_size: int) -> Tokenizer:
    """The tokenizer `base` with its most frequent tokens only; the rest of it stays as it is.

    Args:
        base: a byte-level BPE.
        counts: how often each token id of `base` occurs in the text that the new one is for.
        specials: added tokens of `base` to keep whatever their count; its template of special tokens is kept too.
        vocab_size: upper bound. Bytes and `specials` come first, then tokens by count, each together with the merges
            that make it; one that no longer fits is passed over.

    Returns:
        A tokenizer whose ids have the order of those in `base`.

    Raises:
        ValueError: `base` is no byte-level BPE, or bytes and special tokens alone are more than `vocab_size`.
    """
    description = json.loads(base.to_str())
    model = description["model"]
    if model["type"] != "BPE" or model.get("byte_fallback") or "ByteLevel" not in json.dumps(description["decoder"]):
        raise ValueError("only a byte-level BPE can be pruned: the base tokenizer splits text in another way")
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
        raise ValueError(f"vocab_size is {vocab_size}, but bytes and special tokens alone are {len(kept)}")
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
    """Every token that byte-pair encoding makes on its way from the single characters to `token`."""
    parts, made = list(token), set()
    while len(parts) > 1:
        pairs = list(zip(parts, parts[1:], strict=False))
        best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
        if best not in ranks:
            break  # a token that is looked up as a whole, or never made
        at = pairs.index(best)
        parts[at : at + 2] = ["".join(best)]
        made.add(parts[at])
    return made


def _renumber(post_processor: Any, new_ids: Mapping[str, int]) -> None:
    """Give the special tokens of a template their new ids, in place."""
    if post_processor is None or post_processor["type"] == "ByteLevel":
        return
    if post_processor["type"] == "Sequence":
        for processor in post_processor["processors"]:
            _renumber(processor, new_ids)
    elif post_processor["type"] == "TemplateProcessing":
        for special in post_processor["special_tokens"].values():
            special["ids"] = [new_ids[token] for token in special["tokens"]]
    else:
        raise ValueError(f"a base tokenizer with the post-processor {post_processor['type']} cannot be pruned")


def special_tokens(names: Iterable[str], named: Collection[str], templates: Iterable[str]) -> set[str]:
    """Those of the added tokens `names` that have a role (`named`, for example the end) or stand in a template."""
    texts = list(templates)
    return {name for name in names if name in named or any(name in text for text in texts)}
