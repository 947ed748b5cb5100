"""The media sandbox: files of unbounded time or memory end there, and are refused."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image

from engine import sandbox as process_module
from engine.errors import InvalidContent, Overloaded
from engine.media import sandbox as sandbox_module
from engine.media.sandbox import MediaSandbox, SandboxUnavailable
from engine.sandbox import SandboxProcess
from engine.types.content import Upload
from tests.engine.media import light_process
from tests.engine.media.processors import encoded, media_processor, png, save_processor
from tests.engine.media.test_images import bare_png
from tests.engine.media.test_sounds import muxed, wav

pytestmark = pytest.mark.filterwarnings("ignore")

FIELD = "messages[0].content[0]"
UPLOAD = Upload("image", png(60, 40), FIELD)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_processor(tmp_path_factory.mktemp("llava"), "llava")


@pytest.fixture(scope="module")
def sandbox(folder: Path) -> Iterator[MediaSandbox]:
    """A sandbox with the usual limits."""
    sandbox = MediaSandbox(folder)
    yield sandbox
    sandbox.close()


@pytest.fixture
def light(tmp_path: Path) -> Iterator[Callable[..., MediaSandbox]]:
    """Sandboxes whose subprocess starts in a tenth of the time, with the processor of light_process."""
    sandboxes = []

    def light(folder: Path = tmp_path, **limits: float) -> MediaSandbox:
        sandbox = MediaSandbox(folder, **limits)  # type: ignore[arg-type]
        sandbox._process = SandboxProcess(light_process.__name__)
        sandboxes.append(sandbox)
        return sandbox

    yield light
    for sandbox in sandboxes:
        sandbox.close()


def large() -> Upload:
    """As many pixels as an image may have, with transparency: a small file of 256 MiB."""
    return transparent(8192)


def transparent(side: int) -> Upload:
    return Upload("image", encoded(Image.new("RGBA", (side, side), (9, 9, 9, 128)), compress_level=1), FIELD)


def process_id(sandbox: MediaSandbox) -> int:
    process = sandbox._process._process
    assert process is not None
    return process.pid


def test_a_content_equals_that_of_the_processor_in_this_process(sandbox: MediaSandbox, folder: Path) -> None:
    """The description too; contents of several threads are processed one after another."""
    processor = media_processor(folder)
    uploads = [Upload("image", png(60, 40, seed), FIELD) for seed in range(6)]
    sandbox.start()

    with ThreadPoolExecutor(3) as threads:
        contents = [*threads.map(sandbox.process, uploads)]

    assert contents == [processor.process(upload) for upload in uploads]
    assert (sandbox.markers, sandbox.placeholders) == (processor.markers, processor.placeholders)
    assert sandbox.describe().refused == {}


def test_contents_of_several_requests_alternate(sandbox: MediaSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with many contents lets another one pass after each of them."""
    order: list[str] = []
    both = threading.Barrier(2)

    def recorded(upload: Upload) -> str:
        order.append(upload.field)
        if upload.field == "a0":
            both.wait(30)
            while len(sandbox._lock._turns) < 2:
                time.sleep(0.01)
        return upload.field

    monkeypatch.setattr(sandbox, "_process_once", recorded)

    def first() -> None:
        for number in range(3):
            sandbox.process(Upload("image", b"", f"a{number}"))

    def other() -> None:
        both.wait(30)
        sandbox.process(Upload("image", b"", "b0"))

    with ThreadPoolExecutor(2) as threads:
        [done.result() for done in [threads.submit(first), threads.submit(other)]]

    assert order == ["a0", "b0", "a1", "a2"]


def test_a_wait_for_the_process_is_limited(sandbox: MediaSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards the thread is no longer in the queue."""
    monkeypatch.setattr(sandbox_module, "_LOCK_TIMEOUT_SECONDS", 0.01)
    with sandbox._lock, ThreadPoolExecutor(1) as threads, pytest.raises(Overloaded):
        threads.submit(sandbox.process, UPLOAD).result()

    assert not sandbox._lock._turns
    assert sandbox.process(UPLOAD)


def test_a_refused_content_keeps_the_process(sandbox: MediaSandbox) -> None:
    """The error names the field and the problem."""
    sandbox.process(UPLOAD)
    process = sandbox._process._process
    for data, problem in ((b"", "format"), (png(60, 40)[:-40], "damaged"), (bare_png(9000, 9000), "too_large")):
        with pytest.raises(InvalidContent, match="^the image ") as error:
            sandbox.process(Upload("image", data, FIELD))
        assert (error.value.field, error.value.problem) == (FIELD, problem)

    assert sandbox.process(UPLOAD)
    assert sandbox._process._process is process


@pytest.mark.parametrize(("error", "problem"), [(AttributeError("name"), "damaged"), (MemoryError(), "too_large")])
def test_any_error_of_a_decoder_is_an_answer(error: Exception, problem: str) -> None:
    """So that one file does not end the subprocess of all."""

    class Processor:
        def process(self, _: Upload) -> None:
            raise error

    answer, arrays = sandbox_module._answer(Processor(), Upload("image", b"", "field"))

    assert answer["problem"] == problem
    assert arrays == []


@pytest.mark.slow
def test_the_largest_image_fits(sandbox: MediaSandbox) -> None:
    assert sandbox.process(large()).replacement


@pytest.mark.slow
def test_memory_is_limited(folder: Path) -> None:
    """An image that exceeds it is refused; the next one is processed."""
    sandbox = MediaSandbox(folder, memory_bytes=100 * 2**20)
    try:
        with pytest.raises(InvalidContent, match="too much.* memory") as error:
            sandbox.process(large())
        assert (error.value.field, error.value.problem) == (FIELD, "too_large")
        assert sandbox.process(UPLOAD)
    finally:
        sandbox.close()


def test_time_is_limited(light: Callable[..., MediaSandbox]) -> None:
    """The content is not tried again; the next one is processed in another subprocess."""
    sandbox = light(max_seconds=0.2)
    sandbox.start()
    first = process_id(sandbox)

    with pytest.raises(InvalidContent, match="too much time or memory") as error:
        sandbox.process(Upload("image", light_process.ENDLESS, FIELD))

    assert (error.value.field, error.value.problem) == (FIELD, "too_large")
    assert not sandbox._process.is_running
    assert sandbox.process(UPLOAD)
    assert process_id(sandbox) != first


@pytest.mark.slow
def test_time_of_a_decoder_is_limited(folder: Path) -> None:
    """The signal ends it between two lines of Python, too."""
    sandbox = MediaSandbox(folder, max_seconds=0.2)
    try:
        with pytest.raises(InvalidContent, match="too much time or memory") as error:
            sandbox.process(transparent(4096))
        assert (error.value.field, error.value.problem) == (FIELD, "too_large")
        assert sandbox.process(UPLOAD)
    finally:
        sandbox.close()


def test_a_process_that_was_killed_is_replaced(light: Callable[..., MediaSandbox]) -> None:
    """Before a content, or while it is processed: then the content is tried again."""
    sandbox = light()
    content = sandbox.process(UPLOAD)
    process = sandbox._process._process
    assert process is not None
    process.kill()
    process.wait()

    assert sandbox.process(UPLOAD) == content
    assert sandbox.process(Upload("image", light_process.KILLED_ONCE, FIELD))


def test_a_sandbox_without_an_answer_may_be_asked_again(
    light: Callable[..., MediaSandbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = light()
    monkeypatch.setattr(process_module, "_POLLS", 0)
    with pytest.raises(Overloaded):
        sandbox.process(UPLOAD)
    monkeypatch.undo()

    assert sandbox.process(UPLOAD)


def test_a_sandbox_without_a_processor_says_why(light: Callable[..., MediaSandbox]) -> None:
    with pytest.raises(SandboxUnavailable, match="^it has no processor$"):
        light(Path("/nonexistent")).describe()


@pytest.mark.parametrize(("file", "reason"), [("", "it has no processor"), ("tokenizer.json", "tokenizer")])
def test_a_folder_without_a_processor_says_why(
    tmp_path: Path, file: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, whose messages stay."""
    monkeypatch.setattr(logging, "disable", lambda: None)
    if file:
        save_processor(tmp_path, "llava")
        (tmp_path / file).write_text("{}")

    processor = sandbox_module._read_processor(tmp_path, "contents")

    assert isinstance(processor, str)
    assert reason in processor or file


def test_sounds_pass_the_sandbox(tmp_path: Path) -> None:
    """A small file of minutes is refused before its samples fill the memory."""
    folder = save_processor(tmp_path, "qwen2_audio")
    sandbox = MediaSandbox(folder)
    try:
        upload = Upload("audio", wav(), FIELD)
        assert sandbox.process(upload) == media_processor(folder).process(upload)
        with pytest.raises(InvalidContent, match="longer than 2 s"):
            sandbox.process(Upload("audio", muxed("ogg", "libopus", seconds=90, silent=True), FIELD))
    finally:
        sandbox.close()
