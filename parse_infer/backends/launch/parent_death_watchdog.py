"""Run a command and kill it, with all its processes, when the parent process ends.

    # in its own process group, with a pipe as standard input
    python -m parse_infer.backends.launch.parent_death_watchdog COMMAND …

The parent never writes to the pipe. The pipe closes when the parent ends, also after kill -9. When the command ends
first, its remaining processes are killed too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

GRACE_S = 15.0


def main(command: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: None)  # the signal goes to the whole group, this process included
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def wait_for_the_end() -> None:
        sys.stdin.buffer.read()
        os.killpg(0, signal.SIGTERM)
        try:
            child.wait(GRACE_S)
        finally:
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    code = child.wait()
    print(f"ended with code {code}", file=sys.stderr, flush=True)
    os.killpg(0, signal.SIGKILL)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
