"""A conversation: streaming, stop, edit, regenerate, tools, and what the browser keeps."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.page.tab import ENDLESS_SCHEMA, Tab

pytestmark = pytest.mark.browser
expect = pytest.importorskip("playwright.sync_api", reason="playwright is missing").expect

QUESTION = "What is Cellar?"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def running(tab: Tab) -> int:
    """Sequences in slots of the server."""
    with urllib.request.urlopen(f"{tab.address}/v1/engine", timeout=20) as answer:
        count: int = json.load(answer)["counts"]["running"]
    return count


def test_an_answer_streams_and_has_its_figures(tab: Tab) -> None:
    """Speed, time to the first token, and the cached part of the prompt; the second turn reuses the first."""
    tab.set("Temperature", "0")
    assert "Cellar" in tab.ask(QUESTION)
    expect(tab.answers.last.get_by_role("list", name="Figures of this answer")).to_have_count(0)
    expect(tab.answers.last.locator("summary")).to_have_text(re.compile(r"^[\d.,]+ tok/s$"))
    figures = tab.figures()
    for pattern in (r"[\d.,]+ tok/s", r"first token [\d.]+ m?s", r"\d+ tokens", r"\d+ of \d+ prompt tokens cached"):
        expect(figures).to_contain_text(re.compile(pattern))

    tab.ask("What is a slot?")
    cached = re.search(r"(\d+) of (\d+) prompt", tab.figures().inner_text())
    assert cached is not None
    assert 0 < int(cached[1]) < int(cached[2])


def test_text_is_shown_before_the_answer_is_complete(tab: Tab) -> None:
    """And is marked as busy until then."""
    tab.set("JSON schema", ENDLESS_SCHEMA)
    tab.send("Numbers")
    expect(tab.answers.last.locator(".markdown")).to_contain_text(re.compile(r"\d+,"))
    expect(tab.answers.last).to_have_attribute("aria-busy", "true")
    tab.button("Stop").click()


def test_stop_keeps_the_text_and_frees_the_slot(tab: Tab) -> None:
    tab.set("JSON schema", ENDLESS_SCHEMA)
    tab.send("Numbers")
    expect(tab.answers.last.locator(".markdown")).to_contain_text(re.compile(r"\d"))
    assert 1 == running(tab)
    tab.page.keyboard.press("Escape")
    expect(tab.answers.last).to_contain_text("Stopped")
    expect(tab.page.get_by_role("status")).to_have_text("Stopped")

    for _ in range(50):
        if not running(tab):
            break
        tab.page.wait_for_timeout(100)
    assert 0 == running(tab)
    assert re.search(r"\d", tab.answer())


def test_a_click_on_stop_does_not_send_the_next_message(tab: Tab) -> None:
    """Which is being written meanwhile."""
    writing(tab)
    tab.page.get_by_label("Message", exact=True).fill("Next")
    tab.button("Stop").click()
    tab.answer()

    expect(tab.page.get_by_label("Message", exact=True)).to_have_value("Next")
    expect(tab.questions).to_have_count(1)


def test_an_edit_replaces_what_follows(tab: Tab) -> None:
    """And can be taken back."""
    first = tab.ask(QUESTION)
    tab.ask("What is a slot?")
    tab.questions.first.get_by_role("button", name="Edit").click()
    tab.page.get_by_label("Edit your message").fill("What does --slots do?")
    tab.page.keyboard.press("Enter")

    expect(tab.questions).to_have_count(1)
    assert tab.answer() != first
    assert "--slots" in tab.questions.inner_text()

    tab.button("Restore what it replaced").click()
    expect(tab.questions).to_have_count(2)
    assert tab.answer(0) == first


def test_regenerate_replaces_the_answer(tab: Tab) -> None:
    """At temperature 0 by the same text."""
    tab.set("Temperature", "0")
    first = tab.ask(QUESTION)
    tab.button("Regenerate").click()

    expect(tab.answers).to_have_count(1)
    assert tab.answer() == first


def test_settings_reach_the_request(tab: Tab) -> None:
    """Numbers as numbers, and no field that is left empty."""
    for label, text in {"System prompt": "Be brief.", "Temperature": "0.5", "Max tokens": "5", "Seed": "7"}.items():
        tab.set(label, text)
    tab.page.get_by_label("At a full context").select_option("shift")
    with tab.page.expect_request("**/v1/chat/completions") as sent:
        tab.send(QUESTION)
    expect(tab.answers.last).to_contain_text("Cut at the limit")

    body = json.loads(sent.value.post_data or "")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    own = {"temperature": 0.5, "max_tokens": 5, "seed": 7, "overflow": "shift", "messages": messages}
    assert {"stream": True, "stream_options": {"include_usage": True}, **own} == body


def test_a_schema_is_followed(tab: Tab) -> None:
    """An invalid one is marked in the field while it is typed."""
    tab.set("JSON schema", '{"type": "object", ')
    expect(tab.page.get_by_label("JSON schema")).to_have_attribute("aria-invalid", "true")
    schema = {"type": "object", "properties": {"name": {"enum": ["Cellar"]}}, "required": ["name"]}
    tab.set("JSON schema", json.dumps({**schema, "additionalProperties": False}))
    expect(tab.page.get_by_label("JSON schema")).to_have_attribute("aria-invalid", "false")

    assert {"name": "Cellar"} == json.loads(tab.ask("Name the server"))


def test_tools_are_called_and_their_results_sent(tab: Tab) -> None:
    """A call is a card; the user enters its result, and the model answers with it."""
    tab.set("Tools", json.dumps(TOOLS))
    tab.set("Temperature", "0")
    tab.send("What is the weather in Paris?")
    card = tab.page.get_by_role("region", name="Call of get_weather")
    expect(card).to_contain_text("Paris")
    tab.page.get_by_label("Result of get_weather").fill('{"weather": "sunny"}')
    with tab.page.expect_request("**/v1/chat/completions") as sent:
        tab.button("Send result").click()
    expect(tab.answers).to_have_count(2)
    tab.answer()

    _, call, result = json.loads(sent.value.post_data or "")["messages"]
    assert ("assistant", "get_weather") == (call["role"], call["tool_calls"][0]["function"]["name"])
    assert {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": '{"weather": "sunny"}'} == result
    expect(card).to_contain_text("sunny")


def test_conversations_survive_a_reload(tab: Tab) -> None:
    """With their texts, settings and titles; the latest one is shown."""
    tab.set("Temperature", "0")
    answer = tab.ask(QUESTION)
    tab.page.get_by_role("button", name=f"Rename {QUESTION}").click()
    tab.page.get_by_label("Title").fill("First steps")
    tab.page.keyboard.press("Enter")
    tab.button("New conversation").click()
    tab.ask("What is a slot?")
    tab.page.reload()
    tab.ready()

    assert ["What is a slot?", "First steps"] == tab.entries
    assert "What is a slot?" in tab.questions.inner_text()
    tab.page.get_by_role("button", name="First steps", exact=True).click()
    assert answer == tab.answer()
    tab.open_panel("Settings")
    expect(tab.page.get_by_label("Temperature")).to_have_value("0")


def test_a_conversation_is_deleted_after_a_question(tab: Tab) -> None:
    tab.ask(QUESTION)
    tab.page.get_by_role("button", name=f"Delete {QUESTION}").click()
    assert [QUESTION] == tab.entries
    tab.button("Delete").click()
    expect(tab.questions).to_have_count(0)
    tab.page.reload()
    tab.ready()

    assert [] == tab.entries


def writing(tab: Tab) -> None:
    """Ask for an answer that does not end, and wait for its first text."""
    tab.set("JSON schema", ENDLESS_SCHEMA)
    tab.send("Numbers")
    expect(tab.answers.last.locator(".markdown")).to_contain_text(re.compile(r"\d+, *\d"))


def test_a_reload_keeps_the_text_of_a_running_answer(tab: Tab) -> None:
    writing(tab)
    tab.page.reload()
    tab.ready()

    expect(tab.answers.last).to_contain_text("Stopped")
    assert re.search(r"\d+, *\d", tab.answer())


def test_a_conversation_changes_while_it_is_answered(tab: Tab) -> None:
    """Its title and its settings stay; deleted, it stays away, and the slot is free."""
    writing(tab)
    tab.set("Temperature", "0.5")
    tab.page.get_by_role("button", name="Rename Numbers").click()
    tab.page.get_by_label("Title").fill("Digits")
    tab.page.keyboard.press("Enter")
    length = len(tab.answers.last.inner_text())
    tab.page.wait_for_function("(length) => document.querySelector('.answer').innerText.length > length", arg=length)
    assert ["Digits"] == tab.entries
    expect(tab.page.get_by_label("Temperature", exact=True)).to_have_value("0.5")

    tab.page.get_by_role("button", name="Delete Digits").click()
    tab.page.locator(".entry").get_by_role("button", name="Delete", exact=True).click()
    expect(tab.page.get_by_role("status")).to_have_text("Stopped")
    assert [] == tab.entries
    tab.page.reload()
    tab.ready()
    assert [] == tab.entries


def test_an_unsent_text_stays_with_its_conversation(tab: Tab) -> None:
    """And is written in the direction of its script."""
    field = tab.page.get_by_label("Message", exact=True)
    tab.ask(QUESTION)
    field.fill("مرحبا")
    assert "rtl" == field.evaluate("(area) => getComputedStyle(area).direction")
    tab.button("New conversation").click()
    expect(field).to_have_value("")
    tab.page.locator(".entry .title").click()
    expect(field).to_have_value("مرحبا")
    tab.page.keyboard.press("Enter")
    expect(field).to_have_value("")
    bubble = tab.questions.last.locator(".bubble")
    assert "rtl" == bubble.evaluate("(bubble) => getComputedStyle(bubble).direction")


def test_an_export_can_be_imported_elsewhere(open_tab: Callable[..., Tab], tmp_path: Path) -> None:
    """All messages, under new ids, so that importing twice loses nothing."""
    tab, other = open_tab().ready(), open_tab().ready()
    answer = tab.ask(QUESTION)
    with tab.page.expect_download() as download:
        tab.button("Export all").click()
    file = tmp_path / "conversations.json"
    download.value.save_as(file)
    for _ in range(2):
        other.page.get_by_label("File of conversations").set_input_files(file)
        expect(other.questions).to_have_count(1)

    assert [QUESTION, QUESTION] == other.entries
    assert answer == other.answer()


@pytest.mark.parametrize("content", ["[]", "{", '{"format": "cellar-conversations", "conversations": [{"id": 1}]}'])
def test_a_file_that_is_no_export_is_refused(tab: Tab, tmp_path: Path, content: str) -> None:
    """With the reason; what is there stays."""
    tab.ask(QUESTION)
    file = tmp_path / "file.json"
    file.write_text(content)
    tab.page.get_by_label("File of conversations").set_input_files(file)
    expect(tab.page.get_by_role("alert")).to_contain_text(re.compile("not JSON|not an export|damaged"))

    assert [QUESTION] == tab.entries


def imported(folder: Path, text: str) -> Path:
    """An exported conversation with an answer."""
    messages = [{"id": "a", "role": "user", "content": "hi"}, {"id": "b", "role": "assistant", "content": text}]
    conversation = {"id": "x", "title": "t", "named": True, "updated": 1, "messages": messages, "settings": {}}
    file = folder / "file.json"
    file.write_text(json.dumps({"format": "cellar-conversations", "conversations": [conversation]}))
    return file


def test_markup_of_a_model_is_text(open_tab: Callable[..., Tab], tmp_path: Path) -> None:
    """Neither scripts nor images of other hosts; links open outside."""
    text = "<img src=x onerror=alert(1)> <script>alert(2)</script> ![pixel](https://other.example/p.png)\n"
    text += "[j](javascript:alert(3))\n\n```python\ndef f():\n    return '<b>'\n```"
    tab = open_tab().ready()
    tab.page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    tab.page.get_by_label("File of conversations").set_input_files(imported(tmp_path, text))
    expect(tab.answers).to_have_count(1)

    assert 0 == tab.answers.locator("img, script").count()
    assert ["https://other.example/p.png"] == [
        link.get_attribute("href") for link in tab.answers.get_by_role("link").all()
    ]
    expect(tab.answers.locator(".hljs-keyword").first).to_have_text("def")
    expect(tab.answers.locator("pre")).to_contain_text("return '<b>'")


@pytest.mark.parametrize("nested", [">" * 3000, "- " * 3000], ids=["quotes", "lists"])
def test_a_text_too_deep_for_the_parser_is_shown_plain(
    open_tab: Callable[..., Tab], tmp_path: Path, nested: str
) -> None:
    """The page goes on, also after a reload."""
    tab = open_tab().ready()
    tab.page.get_by_label("File of conversations").set_input_files(imported(tmp_path, f"{nested} x"))
    expect(tab.answers.locator(".plain")).to_have_text(f"{nested} x")
    tab.page.reload()
    tab.ready()
    tab.button("New conversation").click()
    assert "Cellar" in tab.ask(QUESTION)


@pytest.mark.parametrize("secure", [True, False], ids=["secure", "plain"])
def test_code_is_copied(open_tab: Callable[..., Tab], secure: bool) -> None:
    """Also where the browser has no clipboard interface, as on plain HTTP from another machine."""
    tab = open_tab(permissions=["clipboard-read", "clipboard-write"]).ready()
    answer = tab.ask(QUESTION)
    if not secure:
        tab.page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true })")
    tab.button("Copy").click()
    expect(tab.button("Copied")).to_be_visible()
    tab.page.evaluate("delete navigator.clipboard")

    assert answer == tab.page.evaluate("navigator.clipboard.readText()").strip()
