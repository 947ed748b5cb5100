"""Fetches images from https URLs: only from allowed hosts, connected to the address that was checked, within limits of
time, bytes and redirects.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
import urllib.parse
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import httpx

from server.media.addresses import HTTPS_PORT, FetchRefusedError, FetchTarget, check_address, check_url

MAX_REDIRECTS = 3
FETCH_SECONDS = 10.0
MAX_FETCHED_BYTES = 20 * 2**20
REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Without cookies; a compressed body could have any size.
HEADERS = {"Accept": "image/*, audio/*", "Accept-Encoding": "identity", "User-Agent": "cellar", "Connection": "close"}

# (host, port) -> all its addresses. Raises OSError.
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    """The context of all fetches: it verifies certificates for the name of the host."""
    return httpx.create_ssl_context(trust_env=False)


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host, by the resolver of this machine."""
    entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in entries]


@dataclass(frozen=True, slots=True)
class MediaFetcher:
    """Fetches from `hosts`: exact names, or ".example.com" for all names below example.com. Empty: nothing is fetched.

    schemes, ports, check_address  other ones only in tests, whose server is on this machine
    """

    hosts: frozenset[str] = frozenset()
    max_bytes: int = MAX_FETCHED_BYTES
    seconds: float = FETCH_SECONDS
    schemes: frozenset[str] = frozenset({"https"})
    ports: frozenset[int] = frozenset({HTTPS_PORT})
    resolve: Resolve = field(default=resolve)
    check_address: Callable[[str], str] = field(default=check_address)

    async def fetch(self, url: str) -> bytes:
        """The content of a URL. Raises FetchRefusedError."""
        try:
            async with asyncio.timeout(self.seconds):
                for _ in range(MAX_REDIRECTS + 1):
                    target = check_url(url, self.hosts, schemes=self.schemes, ports=self.ports)
                    address = await self._address(target)
                    location, content = await self._get(urllib.parse.urlsplit(url).scheme, target, address)
                    if location is None:
                        return content
                    url = urllib.parse.urljoin(url, location)
        except TimeoutError as error:
            raise FetchRefusedError(f"it was not read within {self.seconds:g} seconds") from error
        except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
            raise FetchRefusedError("it could not be read") from error
        raise FetchRefusedError(f"it redirects more than {MAX_REDIRECTS} times")

    async def _address(self, target: FetchTarget) -> str:
        """An address of the host. One address that is not public refuses the host."""
        addresses = [self.check_address(address) for address in await self.resolve(target.host, target.port)]
        if not addresses:
            raise FetchRefusedError("the host has no address")
        return addresses[0]

    async def _get(self, scheme: str, target: FetchTarget, address: str) -> tuple[str | None, bytes]:
        """The location of a redirect and b"", or None and the content."""
        host = f"[{address}]" if ":" in address else address
        # The URL has the checked address: a second look-up of the name could return another one.
        url = f"{scheme}://{host}:{target.port}{target.path}"
        named = target.host if target.port == HTTPS_PORT else f"{target.host}:{target.port}"
        # A connection that is cancelled during its handshake would stay open: httpx closes one that times out.
        timeout = httpx.Timeout(self.seconds, connect=self.seconds / 2)
        context = await asyncio.to_thread(_ssl_context)
        client = httpx.AsyncClient(verify=context, trust_env=False, follow_redirects=False, timeout=timeout)
        async with (
            client,
            client.stream(
                "GET", url, headers={**HEADERS, "Host": named}, extensions={"sni_hostname": target.host}
            ) as response,
        ):
            if response.status_code in REDIRECTS and "location" in response.headers:
                return response.headers["location"], b""
            self._check_head(response)
            return None, await self._read(response)

    def _check_head(self, response: httpx.Response) -> None:
        if response.status_code != httpx.codes.OK:
            raise FetchRefusedError("its host did not answer with status 200")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise FetchRefusedError("its content is compressed")
        self._check_size(int(response.headers.get("content-length", "0")))

    async def _read(self, response: httpx.Response) -> bytes:
        content = bytearray()
        async for piece in response.aiter_raw():
            content += piece
            self._check_size(len(content))
        return bytes(content)

    def _check_size(self, size: int) -> None:
        if size > self.max_bytes:
            raise FetchRefusedError(f"it has more than {self.max_bytes} bytes")
