"""One run of a batch: check the file, send each line to the app as a request, write the output files.

A run may end at any point; the next one continues with the lines that have no result.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Literal

import anyio
import httpx

from server.batches.lines import BatchLine, batch_lines, check_file
from server.batches.slots import SlotShare
from server.http.auth import acting_for
from server.http.encoding import dumps
from server.http.errors import QUEUE_FULL, SERVER_DRAINING
from server.schemas.batches import BatchBody, BatchError, BatchErrors, BatchStatus
from server.store.batches import BatchStore, StoredBatch
from server.store.files import CHUNK_BYTES, FileStore, StorageFullError, StoredFile

OUTPUT_PURPOSE = "batch_output"
# The queue is full, or the engine drains: the request is sent again.
RETRIED = (QUEUE_FULL.status, SERVER_DRAINING.status)
MAX_RETRY_SECONDS = 30.0
INPUT_LOST = BatchError(
    code="input_file_lost",
    message="The input file was deleted, or has expired, before all of its requests were computed.",
    param="input_file_id",
    line=None,
)
STORAGE_FULL = BatchError(
    code="storage_full",
    message="There is no space for the results: they are written when other files are deleted.",
    param=None,
    line=None,
)
EXPIRED = {"code": "batch_expired", "message": "The batch expired before this request was computed."}


class LeaseLostError(Exception):
    """Another server runs the batch now."""


@dataclass(slots=True)
class BatchRun:
    """A batch that this server runs.

    client          sends requests to the app
    max_line_bytes  of a request
    blocking_bytes  of other files, which left no space for the results
    """

    stored: StoredBatch
    batches: BatchStore
    files: FileStore
    client: httpx.AsyncClient
    slots: SlotShare
    max_line_bytes: int
    clock: Callable[[], float] = time.time
    body: BatchBody = field(init=False)
    blocking_bytes: int = field(init=False, default=0)
    _requests: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    _cancelled: bool = False
    _models: frozenset[str] | None = field(init=False)

    def __post_init__(self) -> None:
        self.body = json.loads(self.stored.body)
        allowed = self.body.get("allowed_models")
        self._models = None if allowed is None else frozenset(allowed)
        self._cancelled = self.stored.cancelling is not None

    def cancel(self) -> None:
        """End the requests; the results so far are kept."""
        self._cancelled = True
        self._requests.cancel()

    async def run(self) -> None:
        """Run the batch to its end; StoreError, StorageFullError or LeaseLostError leave it to a later run."""
        if self.body["status"] == "validating" and not self._cancelled:
            await self._check()
        if self.body["status"] == "in_progress" and not self._cancelled:
            await self._compute()
        if self.body["status"] != "failed":
            await self._finish()

    async def _check(self) -> None:
        id = self.body["input_file_id"]
        if await self.files.get(id, self.stored.owner) is None:
            count, errors = 0, [INPUT_LOST]
        else:
            count, errors = await check_file(self.files.chunks(id), self.body["endpoint"], self.max_line_bytes)
        if errors:
            self._set_errors(errors)
            await self._save("failed", final=True)
        else:
            self.body["request_counts"]["total"] = count
            await self._save("in_progress")

    async def _compute(self) -> None:
        """Send all lines without a result, each as soon as there are slots for it."""
        self._requests.deadline = anyio.current_time() + self.body["expires_at"] - self.clock()
        with self._requests:
            async with anyio.create_task_group() as group:
                async for line in self._missing_lines():
                    held = await self.slots.acquire(line.choices)
                    group.start_soon(self._compute_line, line, held)

    async def _compute_line(self, line: BatchLine, held: int) -> None:
        try:
            response = await self._send(line)
            result = _result(line, response)
            await self.batches.add_result(self.stored.id, line.number, result, failed=response.is_error)
        finally:
            self.slots.release(held)

    async def _send(self, line: BatchLine) -> httpx.Response:
        """The response to a request, which has the owner of the batch."""
        content = await anyio.to_thread.run_sync(dumps, line.body)
        headers = {"content-type": "application/json", "x-request-id": _new_id()}
        while True:
            with acting_for(self.stored.owner, self._models):
                response = await self.client.post(self.body["endpoint"], content=content, headers=headers)
            # A model that cannot be loaded is an error of the line.
            if response.status_code not in RETRIED or response.headers.get("x-should-retry") == "false":
                return response
            await anyio.sleep(min(float(response.headers.get("retry-after", 1)), MAX_RETRY_SECONDS))

    async def _finish(self) -> None:
        """Write the output files and the final status."""
        end = self._end()
        if self.body["finalizing_at"] is None:
            await self._save("finalizing")
        if end == "expired":
            await self._fail_missing_lines()
        completed, failed = await self.batches.count(self.stored.id)
        self.body["request_counts"] |= {"completed": completed, "failed": failed}
        try:
            self.body["output_file_id"] = await self._write_results("output") if completed else None
            self.body["error_file_id"] = await self._write_results("error") if failed else None
        except StorageFullError as error:
            self.blocking_bytes = error.other_bytes
            self._set_errors([STORAGE_FULL])
            await self._save("finalizing")
            raise
        # The file ended before its last request.
        lost = end == "completed" and completed + failed < self.body["request_counts"]["total"]
        self._set_errors([INPUT_LOST] if lost else [])
        await self._save("failed" if lost else end, final=True)

    def _end(self) -> Literal["cancelled", "expired", "completed"]:
        if self._cancelled:
            return "cancelled"
        return "expired" if self._requests.cancelled_caught or self.clock() > self.body["expires_at"] else "completed"

    def _set_errors(self, errors: list[BatchError]) -> None:
        self.body["errors"] = BatchErrors(object="list", data=errors) if errors else None

    async def _fail_missing_lines(self) -> None:
        async for line in self._missing_lines():
            result = {"id": _new_id(), "custom_id": line.custom_id, "response": None, "error": EXPIRED}
            await self.batches.add_result(self.stored.id, line.number, dumps(result), failed=True)

    async def _missing_lines(self) -> AsyncIterator[BatchLine]:
        finished = await self.batches.finished_lines(self.stored.id)
        chunks = self.files.chunks(self.body["input_file_id"])
        async for entries in batch_lines(chunks, self.body["endpoint"], self.max_line_bytes):
            for entry in entries:
                if isinstance(entry, BatchLine) and entry.number not in finished:
                    yield entry

    async def _write_results(self, kind: Literal["output", "error"]) -> str:
        """Write a file of results; its id follows from the batch, so a later run replaces an incomplete file."""
        id = f"file-{self.stored.id.removeprefix('batch_')}-{kind}"
        now, expiry = int(self.clock()), self.body.get("output_expires_after")
        file = StoredFile(
            id=id,
            owner=self.stored.owner,
            purpose=OUTPUT_PURPOSE,
            name=f"{self.stored.id}_{kind}.jsonl",
            created=now,
            expires=None if expiry is None else now + expiry["seconds"],
        )
        await self.files.create(file, _in_chunks(self.batches.results(self.stored.id, failed=kind == "error")))
        return id

    async def _save(self, status: BatchStatus, *, final: bool = False) -> None:
        self.body["status"] = status
        self.body[f"{status}_at"] = int(self.clock())  # type: ignore[literal-required]
        if not await self.batches.save(self.stored.id, dumps(self.body), final=final):
            raise LeaseLostError


def _result(line: BatchLine, response: httpx.Response) -> bytes:
    head = {"id": _new_id(), "custom_id": line.custom_id}
    status = {"status_code": response.status_code, "request_id": response.headers.get("x-request-id", "")}
    # The body of the response is JSON already.
    return dumps(head)[:-1] + b',"response":' + dumps(status)[:-1] + b',"body":' + response.content + b'},"error":null}'


async def _in_chunks(lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    chunk = bytearray()
    async for line in lines:
        chunk += line + b"\n"
        if len(chunk) >= CHUNK_BYTES:
            yield bytes(chunk)
            chunk.clear()
    if chunk:
        yield bytes(chunk)


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"
