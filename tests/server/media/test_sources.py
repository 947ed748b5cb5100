"""Images from the files of their owner and from allowed hosts; stored responses refer to files."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from server.media.addresses import FetchRefusedError
from server.media.fetch import MediaFetcher
from tests.server.fakes import FakeEngine, serve_in_thread, settings
from tests.server.media.requests import JPEG, PNG, WAV, data_url, media_engine

KEYS = ("first:key-1", "second:key-2")


@contextmanager
def clients(engine: FakeEngine, **options: Any) -> Iterator[list[openai.OpenAI]]:
    """Clients of two owners."""
    with serve_in_thread(engine, settings(keys=KEYS, **options)) as port:
        url = f"http://127.0.0.1:{port}/v1"
        yield [openai.OpenAI(base_url=url, api_key=entry.partition(":")[2], max_retries=0) for entry in KEYS]


def upload(client: openai.OpenAI, data: bytes, purpose: str = "vision") -> str:
    """The id of an uploaded file."""
    return client.files.create(file=("a.bin", io.BytesIO(data)), purpose=purpose).id  # type: ignore[arg-type]


def see(client: openai.OpenAI, *parts: Any) -> None:
    """A chat about the parts."""
    client.chat.completions.create(model="fake", messages=[{"role": "user", "content": [*parts]}])


def test_files_are_read_by_their_owner_only() -> None:
    engine = media_engine()
    with clients(engine) as (first, second):
        image, sound = upload(first, PNG), upload(first, WAV, "user_data")
        see(first, {"type": "file", "file": {"file_id": image}}, {"type": "file", "file": {"file_id": sound}})
        with pytest.raises(openai.NotFoundError) as foreign:
            see(second, {"type": "file", "file": {"file_id": image}})
        with pytest.raises(openai.NotFoundError) as missing:
            see(second, {"type": "file", "file": {"file_id": "file-none"}})

    uploads = engine.tokenizer.rendered[-1]["uploads"]
    assert [(read.kind, read.data) for read in uploads] == [("image", PNG), ("audio", WAV)]
    assert str(foreign.value).replace(image, "file-none") == str(missing.value)


def test_a_file_of_a_batch_is_no_image() -> None:
    with clients(media_engine()) as (first, _):
        id = upload(first, PNG, "batch")
        with pytest.raises(openai.BadRequestError, match="the purpose of the file is 'batch'"):
            see(first, {"type": "file", "file": {"file_id": id}})
        with pytest.raises(openai.BadRequestError, match="'batch' or 'vision' or 'user_data'"):
            upload(first, PNG, "fine-tune")


def test_a_file_of_another_format_is_refused() -> None:
    with clients(media_engine()) as (first, _):
        id = upload(first, b"%PDF-1.7", "user_data")
        with pytest.raises(openai.BadRequestError) as refused:
            see(first, {"type": "file", "file": {"file_id": id}})
    assert refused.value.code == "invalid_image_format"


def test_a_stored_response_keeps_files_in_place_of_base64() -> None:
    """A conversation goes on with them, for its owner; the same bytes are one file."""
    engine = media_engine()
    parts = [
        {"type": "input_image", "image_url": data_url(PNG), "detail": "low"},
        {"type": "input_image", "image_url": data_url(PNG)},
        {"type": "input_image", "image_url": data_url(JPEG, "image/jpeg")},
        {"type": "input_text", "text": "a"},
    ]
    with clients(engine) as (first, second):
        content: Any = [{"role": "user", "content": parts}]
        response = first.responses.create(model="fake", input=content)
        listed = first.responses.input_items.list(response.id).data
        next_one = first.responses.create(model="fake", input="b", previous_response_id=response.id)
        files = [first.files.content(file.id).read() for file in first.files.list().data]
        assert second.files.list().data == []

    shown: Any = [part.model_dump(exclude_none=True) for part in listed[0].content]  # type: ignore[union-attr]
    ids = [part.get("file_id") for part in shown]
    assert ids[0] == ids[1] != ids[2]
    assert ids[3] is None
    assert all("image_url" not in part for part in shown)
    assert [part.get("detail") for part in shown] == ["low", "auto", "auto", None]
    assert sorted(files) == sorted([PNG, JPEG])
    assert next_one.status == "completed"
    uploads = engine.tokenizer.rendered[-1]["uploads"]
    assert [read.data for read in uploads] == [PNG, PNG, JPEG]
    assert {read.field for read in uploads} == {"previous_response_id"}


def test_a_response_that_is_not_stored_leaves_no_file() -> None:
    with clients(media_engine()) as (first, _):
        content: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": data_url(PNG)}]}]
        first.responses.create(model="fake", input=content, store=False)
        assert first.files.list().data == []


def test_images_are_fetched_from_allowed_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each URL passes the fetcher with the hosts of the option; its reason is in the error."""
    fetched: list[tuple[frozenset[str], str]] = []

    async def fetch(self: MediaFetcher, url: str) -> bytes:
        fetched.append((self.hosts, url))
        if url.endswith("gone"):
            raise FetchRefusedError("its host did not answer with status 200")
        return JPEG

    monkeypatch.setattr(MediaFetcher, "fetch", fetch)
    engine = media_engine()
    with clients(engine, media_hosts=("images.example.com", ".example.org")) as (first, _):
        see(first, {"type": "image_url", "image_url": {"url": "https://images.example.com/a.jpg"}})
        with pytest.raises(openai.BadRequestError, match="status 200") as gone:
            see(first, {"type": "image_url", "image_url": {"url": "https://images.example.com/gone"}})

    hosts = frozenset({"images.example.com", ".example.org"})
    assert fetched[0] == (hosts, "https://images.example.com/a.jpg")
    assert (gone.value.code, gone.value.param) == ("failed_to_download_image", "messages[0].content[0].image_url.url")
    assert engine.tokenizer.rendered[-1]["uploads"][0].data == JPEG


@pytest.mark.parametrize("host", ["*", "*.example.com", "https://a.com", "a.com:443", "1.2.3.4", ".", "A.com", "0x7f"])
def test_hosts_of_the_option_are_names(host: str) -> None:
    with pytest.raises(ValueError, match="--allow-media-host"):
        settings(media_hosts=(host,)).check()


def test_large_bodies_at_the_same_time_are_bounded() -> None:
    limits = {"body_bytes": 1000, "media_body_bytes": 100_000, "media_buffer_bytes": 3000}
    with serve_in_thread(media_engine(), settings(limits=limits)) as port:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        image = {"type": "image_url", "image_url": {"url": data_url(PNG + bytes(3000))}}
        body = {"model": "fake", "messages": [{"role": "user", "content": [image]}]}
        refused = httpx.post(url, json=body)
        image["image_url"] = {"url": data_url(PNG + bytes(1000))}
        accepted = [httpx.post(url, json=body).status_code for _ in range(3)]

    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert accepted == [200, 200, 200]
