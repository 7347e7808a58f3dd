"""The demo page at `/`: three static files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastapi import Response

_TYPES = {"page.html": "text/html", "page.js": "text/javascript", "page.css": "text/css"}
# No resources of other hosts and no script but page.js: model text that became markup could not run code.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_file(name: str) -> Callable[[], Response]:
    """Handler that sends one of the three files. FastAPI takes its parameters from the query, so it must have none."""
    content, media_type = (Path(__file__).parent / name).read_bytes(), _TYPES[name]

    def handler() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return handler
