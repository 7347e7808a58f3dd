"""API keys of servers: each key goes only to the hosts that it was given for."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from urllib.parse import urlsplit

from parse_infer.errors import SettingsError

TARGET_VARIABLE = "VLLM_API_KEY"  # as in vLLM
DRAFT_VARIABLE = "PARSE_DRAFT_API_KEY"
DRAFT_HINT = f"give its API key with --draft-key, draft_api_key or {DRAFT_VARIABLE}"


def find_key(name: str, given: str | None, variable: str) -> str | None:
    """Return the given key, else that of the environment variable, without the line break of a secret file.

    Raises ValueError for a key that no HTTP header can hold.
    """
    key = (given or os.environ.get(variable) or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise SettingsError(f"{name} has characters that no HTTP header can hold: give the key alone")
    return key or None


def draft_key(
    own: str | None, targets_key: str | None, draft_urls: Sequence[str], target_urls: Sequence[str]
) -> str | None:
    """Return the key of the draft servers.

    Args:
        own: key given for the draft servers.
        targets_key: reused only if each draft server has scheme, host and port of a target server. Without addresses
            PARSE starts the draft server, and a target with a key gets a draft server with a random key.
    """
    if own is not None or targets_key is None:
        return own
    if not draft_urls:
        return secrets.token_urlsafe(24)
    same = {_origin(url) for url in draft_urls} <= {_origin(url) for url in target_urls}
    return targets_key if same else None


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)
