"""An engine of tiny random models."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from parse_infer.engine import ParseEngine
from tests.parse_infer.language_models import (
    cycling,
    language_model,
    printable,
    resembling,
    short_question,
    thinking_tokenizer,
    word_tokenizer,
)


@pytest.fixture
def make_engine(make_model, tokenizer) -> Callable[..., ParseEngine]:
    """`make_engine(noise=…)`: a random target that judges segments, with a draft model that resembles the target."""

    def make(noise: float = 0.1, draft_window: int = 2048, **options) -> ParseEngine:
        model = printable(make_model("llama"), tokenizer)
        draft = printable(resembling(make_model, model, noise), tokenizer)
        draft.config.max_position_embeddings = draft_window
        target_model, draft_model = (
            language_model(model, tokenizer, "target"),
            language_model(draft, tokenizer, "draft"),
        )
        return ParseEngine.from_models(target_model, draft_model, short_question(model, tokenizer), **options)

    return make


@pytest.fixture
def make_thinking_engine(make_model, tokenizer, random_adapter) -> Callable[..., ParseEngine]:
    """`make_thinking_engine(target, draft)`: models that answer "?" with these texts again and again, and a judge of
    tokens. `opened`: see `thinking_tokenizer`."""

    def make(target: str, draft: str, opened: bool = True) -> ParseEngine:
        own = thinking_tokenizer(tokenizer, opened)
        pair = [
            language_model(cycling(make_model("llama", vocab_size=264), own, text, "?"), own, name)
            for name, text in (("target", target), ("draft", draft))
        ]
        return ParseEngine.from_models(*pair, random_adapter(pair[0].model))

    return make


@pytest.fixture
def mixed_engine(make_engine, make_model) -> ParseEngine:
    """The target of `engine` with a draft model that has other tokens and another chat template."""
    words = word_tokenizer()
    draft = printable(make_model("llama", seed=15, vocab_size=300, eos_token_id=0), words)
    engine = make_engine()
    return ParseEngine.from_models(engine.target, language_model(draft, words, "draft"), engine.backend.judge)


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the internet at its import
    import litellm

    return litellm
