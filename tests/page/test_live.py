"""The live view of the engine: shared prefixes, context shifts and drafts as they happen."""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.page.tab import ENDLESS_SCHEMA, Tab

pytestmark = pytest.mark.browser
expect = pytest.importorskip("playwright.sync_api", reason="playwright is missing").expect

LONG = "The cellar holds the keys and values of every sequence. " * 12


@contextmanager
def generating(address: str, text: str, **fields: object) -> Iterator[None]:
    """Another client with an answer that does not end; leaving the block disconnects it."""
    body = {"messages": [{"role": "user", "content": text}], "stream": True, "ignore_eos": True, **fields}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps({"temperature": 0, **body}).encode(), headers
    )
    leaving = threading.Event()
    with urllib.request.urlopen(request, timeout=60) as answer:

        def read() -> None:
            while not leaving.is_set() and answer.readline():
                pass

        answer.readline()
        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield
        finally:
            leaving.set()
            reader.join(60)


def test_a_prefix_is_shown_as_shared_while_both_run(tab: Tab) -> None:
    """Two slots with one prompt: cells in use by both, and a branch of the prefix cache used by both."""
    tab.open_panel("Engine")
    shift = {"overflow": "shift", "max_tokens": 100_000}
    with generating(tab.address, LONG + "One", **shift), generating(tab.address, LONG + "Two", **shift):
        slots = tab.page.locator(".slot.decode")
        expect(slots).to_have_count(2)
        expect(slots.nth(1).locator(".chips .cached")).to_have_text(re.compile(r"[1-9]\d* shared"))
        expect(tab.page.locator(".cells")).to_contain_text(re.compile(r"[1-9]\d* in use · [1-9]\d* of them shared"))
        expect(tab.page.locator(".node.shared title").last).to_have_text(re.compile(r"used by slot \d, \d"))
    expect(tab.page.locator(".slot.decode")).to_have_count(0)
    expect(tab.page.locator(".finished > li:nth-child(-n+2) .cached")).not_to_have_count(0)


def test_a_context_shift_is_shown_while_it_runs(tab: Tab) -> None:
    tab.open_panel("Engine")
    with generating(tab.address, "Go on", overflow="shift", max_tokens=100_000):
        expect(tab.page.locator(".slot .shifted")).to_have_text(re.compile(r"[1-9]\d* shifts?, [\d,]+ dropped"))
    expect(tab.page.locator(".tiles")).to_contain_text(re.compile(r"context shifts\s*[1-9]"))


def test_a_shift_of_the_own_conversation_is_shown(tab: Tab) -> None:
    """At the answer, and among the finished sequences."""
    tab.open_panel("Settings")
    tab.page.get_by_label("At a full context").select_option("shift")
    tab.set("JSON schema", ENDLESS_SCHEMA)
    tab.set("Max tokens", "1000")
    tab.open_panel("Engine")
    tab.send("Numbers")
    expect(tab.answers.last).to_contain_text(re.compile(r"[1-9]\d* context shifts?"))
    expect(tab.page.locator(".finished > li").first).to_contain_text(re.compile(r"shifts?, [\d,]+ dropped"))


def test_accepted_drafts_are_shown(tab: Tab) -> None:
    """In the totals of a drafter, and at the sequence that had them."""
    tab.set("Temperature", "0")
    tab.open_panel("Engine")
    tab.ask("What is Cellar?")
    expect(tab.answers.last).to_contain_text(re.compile(r"[1-9]\d* of [1-9]\d* drafts accepted"))
    expect(
        tab.page.locator(".drafter").filter(has_text=re.compile(r"[1-9][\d,]* of [\d,]+ accepted"))
    ).not_to_have_count(0)
    expect(tab.page.locator(".finished > li").first.locator(".accepted")).to_have_text(
        re.compile(r"[1-9]\d*/\d+ drafts")
    )


def test_the_second_turn_shows_its_cached_prompt(tab: Tab) -> None:
    tab.open_panel("Engine")
    tab.ask("What is Cellar?")
    tab.ask("What is a slot?")

    expect(tab.page.locator(".finished > li").first.locator(".cached")).to_have_text(re.compile(r"[1-9]\d* shared"))


def test_many_slots_have_a_line_each(open_tab: Callable[..., Tab]) -> None:
    """30 of 64 slots run: all sections are in reach, and the counts are in the label of a bar."""
    tab = open_tab()
    sequence = {
        **dict.fromkeys(("drafted_tokens", "accepted_tokens", "context_shifts", "dropped_tokens"), 0),
        "prompt_tokens": 100,
        "cached_tokens": 90,
        "generated_tokens": 40,
        "context_tokens": 140,
    }

    def busy(route: Any) -> None:
        answer = route.fetch()
        state = answer.json()
        running = [{"slot": slot, "state": "decode", "sequence": sequence} for slot in range(30)]
        free = [{"slot": slot, "state": "free", "sequence": None} for slot in range(30, 64)]
        counts = {**state["counts"], "running": 30, "cached_tokens": 0, "prompt_tokens": 0}
        route.fulfill(response=answer, json={**state, "slots": [*running, *free], "counts": counts})

    tab.page.route("**/v1/engine", busy)
    tab.open_panel("Engine")
    slots = tab.page.locator(".slot.decode")
    expect(slots).to_have_count(30)
    expect(slots.first.get_by_role("img")).to_have_accessible_name("decode: 100 prompt, 90 shared, 40 generated")
    expect(tab.page.locator(".tiles")).to_contain_text(re.compile(r"prompts cached\s*90 %\s*2,700 of 3,000"))
    box = tab.page.locator(".slots").bounding_box()
    assert box is not None
    assert box["height"] < 500


def test_polling_slows_down_and_stops(open_tab: Callable[..., Tab]) -> None:
    """While nothing happens the waits double; a closed view and a hidden tab do not poll."""
    tab = open_tab().ready()
    tab.page.wait_for_timeout(1000)
    assert not tab.polls
    tab.open_panel("Engine")
    tab.page.wait_for_timeout(6000)
    assert 3 <= len(tab.polls) <= 7

    tab.button("Close the panel").click()
    before = len(tab.polls)
    tab.page.wait_for_timeout(2000)
    assert len(tab.polls) <= before + 1

    tab.open_panel("Engine")
    expect(tab.page.locator(".engine")).to_be_visible()
    tab.page.evaluate("Object.defineProperty(document, 'hidden', { get: () => true, configurable: true })")
    tab.page.wait_for_timeout(1000)
    before = len(tab.polls)
    tab.page.wait_for_timeout(3000)
    assert before == len(tab.polls)

    tab.page.evaluate("delete document.hidden")
    with tab.page.expect_request("**/v1/engine"):
        tab.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def test_the_panel_is_opened_on_demand_and_remembered(tab: Tab) -> None:
    """Over a reload; on a narrow window it never covers the chat at the start."""
    panel = tab.page.get_by_role("complementary", name="Engine")
    expect(panel).to_have_count(0)
    tab.open_panel("Engine")
    tab.page.reload()
    tab.ready()
    expect(panel).to_be_visible()

    tab.page.set_viewport_size({"width": 700, "height": 800})
    tab.page.reload()
    tab.ready()
    expect(panel).to_have_count(0)
    tab.page.set_viewport_size({"width": 1400, "height": 900})
    tab.page.reload()
    tab.button("Close the panel").click()
    tab.page.reload()
    tab.ready()
    expect(panel).to_have_count(0)
