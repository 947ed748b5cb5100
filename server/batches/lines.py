"""The lines of a batch's input file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import anyio.to_thread

from server.http.parsing import StrictJsonError, decode, parse
from server.schemas.batches import BatchError

# OpenAI's limit.
MAX_REQUESTS = 50_000
MAX_ERRORS = 100
MAX_CUSTOM_ID = 512
# Fields of a request that only work on an open connection.
CONNECTED_FIELDS = ("stream", "background")


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request.

    number  of its line in the file, from 1 on
    """

    number: int
    custom_id: str
    body: dict[str, object]

    @property
    def choices(self) -> int:
        """The number of sequences that it generates, at least 1."""
        count = self.body.get("n")
        return count if isinstance(count, int) and count > 0 else 1


class LineError(Exception):
    """A line is no request of the batch."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


async def batch_lines(
    chunks: AsyncIterator[bytes], endpoint: str, max_bytes: int
) -> AsyncIterator[list[BatchLine | BatchError]]:
    """The requests and the errors of a file, in lists. Lines are split and parsed in a worker thread."""
    number, remainder = 1, b""
    async for chunk in chunks:
        read = partial(_complete_lines, remainder + chunk, number, endpoint, max_bytes)
        entries, number, remainder = await anyio.to_thread.run_sync(read)
        yield entries
        if len(remainder) > max_bytes:
            break
    yield await anyio.to_thread.run_sync(_parsed, enumerate([remainder], number), endpoint, max_bytes)


async def check_file(chunks: AsyncIterator[bytes], endpoint: str, max_bytes: int) -> tuple[int, list[BatchError]]:
    """The number of requests and the first errors of a file."""
    custom_ids: set[str] = set()
    errors: list[BatchError] = []
    count = 0
    async for entries in batch_lines(chunks, endpoint, max_bytes):
        for entry in entries:
            count += 1
            if isinstance(entry, dict):
                errors.append(entry)
            elif entry.custom_id in custom_ids:
                errors.append(_error("duplicate_custom_id", "The custom_id is not unique.", "custom_id", entry.number))
            else:
                custom_ids.add(entry.custom_id)
        if count > MAX_REQUESTS:
            errors.append(_error("too_many_requests", f"The file has more than {MAX_REQUESTS} requests."))
        if len(errors) >= MAX_ERRORS or count > MAX_REQUESTS:
            break
    if not count:
        errors.append(_error("empty_file", "The file has no requests."))
    return count, errors[:MAX_ERRORS]


def _complete_lines(
    text: bytes, number: int, endpoint: str, max_bytes: int
) -> tuple[list[BatchLine | BatchError], int, bytes]:
    """The entries of the complete lines, the number of the next line, and its beginning."""
    *lines, remainder = text.split(b"\n")
    return _parsed(enumerate(lines, number), endpoint, max_bytes), number + len(lines), remainder


def _parsed(lines: Iterable[tuple[int, bytes]], endpoint: str, max_bytes: int) -> list[BatchLine | BatchError]:
    # A file with more lines is refused: its other lines need no memory.
    return list(islice(_entries(lines, endpoint, max_bytes), MAX_REQUESTS + 1))


def _entries(lines: Iterable[tuple[int, bytes]], endpoint: str, max_bytes: int) -> Iterator[BatchLine | BatchError]:
    for number, line in lines:
        if not line.strip():
            continue
        try:
            yield _read(number, line, endpoint, max_bytes)
        except LineError as error:
            yield _error(error.code, error.message, error.param, number)


def _read(number: int, line: bytes, endpoint: str, max_bytes: int) -> BatchLine:
    if len(line) > max_bytes:
        raise LineError("request_too_large", f"The line is larger than {max_bytes} bytes.")
    try:
        request = parse(decode(line))
    except StrictJsonError as error:
        raise LineError("invalid_json_line", f"This line is not parseable as valid JSON: {error}.") from error
    if not isinstance(request, dict):
        raise LineError("invalid_json_line", "This line is not a JSON object.")
    custom_id, body = request.get("custom_id"), request.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        raise LineError("invalid_custom_id", f"It must be a string of 1 to {MAX_CUSTOM_ID} characters.", "custom_id")
    if request.get("method") != "POST":
        raise LineError("invalid_method", "The method must be 'POST'.", "method")
    if request.get("url") != endpoint:
        raise LineError("mismatched_endpoint", f"The URL must be the batch's endpoint '{endpoint}'.", "url")
    if not isinstance(body, dict):
        raise LineError("invalid_body", "The body must be a JSON object.", "body")
    for name in CONNECTED_FIELDS:
        if body.get(name):
            raise LineError("invalid_body", f"'{name}' is not supported in a batch.", f"body.{name}")
    return BatchLine(number, custom_id, body)


def _error(code: str, message: str, param: str | None = None, line: int | None = None) -> BatchError:
    return BatchError(code=code, message=message, param=param, line=line)
