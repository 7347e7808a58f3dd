"""The turns of a conversation go to the replica that has their beginning in its cache, unless it is busy."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from math import ceil
from random import Random
from typing import Any

import httpx
import pytest

from parse_infer.backends.pool import health
from parse_infer.backends.pool import sessions as sessions_module
from parse_infer.backends.pool.client import Client
from parse_infer.backends.pool.replicas import ReplicaPool
from parse_infer.backends.pool.sessions import Session, Sessions
from parse_infer.backends.servers.dialects.dialect import COMPLETIONS
from parse_infer.serve.loop_runner import LoopRunner
from parse_infer.text.conversation import Conversation
from parse_infer.text.prompts import Chat, RenderedPrompt, Verbatim
from tests.parse_infer.serve.conftest import running

URLS = [f"http://replica-{n}:8000" for n in range(4)]
CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [{"type": "function", "function": {"name": "weigh"}}]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def conversation(*messages: dict[str, str]) -> Conversation:
    found = Conversation.of(RenderedPrompt(list(messages)))
    assert found is not None
    return found


def test_a_turn_names_the_turn_before():
    first = [SYSTEM, user("2 + 2?")]
    second = [*first, assistant("4"), user("And 3 + 3?")]
    turns = [conversation(*first), conversation(*second), conversation(*second, assistant("6"), user("Thanks."))]
    assert {turn.begin for turn in turns} == {turns[0].turns[-1]}
    assert turns[1].turns[:2] == turns[0].turns and turns[2].turns[:4] == turns[1].turns
    assert conversation(SYSTEM, user("3 + 3?")).begin != turns[0].begin
    passed = [dict(reversed(message.items())) | {"name": None} for message in second]
    assert Conversation.of_messages(passed) == turns[1], "also as a client wrote it"
    assert Conversation.of(RenderedPrompt(Chat(second, {}))) == turns[1]
    assert Conversation.of(RenderedPrompt("2 + 2?")) is Conversation.of(RenderedPrompt(Verbatim("2 + 2?"))) is None


def pool(urls: list[str] = URLS) -> ReplicaPool:
    servers = ReplicaPool("target", urls, Client(), choose=lambda some: some[0])
    for server in servers.members:
        server.healthy = True
    return servers


def place(servers: ReplicaPool, session: Session) -> str:
    with servers.acquire(session=session) as lease:
        return lease.server.url


def test_chats_that_only_begin_alike_are_different_sessions():
    """A router that keeps a session together would send all of them to one replica."""
    sessions = Sessions()

    def ids(*chats: list[dict[str, str]]) -> list[str]:
        return [sessions.of(conversation(*chat)).id for chat in chats]

    examples = [user("example"), assistant("answer")]
    questions = [[*examples, user(f"{n}")] for n in range(9)]
    first = ids(*questions)
    assert len(set(first)) == 9 and first[0] == conversation(*questions[0]).begin
    tools = [assistant("two calls"), {"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}]
    called = [[*question, *tools] for question in questions]
    assert ids(*called) == first, "a turn of more than two messages"
    assert ids(*[[*turn, assistant("so"), user("Why?")] for turn in called]) == first
    openings = ids(*[[SYSTEM, user("Hi")]] * 9)
    assert len(set(openings)) == 9
    replied = [[SYSTEM, user("Hi"), assistant(f"Hello {n}"), user("Who?")] for n in range(9)]
    second = ids(*replied)
    assert sorted(second) == sorted(openings), "only the first turn is in all of them"
    assert ids(*[[*turn, assistant("PARSE"), user("Why?")] for turn in replied]) == second


def test_a_conversation_keeps_its_session_wherever_its_turns_go():
    chat, processes = [SYSTEM, user("Hi")], [Sessions() for _ in range(3)]
    for turn in range(12):
        assert processes[turn % 3].of(conversation(*chat)).id == conversation(*chat).begin, f"turn {turn}"
        chat += [assistant(f"{turn}"), user("And then?")]


def test_a_prompt_without_a_chat_has_a_session_of_its_own():
    sessions, prompts = Sessions(), [RenderedPrompt("2 + 2?") for _ in range(2)]
    found = [sessions.of_prompt(prompt) for prompt in prompts * 2]
    assert found[:2] == found[2:] and found[0].id != found[1].id and not any(one.returns for one in found)
    chat = RenderedPrompt([user("2 + 2?")])
    assert sessions.of_prompt(chat) == sessions.of_prompt(chat), "n answers"


def test_sessions_are_forgotten(monkeypatch):
    monkeypatch.setattr(sessions_module, "_REMEMBERED", 8)
    sessions = Sessions()
    for n in range(100):
        sessions.of(conversation(user(f"{n}")))
        sessions.of(conversation(user("Hi")))
    assert len(sessions._ids) == 8 and max(map(len, sessions._ids.values())) == sessions_module._ALIKE


@pytest.mark.parametrize("clients", [4, 16, 64])
def test_turns_find_their_prefix(clients):
    """600 conversations of six turns; each client waits for an answer, thinks, and asks again."""
    servers, sessions, random = pool(), Sessions(), Random(0)
    cached: dict[int, Counter[str]] = defaultdict(Counter)
    waiting = [(random.expovariate(1), n) for n in range(clients)]
    running: list[tuple[float, int, ExitStack]] = []
    chats, lengths, begun, found, known = {}, {}, clients, 0, 0
    while waiting or running:
        ask, answer = min(waiting, default=(1e9, 0)), min(running, key=lambda one: one[0], default=None)
        if answer is None or ask[0] < answer[0]:
            waiting.remove(ask)
            now, number = ask
            chat = chats.setdefault(number, [SYSTEM])
            chat.append(user(f"question {number} {len(chat)}"))
            held = ExitStack()
            lease = held.enter_context(servers.acquire(session=sessions.of(conversation(*chat))))
            assert lease.server.busy <= 2 * ceil(sum(server.busy for server in servers.members) / len(URLS))
            lengths[number] = lengths.get(number, 0) + random.randint(20, 300)
            if len(chat) > 2:
                known += max(cached[number].values())
                found += cached[number][lease.server.url]
            lengths[number] += random.randint(50, 400)
            cached[number][lease.server.url] = lengths[number]
            running.append((now + random.expovariate(1 / 3), number, held))
            continue
        running.remove(answer)
        now, number, held = answer
        held.close()
        chats[number].append(assistant("answer"))
        if len(chats[number]) < 13:
            waiting.append((now + random.expovariate(1 / 2), number))
        elif begun < 600:
            waiting.append((now, begun))
            begun += 1
    assert found >= 0.95 * known, f"{found / known:.3f} of the tokens"


def test_processes_agree_on_a_conversation_that_they_do_not_know():
    chats = [conversation(user(f"question {n}"), assistant("a"), user("b")) for n in range(200)]
    turn = [Sessions().of(chat) for chat in chats]
    assert [Sessions().of(chat) for chat in chats] == turn
    places = [place(pool(), each) for each in turn]
    assert [place(pool(URLS[::-1]), each) for each in turn] == places
    assert min(Counter(places).values()) > 30
    fewer = [place(pool(URLS[:3]), each) for each in turn]
    moved = [before for before, after in zip(places, fewer, strict=True) if before != after]
    assert set(moved) == {URLS[3]}, "only the conversations of a removed replica move"


def test_a_busy_or_unhealthy_replica_is_left():
    servers, sessions = pool(), Sessions()
    home = place(servers, sessions.of(conversation(user("a"))))
    second = sessions.of(conversation(user("a"), assistant("b"), user("c")))
    assert place(servers, second) == home
    server = next(one for one in servers.members if one.url == home)
    server.busy = 4
    assert place(servers, second) != home, "twice its share of five"
    server.busy, server.healthy = 0, False
    assert place(servers, second) != home


def test_questions_with_the_same_examples_are_spread():
    servers, sessions, examples = pool(), Sessions(), [user("example"), assistant("answer")]
    with ExitStack() as held:
        found = [sessions.of(conversation(*examples, user(f"{n}"))) for n in range(8)]
        urls = [held.enter_context(servers.acquire(session=session)).server.url for session in found]
    assert set(Counter(urls).values()) == {2}


def test_a_server_is_ready_while_a_target_is_healthy(engine, connect, monkeypatch):
    monkeypatch.setattr(health, "CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(health, "RETRY_EVERY_S", 0.05)
    coordinator, targets, _ = connect(engine, n_targets=2)
    with running(LoopRunner(coordinator), engine) as served:

        def answers(status: int) -> bool:
            end = time.monotonic() + 10
            while (found := httpx.get(served.url + "/ready")).status_code != status and time.monotonic() < end:
                time.sleep(0.05)
            return found.status_code == status and httpx.get(served.url + "/health").status_code == 200

        assert answers(200)
        targets[0].health_status = targets[1].health_status = 503
        assert answers(503), "without a request"
        targets[1].health_status = 200
        assert answers(200)


def test_turns_over_servers_go_to_one_replica(engine, connect):
    coordinator, targets, _ = connect(engine, n_targets=3)
    with running(LoopRunner(coordinator), engine) as served:
        for target in targets:
            target.sessions.clear()  # of the handshake
        messages, homes = [user("How heavy are 5 apples?")], []
        for turn in range(5):
            before = [len(target.bodies) for target in targets]
            body = {"messages": messages, "max_tokens": 6}
            body |= {"tools": TOOLS, "tool_choice": "required"} if turn == 4 else {}  # which is passed through
            reply = served.post(CHAT, body).json()
            homes.append([n for n, target in enumerate(targets) if len(target.bodies) > before[n]])
            messages += [reply["choices"][0]["message"], user("And 6?")]
    assert len(homes[0]) == 1 and homes == homes[:1] * 5
    assert len({session for target in targets for session in target.sessions}) == 1


def test_all_requests_of_an_answer_have_one_session(engine, connect):
    coordinator, targets, draft = connect(engine)
    with running(LoopRunner(coordinator), engine) as served:
        found = []
        for path, body in ((COMPLETIONS, {"prompt": "5 apples"}), (CHAT, {"messages": [user("5 apples?")]})) * 2:
            for server in (*targets, draft):
                server.sessions.clear()
            assert served.post(path, body | {"max_tokens": 8, "parse": {"threshold": 0.5}}).status_code == 200
            (session,) = {*targets[0].sessions, *draft.sessions}
            found.append(session)
    assert len(set(found)) == 4 and None not in found


def called(n: int, calls: int) -> list[dict[str, Any]]:
    """A turn of an agent whose model calls tools."""
    ids = [f"call-{n}-{call}" for call in range(calls)]
    calling = [{"id": id, "type": "function", "function": {"name": "weigh", "arguments": "{}"}} for id in ids]
    results = [{"role": "tool", "content": f"{n} kg", "tool_call_id": id} for id in ids]
    return [{"role": "assistant", "content": None, "tool_calls": calling}, *results]


@pytest.mark.parametrize("messages", ["messages", "input"])
def test_turns_with_tools_go_to_one_replica_too(engine, connect, messages):
    coordinator, targets, _ = connect(engine, n_targets=3)
    for target in targets:
        target.canned = 200, {"Content-Type": "application/json"}, [b"{}"]
    path = CHAT if messages == "messages" else "/v1/responses"
    with running(LoopRunner(coordinator), engine) as served:
        sessions = []
        for agent in range(3):
            chat: list[dict[str, Any]] = [SYSTEM, user("How heavy are 5 apples?")]  # the same for all agents
            for turn in range(3):
                for target in targets:
                    target.headers.clear()
                chat += called(agent, turn) if turn else []
                assert "x-parse-because" in served.post(path, {messages: chat, "tools": TOOLS}).headers
                ((n, headers),) = [(n, headers) for n, target in enumerate(targets) for headers in target.headers]
                sessions.append((n, headers["x-session-id"]))
    agents = [set(sessions[n : n + 3]) for n in (0, 3, 6)]
    assert all(len(used) == 1 for used in agents) and len(set.union(*agents)) == 3


def test_a_client_may_name_the_session(engine, connect):
    coordinator, targets, _ = connect(engine, n_targets=3)
    with running(LoopRunner(coordinator), engine) as served:
        for n, own in enumerate(("mine-7", "mine-7", "other", "x" * 300)):
            served.post(COMPLETIONS, {"prompt": f"{n} apples", "max_tokens": 2}, headers={"X-Session-ID": own})
    used = [{session for session in target.sessions if session} for target in targets]
    assert sum("mine-7" in sessions for sessions in used) == 1, "one replica"
    assert len(set.union(*used)) == 3 and {"mine-7", "other"} < set.union(*used), "a name that is too long is not used"
