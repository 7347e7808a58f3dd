"""Code in the sandbox ends in time, and reaches neither network, files nor other processes."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import pytest

from data_tools.tasks.code import sandbox
from data_tools.tasks.code.sandbox import require_sandbox, run_python
from parse_infer.errors import ParseError

try:
    require_sandbox()
except ParseError as refusal:
    pytest.skip(str(refusal), allow_module_level=True)


@pytest.mark.parametrize(("source", "limit"), [("while True: pass", 120.0), ("import time; time.sleep(60)", 0.5)])
@pytest.mark.slow
def test_code_without_end_is_stopped(source: str, limit: float) -> None:
    begun = time.monotonic()
    assert not run_python(source, seconds=limit, cpu_seconds=1).finished
    assert time.monotonic() - begun < 100  # of a busy machine


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("text = 'a' * 10**9", "MemoryError"),
        ("parts = []\nwhile True: parts.append(bytes(10**7))", "MemoryError"),
        ("open('big', 'wb').write(bytes(10**7))", "File too large"),
        ("for i in range(99): open(str(i), 'wb').write(bytes(10**6))", "No space left on device"),
        ("files = [open('f', 'w') for _ in range(99)]", "Too many open files"),
        ("import sys\nopen(sys.base_prefix + '/planted', 'w')", "Read-only file system"),
        ("open('/etc/passwd')", "No such file or directory"),
        ("import os\nos.setuid(0)\nos.chroot('/')", "Operation not permitted"),
        ("import numpy", "No module named 'numpy'"),
        ("input()", "EOFError"),
    ],
)
def test_what_goes_too_far_is_an_error(source: str, error: str) -> None:
    run = run_python(source)
    assert not run.finished and error in run.stderr


def test_output_is_bounded() -> None:
    run = run_python("while True: print('x' * 1000)")
    assert not run.finished and 0 < len(run.stdout) <= 1 << 20


def test_a_fork_bomb_has_few_processes() -> None:
    source = (
        "import os, time\nn = 0\ntry:\n    while True:\n        if not os.fork(): time.sleep(60)\n        n += 1\n"
        "except OSError as error: print(n, error)"
    )
    run = run_python(source)
    assert run.finished and "temporarily unavailable" in run.stdout and int(run.stdout.split()[0]) < 8
    assert not run_python("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", seconds=0.5).finished


def test_the_network_is_out_of_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
        socket.create_connection(place).close()
        run = run_python(f"import socket\nsocket.create_connection({place})")
    assert not run.finished and "Network is unreachable" in run.stderr


def test_nothing_of_the_caller_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    run = run_python(
        "import os, sys\nprint(dict(os.environ), os.listdir(), sys.argv, os.getpid(), os.path.exists('/proc'))"
    )
    environment, rest = run.stdout.replace(", 'LC_CTYPE': 'C.UTF-8'", "").split("} ")
    assert environment == "{'PYTHONHASHSEED': '0'" and rest == "['main.py'] ['main.py'] 1 False\n"


def test_a_process_that_leaves_its_group_dies_with_the_run() -> None:
    source = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        command = "import time; open('ready', 'w').close(); time.sleep(60)"
        os.execv(sys.executable, [sys.executable, "-S", "-c", command, "left-behind-by-a-test"])
    os._exit(0)
while not os.path.exists("ready"):
    time.sleep(0.01)
print("ready")
"""
    assert run_python(source).stdout == "ready\n"
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert b"left-behind-by-a-test" not in path.read_bytes()
        except OSError:  # ended meanwhile
            continue


def test_a_system_without_namespaces_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = tmp_path / "child.py"
    refusing.write_text("import sys\nprint('unshare: Operation not permitted', file=sys.stderr)\nsys.exit(125)")
    monkeypatch.setattr(sandbox, "_CHILD", refusing)
    with pytest.raises(
        ParseError, match=r"which this system refuses \(unshare: Operation not permitted\): allow user"
    ):
        run_python("print(1)")
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ParseError, match="this system is darwin: use Linux, or another check_with"):
        run_python("print(1)")


def test_a_program_cannot_stop_what_watches_it() -> None:
    run = run_python("import os, signal\nos.kill(0, signal.SIGSTOP)\nprint('goes on')")
    assert run.finished and run.stdout == "goes on\n"


@pytest.mark.slow
def test_a_watcher_that_was_stopped_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stopped = tmp_path / "child.py"
    stopped.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)")
    monkeypatch.setattr(sandbox, "_CHILD", stopped)
    monkeypatch.setattr(sandbox, "_PATIENCE_S", 0.1)
    assert not run_python("", seconds=1.0).finished
