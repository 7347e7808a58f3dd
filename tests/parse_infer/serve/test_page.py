"""The page: nothing from elsewhere, no text as HTML, and every name that the script uses is there."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import httpx

from parse_infer.serve.settings import RiskSettings
from parse_infer.serve.thread_runner import ThreadRunner
from tests.parse_infer.serve.conftest import running
from tests.parse_infer.serve.test_event_stream import calibrated


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_is_strict_and_complete(served):
    page, script, style = (httpx.get(served.url + path) for path in ("/", "/page.js", "/page.css"))
    assert [file.headers["content-type"].split(";")[0] for file in (page, script, style)] == [
        "text/html", "text/javascript", "text/css",
    ]  # fmt: skip
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "http" not in policy
    elements = Elements(page.text).found
    assert not any(name == "style" or name.startswith("on") for _, attributes in elements for name in attributes)
    assert [a["src"] for tag, a in elements if tag == "script"] == ["page.js"] and "style" not in dict(elements)
    ids = {attributes["id"] for _, attributes in elements if "id" in attributes}
    parts = re.findall(r'part\("(\w+)"\)', script.text)
    assert len(parts) > 3 and {f"{side}-{part}" for side in ("parse", "target") for part in parts} <= ids
    assert set(re.findall(r'\$\("([\w-]+)"\)', script.text)) <= ids
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\.style\b", script.text)
    for kind in ("pending", "accepted", "rejected", "target"):
        assert f".{kind} " in style.text and f'"{kind}"' in script.text


def test_a_query_names_no_other_file(served):
    """Anyone may ask for the page, without a key."""
    page = httpx.get(served.url + "/")
    for name in ("page.js", "/etc/hostname", "x"):
        response = httpx.get(served.url + "/", params={"name": name})
        assert response.status_code == 200 and response.text == page.text


def test_the_script_calls_existing_routes(served):
    script = httpx.get(served.url + "/page.js").text
    schema = httpx.get(served.url + "/openapi.json").json()
    for path in re.findall(r'fetch\("([^"]+)"', script):
        assert f"/{path}" in schema["paths"]
    card = httpx.get(served.url + "/v1/models").json()["data"][0]
    assert card["parse"] == {"threshold": served.engine.threshold, "risk": None}


def test_the_card_has_the_servers_risk(make_engine):
    """Which chooses another threshold than the one beside it."""
    engine = make_engine()
    runner = ThreadRunner(make_engine(calibrations=[calibrated(engine)]))
    with running(runner, engine, risk_settings=RiskSettings(0.05)) as server:
        card = httpx.get(server.url + "/v1/models").json()["data"][0]
    assert card["parse"] == {"threshold": engine.threshold, "risk": 0.05}
