"""Run Python source that a model wrote: without network, and with limits of time, memory, files and processes.

The source runs in Linux namespaces of its own. It sees no other process, and no file but an empty folder in memory
and, read-only, the folders of Python and of the system's libraries. Packages are not on its path. When `run_python`
returns, all processes of the source are dead. Where the system refuses any of this, nothing runs.

The sandbox is no virtual machine: it does not protect against errors of the kernel, and System V shared memory does
not count towards the limit of memory.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from parse_infer.errors import ParseError

_CHILD = Path(__file__).with_name("sandbox_child.py")
_REFUSED = 125  # exit code of the child
_MAX_OUTPUT = 1 << 20  # bytes, the limit of a file's size
_PATIENCE_S = 10.0  # of a child that should end
_NEEDS = "a check that runs the model's code needs namespaces of Linux 5.12 or later"


@dataclass(frozen=True)
class ProgramOutput:
    """What a program printed, at most 1 MiB each, and whether it ended without an error."""

    stdout: str
    stderr: str
    finished: bool


def run_python(source: str, seconds: float = 10.0, cpu_seconds: int = 3) -> ProgramOutput:
    """Run `source` as a program in the sandbox.

    Args:
        seconds: time after which all processes are killed.
        cpu_seconds: CPU time of each process. A busy machine does not shorten it.

    Raises:
        ValueError: the system is not Linux, or refuses to isolate the program.
    """
    if sys.platform != "linux":
        raise ParseError(f"{_NEEDS}, and this system is {sys.platform}: use Linux, or another check_with")
    command = [sys.executable, "-I", "-S", str(_CHILD), str(cpu_seconds)]
    # Output goes to files, because the limit of a file's size then bounds the output.
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=out, stderr=err, cwd=folder, env={}, start_new_session=True
        )
        try:
            process.communicate(source.encode("utf-8", "replace"), timeout=seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.terminate()  # the child kills the program's processes first
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()  # the kernel kills the program's processes then
                process.wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(_MAX_OUTPUT).decode("utf-8", "replace"))
    if process.returncode == _REFUSED:
        raise ParseError(
            f"{_NEEDS}, which this system refuses ({texts[1].strip()}): allow user namespaces, give a container "
            "CAP_SYS_ADMIN, or use another check_with"
        )
    return ProgramOutput(texts[0], texts[1], process.returncode == 0)


@cache
def require_sandbox() -> None:
    """Raise ValueError unless `run_python` works on this machine."""
    run = run_python("print('works')")
    if run.stdout != "works\n":
        reason = " ".join(run.stderr.split())[-200:] or "no message"
        raise ParseError(f"Python does not start in the sandbox ({reason}): use another Python, or another check_with")
