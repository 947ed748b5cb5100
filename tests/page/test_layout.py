"""Layout and access: zoom, phone, colours, keyboard, and axe-core in each state of the page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.page.tab import ENDLESS_SCHEMA, Tab

pytestmark = pytest.mark.browser
expect = pytest.importorskip("playwright.sync_api", reason="playwright is missing").expect

AXE = Path(__file__).parents[2] / "server/page/node_modules/axe-core/axe.min.js"
# A window of 1280 x 800 at 200 %, and a small phone.
ZOOMED = {"viewport": {"width": 640, "height": 400}, "device_scale_factor": 2}
PHONE = {"viewport": {"width": 360, "height": 640}, "device_scale_factor": 2, "has_touch": True, "is_mobile": True}
TEXT = """## Plan

A paragraph with `code`, **weight** and a [link](https://example.org).

| setting | default | meaning |
|---|---|---|
| `--context` | what memory allows | Context length in tokens, up to the trained length of the model |
| `--slots` | 8 | Sequences that are computed at the same time |

```python
def first(values: list[int]) -> int:  # a comment that is long enough to leave a narrow column of text
    return values[0] if values else -1
```

> A quotation, and averyveryverylongwordwithoutanyplacetobreakitapart_averyveryverylongwordwithoutanyplacetobreak
"""
CALL = {"id": "c", "name": "get_weather", "arguments": '{"city": "Paris"}'}


def conversation(folder: Path, text: str = TEXT, title: str = "Every kind") -> Path:
    """A file with every kind of message; `text` is the first answer."""
    stats = {"firstToken": 80, "tokens": 120, "tokensPerSecond": 410.5, "promptTokens": 60, "cachedTokens": 40}
    more = {"draftedTokens": 30, "acceptedTokens": 22, "contextShifts": 1}
    failure = {"title": "Error 400", "message": "Unknown type 'nonsense'.", "field": "response_format"}
    messages = [
        {"id": "1", "role": "user", "content": "Which settings decide how much runs at the same time?"},
        {"id": "2", "role": "assistant", "content": text, "reasoning": "Short *thoughts*.", "stats": {**stats, **more}},
        {"id": "3", "role": "user", "content": "And the weather?"},
        {"id": "4", "role": "assistant", "content": "", "calls": [CALL]},
        {"id": "5", "role": "tool", "content": '{"sky": "clear"}', "callId": "c"},
        {"id": "6", "role": "assistant", "content": "Clear.", "failure": failure},
    ]
    entry = {"id": "x", "title": title, "named": True, "updated": 1, "messages": messages, "settings": {}}
    file = folder / "file.json"
    file.write_text(json.dumps({"format": "cellar-conversations", "version": 1, "conversations": [entry]}))
    return file


def fill(tab: Tab, folder: Path) -> Tab:
    """Import a conversation with every kind of message."""
    tab.page.get_by_label("File of conversations").set_input_files(conversation(folder))
    expect(tab.answers).to_have_count(3)
    return tab


def focused(tab: Tab) -> tuple[str, bool]:
    """The name of the focused element, and whether its focus is visible; the body has no focus."""
    name, visible = tab.page.evaluate(
        """() => {
            const one = document.activeElement;
            if (one === document.body) return ['', true];
            const name = one.getAttribute('aria-label') || one.textContent || one.id;
            return [name.trim(), getComputedStyle(one).outlineStyle !== 'none'];
        }"""
    )
    return name, visible


def tab_to(tab: Tab, name: str, *, most: int = 60) -> None:
    """Press Tab until the element with this name has the focus, which must be visible at each step."""
    for _ in range(most):
        tab.page.keyboard.press("Tab")
        found, visible = focused(tab)
        assert visible, f"the focus on {found!r} cannot be seen"
        if found == name:
            return
    raise AssertionError(f"{name} is not reached by the keyboard")


def violations(tab: Tab) -> list[str]:
    """Serious findings of axe-core in the page as it is shown."""
    if not AXE.exists():
        pytest.skip("axe-core is missing: npm ci in server/page")
    tab.page.evaluate(AXE.read_text())
    found: list[dict[str, Any]] = tab.page.evaluate("axe.run().then((result) => result.violations)")
    serious = [one for one in found if one["impact"] in ("serious", "critical")]
    return [
        f"{one['id']}: {one['nodes'][0]['html'][:200]} {one['nodes'][0]['failureSummary'][:300]}" for one in serious
    ]


@pytest.mark.parametrize("options", [ZOOMED, PHONE], ids=["zoom", "phone"])
def test_nothing_is_cut_off_on_narrow_windows(open_tab: Callable[..., Tab], tmp_path: Path, options: Any) -> None:
    """No sideways scrolling; tables and code scroll by themselves. List, settings and live view open over the chat."""
    tab = fill(open_tab(**options).ready(), tmp_path)
    assert 0 == tab.overflow
    assert tab.ask("What is Cellar?")
    expect(tab.page.get_by_label("Message", exact=True)).to_be_in_viewport(ratio=1)

    tab.page.get_by_role("button", name="Conversations").click()
    expect(tab.page.get_by_role("button", name="New conversation")).to_be_in_viewport(ratio=1)
    tab.page.keyboard.press("Escape")
    expect(tab.page.get_by_role("button", name="New conversation")).not_to_be_visible()
    for name in ("Engine", "Settings"):
        tab.open_panel(name)
        expect(tab.page.get_by_role("complementary", name=name)).to_be_in_viewport()
        assert 0 == tab.overflow
        expect(tab.button("Close the panel")).to_be_focused()
        tab.page.keyboard.press("Enter")
        expect(tab.page.get_by_role("button", name=name, exact=True)).to_be_focused()


SMALL = """(least) => [...document.querySelectorAll('button, a, select, summary, textarea, input')]
    .filter((one) => one.checkVisibility() && !one.closest('.skip, .markdown'))
    .map((one) => [one.getAttribute('aria-label') || one.textContent || one.id, one.getBoundingClientRect()])
    .filter(([name, box]) => Math.min(box.width, box.height) < least)
    .map(([name, box]) => `${name}: ${box.width} x ${box.height}`)"""


def test_targets_are_large_enough_for_fingers(open_tab: Callable[..., Tab], tmp_path: Path) -> None:
    """44 pixels, in the chat, the list and both panels."""
    tab = fill(open_tab(**PHONE).ready(), tmp_path)
    assert [] == tab.page.evaluate(SMALL, 44)
    tab.page.get_by_role("button", name="Conversations").click()
    assert [] == tab.page.evaluate(SMALL, 44)
    tab.page.keyboard.press("Escape")
    tab.open_panel("Settings")
    assert [] == tab.page.evaluate(SMALL, 44)
    assert 0 == tab.overflow


def test_text_of_twice_the_size_fits(open_tab: Callable[..., Tab], tmp_path: Path) -> None:
    """Where only the text is enlarged."""
    tab = fill(open_tab(viewport={"width": 1280, "height": 800}).ready(), tmp_path)
    tab.page.evaluate("document.documentElement.style.fontSize = '200%'")

    assert 0 == tab.overflow
    expect(tab.page.get_by_label("Message", exact=True)).to_be_in_viewport(ratio=1)


def test_both_views_stand_side_by_side_on_wide_windows(tab: Tab) -> None:
    tab.open_panel("Engine")
    chat, panel = tab.page.locator("main").bounding_box(), tab.page.locator(".panel").bounding_box()
    assert chat is not None
    assert panel is not None

    assert chat["x"] + chat["width"] <= panel["x"] + 1
    assert chat["width"] > panel["width"]


def test_colours_follow_the_system_or_the_switch(open_tab: Callable[..., Tab]) -> None:
    """The choice is kept."""
    tab = open_tab(color_scheme="dark").ready()
    colour = "getComputedStyle(document.documentElement).backgroundColor"
    dark = tab.page.evaluate(colour)
    tab.page.emulate_media(color_scheme="light")
    light = tab.page.evaluate(colour)
    tab.page.get_by_role("button", name="Colours: system").click()
    tab.page.get_by_role("button", name="Colours: light").click()
    tab.page.reload()
    tab.ready()

    assert light != dark
    assert dark == tab.page.evaluate(colour)


def test_motion_is_reduced_on_request(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(reduced_motion="reduce").ready()
    moving = "[...document.querySelectorAll('*')].filter((one) => parseFloat(getComputedStyle(one).transitionDuration))"

    assert 0 == tab.page.evaluate(f"{moving}.length")


def test_everything_works_with_the_keyboard(tab: Tab) -> None:
    """Send, edit, regenerate, settings and the list; the focus is always visible."""
    tab.page.keyboard.type("What is Cellar?")
    tab.page.keyboard.press("Enter")
    first = tab.answer()
    for name in ("Skip to the message field", "New conversation", "Rename What is Cellar?", "Settings", "Copy", "Edit"):
        tab_to(tab, name)
    tab.page.keyboard.press("Enter")
    expect(tab.page.get_by_label("Edit your message")).to_be_focused()
    tab.page.keyboard.press("Control+A")
    tab.page.keyboard.type("What is a slot?")
    tab.page.keyboard.press("Enter")
    expect(tab.questions).to_contain_text("What is a slot?")
    assert first != tab.answer()
    tab_to(tab, "Regenerate")
    tab.page.keyboard.press("Enter")
    assert "slot" in tab.answer()


def test_the_end_of_an_answer_is_announced(tab: Tab) -> None:
    """Once, not at each token."""
    tab.ask("What is Cellar?")

    expect(tab.page.get_by_role("status")).to_have_text("The answer is complete")
    assert 0 == tab.page.locator("[aria-live]").count()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("state", ["empty", "filled", "streaming", "settings", "editing", "phone", "list"])
def test_axe_finds_nothing_serious(open_tab: Callable[..., Tab], tmp_path: Path, state: str, scheme: str) -> None:
    """In each state of the page, with light and dark colours."""
    narrow = state in ("phone", "list")
    tab = open_tab(color_scheme=scheme, reduced_motion="reduce", **(PHONE if narrow else {})).ready()
    if state not in ("empty", "streaming"):
        fill(tab, tmp_path)
    match state:
        case "streaming":
            tab.set("JSON schema", ENDLESS_SCHEMA)
            tab.set("Max tokens", "100000")
            tab.page.get_by_label("At a full context").select_option("shift")
            tab.open_panel("Engine")
            tab.send("Numbers")
            expect(tab.page.locator(".slot.decode")).to_have_count(1)
        case "settings":
            tab.set("Tools", "[{]")
        case "editing":
            tab.questions.first.get_by_role("button", name="Edit").click()
        case "list":
            tab.page.get_by_role("button", name="Conversations").click()

    assert [] == violations(tab)
