"""The page at `/` in a headless Chromium: a completion and a chat that stream, masks that are filled, and what it says."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.live import KEY, Live, live
from tests.e2e.test_serve_command import folder

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[browser]'")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = ["--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium in the path: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    with playwright.sync_playwright() as driver:  # a fresh profile each time
        made = driver.chromium.launch(
            executable_path=CHROMIUM, headless=True, chromium_sandbox=not root, args=FLAGS, timeout=60_000
        )
        yield made
        made.close()


@contextmanager
def opened(browser: Any, here: Live) -> Iterator[Any]:
    """The page, with the key as the password that the browser is asked for. It may neither fail nor load from elsewhere."""
    address = f"http://127.0.0.1:{here.port}"
    context = browser.new_context(http_credentials={"username": "any", "password": KEY})
    page = context.new_page()
    page.set_default_timeout(30_000)
    wrong: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if "Content Security Policy" in said.text else None)
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    page.wait_for_selector("#tabs button")
    if page.is_visible("#temperature"):
        page.fill("#temperature", "0")  # the same answers each time
    yield page
    context.close()
    assert not wrong and all(url.startswith(address) for url in asked), (wrong, asked)


def modes(page: Any) -> list[str]:
    return [tab.inner_text() for tab in page.query_selector_all("#tabs button")]


WATCH = """([id, list]) => {
    window[list] = [];
    new MutationObserver(() => window[list].push(document.getElementById(id).textContent.length))
        .observe(document.getElementById(id), {childList: true, characterData: true, subtree: true});
}"""


def grew(lengths: list[int]) -> bool:
    """Whether a text came in many pieces and was never taken back."""
    return len(set(lengths)) > 10 and lengths == sorted(lengths)


SPEED = re.compile(r"^(\d+) tokens, first after \d+\.\d\d s, then (\d+\.\d) tokens/s$")


def until_text(page: Any, place: str, pattern: str) -> None:
    """Wait for it. (`wait_for_function` would need an eval, which the page's policy forbids.)"""
    playwright.expect(page.locator(place)).to_have_text(re.compile(pattern, re.DOTALL), timeout=30_000)


def wait_for_speed(page: Any) -> tuple[int, float]:
    until_text(page, "#speed", ".")
    said = SPEED.match(page.inner_text("#speed"))
    assert said is not None, page.inner_text("#speed")
    return int(said[1]), float(said[2])


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(folder(tmp_path_factory.mktemp("page") / "tiny", max_len=20_000), blocks=1400) as here:
        yield here


def test_a_completion_streams_with_its_speed(browser: Any, decoder: Live):
    with opened(browser, decoder) as page:
        assert page.inner_text("#model") == "tiny" and modes(page) == ["Completion", "Chat"]
        page.evaluate(WATCH, ["output", "lengths"])
        page.fill("#input", "The import statement")
        page.fill("#max_tokens", "200")
        page.click("#send")
        tokens, rate = wait_for_speed(page)
        assert 1 < tokens <= 200 and rate > 1
        assert page.inner_text("#output").startswith("The import statement")
        assert grew(page.evaluate("window.lengths")) and page.inner_text("#error") == ""


def test_what_goes_wrong_is_shown_and_stop_ends_the_work(browser: Any, decoder: Live):
    with opened(browser, decoder) as page:
        page.fill("#input", "x")
        page.fill("#max_tokens", "30000")
        page.click("#send")
        until_text(page, "#error", "20000 tokens")
        page.fill("#max_tokens", "19000")
        page.click("#send")
        until_text(page, "#output", ".{20}")
        assert page.inner_text("#error") == "" and decoder.metric("requests_running") == 1
        page.click("#stop")
        decoder.until(lambda: decoder.metric("requests_running") == 0)
        assert page.is_enabled("#send") and page.inner_text("#error") == ""


def test_a_chat_remembers_and_streams(browser: Any, decoder: Live):
    with opened(browser, decoder) as page:
        sent: list[Any] = []
        page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
        page.click("#tabs button[data-mode=chat]")
        page.fill("#max_tokens", "60")
        page.evaluate(WATCH, ["turns", "lengths"])
        for text in ("hello", "and more"):
            page.fill("#input", text)
            page.press("#input", "Enter")
            tokens, _ = wait_for_speed(page)
            page.wait_for_selector("#send:enabled")
            assert 1 < tokens <= 60
        assert grew(page.evaluate("window.lengths"))
        turns = [(line.get_attribute("class"), line.text_content()) for line in page.query_selector_all("#turns .turn")]
        assert [kind for kind, _ in turns] == ["turn user", "turn assistant"] * 2
        first, second = (body["messages"] for body in sent)
        assert first == [{"role": "user", "content": "hello"}]
        assert second == [*first, {"role": "assistant", "content": turns[1][1]}, {"role": "user", "content": "and more"}]
        page.click("#clear")
        assert page.inner_text("#turns") == ""


def test_a_chat_that_is_refused_leaves_no_trace(browser: Any, decoder: Live):
    with opened(browser, decoder) as page:
        sent: list[Any] = []
        page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
        page.click("#tabs button[data-mode=chat]")
        page.fill("#input", "hello")
        page.fill("#max_tokens", "30000")
        page.click("#send")
        until_text(page, "#error", ".")
        page.wait_for_selector("#send:enabled")
        assert page.input_value("#input") == "hello" and page.inner_text("#turns") == ""
        page.fill("#max_tokens", "5")
        page.click("#send")
        wait_for_speed(page)
        assert sent[-1]["messages"] == [{"role": "user", "content": "hello"}]


def test_masks_are_filled(browser: Any, tmp_path: Path):
    with live(folder(tmp_path / "masked", "mlm")) as here, opened(browser, here) as page:
        assert modes(page) == ["Fill mask"] and page.is_hidden("#generation")
        page.fill("#input", "Paris is [MASK] [MASK].")
        page.click("#send")
        page.wait_for_selector("#output table tr")
        rows = [[cell.inner_text() for cell in row.query_selector_all("td")] for row in page.query_selector_all("#output tr")]
        assert len(rows) == 10 and rows[0][0] == "mask 1" and rows[5][0] == "mask 2"
        assert all(re.fullmatch(r"\d+\.\d%", row[2]) and row[3].startswith("Paris is ") for row in rows)
        page.fill("#input", "no mask")
        page.click("#send")
        until_text(page, "#error", "has no mask")


def test_texts_are_classified(browser: Any, tmp_path: Path):
    with live(folder(tmp_path / "classes", "classify")) as here, opened(browser, here) as page:
        assert modes(page) == ["Classify"]
        page.fill("#input", "I want my money back")
        page.click("#send")
        page.wait_for_selector("#output table tr")
        rows = [[cell.inner_text() for cell in row.query_selector_all("td")] for row in page.query_selector_all("#output tr")]
        assert sorted(row[0] for row in rows) == ["bad", "good"]
        assert sum(float(row[1].rstrip("%")) for row in rows) == pytest.approx(100, abs=0.11)
