"""Program of the sandbox's child process: isolate this process, then run the Python source from standard input.

`sandbox.py` starts this file with the standard library alone, in an empty folder. Argument: the limit of CPU seconds.
Exit code 0: the source ran to its end. 125: the system refuses to isolate it, and standard error says why.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

_LIMITS = {"AS": 512 << 20, "FSIZE": 1 << 20, "NOFILE": 32, "NPROC": 8, "CORE": 0}  # sizes in bytes
_ALL_FILES = "size=16m,nr_inodes=1024,mode=755"
_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/nix/store")
_TRANSIENT_USERS = range(61184, 65520)  # systemd gives them to services, so no account has them
_NAMESPACES = 0x00020000 | 0x08000000 | 0x20000000 | 0x40000000  # of mounts, IPC, processes and network
_NEW_USER = 0x10000000
_BIND, _RECURSIVE, _PRIVATE = 1 << 12, 1 << 14, 1 << 18  # flags of mount
_DEATH_SIGNAL, _NO_NEW_PRIVILEGES = 1, 38  # options of prctl
_MOUNT_SETATTR, _AT_WORK_FOLDER, _AT_RECURSIVE = 442, -100, 0x8000  # older C libraries have no mount_setattr
_libc = ctypes.CDLL(None, use_errno=True)


def main(cpu_seconds: int) -> None:
    python, root = os.path.realpath(getattr(sys, "_base_executable", sys.executable)), Path.cwd()
    user, group = os.getuid(), os.getgid()
    if user:
        _call("unshare", _NAMESPACES | _NEW_USER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(text)
    else:
        _call("unshare", _NAMESPACES)
    _build_root(root)
    Path(root, "tmp", "main.py").write_bytes(sys.stdin.buffer.read())
    os.chroot(root)
    os.chdir("/tmp")
    for name, limit in (_LIMITS | {"CPU": cpu_seconds}).items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
    if not user:  # NPROC does not limit root
        user = _TRANSIENT_USERS[os.getpid() % len(_TRANSIENT_USERS)]
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call("prctl", _DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    ends = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    if (child := os.fork()) == 0:  # the first process of its namespace: all others die with it
        _call("prctl", _DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        os.setsid()  # kill(0) of the program must not reach this file's process
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
        # Instead of -I, which ignores the seed: sets then have the same order in every run.
        os.execve(python, [python, "-s", "-P", "-S", "-B", "main.py"], {"PYTHONHASHSEED": "0"})
    signal.sigwait(ends)
    os.kill(child, signal.SIGKILL)
    os._exit(int(os.waitpid(child, 0)[1] != 0))


def _build_root(root: Path) -> None:
    """Make `root` a file system in memory, with Python and libraries read-only, and the empty folder tmp."""
    os.umask(0o022)
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", 0, _ALL_FILES)
    for path in map(Path, (os.path.realpath(sys.base_prefix), *_LIBRARIES)):
        inside = Path(f"{root}{path}")
        if inside.exists() or not path.exists():
            continue
        inside.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            inside.mkdir()
        else:
            inside.touch()
        _mount(path, inside, None, _BIND | _RECURSIVE)
        read_only = (ctypes.c_uint64 * 4)(1, 0, 0, 0)  # struct mount_attr
        _call("syscall", _MOUNT_SETATTR, _AT_WORK_FOLDER, os.fsencode(inside), _AT_RECURSIVE, read_only, 32)
    tmp = root / "tmp"
    tmp.mkdir(exist_ok=True)
    tmp.chmod(0o777)


def _mount(source: str | Path | None, target: str | Path, kind: str | None, flags: int, options: str = "") -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _call("mount", *texts, flags, options.encode() or None)


def _call(name: str, *values: object) -> None:
    """Call a function of the C library. Raise OSError if it fails."""
    if getattr(_libc, name)(*values) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]))
    except OSError as refusal:
        print(refusal.strerror, file=sys.stderr, flush=True)
        os._exit(125)
