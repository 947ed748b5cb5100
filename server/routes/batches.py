"""/v1/files and /v1/batches: upload requests, compute them in the background, download the responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from server.batches.service import PURPOSES, BatchService
from server.http.auth import first_owner, owner
from server.http.encoding import JsonResponse
from server.http.errors import CLIENT_CLOSED, UNSUPPORTED_VALUE, invalid_value
from server.http.forms import FileForm
from server.http.parsing import validated
from server.models.registry import ModelRegistry
from server.routes.openapi import ERROR_RESPONSES
from server.schemas.batches import (
    BatchBody,
    BatchRequest,
    FileBody,
    FileDeleted,
    UploadFields,
)
from server.store.files import CHUNK_BYTES, FileStore

FILES, BATCHES = "/v1/files", "/v1/batches"


def add(app: FastAPI, models: ModelRegistry, files: FileStore | None) -> BatchService:
    """Add the routes; the app's owner starts and closes the returned service."""
    location = None if files is None else files.location
    batches = BatchService(models, location, files, first_owner(*models.settings.read_keys()))
    _add_file_routes(app, batches)
    _add_batch_routes(app, batches)
    return batches


def _add_file_routes(app: FastAPI, batches: BatchService) -> None:
    @app.post(FILES, responses={**ERROR_RESPONSES, 200: {"model": FileBody}}, openapi_extra={"requestBody": _form()})
    async def create_file(request: Request) -> Response:
        """Upload the requests of a batch, or an image or a sound for later requests."""
        form = FileForm(request, "file")

        def checked() -> UploadFields:
            fields = validated(UploadFields, form.fields)
            if fields.purpose not in PURPOSES:
                purposes = " or ".join(f"'{purpose}'" for purpose in PURPOSES)
                raise invalid_value("purpose", f"it must be {purposes}", UNSUPPORTED_VALUE)
            return fields

        try:
            await form.find_file()
            if "purpose" in form.fields:
                checked()
            name = form.filename or "file"
            chunks = form.chunks(CHUNK_BYTES)
            return JsonResponse(await batches.add_file(chunks, owner(request), name, checked))
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)

    @app.get(FILES, responses=ERROR_RESPONSES)
    async def list_files(
        request: Request,
        purpose: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """List files."""
        return JsonResponse(await batches.list_files(owner(request), purpose, limit, after, ascending=order == "asc"))

    @app.get(f"{FILES}/{{file_id}}", responses={**ERROR_RESPONSES, 200: {"model": FileBody}})
    async def retrieve_file(file_id: str, request: Request) -> Response:
        """Return a file without its content."""
        return JsonResponse(await batches.file(file_id, owner(request)))

    @app.get(f"{FILES}/{{file_id}}/content", responses=ERROR_RESPONSES)
    async def download_file(file_id: str, request: Request) -> Response:
        """Return the content of a file."""
        size, chunks = await batches.content(file_id, owner(request))
        return StreamingResponse(chunks, media_type="application/octet-stream", headers={"content-length": str(size)})

    @app.delete(f"{FILES}/{{file_id}}", responses={**ERROR_RESPONSES, 200: {"model": FileDeleted}})
    async def delete_file(file_id: str, request: Request) -> Response:
        """Delete a file."""
        await batches.delete_file(file_id, owner(request))
        return JsonResponse(FileDeleted(id=file_id, object="file", deleted=True))


def _add_batch_routes(app: FastAPI, batches: BatchService) -> None:
    @app.post(BATCHES, responses={**ERROR_RESPONSES, 200: {"model": BatchBody}})
    async def create_batch(body: BatchRequest, request: Request) -> Response:
        """Compute the requests of a file in the background."""
        return JsonResponse(await batches.create(body, owner(request)))

    @app.get(BATCHES, responses=ERROR_RESPONSES)
    async def list_batches(
        request: Request, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
    ) -> Response:
        """List batches, latest first."""
        return JsonResponse(await batches.list_batches(owner(request), limit, after))

    @app.get(f"{BATCHES}/{{batch_id}}", responses={**ERROR_RESPONSES, 200: {"model": BatchBody}})
    async def retrieve_batch(batch_id: str, request: Request) -> Response:
        """Return the state of a batch."""
        return JsonResponse(await batches.batch(batch_id, owner(request)))

    @app.post(f"{BATCHES}/{{batch_id}}/cancel", responses={**ERROR_RESPONSES, 200: {"model": BatchBody}})
    async def cancel_batch(batch_id: str, request: Request) -> Response:
        """End a batch; its results so far are kept."""
        return JsonResponse(await batches.cancel(batch_id, owner(request)))


def _form() -> dict[str, Any]:
    """The body of an upload in /openapi.json."""
    schema = UploadFields.model_json_schema()
    schema["properties"] |= {"file": {"type": "string", "contentMediaType": "application/octet-stream"}}
    schema["required"].append("file")
    return {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
