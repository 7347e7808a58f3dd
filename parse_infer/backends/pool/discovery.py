"""Replicas that come and go: addresses of a name in the DNS, such as a headless Service, or lines of a file."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from parse_infer.errors import ServerError, SettingsError

log = logging.getLogger("parse_infer.backends")

EVERY_S = 5.0
DNS, FILE = "dns+http://", "file:"


def check_source(url: str) -> None:
    """Raise SettingsError unless `url` is an address, or names a source of addresses that may change."""
    if not url.startswith(("http://", "https://", DNS, FILE)):
        raise SettingsError(
            f"{url!r} is not a server address: it must begin with http:// or https://, or be {DNS}NAME:PORT or "
            f"{FILE}PATH for servers that come and go"
        )
    if url.startswith(DNS) and urlsplit(url).port is None:
        raise SettingsError(f"{url!r} has no port: write {DNS}NAME:PORT")


def address_of(url: str) -> str:
    """Return an address without "/v1"."""
    return url.rstrip("/").removesuffix("/v1")


def resolve(sources: Sequence[str]) -> list[str]:
    """Return the addresses of all sources, each once.

    Raises ValueError for an unknown name or file, or a line that is no address.
    """
    found: list[str] = []
    for source in sources:
        try:
            if source.startswith(FILE):
                found += _lines(source)
            elif source.startswith(DNS):
                found += _records(source)
            else:
                found.append(source)
        except (OSError, UnicodeError) as error:
            raise ServerError(f"{source} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return list(dict.fromkeys(map(address_of, found)))


def _lines(source: str) -> list[str]:
    lines = Path(source.removeprefix(FILE)).read_text(encoding="utf-8").splitlines()
    listed = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    for line in listed:
        if not line.startswith(("http://", "https://")):
            raise ServerError(f"{source} has the line {line!r}, which does not begin with http:// or https://")
    return listed


def _records(source: str) -> list[str]:
    parts = urlsplit(source)
    answers = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    hosts = sorted({str(address[0]) for *_, address in answers})
    return [f"http://{f'[{host}]' if ':' in host else host}:{parts.port}{parts.path}" for host in hosts]


class Discovery:
    """Resolves the sources again every few seconds, in the event loop that runs the requests.

    Args:
        role: "target" or "draft", for messages.
        sources: addresses, and sources of them.
        update: called with the addresses. Without any, all replicas stay: a name may be away for a moment.
    """

    def __init__(self, role: str, sources: Sequence[str], update: Callable[[Sequence[str]], None]) -> None:
        self._role, self._sources, self._update = role, sources, update
        self._changes = any(source.startswith((DNS, FILE)) for source in sources)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._failed = ""

    def start(self) -> None:
        """Start, unless the sources cannot change, or this event loop looks at them already."""
        loop = asyncio.get_running_loop()
        if self._changes and self._loop is not loop:
            self.close()
            self._loop, self._task = loop, loop.create_task(self._watch())

    def close(self) -> None:
        if self._task is not None:
            with suppress(RuntimeError):  # its event loop has ended
                self._task.cancel()
        self._loop = self._task = None

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                found = await asyncio.to_thread(resolve, self._sources)
            except ServerError as error:
                if str(error) != self._failed:  # once, not every few seconds
                    log.warning("the %s servers stay as they are: %s", self._role, error)
                self._failed = str(error)
                continue
            self._failed = ""
            if found:
                self._update(found)
