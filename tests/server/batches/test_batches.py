"""/v1/files and /v1/batches with OpenAI's own client."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import socket
import sqlite3
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from engine.errors import EngineDead, Overloaded
from engine.types.events import Event
from engine.types.request import Request
from server.batches import service
from server.batches.lines import check_file
from server.store import files as stored_files
from server.store.batches import BatchStore, StoredBatch
from server.store.files import FileStore, StoredFile
from tests.server.fakes import WORDS, FakeEngine, Gate, serve_in_thread, settings, speak

FINAL = ("completed", "failed", "expired", "cancelled")
PATIENCE_SECONDS = 30.0


@contextmanager
def client_of(engine: FakeEngine, *, key: str = "key", **options: Any) -> Iterator[openai.OpenAI]:
    """A client of a server with a store."""
    with (
        serve_in_thread(engine, settings(**{"store": "memory", **options})) as port,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0) as client,
    ):
        yield client


def line(number: int, **body: Any) -> dict[str, Any]:
    """A request of a batch."""
    return {
        "custom_id": f"request {number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "fake", "messages": [{"role": "user", "content": f"{number}"}], **body},
    }


def upload(client: openai.OpenAI, lines: Sequence[object]) -> str:
    """The id of an uploaded file with these lines."""
    text = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines)
    return client.files.create(file=("requests.jsonl", text.encode()), purpose="batch").id


def start(client: openai.OpenAI, lines: Sequence[object], **options: Any) -> Batch:
    """A new batch of these lines."""
    made = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **options}
    return client.batches.create(input_file_id=upload(client, lines), **made)


def wait(client: openai.OpenAI, id: str, done: Callable[[Batch], bool] = lambda batch: batch.status in FINAL) -> Batch:
    """The batch, once it is done."""
    give_up = time.monotonic() + PATIENCE_SECONDS
    while not done(batch := client.batches.retrieve(id)):
        assert time.monotonic() < give_up, batch
        time.sleep(0.02)
    return batch


def results(client: openai.OpenAI, id: str | None) -> list[dict[str, Any]]:
    """The lines of a file of results."""
    assert id is not None
    return [json.loads(text) for text in client.files.content(id).text.splitlines()]


def test_upload_create_poll_download() -> None:
    """Each result has its custom_id and the response that the same request gets online."""
    engine = FakeEngine()
    with client_of(engine) as client:
        batch = wait(client, start(client, [line(0), "", line(1)], metadata={"night": "1"}).id)
        online = client.chat.completions.create(**line(0)["body"])
        found = results(client, batch.output_file_id)
        output = client.files.retrieve(batch.output_file_id or "")

    assert ("completed", {"night": "1"}) == (batch.status, batch.metadata)
    assert batch.request_counts is not None
    assert (2, 2, 0) == (
        batch.request_counts.total,
        batch.request_counts.completed,
        batch.request_counts.failed,
    )
    assert batch.error_file_id is None
    assert batch.completed_at is not None
    assert ["request 0", "request 1"] == [one["custom_id"] for one in found]
    assert [None, None] == [one["error"] for one in found]
    bodies = [one["response"]["body"] for one in found]
    assert [online.choices[0].message.content] * 2 == [body["choices"][0]["message"]["content"] for body in bodies]
    assert [200, 200] == [one["response"]["status_code"] for one in found]
    assert "batch_output" == output.purpose
    assert ["flex", "flex", "default"] == [request.tier for request in engine.requests]


def test_a_request_with_an_error_does_not_stop_the_others() -> None:
    """It is in the error file with the status and the body that it gets online."""
    with client_of(FakeEngine()) as client:
        batch = wait(client, start(client, [line(0), line(1, model="other"), line(2, temperature=9)]).id)
        failed = results(client, batch.error_file_id)
        succeeded = results(client, batch.output_file_id)

    assert "completed" == batch.status
    assert ["request 0"] == [one["custom_id"] for one in succeeded]
    assert [(404, "model_not_found"), (400, "invalid_value")] == [
        (one["response"]["status_code"], one["response"]["body"]["error"]["code"]) for one in failed
    ]


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([], "empty_file", None),
        ([line(0), "{"], "invalid_json_line", 2),
        ([line(0), '{"a": 1, "a": 2}'], "invalid_json_line", 2),
        ([line(0), "[]"], "invalid_json_line", 2),
        ([line(0), line(0)], "duplicate_custom_id", 2),
        ([{**line(0), "custom_id": 7}], "invalid_custom_id", 1),
        ([{**line(0), "method": "GET"}], "invalid_method", 1),
        ([{**line(0), "url": "/v1/embeddings"}], "mismatched_endpoint", 1),
        ([{**line(0), "body": []}], "invalid_body", 1),
        ([line(0, stream=True)], "invalid_body", 1),
        ([line(0, messages=[{"role": "user", "content": "x" * 2000}])], "request_too_large", 1),
    ],
)
def test_errors_of_the_file_have_their_line(lines: list[object], code: str, number: int | None) -> None:
    """No request of such a file is computed."""
    engine = FakeEngine()
    with client_of(engine, limits={"body_bytes": 1000}) as client:
        batch = wait(client, start(client, lines).id)

    assert "failed" == batch.status
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(code, number)] == [(error.code, error.line) for error in batch.errors.data]
    assert not engine.requests


@pytest.mark.parametrize(
    ("text", "reason"),
    [("\ufeff{}".encode(), "it starts with a byte order mark"), ("{}".encode("utf-16"), "not UTF-8 at byte 0")],
)
def test_another_encoding_is_named(text: bytes, reason: str) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield text

    _, [error] = asyncio.run(check_file(chunks(), "/v1/chat/completions", 1000))

    assert ("invalid_json_line", f"This line is not parseable as valid JSON: {reason}.") == (
        error["code"],
        error["message"],
    )


def test_batches_use_half_of_the_slots() -> None:
    """A request with two choices takes two; other requests find the other half free."""
    most, lock = 0, threading.Lock()
    gates: list[Gate] = []

    def gated(request: Request) -> Iterator[Event | Gate]:
        nonlocal most
        with lock:
            most = max(most, len(engine.running))
            gates.append(Gate())
            gate = gates[-1]
        yield gate
        yield from speak(request)

    engine = FakeEngine(script=gated)
    with client_of(engine) as client:
        batch = start(client, [line(0, n=2), *(line(number) for number in range(1, 6))])
        give_up, opened = time.monotonic() + PATIENCE_SECONDS, 0
        while opened < 7:
            assert time.monotonic() < give_up
            for gate in gates[opened:]:
                assert gate.reached.wait(PATIENCE_SECONDS)
                time.sleep(0.02)
                gate.open()
                opened += 1
        assert "completed" == wait(client, batch.id).status

    assert 2 == most


def test_a_full_queue_is_no_result() -> None:
    """The request is sent again."""
    engine = FakeEngine(refusal=Overloaded(1, 0.01))
    with client_of(engine) as client:
        batch = start(client, [line(0)])
        wait(client, batch.id, lambda batch: batch.status == "in_progress")
        engine.refusal = None
        assert "completed" == wait(client, batch.id).status


def test_a_cancelled_batch_keeps_its_results() -> None:
    """Running requests are cancelled; a final batch cannot be cancelled again."""

    def script(request: Request) -> Iterator[Event | Gate]:
        if request.prompt == engine.tokenizer.render_chat(line(0)["body"]["messages"]).tokens:
            yield from speak(request)
        else:
            yield Gate()

    engine = FakeEngine(script=script)
    with client_of(engine) as client:
        batch = start(client, [line(number) for number in range(5)])
        wait(client, batch.id, lambda batch: batch.request_counts is not None and batch.request_counts.completed == 1)
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        batch = wait(client, batch.id)
        found = results(client, batch.output_file_id)
        with pytest.raises(openai.BadRequestError, match="Cannot cancel"):
            client.batches.cancel(batch.id)

    assert "cancelled" == batch.status
    assert batch.cancelled_at is not None
    assert ["request 0"] == [one["custom_id"] for one in found]
    assert not engine.running


def test_the_input_of_a_batch_cannot_be_deleted() -> None:
    """Its requests would be lost; a final batch does not need it."""
    engine = FakeEngine(script=lambda _: iter((Gate(),)))
    with client_of(engine) as client:
        batch = start(client, [line(number) for number in range(3)])
        with pytest.raises(openai.BadRequestError, match=f"'{batch.id}' still reads this file"):
            client.files.delete(batch.input_file_id)
        client.batches.cancel(batch.id)
        wait(client, batch.id)
        assert client.files.delete(batch.input_file_id).deleted


def lose_files(store: str) -> None:
    """Delete all files, as their expiry does."""
    with closing(sqlite3.connect(store)) as database, database:
        database.execute("PRAGMA foreign_keys = ON")
        database.execute("DELETE FROM files")


def error_codes(batch: Batch) -> list[str | None]:
    """The codes of a batch's errors."""
    return [error.code for error in (batch.errors and batch.errors.data) or []]


@pytest.mark.parametrize("started", [True, False])
def test_a_batch_fails_when_its_input_has_expired(tmp_path: Path, started: bool) -> None:
    """Its results so far are kept. Not started: the engine of the first server never starts."""

    def script(request: Request) -> Iterator[Event | Gate]:
        if len(engine.requests) > 1:
            yield Gate()
        yield from speak(request)

    engine = FakeEngine(script=script) if started else FakeEngine(failure=EngineDead("x"))
    store = str(tmp_path / "store.sqlite")
    with client_of(engine, store=store, grace_seconds=0.0) as client:
        id = start(client, [line(number) for number in range(5)]).id
        if started:
            wait(client, id, lambda batch: batch.request_counts is not None and batch.request_counts.completed == 1)
    lose_files(store)
    with client_of(FakeEngine(), store=store) as client:
        batch = wait(client, id)
        found = results(client, batch.output_file_id) if started else []

    assert ("failed", ["input_file_lost"]) == (batch.status, error_codes(batch))
    assert len(found) == int(started)


def test_a_batch_may_end_while_its_lease_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later batches run."""
    renew = BatchStore.renew

    async def late(self: BatchStore, id: str) -> StoredBatch | None:
        while (stored := await self.get(id, "")) is not None and not stored.final:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        return await renew(self, id)

    monkeypatch.setattr(service, "POLL_SECONDS", 0.01)
    with client_of(FakeEngine(script=lambda _: iter((Gate(),)))) as client:
        first = start(client, [line(0)])
        wait(client, first.id, lambda batch: batch.status == "in_progress")
        monkeypatch.setattr(BatchStore, "renew", late)
        client.batches.cancel(first.id)
        assert "cancelled" == wait(client, first.id).status
        second = start(client, [line(0)])
        assert "in_progress" == wait(client, second.id, lambda batch: batch.status == "in_progress").status
        client.batches.cancel(second.id)
        assert "cancelled" == wait(client, second.id).status


def test_results_wait_for_space(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The batch is `finalizing`, with the reason, until files are deleted: its own input may be one of them.

    Results are written again, and the log has another line, only when there is more space than before.
    """
    created: list[str] = []
    create = FileStore.create

    def counted(store: FileStore, file: StoredFile, *content: Any) -> Awaitable[StoredFile]:
        created.append(file.purpose)
        return create(store, file, *content)

    monkeypatch.setattr(FileStore, "create", counted)
    monkeypatch.setattr(stored_files, "MAX_MEMORY_BYTES", 20_000)
    monkeypatch.setattr(service, "POLL_SECONDS", 0.05)
    with client_of(FakeEngine()) as client:
        other = client.files.create(file=("x", bytes(15_000)), purpose="batch")
        batch = start(client, [line(number) for number in range(8)])
        full = wait(client, batch.id, lambda batch: bool(error_codes(batch)))
        time.sleep(0.3)
        attempts = created.count("batch_output")
        for id in (batch.input_file_id, other.id):
            client.files.delete(id)
        batch = wait(client, batch.id)
        found = results(client, batch.output_file_id)

    assert ("finalizing", ["storage_full"]) == (full.status, error_codes(full))
    assert 1 == attempts
    assert 1 == len([message for message in caplog.messages if "would exceed" in message])
    assert ("completed", []) == (batch.status, error_codes(batch))
    assert 8 == len(found)


def test_a_restart_continues_a_batch(tmp_path: Path) -> None:
    """Lines with a result are not computed again, and each line has one result."""

    def stuck(request: Request) -> Iterator[Event | Gate]:
        if len(engine.requests) > 3:
            yield Gate()
        yield from speak(request)

    engine, store = FakeEngine(script=stuck), str(tmp_path / "store.sqlite")
    with client_of(engine, store=store, grace_seconds=0.0) as client:
        id = start(client, [line(number) for number in range(8)]).id
        before = wait(
            client, id, lambda batch: batch.request_counts is not None and batch.request_counts.completed >= 2
        )
    later = FakeEngine()
    with client_of(later, store=store) as client:
        batch = wait(client, id)
        found = results(client, batch.output_file_id)

    assert before.request_counts is not None
    assert "completed" == batch.status
    assert [f"request {number}" for number in range(8)] == [one["custom_id"] for one in found]
    assert 8 - 3 == len(later.requests)


def test_keys_do_not_see_files_and_batches_of_each_other() -> None:
    """The requests of a batch have the owner of its key."""
    engine = FakeEngine()
    with client_of(engine, keys=("key", "other")) as client:
        batch = wait(client, start(client, [line(0)]).id)
        online = client.chat.completions.create(**line(0)["body"])
        other = client.with_options(api_key="other")
        assert [] == list(other.files.list())
        assert [] == list(other.batches.list())
        for refused in (
            lambda: other.files.retrieve(batch.input_file_id),
            lambda: other.files.content(batch.output_file_id or ""),
            lambda: other.files.delete(batch.input_file_id),
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: other.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                refused()
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").files.list()

    assert online.choices[0].message.content == "".join(WORDS)
    first, second = engine.requests[0], engine.requests[1]
    assert (first.owner, first.salt) == (second.owner, second.salt)
    assert first.owner


def test_files_are_listed_read_and_deleted() -> None:
    """Pages in either order; a file may expire."""
    with client_of(FakeEngine()) as client:
        ids = [upload(client, [line(number)]) for number in range(3)]
        made = client.files.create(
            file=("x.jsonl", b"{}\n"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert made.expires_at == made.created_at + 3600
        assert {*ids, made.id} == {file.id for file in client.files.list(limit=2)}
        assert 2 == len(client.files.list(limit=2).data)
        content = client.files.content(ids[1])
        assert json.dumps(line(1)).encode() == content.read()
        assert len(content.read()) == int(content.response.headers["content-length"])
        assert client.files.delete(ids[1]).deleted
        with pytest.raises(openai.NotFoundError, match="No such File"):
            client.files.retrieve(ids[1])


def test_files_and_batches_of_a_key_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also empty files; another key is not affected, and a deleted file makes space."""
    monkeypatch.setattr(service, "MAX_FILES", 2)
    with client_of(FakeEngine(), keys=("key", "other")) as client:
        ids = [upload(client, []), upload(client, [])]
        for refused in (
            lambda: upload(client, []),
            lambda: client.batches.create(
                input_file_id=ids[0], endpoint="/v1/chat/completions", completion_window="24h"
            ),
        ):
            with pytest.raises(openai.APIStatusError, match="delete some first") as error:
                refused()
            assert (413, "storage_full") == (error.value.status_code, error.value.code)
        assert upload(client.with_options(api_key="other"), [])
        client.files.delete(ids[0])
        assert upload(client, [])


def test_a_large_file_is_stored_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size is not limited by that of a request, but by a limit of its own; a container may have a small /tmp."""
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    limits = {"body_bytes": 1000, "file_bytes": 4 * 2**20}
    with client_of(FakeEngine(), limits=limits) as client:
        content = bytes(range(256)) * 12_000
        stored = client.files.create(file=("x.jsonl", io.BytesIO(content)), purpose="batch")
        assert len(content) == stored.bytes
        assert content == client.files.content(stored.id).read()
        with pytest.raises(openai.APIStatusError) as refused:
            client.files.create(file=("x.jsonl", bytes(5 * 2**20)), purpose="batch")
        assert 413 == refused.value.status_code


def test_wrong_uploads() -> None:
    """Another purpose, no form, a form of a page of another origin, no file."""
    with client_of(FakeEngine()) as client:
        with pytest.raises(openai.BadRequestError, match="purpose"):
            client.files.create(file=("x", b"{}"), purpose="fine-tune")
        url, form = f"{client.base_url}files", {"files": {"file": b"{}"}, "data": {"purpose": "batch"}}
        with httpx.Client(trust_env=False) as http:
            assert 415 == http.post(url, json={}).status_code
            assert 403 == http.post(url, headers={"origin": "https://example.org"}, **form).status_code  # type: ignore[arg-type]
            missing = http.post(url, files={"other": b"{}"}, data={"purpose": "batch"})
            assert (400, "file") == (missing.status_code, missing.json()["error"]["param"])
            assert 200 == http.post(url, **form).status_code  # type: ignore[arg-type]
            for kind, body in (
                ("multipart/form-data", b"x"),
                ("multipart/form-data; boundary=b", b"x"),
                ("multipart/form-data; boundary=b", b"--b\r\nbroken\r\n\r\n"),
                ("multipart/form-data; boundary=b", b"--b\r\nContent-Disposition: form-data; name=file\r\n\r\nx"),
            ):
                broken = http.post(url, content=body, headers={"content-type": kind})
                assert (400, "invalid_value") == (broken.status_code, broken.json()["error"]["code"]), body


def test_parts_of_a_form() -> None:
    """Fields may follow the file, whose expiry is among them; an invalid form leaves no file."""
    purpose, content = ("purpose", (None, "batch")), ("file", ("x.jsonl", b"{}"))
    expiry = ("expires_after[seconds]", (None, "3600"))
    with client_of(FakeEngine()) as client, httpx.Client(trust_env=False) as http:
        url = f"{client.base_url}files"
        stored = http.post(url, files=[content, expiry, ("other", ("y", b"skipped")), purpose]).json()
        assert (3600, "x.jsonl", 2) == (
            stored["expires_at"] - stored["created_at"],
            stored["filename"],
            stored["bytes"],
        )
        for parts, param, text in (
            ([content], "purpose", "Missing"),
            ([content, ("purpose", (None, "fine-tune"))], "purpose", "it must be 'batch'"),
            ([content, purpose, ("expires_after[seconds]", (None, "1"))], "expires_after[seconds]", "3600"),
            ([content, purpose, content], "file", "the form has two of them"),
            ([("file", (None, b"{}")), purpose], "file", "has no filename, so it is not a file"),
            ([content, purpose, ("x", (None, b"x" * 5000))], "x", "more than 4096 bytes"),
            ([content, purpose, *((f"{number}", (None, b"x")) for number in range(17))], None, "cannot be read"),
        ):
            error = http.post(url, files=parts).json()["error"]  # type: ignore[arg-type]
            assert (param, True) == (error["param"], text in error["message"]), error
        assert [stored["id"]] == [file.id for file in client.files.list()]


def test_a_client_that_leaves_during_an_upload_leaves_no_file(caplog: pytest.LogCaptureFixture) -> None:
    with client_of(FakeEngine()) as client:
        head = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
        part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n{}'
        with socket.create_connection(("127.0.0.1", client.base_url.port or 0)) as connection:
            connection.sendall(head + b"Content-Type: multipart/form-data; boundary=b\r\n\r\n" + part)
        with caplog.at_level(logging.INFO):
            give_up = time.monotonic() + PATIENCE_SECONDS
            while not any("/v1/files 499" in message for message in caplog.messages):
                assert time.monotonic() < give_up, caplog.messages
                time.sleep(0.02)
        assert [] == list(client.files.list())


def test_wrong_batches() -> None:
    """Errors name the field."""
    with client_of(FakeEngine()) as client:
        with pytest.raises(openai.BadRequestError, match="completion_window"):
            start(client, [line(0)], completion_window="1h")
        with pytest.raises(openai.BadRequestError, match="endpoint"):
            start(client, [line(0)], endpoint="/v1/moderations")
        output = wait(client, start(client, [line(0)]).id).output_file_id or ""
        with pytest.raises(openai.BadRequestError, match="batch_output"):
            client.batches.create(input_file_id=output, endpoint="/v1/chat/completions", completion_window="24h")


def test_a_server_without_a_store_keeps_no_files() -> None:
    """The error names the option."""
    with client_of(FakeEngine(), store="none") as client, pytest.raises(openai.NotFoundError, match="--store"):
        upload(client, [line(0)])
