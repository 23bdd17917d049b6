"""The page at / in a real browser."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from serving_support import fake, run_server, until

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium of the system, driven by playwright."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium (Debian: apt-get install chromium)")
    sync_api = pytest.importorskip("playwright.sync_api", reason="the browser needs playwright")
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        started = playwright.chromium.launch(executable_path=found, args=arguments)
        yield started
        started.close()


@pytest.fixture
def page(browser) -> Iterator[Any]:
    """A page that must not log an error, nor ask any other host."""
    context = browser.new_context()
    made = context.new_page()
    problems: list[str] = []
    made.on("pageerror", lambda error: problems.append(str(error)))
    made.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    made.on(
        "request",
        lambda asked: (
            None if asked.url.startswith("http://127.0.0.1:") else problems.append(asked.url)
        ),
    )
    made.problems = problems
    yield made
    context.close()


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"[\d.]+", text)]


def test_a_conversation_with_live_figures(page, running, text_of, alone):
    page.goto(running.url)
    page.locator("#model", has_text="tiny").wait_for()
    page.evaluate("document.querySelector('details').open = true")
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "30")
    page.fill("#question", "hello")
    page.press("#question", "Enter")
    page.wait_for_selector("#send:enabled", timeout=20_000)
    assert page.text_content(".turn.user") == "hello"
    assert page.text_content(".turn.assistant") == text_of(alone("hello", 30))
    assert page.text_content("#count") == "30 tokens"
    assert numbers(page.text_content("#ttft"))[0] > 0
    assert numbers(page.text_content("#rate"))[0] > 0
    page.fill("#question", "and again")
    page.click("#send")
    until(lambda: page.locator(".assistant").count() == 2)
    page.wait_for_selector("#send:enabled", timeout=20_000)
    assert page.problems == []


def test_the_plan_is_a_table(page, running):
    page.goto(running.url)
    page.click("#show-plan")
    page.wait_for_selector("tbody tr")
    heads = page.eval_on_selector_all("th", "found => found.map(e => e.textContent)")
    assert heads[:2] == ["region", "decision"]
    rows = httpx.get(f"{running.url}/v1/plan").json()["rows"]
    assert page.locator("tbody tr").count() == len(rows)
    assert "generate" in page.text_content("#notes")
    assert page.is_hidden("#chat")
    page.click("#show-chat")
    assert page.is_visible("#question")
    assert page.problems == []


def test_figures_move_while_the_answer_comes_and_stop_ends_it(page):
    engine = FakeEngine(slots=1, delay_s=0.01)
    with run_server(fake(engine)) as running:
        page.goto(running.url)
        page.evaluate("document.querySelector('details').open = true")
        page.fill("#max_tokens", "5000")
        page.fill("#question", "x")
        page.press("#question", "Enter")
        until(lambda: numbers(page.text_content("#count"))[0] > 20)
        first = numbers(page.text_content("#count"))[0]
        until(lambda: numbers(page.text_content("#count"))[0] > first + 10)
        page.click("#stop")
        page.wait_for_selector("#send:enabled", timeout=20_000)
        page.wait_for_timeout(200)
        assert engine.idle
        assert page.problems == []


def test_a_key_opens_the_page(page):
    with run_server(fake(FakeEngine()), api_keys=("secret",)) as running:
        page.goto(running.url)
        page.locator("#model", has_text="API key").wait_for()
        page.evaluate("document.querySelector('details').open = true")
        page.fill("#key", "secret")
        page.press("#key", "Tab")
        page.locator("#model", has_text="tiny").wait_for()
        page.fill("#question", "<img src=x onerror=alert(1)>")
        page.press("#question", "Enter")
        until(lambda: page.locator(".assistant").count() == 1)
        assert page.text_content(".turn.user") == "<img src=x onerror=alert(1)>"
        assert page.locator("img").count() == 0


def test_the_page_allows_nothing_from_elsewhere(running):
    answer = httpx.get(running.url)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"(src|href)\s*=\s*[\"']?https?:", answer.text)
