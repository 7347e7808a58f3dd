"""The page in headless Chromium: `PARSE_CHROMIUM=/path/to/chromium pytest …`, with the package playwright."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = os.environ.get("PARSE_CHROMIUM")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="PARSE_CHROMIUM names no browser")
PATIENCE = 60_000  # milliseconds


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any, served: Any) -> Iterator[Any]:
    """The page, loaded; it must not complain of anything."""
    page = browser.new_context().new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(served.url)
    page.locator("#model", has_text="tiny").wait_for(timeout=PATIENCE)
    yield page
    page.context.close()
    assert not complaints


def submit(page: Any, prompt: str, tokens: int, threshold: float) -> None:
    page.fill("#prompt", prompt)
    page.fill("#tokens", str(tokens))
    page.evaluate("t => { const s = document.getElementById('threshold'); s.value = t; "
                  "s.dispatchEvent(new Event('input')); }", threshold)  # fmt: skip
    page.click("#ask")


def text_of(page: Any, *kinds: str) -> str:
    """What the answer's column shows of these kinds."""
    return page.evaluate(
        "kinds => [...document.querySelectorAll('#parse-answer span')]"
        ".filter(s => kinds.includes(s.className)).map(s => s.textContent).join('')",
        list(kinds),
    )


@pytest.mark.parametrize("threshold", [0.0, 1.01])
def test_the_page_colours_text_by_author(page, served, threshold):
    prompt = "<b>Tom</b> has 5 apples."
    own = served.engine.generate(prompt, max_new_tokens=32, threshold=threshold)
    submit(page, prompt, 32, threshold)
    page.locator("#target-speed", has_text="tokens/s").wait_for(timeout=PATIENCE)
    assert text_of(page, "accepted", "target") == own.text
    assert bool(text_of(page, "rejected")) == (own.stats.accepted_tokens < own.stats.draft_tokens)
    alone = served.engine.generate_target(prompt, max_new_tokens=32)
    assert page.text_content("#target-answer") == alone.text
    if threshold == 0:
        titles = page.eval_on_selector_all("#parse-answer .accepted", "spans => spans.map(span => span.title)")
        assert titles == [f"validity {span.validity:.3f}" for span in own.spans]
        colours = {page.eval_on_selector(f"footer .{kind}", "e => getComputedStyle(e).color") for kind in
                   ("pending", "accepted", "rejected", "target")}  # fmt: skip
        assert len(colours) == 4
    assert "times as fast" in page.text_content("#parse-speed")


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_a_bar_shows_who_wrote_what(page, threshold):
    submit(page, "Tom has 5 apples.", 32, threshold)
    page.locator("#target-speed", has_text="tokens/s").wait_for(timeout=PATIENCE)
    for side in ("parse", "target"):
        spans = f"[...document.querySelectorAll('#{side}-answer span')].map(s => [s.className, s.textContent.length])"
        pieces = [piece for piece in page.evaluate(spans) if piece[0] != "rejected"]
        bar = page.eval_on_selector_all(
            f"#{side}-bar rect", "all => all.map(r => [r.getAttribute('class'), r.width.baseVal.value])"
        )
        length = sum(size for _, size in pieces)
        assert length and bar == pieces
        draft = 100 * sum(size for kind, size in pieces if kind == "accepted") / length
        share = page.text_content(f"#{side}-share")
        assert share == f"{draft:.0f} % by the draft model, {100 - round(draft)} % by the target"
        ends = page.eval_on_selector(
            f"#{side}-bar", "b => [b, b.lastElementChild].map(e => e.getBoundingClientRect().right)"
        )
        assert ends[0] == pytest.approx(ends[1], abs=1), "the pieces fill the bar"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_colour_is_readable(browser, served, scheme):
    """By the contrast of WCAG 2.2 for text, 4.5 to 1."""
    page = browser.new_context(color_scheme=scheme).new_page()
    page.goto(served.url)
    panel = page.eval_on_selector("section", "e => getComputedStyle(e).backgroundColor")
    ground = page.eval_on_selector("body", "e => getComputedStyle(e).backgroundColor")
    assert (luminance(panel) > 0.5) == (scheme == "light")
    for colour in page.eval_on_selector_all("footer span", "all => all.map(e => getComputedStyle(e).color)"):
        assert min(contrast(colour, panel), contrast(colour, ground)) >= 4.5, colour
    page.context.close()


def luminance(colour: str) -> float:
    """The relative luminance of `rgb(r, g, b)`."""
    channels = [int(c) / 255 for c in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_a_threshold_is_sent_once_its_slider_was_moved(page):
    """Before that the server's risk holds, if it has one."""
    sent: list[dict[str, Any]] = []

    def answer(route: Any) -> None:
        sent.append(json.loads(route.request.post_data)["parse"])
        route.fulfill(content_type="text/event-stream", body="data: [DONE]\n\n")

    page.route("**/v1/chat/completions", answer)
    page.click("#ask")
    page.locator("#ask:enabled").wait_for(timeout=PATIENCE)
    submit(page, "x", 8, 0.5)
    page.locator("#ask:enabled").wait_for(timeout=PATIENCE)
    assert [parse for parse in sent if "mode" not in parse] == [{"events": True}, {"threshold": 0.5, "events": True}]


def test_markup_in_an_answer_stays_text(page, served):
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    choice = {"index": 0, "delta": {}, "parse": {"event": "resumed", "text": evil}}
    stream = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
    answer = {"content_type": "text/event-stream", "body": stream}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer))
    submit(page, "x", 8, 0.5)
    page.locator("#target-answer span").first.wait_for(timeout=PATIENCE)
    assert page.text_content("#target-answer") == evil
    assert page.locator("pre img, pre script").count() == 0


def test_stop_ends_the_work(page, served):
    submit(page, "x", 1500, 1.01)
    page.locator("#parse-answer span").first.wait_for(timeout=PATIENCE)
    page.click("#end")
    page.locator("#ask:enabled").wait_for(timeout=PATIENCE)
    assert served.becomes_idle(5)
