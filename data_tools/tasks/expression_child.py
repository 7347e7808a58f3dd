"""Compares mathematical expressions for `expressions.py`, one pair a line of JSON, in a process of its own."""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys

from math_verify import LatexExtractionConfig, parse, verify

CPU_SECONDS = 5.0
MEMORY = 4 << 30  # bytes


def equal(reference: str, answer: str) -> bool:
    parsed = [
        parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None) for text in (reference, answer)
    ]
    return bool(all(parsed) and verify(*parsed, timeout_seconds=None, allow_set_relation_comp=True))


def main() -> None:
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    print("ready", flush=True)
    for line in sys.stdin:
        # The default action of the signal ends the process, also inside of a computation in C. CPU time: a busy
        # machine changes no result.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            found = equal(*json.loads(line))
        except (Exception, MemoryError, RecursionError):
            found = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
