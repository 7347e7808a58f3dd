"""A server that runs another model than before is noticed, and gets no requests."""

from __future__ import annotations

import pytest

from tests.parse_infer.backends.conftest import soon
from tests.parse_infer.backends.test_answers_over_servers import PROMPT
from tests.parse_infer.language_models import language_model, word_tokenizer

SETTINGS = {"max_new_tokens": 24, "threshold": 0.0}


@pytest.mark.slow
def test_a_server_that_was_offline_at_the_start_is_examined(engine, connect, make_model):
    coordinator, targets, _ = connect(engine, n_targets=2)
    servers = coordinator.backend.servers["target"]
    targets[0].offline = True
    coordinator.backend.run(coordinator.backend.handshake())
    assert [server.healthy for server in servers.members] == [False, True]
    words = word_tokenizer()
    own, targets[0].lm = targets[0].lm, language_model(make_model("llama", seed=15, vocab_size=300), words, "target")
    targets[0].offline = False
    coordinator.generate_target(PROMPT, max_new_tokens=8)
    assert soon(coordinator, lambda: "has other tokens than" in servers.members[0].last_error)
    assert not servers.members[0].healthy
    targets[0].lm = own
    assert soon(coordinator, lambda: servers.members[0].healthy)
    assert any(body.get("prompt_logprobs") for body in targets[0].bodies), "whether it can judge was tried"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda server: server.names.__setitem__(0, "other"), "serves 'other' and not"),
        (lambda server: setattr(server, "root", "/models/other"), "now serves '/models/other', before"),
        (lambda server: setattr(server.lm, "window", 8), "now has a window of 8 tokens"),
    ],
)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_server_with_another_model_is_unused(engine, connect, quick_checks, monkeypatch, change, said, role):
    coordinator, (target,), draft = connect(engine)
    coordinator.generate(PROMPT, **SETTINGS)
    server = target if role == "target" else draft
    (member,) = coordinator.backend.servers[role].members
    monkeypatch.setattr(server.lm, "window", server.lm.window)
    change(server)
    assert soon(coordinator, lambda: not member.healthy)
    assert said in member.last_error
