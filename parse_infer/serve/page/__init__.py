"""The page at `/`: three files, sent as they are."""

from __future__ import annotations

from pathlib import Path

from fastapi import Response

_TYPES = {"page.html": "text/html", "page.js": "text/javascript", "page.css": "text/css"}
# Nothing from elsewhere, no script but page.js: should text of a model ever become markup, it still could do nothing.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_file(name: str) -> Response:
    """One of the three files."""
    content = (Path(__file__).parent / name).read_bytes()
    return Response(content, media_type=_TYPES[name], headers=_HEADERS)
