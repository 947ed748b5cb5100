"""A full context and failed turns: the conversation goes on by a button, and failures do not grow its prompts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.page.tab import Tab

pytestmark = pytest.mark.browser
expect = pytest.importorskip("playwright.sync_api", reason="playwright is missing").expect

# 150 tokens: four of them exceed the 512 of the server.
LONG = "The cellar holds the keys and values of every sequence. " * 12
DROP, ANEW = "Drop older messages and try again", "Start a new conversation"


def sent(request: Any) -> list[str]:
    """The texts of the user in a request."""
    messages = json.loads(request.post_data or "")["messages"]
    return [message["content"] for message in messages if message["role"] == "user"]


def filled(tab: Tab) -> Tab:
    """A conversation whose last message did not fit."""
    tab.expected_statuses = {"400"}
    tab.set("Temperature", "0")
    tab.set("Max tokens", "8")
    tab.ask("What is Cellar?")
    for number in range(8):
        tab.send(f"{LONG}{number}")
        tab.answers.nth(number + 1).locator("footer").wait_for()
        if tab.page.locator(".failure").count():
            return tab
    raise AssertionError("the context was not filled")


def test_a_failed_turn_is_left_out_of_the_next_prompt(tab: Tab) -> None:
    """A shorter message is answered; what failed stays in sight."""
    filled(tab)
    failed = tab.questions.last.locator(".bubble").inner_text()
    with tab.page.expect_request("**/v1/chat/completions") as request:
        tab.ask("Hi")

    texts = sent(request.value)
    assert "Hi" == texts[-1]
    assert failed not in texts
    expect(tab.answers.last.get_by_role("alert")).to_have_count(0)
    expect(tab.page.locator(".failure")).to_have_count(1)


def test_older_messages_are_dropped_by_a_button(tab: Tab) -> None:
    """The same message is answered; what was dropped stays in sight, also after a reload, and is not sent again."""
    filled(tab)
    last, count = tab.questions.last.locator(".bubble").inner_text(), tab.questions.count()
    with tab.page.expect_request("**/v1/chat/completions") as request:
        tab.button(DROP).click()
    tab.answer()

    texts = sent(request.value)
    assert [last] == [text.strip() for text in texts[-1:]]
    assert 1 <= len(texts) < count
    assert 0 == tab.page.locator(".failure").count()
    expect(tab.questions).to_have_count(count)
    expect(tab.page.get_by_text("The messages above are no longer sent.")).to_have_count(1)
    tab.page.reload()
    tab.ready()
    with tab.page.expect_request("**/v1/chat/completions") as request:
        tab.ask("Hi")
    assert [*texts, "Hi"] == sent(request.value)


def test_a_new_conversation_has_the_message_that_did_not_fit(tab: Tab) -> None:
    """Unsent, with the same settings."""
    filled(tab)
    last = tab.questions.last.locator(".bubble").inner_text()
    tab.button(ANEW).click()
    expect(tab.questions).to_have_count(0)
    expect(tab.page.get_by_label("Message", exact=True)).to_have_value(last)
    tab.page.get_by_label("Message", exact=True).press("Enter")
    tab.answer()

    expect(tab.questions).to_have_count(1)
    assert 0 == tab.page.locator(".failure").count()


def test_a_first_message_that_is_too_long_has_nothing_to_drop(tab: Tab) -> None:
    tab.expected_statuses = {"400"}
    tab.send(LONG * 8)

    expect(tab.button(ANEW)).to_be_visible()
    expect(tab.button(DROP)).to_have_count(0)
