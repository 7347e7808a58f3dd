"""Queueing simulation of servers under random arrivals, with PARSE and with the target alone.

The model
    Requests arrive at random (Poisson) with a rate λ, or each of a number of clients sends its next one after its last
    answer (a closed loop). They stay with the target server that has the fewest. Lengths of answers are drawn from
    the measured ones, or are exponential around their mean. Both ways to answer get the same requests and as many
    GPUs.

    Processor sharing: n requests that write at once get a token each every t(n) seconds, so one of them writes at
    1 / t(n) tokens/s. t comes from measurements, linear between them. Beyond the largest measured load a server is
    taken to be saturated: t(n) = t(N) n / N.

    A read of r tokens takes r c(n) seconds. It has the server to itself, in order of arrival, because a server
    computes it between two tokens of the other requests. Beyond the largest measured load c(n) = c(N).

    The target alone reads the prompt and writes the answer. With PARSE a draft server writes B tokens, the target
    reads them, keeps the first min(B, E), writes a few tokens of its own, and so on. E is exponential: each token has
    the same chance to be the first wrong one. Its mean m follows from the mean number K of kept tokens:
    K = m (1 - exp(-B / m)). The draft model's reads are left out, and so are all limits of memory.

    Without GPUs of their own the drafts are written on the target's. Then an answer is a text that is written at the
    pace that was measured for the whole, prompt and reads included. Without that measurement the two models share the
    GPU in halves.

With t(n) = n t(1) and no reads a server is the queue M/M/1-PS, whose mean response time is 1 / (μ - λ).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from parse_infer.evaluation.serving_costs import Costs

WARM_UP = 0.2  # share of the requests that come before the measured ones
OVERLOADED = 0.93  # a server that completes less than this share of the arrivals falls behind


@dataclass(frozen=True)
class Outcome:
    """What clients see. Times are in seconds."""

    answers_per_s: float
    mean_s: float
    p50_s: float
    p99_s: float
    overloaded: bool
    """Requests arrive faster than they are answered."""


Work = tuple[str, str, float]  # "target", "draft" or "both", "read" or "write", tokens


def alone(costs: Costs, length: float, random: Random) -> Iterator[Work]:
    yield "target", "read", costs.prompt_tokens
    yield "target", "write", length


def parse(costs: Costs, length: float, random: Random) -> Iterator[Work]:
    mean, left, unread = costs.tokens_to_error, length, costs.prompt_tokens
    while left > 0:
        block = min(left, costs.draft_tokens)
        yield "draft", "write", block
        yield "target", "read", unread + block
        kept = min(block, random.expovariate(1 / mean) if mean else 0.0)
        written = min(left - kept, costs.target_tokens)
        yield "target", "write", written
        left, unread = left - kept - written, 0.0


def parse_as_a_whole(costs: Costs, length: float, random: Random) -> Iterator[Work]:
    yield "both", "write", length


Way = Callable[[Costs, float, Random], Iterator[Work]]
"""The work of one answer of a length."""


class _Server:
    """Runs the work of one GPU: reads first and in order, else all texts at once, each model's at its pace."""

    def __init__(self, costs: Costs) -> None:
        self.assigned = 0  # requests
        self._curves = {"target": costs.target_token_s, "draft": costs.draft_token_s}
        if costs.parse_token_s is not None:
            self._curves["both"] = costs.parse_token_s
        self._read_s = costs.read_token_s
        self._now = 0.0
        self._next = "target"  # model whose text ends at `due`
        self._written = dict.fromkeys(self._curves, 0.0)  # by a request that has been here from the beginning
        self._texts: dict[str, list[tuple[float, int]]] = {model: [] for model in self._curves}  # its end; request
        self._reads: deque[list[float]] = deque()  # tokens left; request
        self.due = math.inf

    def add(self, now: float, work: Work, request: int) -> None:
        self._advance(now)
        model, kind, tokens = work
        if kind == "read":
            self._reads.append([tokens, request])
        else:
            heapq.heappush(self._texts[model], (self._written[model] + tokens, request))
        self._plan()

    def finish(self) -> int:
        """Advance to `due`; return the request whose work ends then."""
        self._advance(self.due)
        request = int(self._reads.popleft()[1]) if self._reads else heapq.heappop(self._texts[self._next])[1]
        self._plan()
        return request

    def _pace(self, model: str) -> float:
        """Seconds per token."""
        return self._curves[model].at(len(self._texts[model])) * sum(map(bool, self._texts.values()))

    @property
    def _read_pace(self) -> float:
        return self._read_s.at(min(len(self._reads) + len(self._texts["target"]), self._read_s.points[-1][0]))

    def _advance(self, now: float) -> None:
        passed, self._now = now - self._now, now
        if self._reads:
            self._reads[0][0] -= passed / self._read_pace
        else:
            for model in filter(self._texts.get, self._texts):
                self._written[model] += passed / self._pace(model)

    def _plan(self) -> None:
        if self._reads:
            self.due = self._now + max(0.0, self._reads[0][0]) * self._read_pace
            return
        ends = [
            (max(0.0, texts[0][0] - self._written[model]) * self._pace(model), model)
            for model, texts in self._texts.items()
            if texts
        ]
        wait, self._next = min(ends, default=(math.inf, ""))
        self.due = self._now + wait


def simulate(
    costs: Costs,
    way: Way,
    rate: float | None,
    n_targets: int,
    n_drafts: int = 0,
    requests: int = 2000,
    seed: int = 0,
    clients: int = 0,
) -> Outcome:
    """Serve `requests` requests.

    Args:
        rate: requests per second that arrive at random; None: of `clients`, each of which waits for its answer.
        n_drafts: without draft servers the targets' GPUs write the drafts.
    """
    arrivals, lengths, errors = (Random(f"{seed} {name}") for name in ("arrivals", "lengths", "errors"))
    targets, drafts = ([_Server(costs) for _ in range(n)] for n in (n_targets, n_drafts))
    servers = targets + drafts
    rests: list[Iterator[Work]] = []
    homes: list[_Server] = []
    begun: list[float] = []
    ended: dict[int, float] = {}

    def go_on(request: int, now: float) -> None:
        for work in rests[request]:
            if work[2] > 0:
                own = drafts if work[0] == "draft" and drafts else [homes[request]]
                server = min(own, key=lambda each: each.assigned)
                server.assigned += server is not homes[request]
                server.add(now, work, request)
                return
        ended[request] = now
        homes[request].assigned -= 1

    def begin(now: float) -> None:
        measured = costs.answer_lengths
        length = lengths.choice(measured) if measured else max(1.0, lengths.expovariate(1 / costs.answer_tokens))
        rests.append(way(costs, length, Random(errors.random())))
        homes.append(min(targets, key=lambda each: each.assigned))
        homes[-1].assigned += 1
        begun.append(now)
        go_on(len(begun) - 1, now)

    coming = 0.0
    for _ in range(clients):
        begin(0.0)
    while len(ended) < requests:
        server = min(servers, key=lambda each: each.due)
        if rate is not None and len(begun) < requests and coming <= server.due:
            begin(coming)
            coming += arrivals.expovariate(rate)
        else:
            now = server.due
            request = server.finish()
            server.assigned -= server is not homes[request]
            go_on(request, now)
            if rate is None and request in ended and len(begun) < requests:
                begin(now)
    first = round(WARM_UP * requests)
    times = sorted(ended[request] - begun[request] for request in range(first, requests))
    done = sum(begun[first] <= at < begun[-1] for at in ended.values())
    answers_per_s = done / (begun[-1] - begun[first])
    return Outcome(
        answers_per_s,
        sum(times) / len(times),
        times[len(times) // 2],
        times[len(times) * 99 // 100],
        rate is not None and answers_per_s < OVERLOADED * (len(begun) - first) / (begun[-1] - begun[first]),
    )
