"""The view of a model without a chat template: one text, continued and stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.types.events import Delta, Event, Started
from engine.types.request import Request
from tests.page.tab import Tab
from tests.page.test_layout import PHONE, violations
from tests.server.fakes import FakeEngine, FakeTokenizer, Gate, finished, serve_in_thread

pytestmark = pytest.mark.browser
expect = pytest.importorskip("playwright.sync_api", reason="playwright is missing").expect

Opened = Callable[..., Tab]
PROMPT = "Once upon a time"


def tell(request: Request) -> Iterator[Event]:
    """The script of a short continuation."""
    yield Started(len(request.prompt), 0, 7)
    for text in (" there was", " a cellar."):
        yield Delta(text, (1,))
    yield finished(request)


def view(open_tab: Opened, port: int, **options: Any) -> Tab:
    """A tab on a server whose model has no chat template."""
    return open_tab(f"http://127.0.0.1:{port}", **options).ready()


def test_a_text_is_continued_in_place(open_tab: Opened) -> None:
    """Again from where it stands; with the settings, and kept over a reload."""
    with serve_in_thread(FakeEngine(script=tell, tokenizer=FakeTokenizer())) as port:
        tab = view(open_tab, port)
        field = tab.page.get_by_label("Text", exact=True)
        expect(tab.button("Continue")).to_be_disabled()
        expect(tab.page.get_by_label("Message", exact=True)).to_have_count(0)
        tab.set("Temperature", "0")
        expect(tab.page.get_by_label("System prompt")).to_have_count(0)
        field.fill(PROMPT)
        with tab.page.expect_request("**/v1/completions") as sent:
            tab.button("Continue").click()
        expect(field).to_have_value(f"{PROMPT} there was a cellar.")
        assert {"stream": True, "temperature": 0, "prompt": PROMPT} == json.loads(sent.value.post_data or "")

        field.press("Control+Enter")
        expect(field).to_have_value(f"{PROMPT} there was a cellar. there was a cellar.")
        expect(tab.page.get_by_role("status")).to_have_text("The text is complete")
        tab.page.reload()
        expect(field).to_have_value(f"{PROMPT} there was a cellar. there was a cellar.")
        tab.page.goto("about:blank")


def test_a_continuation_is_stopped(open_tab: Opened) -> None:
    """The text so far stays and can be changed."""
    gate = Gate()

    def pause(request: Request) -> Iterator[Event | Gate]:
        yield Started(len(request.prompt), 0, 7)
        yield Delta(" there", (1,))
        yield gate
        yield finished(request)

    with serve_in_thread(FakeEngine(script=pause, tokenizer=FakeTokenizer())) as port:
        tab = view(open_tab, port)
        field = tab.page.get_by_label("Text", exact=True)
        field.fill(PROMPT)
        tab.button("Continue").click()
        expect(field).to_have_value(f"{PROMPT} there")
        expect(field).not_to_be_editable()
        tab.button("Stop").click()
        expect(tab.page.get_by_role("status")).to_have_text("Stopped")
        expect(field).to_be_editable()
        expect(field).to_have_value(f"{PROMPT} there")
        assert 0 == tab.page.locator(".failure").count()
        tab.page.goto("about:blank")


def test_a_refused_text_shows_the_reason(open_tab: Opened) -> None:
    """And stays as it was."""
    with serve_in_thread(FakeEngine(tokenizer=FakeTokenizer())) as port:
        tab = view(open_tab, port)
        tab.expected_statuses = {"400"}
        field = tab.page.get_by_label("Text", exact=True)
        field.fill("x" * 500)
        tab.button("Continue").click()
        expect(tab.page.get_by_role("alert")).to_contain_text("maximum context length")
        expect(field).to_have_value("x" * 500)
        tab.page.goto("about:blank")


@pytest.mark.parametrize("options", [{}, PHONE], ids=["wide", "phone"])
def test_the_view_is_accessible(open_tab: Opened, options: Any) -> None:
    with serve_in_thread(FakeEngine(script=tell, tokenizer=FakeTokenizer())) as port:
        tab = view(open_tab, port, reduced_motion="reduce", **options)
        expect(tab.page.get_by_label("Text", exact=True)).to_be_in_viewport(ratio=1)
        assert 0 == tab.overflow
        assert [] == violations(tab)
        tab.page.goto("about:blank")
