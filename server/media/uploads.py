"""The bytes of a request's images and sounds: inline, from the files of its owner, or fetched; within limits."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import anyio.to_thread

from engine.types.content import ContentKind, ImageDetail, Upload
from engine.types.status import ModelInfo
from server.http.auth import caller
from server.http.errors import (
    FAILED_TO_DOWNLOAD_IMAGE,
    IMAGE_TOO_LARGE,
    INVALID_IMAGE_FORMAT,
    INVALID_IMAGE_URL,
    INVALID_VALUE,
    STORAGE_FULL,
    UNSUPPORTED_VALUE,
    ApiError,
    file_not_found,
    invalid_value,
)
from server.media.addresses import FetchRefusedError, UrlRefusedError
from server.media.fetch import MediaFetcher
from server.media.formats import AUDIO_FORMATS, IMAGE_FORMATS, media_type_of, plain_media_type
from server.schemas.media import MAX_UPLOAD_BYTES, Detail, FileId, InlineMedia, MediaPart
from server.store.files import CHUNK_BYTES, FileStore, StorageFullError, StoredFile

# Images and sounds of a request, and their bytes, wherever they come from.
MAX_UPLOADS = 16
MAX_REQUEST_BYTES = 64 * 2**20
PURPOSES = ("vision", "user_data")
# Browsers declare it for files of a type that they do not know.
_UNKNOWN_TYPE = "application/octet-stream"
# Files of inline images that stored responses refer to live as long as these do.
KEPT_SECONDS = 30 * 86400

_DETAILS: dict[Detail, ImageDetail] = {"auto": "auto", "low": "low", "high": "high", "original": "high"}


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """A part with the path of its source in the request."""

    field: str
    part: MediaPart


@dataclass(frozen=True, slots=True)
class MediaReader:
    """Reads images and sounds of requests. files: None: the server stores none."""

    files: FileStore | None = None
    fetcher: MediaFetcher = field(default_factory=MediaFetcher)

    async def read(self, parts: Sequence[PlacedPart], model: str, info: ModelInfo) -> tuple[Upload, ...]:
        """The uploads of the parts, in their order; ApiError for the first part that cannot be read."""
        for number, placed in enumerate(parts, 1):
            _check_modality(placed, model, info.input_modalities)
            if number > MAX_UPLOADS:
                reason = f"a request has at most {MAX_UPLOADS} images and sounds, and this is number {number}"
                raise invalid_value(placed.field, reason)
        uploads: list[Upload] = []
        free_bytes = MAX_REQUEST_BYTES
        for placed in parts:
            data = await self._data(placed, free_bytes)
            free_bytes -= len(data)
            kind = _checked_kind(placed, data)
            if kind not in info.input_modalities:
                raise _unread_kind(placed.field, kind, model, info.input_modalities)
            uploads.append(Upload(kind, data, placed.field, _DETAILS[placed.part.detail]))
        return tuple(uploads)

    async def keep(self, media: InlineMedia) -> str:
        """The id of a file of the caller with the bytes; the same bytes are one file."""
        assert self.files is not None
        owner, now = caller().owner, int(time.time())
        id = await anyio.to_thread.run_sync(_file_id, owner, media.data)
        known = await self.files.get(id, owner)
        if known is None or (known.expires or 0) < now + KEPT_SECONDS // 2:
            file = StoredFile(id, owner, PURPOSES[1], "inline", now, now + KEPT_SECONDS)
            try:
                await self.files.create(file, _chunks(media.data))
            except StorageFullError:
                message = "The files of this server leave no space for the images of a stored response."
                raise ApiError(STORAGE_FULL, message, param="input") from None
        return id

    async def _data(self, placed: PlacedPart, free_bytes: int) -> bytes:
        match placed.part.source:
            case InlineMedia(data=data):
                _check_size(placed, len(data), free_bytes)
                return data
            case FileId(id=id):
                return await self._file(placed, id, free_bytes)
            case url:
                return await self._fetched(placed, url, free_bytes)

    async def _file(self, placed: PlacedPart, id: str, free_bytes: int) -> bytes:
        file = None if self.files is None else await self.files.get(id, caller().owner)
        if self.files is None or file is None:
            raise file_not_found(id, placed.field)
        if file.purpose not in PURPOSES:
            raise invalid_value(
                placed.field, f"the purpose of the file is '{file.purpose}', not 'vision' or 'user_data'"
            )
        _check_size(placed, file.bytes, free_bytes)
        return b"".join([chunk async for chunk in self.files.chunks(id)])

    async def _fetched(self, placed: PlacedPart, url: str, free_bytes: int) -> bytes:
        try:
            data = await self.fetcher.fetch(url)
        except FetchRefusedError as error:
            kind = INVALID_IMAGE_URL if isinstance(error, UrlRefusedError) else FAILED_TO_DOWNLOAD_IMAGE
            raise invalid_value(placed.field, str(error), kind) from error
        _check_size(placed, len(data), free_bytes)
        return data


def _check_modality(placed: PlacedPart, model: str, modalities: Sequence[str]) -> None:
    kind = placed.part.kind
    if kind is None and len(modalities) == 1:
        raise _unread_kind(placed.field, "image", model, modalities)
    if kind is not None and kind not in modalities:
        raise _unread_kind(placed.field, kind, model, modalities)


def _unread_kind(field: str, kind: ContentKind, model: str, modalities: Sequence[str]) -> ApiError:
    inputs = {"text": "text", "image": "images", "audio": "audio"}
    read = " and ".join(inputs[name] for name in modalities)
    return invalid_value(field, f"{model} reads {read} only, no {inputs[kind]}", UNSUPPORTED_VALUE)


def _check_size(placed: PlacedPart, size: int, free_bytes: int) -> None:
    kind = INVALID_VALUE if placed.part.kind == "audio" else IMAGE_TOO_LARGE
    if size > MAX_UPLOAD_BYTES:
        raise invalid_value(placed.field, f"it has {size} bytes, and at most {MAX_UPLOAD_BYTES} are read", kind)
    if size > free_bytes:
        reason = f"with it the images and sounds of the request have more than {MAX_REQUEST_BYTES} bytes"
        raise invalid_value(placed.field, reason, kind)


def _checked_kind(placed: PlacedPart, data: bytes) -> ContentKind:
    """The kind of the bytes; ApiError if it is another one than the part's, or than declared."""
    media_type, part = media_type_of(data), placed.part
    expected = {"image": IMAGE_FORMATS, "audio": AUDIO_FORMATS, None: f"{IMAGE_FORMATS}, and no {AUDIO_FORMATS}"}
    error = INVALID_VALUE if part.kind == "audio" else INVALID_IMAGE_FORMAT
    if media_type is None or (part.kind is not None and not media_type.startswith(part.kind)):
        raise invalid_value(placed.field, f"it is no {expected[part.kind]}", error)
    declared = part.source.media_type if isinstance(part.source, InlineMedia) else ""
    if declared not in ("", _UNKNOWN_TYPE) and plain_media_type(declared) != media_type:
        raise invalid_value(placed.field, f"its bytes are {media_type}, and another type is declared", error)
    return "image" if media_type.startswith("image") else "audio"


def _file_id(owner: str, data: bytes) -> str:
    digest = hashlib.sha256(owner.encode() + b"/")
    digest.update(data)
    return f"file-{digest.hexdigest()[:32]}"


async def _chunks(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]
