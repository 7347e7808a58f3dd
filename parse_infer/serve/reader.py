"""The part of a backend that needs a target's tokenizer only."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from parse_infer.models.language import Language
from parse_infer.models.prompts import Prompt, RenderedPrompt, Verbatim
from parse_infer.serve.backend import Refused

Result = TypeVar("Result")
_NO_FORMS = (
    "tools and structured output are not offered here: the local engine cannot hold an answer to a form, but "
    "`parse-infer serve --backend vllm` has it done by vLLM"
)


class PromptReader:
    """Text to tokens and back, in a thread of its own: a long text stops neither the event loop nor the engine, and a
    copy of the tokenizer is used, since tokenizers are not made for two threads."""

    def __init__(self, target: Language) -> None:
        self.name = target.name
        self.window = target.window
        self._target = target
        self._own = copy.copy(target)
        self._own.tokenizer = copy.deepcopy(target.tokenizer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parse-tokenizer")

    async def encode(self, text: str, special_tokens: bool) -> list[int]:
        return await self._ask(lambda own: own.tokenizer.encode(text, add_special_tokens=special_tokens))

    async def decode(self, ids: Sequence[int]) -> str:
        _check_ids(ids, self._target.n_embeddings)
        return str(await self._ask(lambda own: own.tokenizer.decode(list(ids))))

    async def token_texts(self, ids: Sequence[int]) -> list[str]:
        return await self._ask(lambda own: [str(own.tokenizer.convert_ids_to_tokens(i)) for i in ids])

    async def verbatim(self, ids: Sequence[int]) -> Verbatim:
        _check_ids(ids, self._target.n_embeddings)
        return await self._ask(lambda own: Verbatim.of_tokens(ids, own.tokenizer))

    async def render(self, prompt: Prompt) -> list[int]:
        rendered = RenderedPrompt.of(prompt)
        try:
            ids = await self._ask(lambda own: own.render(rendered))
        except ValueError as error:
            raise Refused(str(error)) from error
        rendered.remember(self._target, ids)
        return ids

    def tokenizer_info(self) -> dict[str, Any]:
        tokenizer = self._target.tokenizer
        special = {
            name: getattr(tokenizer, name, None) for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": len(tokenizer),
            "max_model_len": self.window,
            "chat_template": tokenizer.chat_template,
            **{name: None if token is None else str(token) for name, token in special.items()},
        }

    async def relay(self, fields: dict[str, Any]) -> AsyncGenerator[Any, None]:
        raise Refused(_NO_FORMS)
        yield  # an asynchronous generator, as those of other backends

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    async def _ask(self, question: Callable[[Language], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, question, self._own)


def _check_ids(ids: Sequence[int], n: int) -> None:
    strange = next((token for token in ids if not 0 <= token < n), None)
    if strange is not None:
        raise Refused(f"{strange} is no token of this model, which has tokens 0 to {n - 1}")
