"""lm-eval's own clients against the server: the answers, and so the accuracy, of the engine itself."""

from __future__ import annotations

from typing import Any

import pytest

from parse_infer.text.prompts import Verbatim
from tests.parse_infer.lm_eval_tasks import QUESTIONS, own_tasks, texts, write_apples

from lm_eval import simple_evaluate  # isort: skip  (after the skip where lm-eval is missing)

pytest.importorskip("aiohttp", reason='lm-eval\'s clients are not installed: pip install "lm-eval[api]"')


def evaluate(client: str, path: str, served: Any, folder: Any, chat: bool, **options: Any) -> Any:
    return simple_evaluate(
        client,
        {"model": "tiny", "base_url": served.url + path, **options},
        ["apples"],
        task_manager=own_tasks(folder),
        apply_chat_template=chat,
    )


def expected(served: Any, stop: str, chat: bool) -> list[str]:
    prompts = [question if chat else Verbatim(question) for question in QUESTIONS]
    return [answer.text.split(stop)[0] for answer in served.engine.generate(prompts, max_new_tokens=24, stop=stop)]


@pytest.mark.parametrize(
    ("client", "path", "options"),
    [
        ("local-completions", "/v1/completions", {}),  # token ids, by the server's own tokenizer
        ("local-completions", "/v1/completions", {"batch_size": 2, "num_concurrent": 2}),
        ("local-completions", "/v1/completions", {"tokenizer_backend": None, "tokenized_requests": False}),
        ("local-chat-completions", "/v1/chat/completions", {}),
        ("local-chat-completions", "/v1/chat/completions", {"num_concurrent": 3}),
    ],
)
@pytest.mark.slow
def test_lm_evals_clients_get_the_engines_answers(client, path, options, served, tmp_path):
    chat = "chat" in client
    stop = expected(served, "\x00", chat)[0][8:10]
    own = expected(served, stop, chat)
    right = [text if i % 2 else "something else" for i, text in enumerate(own)]
    results = evaluate(client, path, served, write_apples(tmp_path, right, [stop]), chat, **options)
    assert texts(results) == own and len(own[0]) <= 8
    assert results["results"]["apples"]["exact_match,none"] == pytest.approx(2 / 5)
