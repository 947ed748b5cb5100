"""The choice of a model: none with one name, names of adapters, and models that load on demand."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from engine.errors import ModelUnsupported
from server.app import create_app_of_several
from server.lifecycle import SignalFreeServer, listen
from server.models.entry import ModelEntry
from server.models.loader import LoaderLimits
from tests.page.tab import Tab
from tests.page.test_images import attach, attached, dispatch, image_engine, picture, sent
from tests.page.test_layout import PHONE
from tests.server.fakes import HERMES, FakeEngine, FakeTokenizer, serve_in_thread, settings

pytestmark = pytest.mark.browser
expect = pytest.importorskip("playwright.sync_api", reason="playwright is missing").expect


class SlowEngine(FakeEngine):
    """Loads until a test opens `loaded`; then it is ready, or fails."""

    def __init__(self, loaded: threading.Event, failure: ModelUnsupported | None, reads_images: bool) -> None:
        super().__init__(phase="weights 43 %", tokenizer=FakeTokenizer(HERMES), failure=failure)
        if reads_images:
            reader = image_engine()
            self.tokenizer, self.info_value = reader.tokenizer, reader.info_value
        self._loaded = loaded

    async def wait_ready(self) -> None:
        while not self._loaded.is_set():
            await asyncio.sleep(0.02)
        await super().wait_ready()
        self.phase = "ready"


class Launcher:
    """Engines of the models text, vision and broken; each loads until its event is set."""

    def __init__(self) -> None:
        self.loaded = {name: threading.Event() for name in ("text", "vision", "broken")}

    async def needed_bytes(self, entry: ModelEntry) -> int:
        return 1

    def start(self, entry: ModelEntry, memory_bytes: int) -> Any:
        failure = ModelUnsupported("broken", "wrong outputs") if entry.name == "broken" else None
        return SlowEngine(self.loaded[entry.name], failure, entry.name == "vision")

    async def stop(self, engine: Any) -> None:
        pass


@contextmanager
def several() -> Iterator[tuple[str, Launcher]]:
    """The address of a server of several models, and their launcher."""
    listening, launcher, ready = listen("127.0.0.1", 0), Launcher(), threading.Event()
    models = [ModelEntry(name, settings(served_names=(name,))) for name in launcher.loaded]
    running: list[tuple[asyncio.AbstractEventLoop, SignalFreeServer]] = []

    async def serve() -> None:
        app = create_app_of_several(models, launcher, LoaderLimits(8), settings(limits={"ping_seconds": 0.1}))
        app.state.loader.start()
        server = SignalFreeServer(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=2))
        running.append((asyncio.get_running_loop(), server))
        ready.set()
        await server.serve(sockets=[listening])
        await app.state.loader.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(30)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", launcher
    finally:
        for loaded in launcher.loaded.values():
            loaded.set()
        loop, server = running[0]
        loop.call_soon_threadsafe(setattr, server, "should_exit", True)
        thread.join(30)
        listening.close()


def picker(tab: Tab) -> Any:
    return tab.page.get_by_label("Model", exact=True)


def requested_model(tab: Tab, text: str) -> str | None:
    """Send a message; the model of its request."""
    with tab.page.expect_request("**/v1/chat/completions") as request:
        tab.send(text)
    model: str | None = json.loads(request.value.post_data or "").get("model")
    return model


def test_one_name_has_no_picker(tab: Tab) -> None:
    """Also for a conversation with the name of another server, which is not sent."""
    expect(picker(tab)).to_have_count(0)
    assert requested_model(tab, "What is Cellar?") is None
    tab.answer()
    tab.page.evaluate(
        """() => {
            const key = Object.keys(localStorage).find((name) => name.startsWith('cellar.conversation.'));
            const conversation = JSON.parse(localStorage.getItem(key));
            conversation.settings.model = 'gone';
            localStorage.setItem(key, JSON.stringify(conversation));
        }"""
    )
    tab.page.reload()
    tab.ready()
    assert requested_model(tab, "What is a slot?") is None
    assert "slot" in tab.answer()


def test_a_name_is_picked_and_stays_with_its_conversation(open_tab: Callable[..., Tab]) -> None:
    with serve_in_thread(FakeEngine(tokenizer=FakeTokenizer(HERMES))) as port:
        tab = open_tab(f"http://127.0.0.1:{port}").ready()
        assert requested_model(tab, "One") == "fake"
        tab.answer()
        tab.button("New conversation").click()
        picker(tab).select_option("org/alias")
        assert requested_model(tab, "Two") == "org/alias"
        tab.answer()
        tab.page.reload()
        tab.ready()
        expect(picker(tab)).to_have_value("org/alias")
        tab.page.get_by_role("button", name="One", exact=True).click()
        expect(picker(tab)).to_have_value("fake")
        tab.page.goto("about:blank")


def test_a_picked_model_is_loaded_by_its_first_message(open_tab: Callable[..., Tab]) -> None:
    """The phase stands where the answer will be; what the model reads is known then."""
    with several() as (address, launcher):
        tab = open_tab(address).ready()
        expect(picker(tab).locator("option")).to_have_text(
            ["text, not loaded", "vision, not loaded", "broken, not loaded"]
        )
        picker(tab).select_option("vision")
        expect(tab.button("Attach images")).to_have_count(0)
        dispatch(tab, "paste", picture())
        expect(tab.page.get_by_role("alert")).to_contain_text("known once it is loaded")

        assert requested_model(tab, "Hello") == "vision"
        expect(tab.answers.last).to_contain_text("Loading vision: weights 43 %")
        expect(picker(tab).locator("option").nth(1)).to_have_text("vision, loading: weights 43 %")
        launcher.loaded["vision"].set()
        assert tab.answer() == "Hello world"
        attach(tab, ("photo.png", picture()))
        assert len(sent(tab, "What is it?")[-1]["content"]) == 2
        tab.open_panel("Engine")
        expect(tab.page.get_by_role("complementary", name="Engine")).to_contain_text("tokens / s")

        # The other model answers without the images, and says so.
        launcher.loaded["text"].set()
        picker(tab).select_option("text")
        assert [type(message["content"]) for message in sent(tab, "And now?")] == [str] * 5
        expect(tab.page.get_by_text("text does not read images. It does not get those")).to_be_visible()
        picker(tab).select_option("vision")
        attach(tab, ("other.png", picture()))
        picker(tab).select_option("text")
        expect(tab.page.get_by_role("alert")).to_contain_text("Remove the images, or choose another model.")
        expect(tab.button("Send")).to_be_disabled()
        expect(attached(tab)).to_have_count(1)
        tab.page.goto("about:blank")


def test_the_picker_fits_a_phone(open_tab: Callable[..., Tab]) -> None:
    """Also while the phase of a load makes its text longer than the line."""
    with several() as (address, launcher):
        tab = open_tab(address, **PHONE).ready()
        picker(tab).select_option("vision")
        tab.send("Hello")
        expect(picker(tab).locator("option").nth(1)).to_have_text("vision, loading: weights 43 %")
        heading, box = tab.page.locator(".heading").bounding_box(), picker(tab).bounding_box()
        assert heading is not None
        assert box is not None
        assert box["height"] >= 44
        assert box["x"] + box["width"] <= heading["x"] + heading["width"]
        # An ellipsis in place of the picker has none of its points.
        point = [box["x"] + box["width"] / 2, box["y"] + box["height"] / 2]
        assert tab.page.evaluate("(point) => document.elementFromPoint(...point).className", point) == "model"
        assert tab.overflow == 0
        launcher.loaded["vision"].set()
        assert tab.answer() == "Hello world"
        tab.page.goto("about:blank")


def test_a_model_that_cannot_be_loaded_names_the_reason(open_tab: Callable[..., Tab]) -> None:
    with several() as (address, launcher):
        launcher.loaded["broken"].set()
        tab = open_tab(address).ready()
        tab.expected_statuses = {"503"}
        picker(tab).select_option("broken")
        tab.send("Hello")
        expect(tab.answers.last.get_by_role("alert")).to_contain_text("wrong outputs")
        expect(tab.page.locator(".server")).to_contain_text("wrong outputs")
        launcher.loaded["text"].set()
        picker(tab).select_option("text")
        tab.button("Try again").click()
        assert tab.answer() == "Hello world"
        tab.page.goto("about:blank")
