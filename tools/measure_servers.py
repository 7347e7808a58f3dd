"""Measure the coordinator on an idle machine: `python -m tools.measure_servers [row …]`.

Needs vLLM. Starts the servers of a pair (`--pair smollm2` for the larger pair), and prints one line per row:

cpu            CPU time of the coordinator per request, 8 concurrent requests
killed         1,000 requests, 32 concurrent, each server killed once: wrong and lost answers, memory before and after
costs FILE     write the costs that `parse-infer plan` reads, at 1, 8 and 32 concurrent requests; a row alone. A small
               draft model runs in this process, as in `parse-infer bench`; with --draft-server, on a server
useless FILE   prompts outside the draft model's task (jsonl, such as MT-Bench's): adaptive from a cold start, then
               alternating with the target alone, 32 and 8 concurrent requests

For speed see docs/results/servers.md.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean, median
from typing import Any

from data_tools.tasks.registry import load_task
from parse_infer.cli.model_options import PAIR_NAMES, PAIRS, progress
from parse_infer.decoding.adaptive import Controller
from parse_infer.engine import ParseEngine
from parse_infer.files import write_json
from parse_infer.request.output import Generation
from parse_infer.settings.generation import GenerationSettings

TOKENS = 256


def prompts(n: int) -> list[Any]:
    return [problem.prompt for problem in load_task("gsm_symbolic").problems("test", seed=11, limit=n)]


def cpu(engine: ParseEngine) -> str:
    engine.backend.parallel = 8
    sent = prompts(200)  # before the timing, because generating prompts is slow
    list(engine.collect([engine.events(p) for p in sent[:40]]))
    engine.clear_caches()
    start = time.thread_time()
    list(engine.collect([engine.events(p) for p in sent]))
    seconds = time.thread_time() - start
    return f"{1000 * seconds / len(sent):.2f} ms of CPU time per request"


def killed(engine: ParseEngine) -> str:
    engine.backend.parallel = 32
    sent = prompts(200)
    expected = [g.token_ids for g in engine.collect([engine.events(p) for p in sent])]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    processes = engine.backend.processes.members

    def kill() -> None:
        for process in processes:
            time.sleep(15)
            os.killpg(process.guard.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    found: list[Generation] = []
    lost = ""
    try:
        for generation in engine.collect([engine.events(p) for p in sent * 5]):
            found.append(generation)
    except OSError as error:
        lost = f"; then: {error}"
    killer.join()
    wrong = sum(g.token_ids != expected[n % len(expected)] for n, g in enumerate(found))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    alive = sum(process.alive for process in processes)
    return (
        f"{len(found)} of {5 * len(sent)} answers, {wrong} wrong, {alive} of {len(processes)} servers up, "
        f"peak memory {before // 1024} MB before, {after // 1024} MB after{lost}"
    )


def useless(engine: ParseEngine, sent: Sequence[Any]) -> str:
    assert engine.draft is not None
    sent = [prompt for prompt in sent if len(engine.draft.tokenizer.encode(str(prompt))) < engine.draft.window // 2]
    settings = GenerationSettings(96, adaptive=True)

    def speed(n: int, alone: bool) -> str:
        engine.clear_caches()
        engine.backend.parallel = n
        start = time.perf_counter()
        found = list(engine.collect([engine.events(p, settings, alone=alone) for p in sent[:64]]))
        seconds = time.perf_counter() - start
        drafted = sum(g.stats.rounds > 0 for g in found)
        return f"{sum(len(g.token_ids) for g in found) / seconds:.0f}" + f" ({drafted} drafts)" * (not alone)

    lines = []
    for n in (32, 8):
        speed(n, alone=True)  # warm up
        engine.controller = Controller()
        cold = speed(n, alone=False)
        pairs = [(speed(n, alone=False), speed(n, alone=True)) for _ in range(2)]
        adaptive, alone = (" ".join(column) for column in zip(*pairs, strict=True))
        lines.append(f"{n} concurrent: {cold} cold, {adaptive}, the target alone {alone} tokens/s")
    return "; ".join(lines)


def costs(engine: ParseEngine, file: str, loads: Sequence[int] = (1, 8, 32), tokens: int = TOKENS) -> str:
    """Write the fields of `Costs`, measured by answers of the target alone, of the draft model (all of whose tokens
    are kept), and of PARSE as it is."""

    def answers(settings: GenerationSettings, sent: Sequence[Any], n: int, alone: bool = False) -> list[Generation]:
        engine.clear_caches()
        engine.backend.parallel = n
        return list(engine.collect([engine.events(p, settings, alone=alone, streamed=False) for p in sent]))

    sent, whole = prompts(3 * max(loads)), GenerationSettings(tokens, 0.0, block_tokens="whole", ignore_eos=True)
    found = answers(GenerationSettings(tokens), sent, max(loads))  # also warms up
    rounds = sum(g.stats.rounds for g in found)
    if not rounds:
        return "no answer has a draft, so there is nothing to plan"
    kept = sum(g.stats.accepted_tokens for g in found)
    held: dict[str, Any] = {"target_token_s": {}, "draft_token_s": {}, "parse_token_s": {}}
    for n in loads:
        first, all_of_them = (
            median(g.timings.work_s for g in answers(whole.override(max_new_tokens=m), sent[: 2 * n], n, alone=True))
            for m in (1, tokens)
        )
        drafted = [g for g in answers(whole, sent[: 2 * n], n) if g.stats.draft_tokens]
        held["target_token_s"][n] = max(1e-6, (all_of_them - first) / (tokens - 1))  # the first has read the prompt
        held["draft_token_s"][n] = median(g.timings.draft_s / g.stats.draft_tokens for g in drafted)
        begun = time.perf_counter()
        mixed = answers(GenerationSettings(tokens), sent, n)
        held["parse_token_s"][n] = n * (time.perf_counter() - begun) / sum(len(g.token_ids) for g in mixed)
    lengths = [len(engine.target.render(prompt)) for prompt in sent]
    reads = answers(GenerationSettings(1), sent, 1, alone=True)
    held |= {
        "read_token_s": median(g.timings.work_s / n for g, n in zip(reads, lengths, strict=True)),
        "draft_tokens": sum(g.stats.draft_tokens for g in found) / rounds,
        "kept_tokens": kept / rounds,
        "target_tokens": (sum(len(g.token_ids) for g in found) - kept) / rounds,
        "prompt_tokens": mean(lengths),
        "answer_tokens": mean(len(g.token_ids) for g in found),
        "answer_lengths": [len(g.token_ids) for g in found],
    }
    write_json(file, held)
    return f"wrote {file}: parse-infer plan {file}"


ROWS = {"cpu": cpu, "killed": killed}


def main(words: Sequence[str]) -> None:
    pair = "smollm2" if "--pair" in words and "smollm2" in words else "tiny"
    rows: dict[str, Callable[[ParseEngine], str]] = {word: ROWS[word] for word in words if word in ROWS}
    if "useless" in words:
        file = "".join(words[words.index("useless") + 1 :][:1])
        try:
            task = load_task("jsonl", path=file, check_with="none")
            rows["useless"] = partial(useless, sent=[problem.prompt for problem in task.problems("test")])
        except (OSError, ValueError) as error:
            sys.exit(f"useless: {error}")
    if "costs" in words:
        file = "".join(words[words.index("costs") + 1 :][:1])
        if not file:
            sys.exit("costs: give the file to write")
        if rows:
            sys.exit(f"costs: measure it alone, without {', '.join(rows)}")
        rows["costs"] = partial(costs, file=file)
    target = PAIR_NAMES[pair]
    local_draft = None if "costs" in rows and "--draft-server" not in words else False
    with ParseEngine.from_pretrained(
        target, *PAIRS[target], backend="vllm", local_draft=local_draft, on_progress=progress
    ) as engine:
        engine.adaptive = False
        for name, row in (rows or ROWS).items():
            print(f"{name:14}{row(engine)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
