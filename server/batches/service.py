"""The service of /v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
from starlette.types import ASGIApp

from engine.errors import EngineError, Overloaded
from server.batches.run import BatchRun, LeaseLostError
from server.batches.slots import SlotShare
from server.http.auth import caller
from server.http.encoding import dumps
from server.http.errors import (
    BATCH_NOT_FOUND,
    FILE_IN_USE,
    FILE_NOT_FOUND,
    INVALID_VALUE,
    STORAGE_FULL,
    ApiError,
    file_not_found,
    invalid_value,
)
from server.http.paging import Page, first_page, no_such_item
from server.media import uploads
from server.models.registry import ModelRegistry
from server.schemas.batches import BatchBody, BatchRequest, BatchStatus, FileBody, RequestCounts, UploadFields
from server.store.batches import LEASE_SECONDS, BatchStore, StoredBatch
from server.store.database import MEMORY, StoreError, is_url
from server.store.files import MAX_MEMORY_BYTES, FileStore, StorageFullError, StoredFile

# Between renewals of leases, and between looks for batches of a server that has ended.
POLL_SECONDS = LEASE_SECONDS / 3
WINDOW_SECONDS = 86400
# Batches of an owner that are not final.
MAX_OPEN_BATCHES = 100
RETRY_SECONDS = 60.0
PURPOSE = "batch"
PURPOSES = (PURPOSE, *uploads.PURPOSES)
# Of an owner, with the results of batches. A list has no more.
MAX_FILES = 10_000
MAX_NAME = 255
# The status of batches that read their input.
READING: tuple[BatchStatus, ...] = ("validating", "in_progress")

logger = logging.getLogger("cellar.batches")


class BatchService:
    """Files and batches of all owners. Batches run from `start` to `close`, also batches of an earlier process.

    location     of the database; None: files and batches are refused
    files        in the same database; the service closes them
    first_owner  gets the files and batches without an owner; "": they stay as they are
    """

    def __init__(
        self, models: ModelRegistry, location: str | None, files: FileStore | None = None, first_owner: str = ""
    ) -> None:
        self._models, self._location = models, location
        place = location or MEMORY
        self._files = files or FileStore(place, MAX_MEMORY_BYTES, first_owner=first_owner)
        self._batches = BatchStore(uuid.uuid4().hex, place, first_owner=first_owner)
        self._runs: dict[str, BatchRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._client: httpx.AsyncClient | None = None
        self._slots: SlotShare | None = None
        # The last warning about a batch, or about the store under "".
        self._warnings: dict[str, str] = {}
        # Bytes of other files when the results of a batch had no space.
        self._blocking_bytes: dict[str, int] = {}

    def start(self, app: ASGIApp) -> None:
        """Begin to run batches, as requests to `app`."""
        if self._location is not None:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            self._client = httpx.AsyncClient(transport=transport, base_url="http://localhost")
            self._loop = asyncio.create_task(self._run())
            self._loop.add_done_callback(_log_failure)

    async def close(self) -> None:
        """End all runs; the next server continues them."""
        for task in [*([self._loop] if self._loop else []), *self._tasks.values()]:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._client is not None:
            await self._client.aclose()
        self._batches.close()
        self._files.close()

    async def add_file(
        self, content: AsyncIterator[bytes], owner: str, name: str, fields: Callable[[], UploadFields]
    ) -> FileBody:
        """Store an uploaded file; `fields`, of its form, is called after the content."""
        self._check_stored()
        await self._check_file_count(owner)
        now = int(time.time())
        file = StoredFile(f"file-{uuid.uuid4().hex}", owner, PURPOSE, name[:MAX_NAME], now)

        def final() -> tuple[str, int | None]:
            form = fields()
            return form.purpose, None if form.seconds is None else now + form.seconds

        try:
            return _file_body(await self._files.create(file, content, final))
        except StorageFullError:
            message = f"The files of this server would exceed {self._files.max_bytes} bytes; delete some first."
            raise ApiError(STORAGE_FULL, message, param="file") from None

    async def file(self, id: str, owner: str) -> FileBody:
        """A file; ApiError if there is none."""
        return _file_body(await self._stored_file(id, owner))

    async def content(self, id: str, owner: str) -> tuple[int, AsyncIterator[bytes]]:
        """The size and the chunks of a file; ApiError if there is none."""
        file = await self._stored_file(id, owner)
        return file.bytes, self._files.chunks(file.id)

    async def list_files(
        self, owner: str, purpose: str | None, limit: int, after: str | None, *, ascending: bool
    ) -> Page[FileBody]:
        """A page of the files of an owner, by time."""
        self._check_stored()
        files = await self._files.page(owner, limit + 1, after, purpose=purpose, ascending=ascending)
        if files is None:
            raise no_such_item()
        return first_page([_file_body(file) for file in files], [file.id for file in files], limit)

    async def delete_file(self, id: str, owner: str) -> None:
        """Delete a file; ApiError if there is none, or if a batch still reads it."""
        self._check_stored()
        for stored in await self._batches.open(owner):
            body: BatchBody = json.loads(stored.body)
            if body["input_file_id"] == id and body["status"] in READING:
                raise ApiError(FILE_IN_USE, f"The batch '{stored.id}' still reads this file; cancel it first.")
        if not await self._files.delete(id, owner):
            raise file_not_found(id)
        # A batch may wait for the space.
        self._wake.set()

    async def create(self, request: BatchRequest, owner: str) -> BatchBody:
        """Start a batch."""
        file = await self._stored_file(request.input_file_id, owner, "input_file_id")
        if file.purpose != PURPOSE:
            raise invalid_value("input_file_id", f"the purpose of the file is '{file.purpose}', not '{PURPOSE}'")
        open_batches = await self._batches.count_open(owner)
        if open_batches >= MAX_OPEN_BATCHES:
            raise Overloaded(open_batches, RETRY_SECONDS)
        # Its results are files, too.
        await self._check_file_count(owner)
        body = _new_body(request, int(time.time()))
        if (allowed := caller().models) is not None:
            body["allowed_models"] = sorted(allowed)
        await self._batches.create(body["id"], owner, dumps(body))
        self._wake.set()
        return body

    async def batch(self, id: str, owner: str) -> BatchBody:
        """The current state of a batch; ApiError if there is none."""
        self._check_stored()
        stored = await self._batches.get(id, owner)
        if stored is None:
            raise _no_batch(id)
        return await self._body(stored)

    async def list_batches(self, owner: str, limit: int, after: str | None) -> Page[BatchBody]:
        """A page of the batches of an owner, latest first."""
        self._check_stored()
        batches = await self._batches.page(owner, limit + 1, after)
        if batches is None:
            raise no_such_item()
        body = first_page(batches, [stored.id for stored in batches], limit)
        return {**body, "data": [await self._body(stored) for stored in body["data"]]}

    async def cancel(self, id: str, owner: str) -> BatchBody:
        """End a batch; requests that run are cancelled, results are kept."""
        await self.batch(id, owner)
        stored = await self._batches.cancel(id, owner)
        if stored is None:
            body = await self.batch(id, owner)
            raise ApiError(INVALID_VALUE, f"Cannot cancel a batch with status '{body['status']}'.")
        if id in self._runs:
            self._runs[id].cancel()
        self._wake.set()
        return await self._body(stored)

    async def _body(self, stored: StoredBatch) -> BatchBody:
        body: BatchBody = json.loads(stored.body)
        if not stored.final:
            completed, failed = await self._batches.count(stored.id)
            body["request_counts"] |= {"completed": completed, "failed": failed}
            if stored.cancelling is not None:
                body["status"], body["cancelling_at"] = "cancelling", stored.cancelling
        return body

    async def _stored_file(self, id: str, owner: str, param: str | None = None) -> StoredFile:
        self._check_stored()
        file = await self._files.get(id, owner)
        if file is None:
            raise file_not_found(id, param)
        return file

    async def _check_file_count(self, owner: str) -> None:
        if await self._files.count(owner) >= MAX_FILES:
            raise ApiError(STORAGE_FULL, f"There are {MAX_FILES} files of this key or organisation; delete some first.")

    def _check_stored(self) -> None:
        if self._location is None:
            raise ApiError(FILE_NOT_FOUND, "This server stores no files; see --store.")

    async def _run(self) -> None:
        """Claim batches and renew their leases, until cancelled."""
        try:
            self._slots = SlotShare(max(await self._models.batch_slots() // 2, 1))
        except EngineError:
            return
        while True:
            try:
                # A default file is created by its first batch.
                if self._runs or is_url(self._location or "") or self._wake.is_set() or self._exists():
                    self._wake.clear()
                    await self._renew()
                    for stored in await self._batches.claim():
                        await self._begin(stored)
                    if self._warnings.pop("", None):
                        logger.info("batches: the store works again")
            except StoreError as error:
                self._warn("", f"batches wait for the store: {error}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), POLL_SECONDS)

    def _exists(self) -> bool:
        return self._location == MEMORY or (self._location is not None and Path(self._location).exists())

    async def _renew(self) -> None:
        for id, run in list(self._runs.items()):
            stored = await self._batches.renew(id)
            if id not in self._runs:
                # It ended meanwhile.
                continue
            if stored is None:
                self._tasks[id].cancel()
            elif stored.cancelling is not None:
                run.cancel()

    async def _begin(self, stored: StoredBatch) -> None:
        assert self._client is not None
        assert self._slots is not None
        blocking = self._blocking_bytes.get(stored.id)
        if blocking is not None and await self._files.used_bytes() >= blocking:
            # There is no more space for its results than before.
            await self._batches.release(stored.id)
            return
        limit = self._models.settings.limits.body_bytes
        run = BatchRun(stored, self._batches, self._files, self._client, self._slots, limit)
        self._runs[stored.id] = run
        self._tasks[stored.id] = task = asyncio.create_task(self._finish(run))
        task.add_done_callback(_log_failure)

    async def _finish(self, run: BatchRun) -> None:
        """Run a batch; what does not end well is left to a later run."""
        id = run.stored.id
        try:
            await run.run()
            self._forget(id)
            logger.info("batch %s: %s, %s", id, run.body["status"], run.body["request_counts"])
        except* LeaseLostError:
            self._forget(id)
            logger.info("batch %s: another server has it", id)
        except* StoreError as errors:
            self._warn(id, f"batch {id} waits for the store: {errors.exceptions[0]}")
        except* StorageFullError:
            self._warn(id, f"batch {id} waits: its results would exceed {self._files.max_bytes} bytes of files")
            self._blocking_bytes[id] = run.blocking_bytes
        finally:
            del self._runs[id], self._tasks[id]
            with contextlib.suppress(StoreError):
                await asyncio.shield(self._batches.release(id))

    def _warn(self, subject: str, message: str) -> None:
        """Log a warning, unless it is the last one of its subject."""
        if self._warnings.get(subject) != message:
            self._warnings[subject] = message
            logger.warning("%s", message)

    def _forget(self, id: str) -> None:
        self._warnings.pop(id, None)
        self._blocking_bytes.pop(id, None)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("batches ended with an unexpected exception; they are continued later", exc_info=error)


def _new_body(request: BatchRequest, now: int) -> BatchBody:
    body = BatchBody(
        id=f"batch_{uuid.uuid4().hex}",
        object="batch",
        endpoint=request.endpoint,
        errors=None,
        input_file_id=request.input_file_id,
        completion_window=request.completion_window,
        status="validating",
        output_file_id=None,
        error_file_id=None,
        created_at=now,
        in_progress_at=None,
        expires_at=now + WINDOW_SECONDS,
        finalizing_at=None,
        completed_at=None,
        failed_at=None,
        expired_at=None,
        cancelling_at=None,
        cancelled_at=None,
        request_counts=RequestCounts(total=0, completed=0, failed=0),
        metadata=request.metadata,
    )
    if request.output_expires_after is not None:
        body["output_expires_after"] = {"anchor": "created_at", "seconds": request.output_expires_after.seconds}
    return body


def _file_body(file: StoredFile) -> FileBody:
    return FileBody(
        id=file.id,
        object="file",
        bytes=file.bytes,
        created_at=file.created,
        expires_at=file.expires,
        filename=file.name,
        purpose=file.purpose,
        status="processed",
    )


def _no_batch(id: str) -> ApiError:
    return ApiError(BATCH_NOT_FOUND, f"No batch found with id '{id[:128]}'.")
