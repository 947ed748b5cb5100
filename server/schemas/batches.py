"""/v1/files and /v1/batches: requests and responses."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from server.schemas.common import Label, MetadataKey, MetadataValue
from server.schemas.content import Strict

BatchEndpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
# OpenAI's limits of a file's life: an hour, 30 days.
ExpirySeconds = Annotated[int, Field(ge=3600, le=2592000)]


class Expiry(Strict):
    """When a file is deleted."""

    anchor: Literal["created_at"]
    seconds: ExpirySeconds


class BatchRequest(Strict):
    """A batch: an uploaded file with a request on each line."""

    input_file_id: Label
    endpoint: BatchEndpoint
    completion_window: Literal["24h"]
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    output_expires_after: Expiry | None = None


class UploadFields(BaseModel):
    """The fields of an upload next to its file; texts of a form, so numbers are converted."""

    purpose: str
    anchor: Literal["created_at"] = Field(default="created_at", alias="expires_after[anchor]")
    seconds: ExpirySeconds | None = Field(default=None, alias="expires_after[seconds]")


class FileBody(TypedDict):
    """A file without its content."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]


class FileDeleted(TypedDict):
    """The response to DELETE /v1/files/{file_id}."""

    id: str
    object: Literal["file"]
    deleted: bool


class BatchError(TypedDict):
    """An error of the input file, with its line from 1 on."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(TypedDict):
    """The errors of the input file."""

    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(TypedDict):
    """Requests of a batch: all, with a response, and failed."""

    total: int
    completed: int
    failed: int


class OutputExpiry(TypedDict):
    """When the output files are deleted."""

    anchor: Literal["created_at"]
    seconds: int


class BatchBody(TypedDict):
    """A batch. Times are seconds since 1970.

    allowed_models  those that the key of its creation may use; absent: all
    """

    id: str
    object: Literal["batch"]
    endpoint: BatchEndpoint
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None
    output_expires_after: NotRequired[OutputExpiry]
    allowed_models: NotRequired[list[str]]
