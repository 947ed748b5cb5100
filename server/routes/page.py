"""The web page: HTML for browsers at /, and its script, style and icon under /page/.

The files are built from server/page/src (`make page`). They are the same for everyone and hold no secrets, so they need
no API key; the page asks for the key and sends it to the API. Names contain a hash of their content.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from server.http.errors import UNKNOWN_URL, ApiError
from server.service import Service

FOLDER = Path(__file__).resolve().parents[1] / "page" / "static"
INDEX, PREFIX = "index.html", "/page/"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
# No script, style or connection but the server's own; no other page may frame it.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "base-uri 'none'; frame-ancestors 'none'; form-action 'none'"
)
SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class _StaticFile:
    """One file of the page, plain and compressed."""

    content: bytes
    compressed: bytes
    headers: Mapping[str, str]

    def response(self, request: Request) -> Response:
        """The file, or 304 for a client that has it."""
        if self.headers["ETag"] in request.headers.get("if-none-match", "").replace("W/", "").split(", "):
            return Response(status_code=304, headers=dict(self.headers))
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(self.compressed, headers={**self.headers, "Content-Encoding": "gzip"})
        return Response(self.content, headers=dict(self.headers))


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    files = _files()

    # Ollama's command line requests this path first, with HEAD.
    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        """The page for browsers; for other clients a text that confirms that a server is running."""
        if "text/html" in request.headers.get("accept", ""):
            return files["/"].response(request)
        return PlainTextResponse("Cellar is running", headers={"Vary": "Accept"})

    @app.head(PREFIX + "{name}", include_in_schema=False)
    @app.get(PREFIX + "{name}", include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        """A file of the page."""
        page_file = files.get(PREFIX + name)
        if page_file is None:
            raise ApiError(UNKNOWN_URL, "There is nothing at this URL.")
        return page_file.response(request)


def open_paths() -> frozenset[str]:
    """The paths of the page, which need no API key."""
    return frozenset(_files())


@functools.cache
def _files() -> Mapping[str, _StaticFile]:
    """The files by their paths."""
    return dict(_read_files())


def _read_files() -> Iterator[tuple[str, _StaticFile]]:
    for path in sorted(FOLDER.iterdir()):
        content, is_index = path.read_bytes(), path.name == INDEX
        headers = {
            **SECURITY_HEADERS,
            "Content-Type": TYPES[path.suffix],
            "ETag": f'"{hashlib.sha256(content).hexdigest()[:16]}"',
            "Cache-Control": "no-cache" if is_index else "public, max-age=31536000, immutable",
            "Vary": "Accept, Accept-Encoding" if is_index else "Accept-Encoding",
        }
        yield "/" if is_index else PREFIX + path.name, _StaticFile(content, gzip.compress(content, mtime=0), headers)
