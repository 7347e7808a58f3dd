"""`ServerOptions`: the keyword options of `connect_backend`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parse_infer.backends.options import BackendOptions
from parse_infer.backends.pool.discovery import check_source
from parse_infer.backends.servers.logprob_reads import MAX_READ_TOKENS
from parse_infer.errors import SettingsError
from parse_infer.settings.generation import GenerationSettings

PARALLEL = 64  # concurrent answers
Urls = str | Sequence[str]


@dataclass(frozen=True)
class ServerOptions(BackendOptions):
    """Where the models' servers are, or how to start them.

    Raises SettingsError for an address without http:// or https://, and for options that exclude each other.
    """

    target_url: Urls = ()
    """Addresses of the target's replicas; without one PARSE starts a server, which ends with the backend. Any server
    with log-probabilities will do, such as vLLM as its users start it. Replicas that come and go: `dns+http://NAME:PORT`,
    all addresses of a name, or `file:PATH`, a line each."""
    draft_url: Urls = ()
    """Addresses of the draft model's replicas, as `target_url`, of any server with OpenAI's API. If it returns no
    token ids, drafts pass as text, and `draft` may be None or the model's name on the server."""
    api_key: str | None = None
    """API key of the target's servers; None: the environment variable VLLM_API_KEY, as in vLLM."""
    draft_api_key: str | None = None
    """API key of the draft servers; None: the environment variable PARSE_DRAFT_API_KEY. Without it, draft servers at a
    target server's address get `api_key`, and others get no key."""
    parallel: int = PARALLEL
    """Number of concurrent answers in `generate` and `collect`."""
    patience_s: float | None = None
    """How long a request waits while no replica is healthy. None: 2 minutes; for started servers, the time that a
    restart may take."""
    start_servers: bool = True
    """Start a server for each model that needs one and has no address; False: refuse, and name the command."""
    local_draft: bool | None = None
    """Run the draft model in this process. None: if the draft has no address and no options, is a folder with at most
    32 MiB of weights, and there is no GPU."""
    target_options: Mapping[str, Any] | None = None
    """Extra vLLM options of a started target server, by their names in `vllm.LLM`."""
    draft_options: Mapping[str, Any] | None = None
    """As `target_options`, of a started draft server."""
    max_read_tokens: int = MAX_READ_TOKENS
    """Longest read of log-probabilities, without what the server's prefix cache holds. A larger one takes more of the
    server's memory (`MAX_READ_TOKENS`)."""
    expected: GenerationSettings | None = None
    """Settings of future requests; errors in them are raised before a server starts."""
    on_progress: Callable[[str], None] = lambda line: None
    """Called with progress lines about starting servers."""

    def __post_init__(self) -> None:
        for url in (*self.target_urls, *self.draft_urls):
            check_source(url)
        if self.local_draft and (self.draft_urls or self.draft_options):
            raise SettingsError(
                f"local_draft and {'draft_url' if self.draft_urls else 'draft_options'} were both given: choose one"
            )
        for role in ("target", "draft"):
            if getattr(self, f"{role}_urls") and getattr(self, f"{role}_options"):
                raise SettingsError(
                    f"{role}_options are for a server that PARSE starts, but {role}_url names a running one: give its "
                    "options to that server, or leave one of the two out"
                )
        if self.max_read_tokens < 1:
            raise SettingsError(f"max_read_tokens is {self.max_read_tokens}; it must be at least 1")

    @property
    def target_urls(self) -> list[str]:
        return _listed(self.target_url)

    @property
    def draft_urls(self) -> list[str]:
        return _listed(self.draft_url)


def _listed(urls: Urls) -> list[str]:
    return [urls] if isinstance(urls, str) else list(urls)
