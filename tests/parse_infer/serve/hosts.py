"""Hosts of a fleet in tests: network namespaces behind one bridge, or, without the rights to make them, addresses of
the loopback interface."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNET = 0x40000000  # of setns(2)


@dataclass(frozen=True)
class Host:
    """
    Attributes:
        namespace: name of its network namespace; empty: that of this process.
    """

    address: str
    namespace: str = ""

    def enter(self) -> None:
        """Move this thread onto the host, with the threads and processes that it starts from now on."""
        if self.namespace:
            with Path("/run/netns", self.namespace).open() as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"setns to {self.namespace}")

    def cut_off(self) -> None:
        """From now on every packet to and from the host is lost."""
        _ip("link", "set", self.namespace, "down")


@contextmanager
def hosts() -> Iterator[Iterator[Host]]:
    """One host after the other."""
    with ExitStack() as stack:
        try:
            start = _network(stack)
            found = itertools.chain([start(2)], map(start, itertools.count(3)))
        except (OSError, subprocess.CalledProcessError):
            found = itertools.chain(Host(f"127.0.0.{n}") for n in range(2, 100))
        yield found


def _network(stack: ExitStack) -> Callable[[int], Host]:
    """Make a bridge, and return what makes the n-th host on it."""
    bridge, network = f"p{os.getpid()}", f"10.213.{os.getpid() % 256}"
    _ip("link", "add", bridge, "type", "bridge")
    stack.callback(_ip, "link", "del", bridge)
    _ip("address", "add", f"{network}.1/24", "dev", bridge)
    _ip("link", "set", bridge, "up")

    def start(n: int) -> Host:
        name, address = f"{bridge}h{n}", f"{network}.{n}"
        _ip("netns", "add", name)
        stack.callback(_ip, "netns", "del", name)
        _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        stack.callback(_ip, "link", "del", name)  # open sockets keep a namespace for a while
        _ip("link", "set", name, "master", bridge, "up")
        _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", name, "link", "set", device, "up")
        return Host(address, name)

    return start


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
