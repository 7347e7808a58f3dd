"""Check, before a build starts, that the servers serve the model and support the requests of a build."""

from __future__ import annotations

from openai import APIConnectionError, APIError, APIStatusError, InternalServerError

from data_tools.labels.served.completions import BrokenAnswer, Request
from data_tools.labels.served.retry import reason
from data_tools.labels.served.servers import CompletionServers
from parse_infer.errors import ParseError
from parse_infer.suggest import suggestion

_MANY = 12  # an error lists at most this number of served models


def check_servers(servers: CompletionServers, prompt: list[int] | str, url_key: str, name_key: str) -> int | None:
    """Request the model list and one token after `prompt` from every server.

    Args:
        prompt: token ids or text, as in the requests of the build.
        url_key, name_key: the options for the addresses, and for the model's name on the servers.

    Returns:
        The smallest context window that a server reports; None if no server reports its window.

    Raises:
        ConnectionError: no server answers.
        ValueError: a server is unusable; the message is one sentence.
    """
    windows = []
    for url in servers.urls:
        windows.append(_check_models(servers, url, url_key, name_key))
        _check_completion(servers, url, prompt)
    return min((window for window in windows if window is not None), default=None)


def _check_models(servers: CompletionServers, url: str, url_key: str, name_key: str) -> int | None:
    try:
        served = servers.models(url)
    except APIConnectionError as error:
        raise ConnectionError(
            f"no server answers at {url} ({reason(error)}): start it, or correct {url_key}"
        ) from None
    except InternalServerError:
        return None  # `transformers serve` without a hub cache; the completion request decides
    except (APIStatusError, BrokenAnswer) as error:
        _check_key(url, error)
        raise ParseError(
            f"{url} is no OpenAI-compatible server ({url}/models: {reason(error)}): correct {url_key}, which usually "
            "ends with /v1"
        ) from None
    if served and servers.model not in served:  # `transformers serve` may list nothing
        known = suggestion(servers.model, served) if len(served) > _MANY else f"it serves {', '.join(served)}"
        raise ParseError(
            f"the server at {url} does not serve {servers.model!r} ({known}): set {name_key} to the name there, or "
            f"{'draft_base_url' if name_key == 'served_draft' else url_key} to another server"
        )
    return served.get(servers.model)


def _check_completion(servers: CompletionServers, url: str, prompt: list[int] | str) -> None:
    text = "" if isinstance(prompt, str) else "; if the server does not take token ids, set wire to text"
    try:
        servers.try_out(url, Request(0, prompt, max_tokens=1))
    except APIStatusError as error:
        _check_key(url, error)
        if error.status_code in (404, 405):
            raise ParseError(
                f"the server at {url} has no /v1/completions ({reason(error)}), and chat completions cannot continue "
                "a partial answer: use vLLM, SGLang or transformers serve"
            ) from None
        raise ParseError(f"the server at {url} refuses to continue a prompt ({reason(error)}){text}") from None
    except (APIError, BrokenAnswer) as error:
        raise ParseError(f"the server at {url} does not continue a prompt: {reason(error)}{text}") from None


def _check_key(url: str, error: Exception) -> None:
    if isinstance(error, APIStatusError) and error.status_code in (401, 403):
        raise ParseError(
            f"the server at {url} rejects the API key ({reason(error)}): set the environment variable OPENAI_API_KEY"
        ) from None
