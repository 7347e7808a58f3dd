"""A thread that tokenizes, so that long texts block neither the event loop nor the engine."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from parse_infer.text.tokenizer_spec import TokenizerSpec

Result = TypeVar("Result")


class TokenizerThread:
    """One thread with copies of the tokenizers, which are not thread-safe.

    Attributes:
        target, draft: the copies; only functions that `call` runs may use them.
    """

    def __init__(self, target: TokenizerSpec, draft: TokenizerSpec | None) -> None:
        self.target = _copy(target)
        self.draft = None if draft is None else _copy(draft)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="parse-tokenizer")

    async def call(self, function: Callable[[TokenizerThread], Result]) -> Result:
        """Call a function in the thread. A caller that is cancelled takes its function back unless it has begun."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, self)

    def close(self) -> None:
        self._executor.shutdown(wait=False)


def _copy(language: TokenizerSpec) -> TokenizerSpec:
    own = copy.copy(language)
    own.tokenizer = copy.deepcopy(language.tokenizer)
    return own
