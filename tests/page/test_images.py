"""Images in messages: chosen, pasted and dropped; what is sent, what is kept, and what a model without images gets."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.page.tab import Tab
from tests.page.test_layout import PHONE, SMALL, violations
from tests.server.fakes import HERMES, FakeEngine, serve_in_thread
from tests.server.media.requests import MediaTokenizer, media_engine

pytestmark = pytest.mark.browser
expect = pytest.importorskip("playwright.sync_api", reason="playwright is missing").expect
Image = pytest.importorskip("PIL.Image", reason="pillow is missing")

# Dispatches an event with a file, as a paste or a drop on an element does.
DISPATCH = """(element, [type, name, media, text]) => {
    const data = new DataTransfer();
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    data.items.add(new File([bytes], name, { type: media }));
    const options = { bubbles: true, cancelable: true };
    const event = type === 'paste' ? new ClipboardEvent(type, { ...options, clipboardData: data })
                                   : new DragEvent(type, { ...options, dataTransfer: data });
    element.dispatchEvent(event);
    return event.defaultPrevented;
}"""


def picture(width: int = 40, height: int = 30, kind: str = "PNG", *, noise: bool = False) -> bytes:
    """An image file; noise cannot be compressed."""
    image = Image.new("RGB", (width, height), "teal")
    if noise:
        image.frombytes(random.Random(5).randbytes(3 * width * height))
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def image_engine() -> FakeEngine:
    """A fake engine with a chat template, whose model reads images."""
    engine = media_engine("image")
    engine.tokenizer, engine.info_value = MediaTokenizer(HERMES), replace(engine.info_value, context=512)
    return engine


@contextmanager
def opened(open_tab: Callable[..., Tab], engine: FakeEngine, **options: Any) -> Iterator[Tab]:
    """A tab on a server of a fake engine."""
    with serve_in_thread(engine) as port:
        tab = open_tab(f"http://127.0.0.1:{port}", **options).ready()
        yield tab
        tab.page.goto("about:blank")


def dispatch(tab: Tab, type: str, data: bytes, name: str = "photo.png", media: str = "image/png") -> bool:
    """Paste or drop a file on the message field; whether the page prevents what the browser does."""
    field = tab.page.get_by_label("Message", exact=True)
    prevented: bool = field.evaluate(DISPATCH, [type, name, media, base64.b64encode(data).decode()])
    return prevented


def attached(tab: Tab) -> Any:
    """The images in the message field."""
    return tab.page.get_by_role("list", name="Images of this message").get_by_role("img")


def attach(tab: Tab, *files: tuple[str, bytes]) -> None:
    """Choose files, and wait for their thumbnails."""
    chosen = [{"name": name, "mimeType": "image/png", "buffer": data} for name, data in files]
    count = attached(tab).count()
    tab.page.get_by_label("Image files").set_input_files(chosen)
    expect(attached(tab)).to_have_count(count + len(files))


def sent(tab: Tab, text: str) -> list[dict[str, Any]]:
    """Send the message; the messages of the request."""
    count = tab.answers.count()
    with tab.page.expect_request("**/v1/chat/completions") as request:
        tab.send(text)
    tab.answer(count)
    messages: list[dict[str, Any]] = json.loads(request.value.post_data or "")["messages"]
    return messages


def data_of(part: dict[str, Any]) -> tuple[str, bytes]:
    """The declared type and the bytes of a part with an image."""
    head, text = part["image_url"]["url"].split(",")
    return head.removeprefix("data:").removesuffix(";base64"), base64.b64decode(text)


@pytest.mark.parametrize("source", ["paste", "drop", "files"])
def test_a_small_image_is_sent_as_it_is(open_tab: Callable[..., Tab], source: str) -> None:
    """As a data URL before the text; the server reads it, and the message shows it."""
    engine, data = image_engine(), picture()
    with opened(open_tab, engine) as tab:
        if source == "files":
            attach(tab, ("photo.png", data))
        else:
            assert dispatch(tab, source, data)
        expect(attached(tab)).to_have_attribute("alt", "photo.png")
        [message] = sent(tab, "What is it?")

        image, text = message["content"]
        assert data_of(image) == ("image/png", data)
        assert text == {"type": "text", "text": "What is it?"}
        [upload] = engine.tokenizer.rendered[-1]["uploads"]
        assert upload.data == data
        expect(attached(tab)).to_have_count(0)
        expect(tab.questions.get_by_role("img", name="photo.png")).to_be_visible()


def test_the_type_follows_the_content(open_tab: Callable[..., Tab]) -> None:
    """Not the name of the file, which the server would refuse; an image without a text is a message."""
    data = picture(kind="JPEG")
    with opened(open_tab, image_engine()) as tab:
        attach(tab, ("photo.png", data))
        tab.button("Send").click()
        tab.answer()
        assert tab.entries == ["photo.png"]
        [first, _, second] = sent(tab, "And?")
        assert [data_of(part) for part in first["content"]] == [("image/jpeg", data)]
        assert second["content"] == "And?"


@pytest.mark.parametrize(("size", "noise"), [((3000, 1500), False), ((2000, 2000), True)], ids=["sides", "bytes"])
def test_a_large_image_is_scaled_down(open_tab: Callable[..., Tab], size: tuple[int, int], noise: bool) -> None:
    """To 2048 pixels, or to fewer bytes, as JPEG."""
    with opened(open_tab, image_engine()) as tab:
        attach(tab, ("large.png", picture(*size, noise=noise)))
        [message] = sent(tab, "Large")
        media_type, data = data_of(message["content"][0])
        assert media_type == "image/jpeg"
        assert len(data) <= 2.5 * 2**20
        image = Image.open(io.BytesIO(data))
        assert max(image.size) <= 2048
        assert image.width / image.height == size[0] / size[1]
        if not noise:
            assert image.size == (2048, 1024)


def test_images_can_be_removed_and_enlarged_with_the_keyboard(open_tab: Callable[..., Tab]) -> None:
    with opened(open_tab, image_engine()) as tab:
        attach(tab, ("one.png", picture()), ("two.png", picture(30, 40)))
        tab.page.get_by_role("button", name="Remove one.png").press("Enter")
        expect(attached(tab)).to_have_count(1)
        expect(tab.page.get_by_label("Message", exact=True)).to_be_focused()
        [message] = sent(tab, "One")
        assert len(message["content"]) == 2
        enlarge = tab.questions.get_by_role("button", name="Enlarge two.png")
        enlarge.press("Enter")
        expect(enlarge).to_have_attribute("aria-pressed", "true")


def test_images_survive_a_reload_and_an_edit(open_tab: Callable[..., Tab]) -> None:
    """A deleted conversation leaves none."""
    data = picture()
    with opened(open_tab, image_engine()) as tab:
        attach(tab, ("photo.png", data))
        sent(tab, "Before")
        tab.page.reload()
        tab.ready()
        expect(tab.questions.get_by_role("img", name="photo.png")).to_be_visible()
        tab.questions.get_by_role("button", name="Edit").click()
        tab.page.get_by_label("Edit your message").fill("After")
        with tab.page.expect_request("**/v1/chat/completions") as request:
            tab.page.keyboard.press("Enter")
        tab.answer()
        [message] = json.loads(request.value.post_data or "")["messages"]
        assert data_of(message["content"][0])[1] == data
        assert message["content"][1]["text"] == "After"

        assert "base64" not in tab.page.evaluate("JSON.stringify({...localStorage})")
        tab.page.get_by_role("button", name="Delete After").click()
        tab.button("Delete").click()
        tab.page.wait_for_function(
            """() => new Promise((resolve) => {
                const opening = indexedDB.open('cellar');
                opening.onsuccess = () => {
                    const keys = opening.result.transaction('images').objectStore('images').getAllKeys();
                    keys.onsuccess = () => { opening.result.close(); resolve(keys.result.length === 0); };
                };
            })"""
        )


def test_an_image_that_is_no_longer_stored_is_named(open_tab: Callable[..., Tab]) -> None:
    """And left out of the next prompts."""
    with opened(open_tab, image_engine()) as tab:
        attach(tab, ("photo.png", picture()))
        sent(tab, "Before")
        tab.page.evaluate(
            """() => new Promise((resolve) => {
                const opening = indexedDB.open('cellar');
                opening.onsuccess = () => {
                    const writing = opening.result.transaction('images', 'readwrite');
                    writing.objectStore('images').clear();
                    writing.oncomplete = () => { opening.result.close(); resolve(); };
                };
            })"""
        )
        tab.page.reload()
        tab.ready()
        expect(tab.questions).to_contain_text("photo.png is no longer stored in this browser, and not sent.")
        assert sent(tab, "After")[0]["content"] == "Before"


def test_an_export_has_the_images(open_tab: Callable[..., Tab], tmp_path: Path) -> None:
    data, file = picture(), tmp_path / "conversations.json"
    with opened(open_tab, image_engine()) as tab:
        attach(tab, ("photo.png", data))
        sent(tab, "Kept")
        with tab.page.expect_download() as download:
            tab.button("Export all").click()
        download.value.save_as(file)
        other = open_tab(tab.address).ready()
        other.page.get_by_label("File of conversations").set_input_files(file)
        expect(other.questions.get_by_role("img", name="photo.png")).to_be_visible()
        assert data_of(sent(other, "Again")[0]["content"][0])[1] == data
        other.page.goto("about:blank")


def test_a_conversation_has_at_most_as_many_images_as_a_request(open_tab: Callable[..., Tab]) -> None:
    with opened(open_tab, image_engine()) as tab:
        attach(tab, *((f"{number}.png", picture()) for number in range(15)))
        sent(tab, "Fifteen")
        attach(tab, ("15.png", picture()))
        assert dispatch(tab, "paste", picture())
        expect(tab.page.get_by_role("alert")).to_have_text("A conversation has at most 16 images.")
        assert len(sent(tab, "Sixteen")[-1]["content"]) == 2


def test_a_file_that_is_no_image_is_named(open_tab: Callable[..., Tab]) -> None:
    with opened(open_tab, image_engine()) as tab:
        assert dispatch(tab, "drop", b"no image", "broken.png")
        expect(tab.page.get_by_role("alert")).to_have_text("broken.png is no image that this browser can read.")
        expect(attached(tab)).to_have_count(0)


def test_a_model_of_text_gets_no_images(tab: Tab) -> None:
    """No button, and a sentence where one is pasted or dropped; a drop does not leave the page."""
    expect(tab.button("Attach images")).to_have_count(0)
    for kind in ("paste", "drop"):
        assert dispatch(tab, kind, picture())
        expect(tab.page.get_by_role("alert")).to_have_text("cellar-tiny does not read images.")
    expect(attached(tab)).to_have_count(0)
    assert "Cellar" in tab.ask("What is Cellar?")
    expect(tab.page.get_by_role("alert")).to_have_count(0)


@pytest.mark.parametrize("options", [PHONE, {}], ids=["phone", "laptop"])
def test_axe_finds_nothing_serious_with_images(open_tab: Callable[..., Tab], options: Any) -> None:
    """In the message field and in a message; on phones the targets are large, and a photo can be taken."""
    with opened(open_tab, image_engine(), reduced_motion="reduce", **options) as tab:
        attach(tab, ("one.png", picture()))
        sent(tab, "One")
        attach(tab, ("two.png", picture(1600, 900)), ("three.png", picture(20, 300)))
        assert violations(tab) == []
        assert tab.overflow == 0
        if options:
            assert tab.page.evaluate(SMALL, 44) == []
            expect(tab.button("Take a photo")).to_be_visible()
            expect(tab.page.get_by_label("Photo", exact=True)).to_have_attribute("capture", "environment")
        else:
            expect(tab.button("Take a photo")).not_to_be_visible()
