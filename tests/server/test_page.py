"""The web page: its files, their headers, and what other clients get at /."""

from __future__ import annotations

import gzip
import re
from typing import Any

import pytest

from server.app import create_app
from server.routes.page import CONTENT_SECURITY_POLICY, FOLDER, open_paths
from tests.server.fakes import Answer, FakeEngine, ask, settings

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
PATHS = sorted(open_paths())
MAX_COMPRESSED_BYTES = 150_000


@pytest.fixture(scope="module")
def app() -> Any:
    return create_app(FakeEngine(), settings(keys=("secret-key", "other-key")))  # type: ignore[arg-type]


def get(app: Any, path: str, method: str = "GET", **headers: str) -> Answer:
    """An answer for a browser."""
    return ask(
        app, method, path, headers={**BROWSER, **{name.replace("_", "-"): text for name, text in headers.items()}}
    )


def test_browsers_get_the_page(app: Any) -> None:
    """Without a key; it refers to its own files only, each of which is there."""
    page = get(app, "/")
    links = re.findall(r'(?:src|href|content)="(/[^"]*)"', page.body.decode())

    assert (200, "text/html; charset=utf-8") == (page.status, page.headers["content-type"])
    assert {*links} | {"/"} == {*PATHS}
    assert not re.search(rb"https?:|<style|\son[a-z]+=|<script(?![^>]*src)", page.body)


@pytest.mark.parametrize("accept", [None, "*/*", "application/json", "text/plain"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_other_clients_get_a_line_of_text(app: Any, method: str, accept: str | None) -> None:
    """Ollama's command line sends HEAD, curl accepts everything."""
    answer = ask(app, method, "/", headers={} if accept is None else {"accept": accept})

    assert (200, "text/plain; charset=utf-8") == (answer.status, answer.headers["content-type"])
    assert (b"Cellar is running", "Accept") == (answer.body, answer.headers["vary"])


@pytest.mark.parametrize("path", PATHS)
def test_every_file_has_the_security_headers(app: Any, path: str) -> None:
    headers = get(app, path).headers

    assert CONTENT_SECURITY_POLICY == headers["content-security-policy"]
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert ("nosniff", "no-referrer") == (headers["x-content-type-options"], headers["referrer-policy"])


@pytest.mark.parametrize("path", PATHS)
def test_files_are_cached(app: Any, path: str) -> None:
    """Files with a hash in their names for good, the page itself after a check by ETag."""
    first = get(app, path)
    again = get(app, path, if_none_match=f'"x", W/{first.headers["etag"]}')
    changed = get(app, path, if_none_match='"x"')

    assert ("no-cache" if path == "/" else "public, max-age=31536000, immutable") == first.headers["cache-control"]
    assert (304, b"", first.headers["etag"]) == (again.status, again.body, again.headers["etag"])
    assert (200, first.body) == (changed.status, changed.body)


@pytest.mark.parametrize("path", PATHS)
def test_files_are_compressed_for_clients_that_accept_it(app: Any, path: str) -> None:
    plain, packed = get(app, path), get(app, path, accept_encoding="gzip, br")

    assert "content-encoding" not in plain.headers
    assert "gzip" == packed.headers["content-encoding"]
    assert gzip.decompress(packed.body) == plain.body
    assert "Accept-Encoding" in plain.headers["vary"]


def test_the_page_is_small(app: Any) -> None:
    """All files together, as they are sent."""
    sizes = [len(get(app, path, accept_encoding="gzip").body) for path in PATHS]

    assert sum(sizes) < MAX_COMPRESSED_BYTES


@pytest.mark.parametrize("path", ["/page/app.js", "/page/..", "/page/%2e%2e", "/page/a/b", "/page/"])
def test_there_are_no_other_files(path: str) -> None:
    """Files are found by name in a fixed list, never by a path."""
    app = create_app(FakeEngine(), settings())  # type: ignore[arg-type]

    assert 404 == get(app, path).status


def test_the_page_is_there_while_the_model_loads() -> None:
    app = create_app(FakeEngine(phase="weights"), settings())  # type: ignore[arg-type]

    assert [200] * len(PATHS) == [get(app, path).status for path in PATHS]


def test_the_licences_of_all_bundled_packages_are_served(app: Any) -> None:
    (licences,) = FOLDER.glob("licences-*.txt")
    text = licences.read_text()

    for name in ("dompurify", "highlight.js", "marked", "preact", "temml"):
        assert re.search(rf"^{re.escape(name)} [0-9.]+ \(", text, re.MULTILINE)
