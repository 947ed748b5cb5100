"""Images are fetched from allowed hosts with public addresses only, within limits."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from server.media.addresses import FetchRefusedError, check_address, check_url
from server.media.fetch import MAX_REDIRECTS, MediaFetcher

HOSTS = frozenset(f"{name}.example.com" for name in ("images", "rebind", "mixed", "internal", "six", "empty")) | {
    ".cdn.example.com"
}
PUBLIC = "93.184.216.34"
ADDRESSES = {
    "images.example.com": [PUBLIC],
    "a.cdn.example.com": [PUBLIC],
    "internal.example.com": ["10.0.0.7"],
    "mixed.example.com": [PUBLIC, "169.254.169.254"],
    "six.example.com": ["::ffff:127.0.0.1"],
}
REFUSED_URLS = (
    "http://images.example.com/a.png",
    "ftp://images.example.com/a.png",
    "file:///etc/passwd",
    "gopher://images.example.com/",
    "HTTPS://images.example.com\\@127.0.0.1/",
    "https://images.example.com\\@evil.test/a",
    "https://images.example.com@evil.test/a",
    "https://evil.test#@images.example.com/",
    "https://evil.test?images.example.com",
    "https://images.example.com.evil.test/",
    "https://xcdn.example.com/",
    "https://cdn.example.com.evil.test/",
    "https://127.0.0.1/",
    "https://127.1/",
    "https://2130706433/",
    "https://0x7f000001/",
    "https://0177.0.0.1/",
    "https://[::1]/",
    "https://[::ffff:127.0.0.1]/",
    "https://[fd00::1]/",
    "https://169.254.169.254/latest/meta-data/",
    "https://metadata.google.internal/",
    "https://localhost/",
    "https://images.example.com:22/",
    "https://images.example.com:99999/",
    "https://images.example.com%2f.evil.test/",
    "https://images.example.com%00.evil.test/",
    "https://images.example.com./",
    "https://images。example。com/",
    "https://ⓘmages.example.com/",
    "https://images.example.com/\r\nHost: evil",
    "https://images.example.com /a",
    "https:///images.example.com/a",
    "//images.example.com/a",
    "https:images.example.com/a",
    "https://internal.example.com/a",
    "https://mixed.example.com/a",
    "https://six.example.com/a",
    "https://empty.example.com/a",
    f"https://images.example.com/{'a' * 3000}",
    "javascript:alert(1)",
    "data:text/html,x",
    "https://user:pw@images.example.com/a",
    "https://[images.example.com/a",
)
REFUSED_ADDRESSES = (
    *("127.0.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "169.254.169.254", "192.0.0.192"),
    *("198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "::", "::1", "fe80::1", "fc00::1", "ff02::1"),
    *("::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::", "fe80::1%eth0", "2001:db8::1"),
)

Handler = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


async def _resolve(host: str, port: int) -> list[str]:
    return ADDRESSES.get(host, [])


@pytest.mark.parametrize("url", REFUSED_URLS)
def test_urls_of_other_hosts_and_addresses_are_refused_without_a_connection(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections: list[object] = []

    async def connect(self: object, *arguments: object, **options: object) -> None:
        connections.append(arguments)
        raise OSError("no network")

    monkeypatch.setattr("anyio.connect_tcp", connect)
    with pytest.raises(FetchRefusedError):
        asyncio.run(MediaFetcher(HOSTS, resolve=_resolve).fetch(url))
    assert connections == []


@pytest.mark.parametrize("address", REFUSED_ADDRESSES)
def test_an_address_that_is_not_public_is_refused(address: str) -> None:
    with pytest.raises(FetchRefusedError, match="not public"):
        check_address(address)


@pytest.mark.parametrize("address", [PUBLIC, "2606:4700:4700::1111", f"::ffff:{PUBLIC}"])
def test_public_addresses_are_accepted(address: str) -> None:
    assert check_address(address) == address.removeprefix("::ffff:")


def test_nothing_is_fetched_without_allowed_hosts() -> None:
    with pytest.raises(FetchRefusedError, match="--allow-media-host"):
        check_url("https://images.example.com/a.png", ())


def test_a_rule_with_a_dot_allows_names_below_the_domain_only() -> None:
    assert check_url("https://A.cdn.example.com/x?y=1#z", HOSTS).host == "a.cdn.example.com"
    assert check_url("https://A.cdn.example.com/x?y=1#z", HOSTS).path == "/x?y=1"
    with pytest.raises(FetchRefusedError):
        check_url("https://cdn.example.com/x", HOSTS)


def test_the_connection_goes_to_the_checked_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name has another address at the second look-up (DNS rebinding)."""
    lookups: Counter[str] = Counter()
    connections: list[str] = []

    async def rebinding(host: str, port: int) -> list[str]:
        lookups[host] += 1
        return [PUBLIC] if lookups[host] == 1 else ["127.0.0.1"]

    async def connect(remote_host: str, *arguments: object, **options: object) -> None:
        connections.append(remote_host)
        raise OSError("no network")

    monkeypatch.setattr("anyio.connect_tcp", connect)
    with pytest.raises(FetchRefusedError, match="could not be read"):
        asyncio.run(MediaFetcher(HOSTS, resolve=rebinding).fetch("https://rebind.example.com/a"))
    assert connections == [PUBLIC]
    assert lookups == {"rebind.example.com": 1}


async def _answer(path: str, writer: asyncio.StreamWriter) -> None:
    answers = {
        "/ok": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc",
        "/redirect": b"HTTP/1.1 302 Found\r\nLocation: http://evil.test/\r\nContent-Length: 0\r\n\r\n",
        "/loop": b"HTTP/1.1 302 Found\r\nLocation: /loop\r\nContent-Length: 0\r\n\r\n",
        "/moved": b"HTTP/1.1 302 Found\r\nLocation: /ok\r\nContent-Length: 0\r\n\r\n",
        "/large": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n",
        "/lies": b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 400_000,
        "/chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10000\r\n"
        + b"x" * 0x10000
        + b"\r\nfffffff\r\n",
        "/gzip": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\nxx",
        "/short": b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",
        "/missing": b"HTTP/1.1 404 Not Found\r\nContent-Length: 6\r\n\r\nsecret",
        "/head": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 500_000,
        "/negative": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
    }
    if path == "/slow":
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(1000):
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)
    writer.write(answers[path])
    if path == "/chunks":
        for _ in range(16):
            writer.write(b"x" * 0x10000)
            await writer.drain()
    await writer.drain()


@asynccontextmanager
async def _serving(requests: list[bytes]) -> AsyncIterator[int]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            requests.append(head)
            await _answer(head.split(b" ")[1].decode(), writer)
        except (ConnectionError, asyncio.CancelledError):
            return
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def _fetched(path: str, requests: list[bytes]) -> bytes:
    async def local(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    async with _serving(requests) as port:
        fetcher = MediaFetcher(
            frozenset({"local.test"}),
            300_000,
            0.5 if path == "/slow" else 30.0,
            frozenset({"http"}),
            frozenset({port}),
            resolve=local,
            check_address=str,
        )
        return await fetcher.fetch(f"http://local.test:{port}{path}")


@pytest.mark.parametrize("path", ["/ok", "/moved"])
def test_content_is_read(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    requests: list[bytes] = []
    assert asyncio.run(_fetched(path, requests)) == b"abc"
    head = requests[-1].decode().lower()
    assert "host: local.test:" in head
    assert "accept-encoding: identity" in head
    assert "cookie" not in head


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/redirect", "--allow-media-host|port"),
        ("/loop", "redirects more than 3"),
        ("/large", "more than 300000 bytes"),
        ("/lies", "more than 300000 bytes"),
        ("/chunks", "more than 300000 bytes"),
        ("/slow", "within 0.5 seconds"),
        ("/gzip", "compressed"),
        ("/short", "could not be read"),
        ("/missing", "status 200"),
        ("/head", "could not be read"),
        ("/negative", "could not be read"),
    ],
)
def test_other_answers_are_bounded_and_refused(path: str, reason: str) -> None:
    requests: list[bytes] = []
    with pytest.raises(FetchRefusedError, match=reason) as refused:
        asyncio.run(_fetched(path, requests))
    assert "secret" not in str(refused.value)
    assert len(requests) <= MAX_REDIRECTS + 1


def test_certificates_are_verified_for_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[object] = []
    wrap = ssl.SSLContext.wrap_bio

    def wrapped(self: ssl.SSLContext, *arguments: object, **options: object) -> object:
        names.append((options["server_hostname"], self.check_hostname, self.verify_mode))
        return wrap(self, *arguments, **options)  # type: ignore[arg-type]

    async def local(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    async def fetch() -> None:
        async with _serving([]) as port:
            fetcher = MediaFetcher(
                frozenset({"local.test"}), seconds=1.0, ports=frozenset({port}), resolve=local, check_address=str
            )
            await fetcher.fetch(f"https://local.test:{port}/ok")

    monkeypatch.setattr(ssl.SSLContext, "wrap_bio", wrapped)
    with pytest.raises(FetchRefusedError):
        asyncio.run(fetch())
    assert names == [(b"local.test", True, ssl.CERT_REQUIRED)]
