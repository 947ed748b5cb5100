"""Forms with a file, parsed as they arrive: no content is kept in memory or in a temporary file."""

from __future__ import annotations

from collections.abc import AsyncIterator

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from server.http.errors import INVALID_VALUE, ApiError, invalid_value, missing_parameter

MAX_FIELDS = 16
MAX_FIELD_BYTES = 4096


class FileForm:
    """A request of type multipart/form-data with a file; ApiError for an invalid form.

    field     the name of the file's part; parts of other files are skipped
    filename  of the file, once its part has begun
    fields    texts of the other parts so far
    lists     texts of parts whose name ends in [], which may occur several times
    """

    def __init__(self, request: Request, field: str) -> None:
        self.filename: str | None = None
        self.fields: dict[str, str] = {}
        self.lists: dict[str, list[str]] = {}
        self._field, self._body = field, request.stream()
        _, options = parse_options_header(request.headers.get("content-type"))
        if b"boundary" not in options:
            raise _unreadable()
        self._parser = _parser(options[b"boundary"], self)
        self._content, self._skipped = bytearray(), bytearray()
        self._part, self._part_name = self._skipped, ""
        self._header, self._value, self._disposition = b"", b"", b""
        self._complete = False

    async def find_file(self) -> None:
        """Read up to the content of the file."""
        while self.filename is None:
            if not await self._read():
                raise missing_parameter(self._field)

    async def chunks(self, size: int) -> AsyncIterator[bytes]:
        """The content of the file, in chunks of `size` bytes but the last one; the form has been read at its end."""
        more = True
        while more:
            more = await self._read()
            while len(self._content) >= size or (self._content and not more):
                yield bytes(self._content[:size])
                del self._content[:size]

    def parse(self, body: bytes) -> bytes:
        """The content of the file in a whole body, which takes the place of the request's. For worker threads."""
        for piece in (body, b""):
            if piece or not self._complete:
                self._write(piece)
        if self.filename is None:
            raise missing_parameter(self._field)
        return bytes(self._content)

    def on_part_begin(self) -> None:
        """Called by the parser, as the other methods below."""
        self._disposition, self._part_name, self._part = b"", "", self._skipped

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        """A piece of a header's name."""
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        """A piece of a header's value."""
        self._value += data[start:end]

    def on_header_end(self) -> None:
        """The end of a header."""
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def on_headers_finished(self) -> None:
        """The beginning of a part's content."""
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise _unreadable()
        name = options[b"name"].decode(errors="replace")
        if b"filename" not in options:
            if name == self._field:
                raise invalid_value(name, "its part of the form has no filename, so it is not a file")
            self._part, self._part_name = bytearray(), name
        elif name == self._field:
            if self.filename is not None:
                raise invalid_value(name, "the form has two of them")
            self.filename, self._part = options[b"filename"].decode(errors="replace"), self._content

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        """A piece of a part's content."""
        if self._part is self._skipped:
            return
        self._part += data[start:end]
        if self._part_name and len(self._part) > MAX_FIELD_BYTES:
            raise invalid_value(self._part_name[:64], f"it has more than {MAX_FIELD_BYTES} bytes")

    def on_part_end(self) -> None:
        """The end of a part."""
        if self._part_name:
            self._add_field(self._part_name, _text(bytes(self._part)))
            if len(self.fields) + sum(map(len, self.lists.values())) > MAX_FIELDS:
                raise _unreadable()

    def _add_field(self, name: str, text: str) -> None:
        if name.endswith("[]"):
            self.lists.setdefault(name, []).append(text)
        else:
            self.fields[name] = text

    def on_end(self) -> None:
        """The end of the form."""
        self._complete = True

    async def _read(self) -> bool:
        """Parse the next piece of the body; whether there was one."""
        piece = await anext(self._body, b"")
        self._write(piece)
        return bool(piece)

    def _write(self, piece: bytes) -> None:
        """Parse a piece of the body; an empty one is its end."""
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise _unreadable() from error
        if not piece and not self._complete:
            raise _unreadable()


def _parser(boundary: bytes, form: FileForm) -> MultipartParser:
    try:
        return MultipartParser(
            boundary,
            {
                "on_part_begin": form.on_part_begin,
                "on_part_data": form.on_part_data,
                "on_part_end": form.on_part_end,
                "on_header_field": form.on_header_field,
                "on_header_value": form.on_header_value,
                "on_header_end": form.on_header_end,
                "on_headers_finished": form.on_headers_finished,
                "on_end": form.on_end,
            },
        )
    except FormParserError as error:
        raise _unreadable() from error


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise _unreadable() from error


def _unreadable() -> ApiError:
    return ApiError(INVALID_VALUE, "Invalid body: the form cannot be read.")
