"""What a new conversation offers: first messages with their settings, and the models to choose from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.page.conftest import OpenTab
from tests.page.tab import Tab
from tests.page.test_server import own_server

pytestmark = pytest.mark.browser
expect = pytest.importorskip("playwright.sync_api", reason="playwright is missing").expect


def test_a_starter_calls_a_tool(tab: Tab) -> None:
    """Its tools stay with its conversation, and are not those of the next one."""
    tab.set("Temperature", "0")
    tab.button("Call a tool").click()
    expect(tab.page.get_by_role("region", name="Call of get_weather")).to_contain_text("Paris")
    tab.open_panel("Settings")
    expect(tab.page.get_by_label("Tools")).to_have_value(re.compile("get_weather"))
    tab.button("New conversation").click()
    expect(tab.page.get_by_label("Tools")).to_have_value("")
    expect(tab.page.get_by_label("Temperature", exact=True)).to_have_value("0")


def test_a_starter_answers_in_json(tab: Tab) -> None:
    """By a schema, which is not that of the next conversation."""
    tab.set("Temperature", "0")
    tab.button("Answer in JSON").click()

    assert {"city", "country", "inhabitants"} == set(json.loads(tab.answer()))
    tab.button("New conversation").click()
    expect(tab.page.get_by_label("JSON schema")).to_have_value("")


def test_a_starter_tells_a_story(tab: Tab) -> None:
    tab.button("Tell a story").click()
    expect(tab.questions).to_contain_text("story")
    expect(tab.answers.last.locator(".markdown")).not_to_be_empty()


def test_a_model_is_picked_where_there_are_several(open_tab: OpenTab, tmp_path: Path) -> None:
    """The names of /v1/models; the choice is sent, and stays with the conversation."""
    with own_server(tmp_path, "--served-model-name", "first", "--served-model-name", "second") as address:
        tab = open_tab(address).ready()
        picker = tab.page.get_by_role("combobox", name="Model")
        expect(picker).to_have_value("first")
        assert ["first", "second"] == picker.locator("option").all_inner_texts()
        picker.select_option("second")
        with tab.page.expect_request("**/v1/chat/completions") as sent:
            tab.ask("What is Cellar?")
        assert "second" == json.loads(sent.value.post_data or "")["model"]
        tab.page.reload()
        expect(picker).to_have_value("second")


def test_a_single_model_is_no_choice(tab: Tab) -> None:
    expect(tab.page.get_by_role("combobox", name="Model")).to_have_count(0)
    expect(tab.page.locator(".server")).to_contain_text("tokens")
