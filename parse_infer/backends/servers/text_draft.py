"""Drafts as text, from any OpenAI-compatible server: llama.cpp's, Ollama, a remote API."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from parse_infer.backends.pool.client import RequestRejected, TransientServerError
from parse_infer.backends.pool.health import Replica
from parse_infer.backends.pool.replicas import ReplicaPool
from parse_infer.backends.servers.dialects.dialect import COMPLETIONS
from parse_infer.drafters.cross_tokenizer import without_last_word
from parse_infer.drafters.source import Draft
from parse_infer.errors import ServerError
from parse_infer.settings.sampling import Sampling, seed_of
from parse_infer.text.detokenizer import Detokenizer, encode_continuation
from parse_infer.text.prompts import (
    Chat,
    Prompt,
    RenderedPrompt,
    Verbatim,
    content_of,
    left_context,
    open_turn,
    prompt_text,
)
from parse_infer.text.tokenizer_spec import TokenizerSpec

CHAT = "/v1/chat/completions"
_LOGPROBS: dict[str, dict[str, Any]] = {COMPLETIONS: {"logprobs": 1}, CHAT: {"logprobs": True, "top_logprobs": 1}}
_PLAIN_TOKENS = 3  # of the prompt "1", at most; a chat template adds more
_UNSUPPORTED = (500, 501)  # how some servers refuse a field
_MALFORMED = (LookupError, TypeError, AttributeError, ValueError)
Piece = tuple[str, list[tuple[int, float]], str | None]
"""Text, place and probability of each of its tokens, and why the text ends; see `read_piece`."""


@dataclass(frozen=True)
class TextApi:
    """How a draft server takes prompts and returns text.

    Attributes:
        path: `COMPLETIONS`, or `CHAT`, which cannot continue an answer.
        logprobs: it returns log-probabilities of its tokens.
    """

    path: str
    logprobs: bool

    @property
    def ends_blocks(self) -> bool:
        """Whether "auto" ends blocks by the draft model's confidence: the server lists it, and can continue."""
        return self.logprobs and self.path != CHAT


async def find_text_api(servers: ReplicaPool, server: Replica, draft: TokenizerSpec | None) -> TextApi | None:
    """Find out how a draft server takes prompts; None: as token ids of `draft`, which it returns too.

    Raises:
        ValueError: the server returns neither token ids nor text, or changes the prompt.
        TransientServerError: the server does not answer.
    """
    trials: list[tuple[str, dict[str, Any]]] = []
    if draft is not None:
        ids = draft.tokenizer.encode("1", add_special_tokens=False)
        trials.append((COMPLETIONS, {"prompt": ids, "return_token_ids": True}))
    for path, prompt in ((COMPLETIONS, {"prompt": "1"}), (CHAT, {"messages": [{"role": "user", "content": "1"}]})):
        trials += [(path, prompt | _LOGPROBS[path]), (path, prompt)]
    refusals: dict[str, str] = {}
    for path, fields in trials:
        try:
            response = await servers.ask_one(server, {"max_tokens": 1, "temperature": 0, **fields}, path)
            if "return_token_ids" in fields:
                if response["choices"][0].get("token_ids"):
                    return None
            elif path == COMPLETIONS and ((response.get("usage") or {}).get("prompt_tokens") or 0) > _PLAIN_TOKENS:
                refusals[path] = "puts a prompt into a chat template"  # such as Ollama's
            else:
                return TextApi(path, bool(read_piece(response)[1]))
        except RequestRejected as error:
            if error.status in (401, 403):
                raise
            refusals[path] = error.sentence
        except TransientServerError as error:
            if error.status not in _UNSUPPORTED:
                raise
            refusals[path] = str(error)
        except _MALFORMED:
            refusals[path] = "has another format"
    why = "; ".join(f"{path}: {reason}" for path, reason in refusals.items())
    raise ServerError(
        f"the draft server {server.url} returns neither token ids nor text: give an OpenAI-compatible server ({why})"
    )


def read_piece(response: Any) -> Piece:
    """Read a response, or a chunk of a stream. Raises one of `_MALFORMED` for another format than OpenAI's.

    Returns:
        The text, for each of its tokens the character where it begins and its probability (empty without
        log-probabilities), and why the text ends here, or None.
    """
    choice = response["choices"][0]
    text = choice["text"] if "text" in choice else choice.get("delta", choice.get("message")).get("content")
    text = "" if text is None else text
    data, listed = text.encode(), choice.get("logprobs") or {}
    try:
        if "content" in listed:  # of a chat, and of llama.cpp's server
            entries = listed["content"]
            sizes = [len(one["token"].encode() if one.get("bytes") is None else one["bytes"]) for one in entries]
            places = [len(data[:n].decode(errors="ignore")) for n in accumulate(sizes[:-1], initial=0)]
            values = [one["logprob"] for one in entries]
        else:
            values, offsets = listed["token_logprobs"], listed["text_offset"]
            places = [offset - offsets[0] for offset in offsets]
        tokens = [(place, math.exp(min(0.0, value))) for place, value in zip(places, values, strict=True)]
    except _MALFORMED:
        tokens = []
    return text, tokens, choice.get("finish_reason")


def read_chunk(chunk: Any, url: str) -> Piece:
    """Read a chunk of a stream as `read_piece` does. Raise TransientServerError for another format than OpenAI's."""
    try:
        return read_piece(chunk) if chunk["choices"] else ("", [], None)  # the last: usage
    except _MALFORMED as error:
        raise TransientServerError(f"{url} sent no completion") from error


class TextDraft:
    """One answer over a draft server that takes and returns text, like `CrossTokenizerDraft`.

    Args:
        draft: its chat template renders the prompt; without one the target's does.
        stop: a draft may end at the first of these strings.
        window: context window of the server in tokens; 0: unknown. The answer is counted in the target's tokens.
    """

    def __init__(
        self,
        api: TextApi,
        draft: TokenizerSpec | None,
        target: TokenizerSpec,
        prompt: Prompt,
        stop: Sequence[str],
        window: int = 0,
    ) -> None:
        prompt = RenderedPrompt.of(prompt).as_text
        self.api, self.target, self.stop = api, target, stop
        self.before = open_turn(prompt, target.tokenizer)
        self.left = left_context(prompt, target.encode(prompt), target.tokenizer)
        own = api.path != CHAT and draft is not None and draft.tokenizer.chat_template is not None
        renders = draft if own and draft is not None else target
        self.chat = _chat(prompt, target) if api.path == CHAT else {}
        ids = renders.encode(prompt)
        self.prompt = prompt_text(renders.tokenizer, ids) if api.path != CHAT else ""
        self._free_tokens = window - len(ids) if window else sys.maxsize

    def begin(self, answer_ids: Sequence[int], max_new_tokens: int) -> TextStream | None:
        """Start a draft that continues the answer; None if the server cannot continue."""
        answer = Detokenizer(self.target.tokenizer, self.left)
        answer.add(answer_ids)
        ended = bool(answer_ids) and answer_ids[-1] in self.target.eos_ids
        limit = min(max_new_tokens, self._free_tokens - len(answer_ids))
        if limit < 1 or ended or not answer.complete or (self.api.path == CHAT and (answer_ids or not self.chat)):
            return None
        return TextStream(self, answer.text, limit, begun=bool(answer_ids))


class TextStream:
    """A draft in progress, as text.

    Attributes:
        n: number of tokens so far, or of pieces if the server does not list tokens.
        confidences: the draft model's probability of each token; empty if the server does not list them.
    """

    def __init__(self, source: TextDraft, answer: str, max_new_tokens: int, begun: bool) -> None:
        self.n, self.confidences = 0, list[float]()
        self._source, self._answer, self._max_new_tokens, self._begun = source, answer, max_new_tokens, begun
        self._text, self._places, self._reason = "", list[int](), ""

    def body(self, sampling: Sampling, round: int, logprobs: bool) -> dict[str, Any]:
        """Return the request, with parameters of OpenAI's API alone, but for a `top_k` of sampled drafts."""
        source = self._source
        body: dict[str, Any] = {"max_tokens": self._max_new_tokens, "stream": True}
        body |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        if sampling.top_k and not sampling.greedy:
            body["top_k"] = sampling.top_k
        if sampling.seed is not None and not sampling.greedy:
            body["seed"] = seed_of(sampling.seed, "draft", round) % 2**31
        body |= _LOGPROBS[source.api.path] if logprobs else {}
        return body | (source.chat or {"prompt": source.prompt + self._answer})

    def add(self, piece: Piece) -> None:
        """Add what `read_chunk` read."""
        text, tokens, reason = piece
        self._places += [len(self._text) + place for place, _ in tokens]
        self.confidences += [probability for _, probability in tokens]
        self._text, self._reason = self._text + text, reason or self._reason
        self.n += len(tokens) or bool(text)

    @property
    def is_finished(self) -> bool:
        """Whether the text has a stop string; the engine finds the exact place."""
        return any(string in self._text for string in self._source.stop)

    def draft(self) -> Draft:
        """Return the draft in the target's tokens, without a last word that may go on."""
        target, before = self._source.target, self._source.before + self._answer or "\n" * self._begun
        ended, text = self._reason == "stop", self._text
        if not ended and not self.is_finished:
            text = without_last_word(text.rstrip("\ufffd"))  # the budget may end inside a character
        ids = encode_continuation(target.tokenizer, before, text)
        if ids and ended and target.end_token is not None:
            return Draft([*ids, target.end_token], finished=True)
        return Draft(ids)

    def confidences_of(self, ids: Sequence[int]) -> list[float]:
        """Return the confidence of each of the draft's tokens: of the server's token at its first character."""
        text, confidences = Detokenizer(self._source.target.tokenizer), list[float]()
        for token in ids:
            confidences.append(self.confidences[max(0, bisect_right(self._places, len(text.text)) - 1)])
            text.add([token])
        return confidences


def _chat(prompt: RenderedPrompt, target: TokenizerSpec) -> dict[str, Any]:
    """The prompt's fields in a chat request; empty if the prompt is no chat, or continues the assistant's turn."""
    content, own = content_of(prompt), prompt.prompt
    if isinstance(content, str) and target.tokenizer.chat_template is not None:
        content = [{"role": "user", "content": content}]
    if isinstance(content, (str, Verbatim)) or content[-1]["role"] == "assistant":
        return {}
    options = {**target.template_options, **(own.template_options if isinstance(own, Chat) else {})}
    return {"messages": [dict(one) for one in content]} | ({"chat_template_kwargs": options} if options else {})
