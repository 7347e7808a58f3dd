"""API keys share the seats by weight, and requests that pass through have seats of their own."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

import httpx
import pytest

from parse_infer.errors import ParseError
from parse_infer.serve.admission import AdmissionQueue, Limits
from parse_infer.serve.api_keys import ANYONE, ApiKeys, Caller, caller
from parse_infer.serve.errors import ApiError
from parse_infer.serve.fair_seats import FairSeats
from tests.parse_infer.serve.conftest import running

A, B, HEAVY = Caller("a"), Caller("b"), Caller("heavy", 3.0)


def seated(number: int, waves: list[tuple[Caller, int, int]]) -> list[Caller]:
    """Whom `number` seats are given to, in order, when each wave of a client's equal requests arrives at once.

    Args:
        waves: client, number of requests, answers of each.
    """
    order: list[Caller] = []

    async def ask(seats: FairSeats, client: Caller, answers: int) -> None:
        async with seats.seat(client, answers):
            order.append(client)
            await asyncio.sleep(0)

    async def main() -> None:
        seats = FairSeats(number)
        async with asyncio.TaskGroup() as tasks:
            for client, requests, answers in waves:
                for _ in range(requests):
                    tasks.create_task(ask(seats, client, answers))

    asyncio.run(main())
    return order


@pytest.mark.parametrize("number", [1, 3])
def test_a_wave_of_one_client_does_not_stop_another(number):
    order = seated(number, [(A, 100, 1), (B, 10, 1)])
    assert len(order) == 110
    last = max(i for i, client in enumerate(order) if client is B)
    assert last <= number + 2 * 10 + 1, "one of each in turn"


def test_a_client_that_left_while_it_waited_pays_for_no_seat():
    order: list[Caller] = []

    async def main() -> None:
        seats = FairSeats(1)

        async def ask(client: Caller) -> None:
            async with seats.seat(client):
                order.append(client)
                await asyncio.sleep(0)

        async with seats.seat(B):
            gone = [asyncio.create_task(ask(A)) for _ in range(20)]
            await asyncio.sleep(0)
            for task in gone:
                task.cancel()
            await asyncio.gather(*gone, return_exceptions=True)
            asked = [asyncio.create_task(ask(client)) for client in [A] + [B] * 25]
            await asyncio.sleep(0)
        await asyncio.gather(*asked)

    asyncio.run(main())
    assert order.index(A) <= 1 and len(order) == 26


def test_seats_are_given_by_weight():
    order = seated(1, [(A, 100, 1), (HEAVY, 100, 1)])
    counts = Counter(order[:80])
    assert counts[HEAVY] == pytest.approx(3 * counts[A], abs=4)


def test_a_request_for_several_answers_counts_them():
    order = seated(1, [(A, 40, 4), (B, 40, 1)])
    counts = Counter(order[:40])
    assert counts[B] == pytest.approx(4 * counts[A], abs=4)


def test_one_client_is_served_in_order_and_by_all_seats():
    async def main() -> None:
        seats, order = FairSeats(2), []

        async def ask(i: int) -> None:
            async with seats.seat(ANYONE):
                order.append(i)
                await free.wait()

        free = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for i in range(6):
                tasks.create_task(ask(i))
            for _ in range(5):
                await asyncio.sleep(0)
            assert order == [0, 1]
            free.set()
        assert order == list(range(6))

    asyncio.run(main())


def test_an_idle_client_saves_up_no_seats():
    async def main() -> list[Caller]:
        seats, order = FairSeats(1), []

        async def ask(client: Caller) -> None:
            async with seats.seat(client):
                order.append(client)
                await asyncio.sleep(0)

        for _ in range(50):
            await ask(A)
        async with asyncio.TaskGroup() as tasks:
            for client in [B, A] * 10:
                tasks.create_task(ask(client))
        return order[50:]

    assert Counter(asyncio.run(main())[:10]) == {A: 5, B: 5}


@pytest.mark.parametrize("granted", [False, True])
def test_a_client_that_leaves_frees_its_seat(granted):
    async def main() -> None:
        seats = FairSeats(1)
        async with AsyncExitStack() as held:
            await held.enter_async_context(seats.seat(A))
            leaving = asyncio.create_task(seats.seat(B).__aenter__())
            await asyncio.sleep(0)
            if granted:
                await held.aclose()  # the seat is B's, which does not know it yet
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        async with asyncio.timeout(5), seats.seat(A):
            pass

    asyncio.run(main())


def test_the_queue_of_one_client_leaves_room_for_another():
    async def main() -> None:
        queue = AdmissionQueue(Limits(waiting=1), parallel=1)
        async with queue.place(2):
            with pytest.raises(ApiError, match="the queue is full \\(2 answers\\)"):
                await queue.place(1).__aenter__()
            async with queue.place(2, relayed=True):
                assert queue.answers == 4
            token = caller.set(HEAVY)
            async with queue.place(1):
                queue.note(6.0)
                with pytest.raises(ApiError) as full:
                    await queue.place(2).__aenter__()
                assert full.value.headers == {"Retry-After": "8"}, "an answer too many, at three quarters of the pace"
            caller.reset(token)
            assert queue.retry_after() == 6
        assert queue.answers == 0 and queue.retry_after() == 1

    asyncio.run(main())


def test_passed_through_requests_have_seats_of_their_own():
    async def main() -> None:
        queue = AdmissionQueue(Limits(), parallel=1)
        async with asyncio.timeout(5), queue.seat(relayed=True), queue.seat():
            pass

    asyncio.run(main())


def lines(*rows: str) -> str:
    return "\n".join(rows) + "\n"


def test_a_file_of_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text(lines("# the team", "k1", "k2 2.5 search team", "k3 3", "", "k4 web", "k5 web"))
    keys = ApiKeys("own", file)
    found = {key: keys.caller_of(key) for key in ("own", "k1", "k2", "k3", "k4", "k5", "k6", "#", "")}
    assert found == {
        "own": ANYONE,
        "k1": Caller("line 2"),
        "k2": Caller("search team", 2.5),
        "k3": Caller("line 4", 3.0),
        "k4": Caller("web"),
        "k5": Caller("web"),  # a successor
        "k6": None,
        "#": None,
        "": None,
    }
    assert keys.required and ApiKeys("own").required and not ApiKeys().required


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "has no API key: write one per line, as KEY"),
        (lines("s3cret 0 a"), "line 1 of .*keys has the weight 0: give a number above 0"),
        (lines("a", "s3cret nan"), "line 2 of .*keys has the weight nan"),
        (lines("s3cret", "s3cret 2"), "line 2 of .*keys has a key that is not ASCII, or is in another line too"),
        (lines("s3crét"), "line 1 of .*keys has a key that is not ASCII"),
        (b"s3cr\xff", "cannot be read: it is not UTF-8"),
        (None, "cannot be read: No such file"),
    ],
)
def test_an_unusable_file_is_one_sentence_without_a_key(tmp_path, content, sentence):
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ParseError, match=sentence) as refused:
        ApiKeys(file=file)
    assert "s3cr" not in str(refused.value)


def test_a_changed_file_is_read_again(tmp_path, caplog):
    file, other = tmp_path / "keys", tmp_path / "other"
    file.write_text(lines("s3cret 1 a"))
    keys = ApiKeys(file=file)
    other.write_text(lines("n3w 2 b"))
    other.replace(file)
    assert keys.caller_of("s3cret") is None and keys.caller_of("n3w") == Caller("b", 2.0)
    caplog.clear()
    with caplog.at_level(logging.INFO, "parse_infer.serve"):
        for content in (lines("n3w -1"), ""):
            file.write_text(content)
            assert keys.caller_of("n3w") == keys.caller_of("n3w") == Caller("b", 2.0), "as before"
        file.unlink()
        assert keys.caller_of("n3w") == Caller("b", 2.0)
        file.write_text(lines("l4st"))
        assert keys.caller_of("l4st") is not None and keys.caller_of("n3w") is None
    told = [record.message for record in caplog.records]
    assert len(told) == 4 and "n3w" not in caplog.text and "l4st" not in caplog.text
    assert told[-1] == "API keys read" and all("API keys stay as they are" in line for line in told[:3])


@pytest.mark.slow
def test_a_server_with_several_keys(served, tmp_path, capfd):
    file = tmp_path / "keys"
    file.write_text(lines("s3cret-a 1 team-a", "s3cret-b 2 team-b"))
    with running(served.runner, served.engine, keys=ApiKeys("s3cret", file)) as shared:
        ask = {"max_tokens": 8, "n": 2}
        given = {key: {"Authorization": f"Bearer {key}"} for key in ("s3cret-a", "s3cret-b", "s3cret", "other")}
        with ThreadPoolExecutor(8) as pool:
            waves = {key: [pool.submit(shared.chat, **ask, headers=given[key]) for _ in range(3)] for key in given}
        for key, answers in waves.items():
            assert {answer.result().status_code for answer in answers} == {401 if key == "other" else 200}
        metrics = httpx.get(f"{shared.url}/metrics", headers=given["s3cret"]).text
        assert 'parse_client_answers_total{client="team-a"} 6.0' in metrics and "s3cret" not in metrics
    logged = capfd.readouterr().err
    assert '"client": "team-b"' in logged and "s3cret" not in logged
