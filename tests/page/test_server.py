"""Errors of the server, its end and return, its load phase, and API keys."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.types.events import Delta, Event, Started
from engine.types.request import Request
from tests.e2e.serving import serving
from tests.page.tab import ENDLESS_SCHEMA, Tab
from tests.server.fakes import HERMES, FakeEngine, FakeTokenizer, finished, serve_in_thread

pytestmark = pytest.mark.browser
expect = pytest.importorskip("playwright.sync_api", reason="playwright is missing").expect

KEY = "a-secret-key"


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port


@contextlib.contextmanager
def own_server(folder: Path, *flags: str) -> Iterator[str]:
    """A server of this test."""
    with (folder / "log").open("a") as errors, serving(["--store", "memory", *flags], errors) as address:
        yield address


def test_a_refused_request_shows_the_reason_at_its_answer(tab: Tab) -> None:
    """With the field; after a correction the answer is tried again in place."""
    tab.expected_statuses = {"400"}
    tab.set("JSON schema", '{"type": "nonsense"}')
    tab.send("What is Cellar?")
    alert = tab.answers.last.get_by_role("alert")
    expect(alert).to_contain_text("Error 400")
    expect(alert).to_contain_text("response_format")

    tab.set("JSON schema", "")
    tab.button("Try again").click()
    assert "Cellar" in tab.answer()
    expect(tab.answers).to_have_count(1)
    expect(tab.questions).to_have_count(1)


def test_settings_that_are_no_json_are_named(tab: Tab) -> None:
    """Nothing is sent."""
    tab.set("Tools", "[{]")
    tab.send("What is Cellar?")

    expect(tab.answers.last.get_by_role("alert")).to_contain_text("The list of tools in Settings is not JSON")


def test_the_server_goes_and_comes_back(open_tab: Callable[..., Tab], tmp_path: Path) -> None:
    """A cut answer keeps its text; the page sees the return without a reload, and no message is lost."""
    port = str(free_port())
    with own_server(tmp_path, "--port", port, "--grace", "0") as address:
        tab = open_tab(address).ready()
        tab.expected_statuses = {
            "ERR_CONNECTION_REFUSED",
            "ERR_INCOMPLETE_CHUNKED_ENCODING",
            "ERR_CONNECTION_RESET",
            "503",
        }
        tab.ask("What is Cellar?")
        tab.set("JSON schema", ENDLESS_SCHEMA)
        tab.send("Numbers")
        expect(tab.answers.last.locator(".markdown")).to_contain_text("1")
    expect(tab.answers.last.get_by_role("alert")).to_be_visible()
    expect(tab.page.locator(".server.unreachable")).to_be_visible()
    expect(tab.answers.last.locator(".markdown")).to_contain_text("1")
    tab.set("JSON schema", "")
    tab.send("What is a slot?")
    expect(tab.answers.last.get_by_role("alert")).to_contain_text("The server does not answer")

    with own_server(tmp_path, "--port", port):
        tab.ready()
        tab.button("Try again").click()
        assert "slot" in tab.answer()
        expect(tab.questions).to_have_count(3)


def test_a_key_is_asked_for_and_kept_in_the_session(open_tab: Callable[..., Tab], tmp_path: Path) -> None:
    """A wrong key is refused; the right one is in no storage that outlives the tab."""
    with own_server(tmp_path, "--api-key", f"{KEY},another-key") as address:
        tab = open_tab(address)
        tab.expected_statuses = {"401"}
        expect(tab.page.locator(".server.locked")).to_be_visible()
        tab.page.get_by_label("API key").first.fill("wrong")
        tab.page.keyboard.press("Enter")
        expect(tab.page.locator(".server.locked")).to_be_visible()
        tab.page.get_by_label("API key").first.fill(KEY)
        tab.page.keyboard.press("Enter")
        tab.ready()
        tab.set("Temperature", "0")
        assert "Cellar" in tab.ask("What is Cellar?")
        tab.open_panel("Engine")
        expect(tab.page.locator(".slots")).to_be_visible()

        assert KEY not in tab.page.evaluate("JSON.stringify({...localStorage}) + document.cookie + location.href")
        assert KEY in tab.page.evaluate("JSON.stringify({...sessionStorage})")
        tab.page.reload()
        tab.ready()


def test_the_phase_is_shown_while_the_model_loads(open_tab: Callable[..., Tab]) -> None:
    """Then the page becomes ready without a reload."""
    engine = FakeEngine(phase="weights")
    with serve_in_thread(engine) as port:
        tab = open_tab(f"http://127.0.0.1:{port}")
        tab.expected_statuses = {"503"}
        expect(tab.page.locator(".server.loading")).to_contain_text("weights")
        engine.phase = "ready"
        tab.ready()
        tab.page.goto("about:blank")


def reason(request: Request) -> Iterator[Event]:
    """The script of an answer with reasoning."""
    yield Started(len(request.prompt), 0, 7)
    for token, text in ((254, "<think>"), (1, "Two and two"), (255, "</think>"), (2, "Four.")):
        yield Delta(text, (token,))
    yield finished(request)


def test_reasoning_is_folded(open_tab: Callable[..., Tab]) -> None:
    """Above the answer, and opened by a click."""
    with serve_in_thread(FakeEngine(script=reason, tokenizer=FakeTokenizer(HERMES))) as port:
        tab = open_tab(f"http://127.0.0.1:{port}").ready()
        assert "Four." == tab.ask("2 + 2")
        reasoning = tab.answers.last.locator("details.reasoning")
        expect(reasoning.get_by_text("Two and two")).not_to_be_visible()
        reasoning.locator("summary").click()
        expect(reasoning.get_by_text("Two and two")).to_be_visible()
        tab.page.goto("about:blank")


def test_a_full_storage_is_reported(tab: Tab) -> None:
    """The conversation goes on, and can be exported."""
    tab.set("Temperature", "0")
    tab.page.evaluate("void (Storage.prototype.setItem = () => { throw new Error() })")
    assert "Cellar" in tab.ask("What is Cellar?")

    expect(tab.page.get_by_role("alert")).to_contain_text("The storage of this browser is full")
    expect(tab.button("Export all")).to_be_enabled()
