"""API keys go to the servers that they were given for, and to no others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from aiohttp import web

from data_tools.labels.build_config import BuildConfig
from data_tools.labels.served.servers import CompletionServers
from parse_infer.backends.pool.client import Client, RequestRejected
from parse_infer.backends.servers.api_keys import draft_key, find_key
from parse_infer.cli.app import main
from parse_infer.engine import ParseEngine
from parse_infer.models.loading import load_language_model
from tests.parse_infer.backends.fake_server import FakeServer, serving, serving_app

HERE = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch) -> None:
    for name in ("VLLM_API_KEY", "PARSE_DRAFT_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def servers() -> Iterator[tuple[FakeServer, FakeServer]]:
    """The embedded target and draft model."""
    with (
        serving(FakeServer(load_language_model("zoo:target", role="target"))) as target,
        serving(FakeServer(load_language_model("zoo:draft", role="draft"))) as draft,
    ):
        yield target, draft


@pytest.mark.parametrize("own", [None, "of-draft"])
@pytest.mark.parametrize("by", ["option", "variable", "argument"])
@pytest.mark.slow
def test_each_model_gets_its_own_key(servers, own, by, monkeypatch, capsys):
    target, draft = servers
    target.key, draft.key = "of-target", own
    urls = ["--target-url", target.url, "--draft-url", f"{draft.url}/v1"]
    command = ["generate", "Tom has 5 apples.", "--backend", "vllm", *urls, "--max-new-tokens", "8"]
    if by == "argument":
        options = {"target_url": target.url, "draft_url": draft.url, "api_key": "of-target", "draft_api_key": own}
        with ParseEngine.from_pretrained("zoo:target", "zoo:draft", "zoo:adapter", backend="vllm", **options) as made:
            assert made.generate("Tom has 5 apples.", max_new_tokens=8).text
    elif by == "variable":
        monkeypatch.setenv("VLLM_API_KEY", "of-target\n")
        monkeypatch.setenv("PARSE_DRAFT_API_KEY", own or "")
        assert main(command) == 0, capsys.readouterr().err
    else:
        options = ["--server-key", "of-target", *(["--draft-key", own] if own else [])]
        assert main([*command, *options]) == 0, capsys.readouterr().err
    assert draft.bodies and set(draft.given_keys) == {None if own is None else f"Bearer {own}"}
    assert target.bodies and set(target.given_keys) == {"Bearer of-target"}


@pytest.mark.slow
def test_a_draft_server_that_needs_a_key_is_named_with_its_option(servers, capsys):
    target, draft = servers
    draft.key = "of-draft"
    urls = ["--target-url", target.url, "--draft-url", draft.url]
    assert main(["generate", "Hi", "--backend", "vllm", "--server-key", "of-target", *urls]) == 2
    said = capsys.readouterr().err
    assert f"{draft.url}/v1/models" in said and "with --draft-key" in said and said.count("\n") == 1
    assert "of-target" not in said and set(draft.given_keys) == {None}


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("method", ["get", "post", "text"])
def test_a_redirect_takes_neither_key_nor_request_elsewhere(engine, status, method):
    with serving(FakeServer(engine.target)) as other:

        async def redirect(request: web.Request) -> web.Response:
            return web.Response(status=status, headers={"Location": f"{other.url}{request.path}"})

        async def ask(url: str) -> None:
            client = Client("secret")
            try:
                arguments = ({"prompt": [1]},) if method == "post" else ()
                await getattr(client, method)(f"{url}/v1/models", *arguments)
            finally:
                await client.close()

        with (
            serving_app([web.route("*", "/{path:.*}", redirect)]) as url,
            pytest.raises(RequestRejected, match=f"redirects to {other.url}/v1/models: give the address behind it"),
        ):
            asyncio.run(ask(url))
    assert not other.clients


@pytest.mark.parametrize(
    ("drafts", "targets", "reuses"),
    [
        (["http://a:1"], ["http://a:1"], True),
        (["https://A/v1"], ["https://a:443/"], True),
        (["http://a:1", "http://b:1"], ["http://b:1", "http://a:1/v1"], True),
        (["http://a:2"], ["http://a:1"], False),
        (["https://a"], ["http://a"], False),
        (["http://a.b"], ["http://a"], False),
        (["http://a:1", "http://c:1"], ["http://a:1", "http://b:1"], False),
        (["http://a:1@b"], ["http://a:1"], False),
    ],
)
def test_the_targets_key_goes_to_its_own_address_only(drafts, targets, reuses):
    assert draft_key(None, "key", drafts, targets) == ("key" if reuses else None)
    assert draft_key("own", "key", drafts, targets) == "own"
    assert draft_key(None, None, drafts, targets) is None


def test_a_started_draft_server_gets_a_random_key_if_the_target_has_one():
    keys = {draft_key(None, "key", [], [HERE]) for _ in range(2)}
    assert len(keys) == 2 and "key" not in keys and None not in keys
    assert draft_key(None, None, [], [HERE]) is None


@pytest.mark.parametrize("key", ["se\ncret", "schlüssel", "a\x00b"])
def test_a_key_that_no_header_can_hold_is_refused(key):
    with pytest.raises(ValueError, match="api_key has characters that no HTTP header can hold"):
        find_key("api_key", key, "VLLM_API_KEY")


@pytest.mark.parametrize("own", [None, "of-draft"])
def test_a_build_keeps_the_targets_key_from_other_hosts(engine, own, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "of-target")
    if own:
        monkeypatch.setenv("PARSE_DRAFT_API_KEY", own)
    with serving(FakeServer(engine.target)) as target, serving(FakeServer(engine.draft)) as draft:
        urls = {"target_url": [target.url], "draft_url": [draft.url]}
        config = BuildConfig("out", "target", "draft", backend="openai", task="gsm8k", **urls)
        for role in ("target", "draft"):
            CompletionServers(config, role).check([1])
    assert set(target.given_keys) == {"Bearer of-target"}
    assert set(draft.given_keys) == {None if own is None else "Bearer of-draft"}
