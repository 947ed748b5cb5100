"""Raw HTTP over a socket: what a client that follows no library sends, and what comes back byte by byte."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

CHAT = "/v1/chat/completions"
PATIENCE_SECONDS = 20.0


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    """A connection to the server under test; a read that takes too long fails the test."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as client:
        yield client


def post(path: str, body: dict[str, Any], *headers: str) -> bytes:
    """The bytes of a POST."""
    content = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def get(path: str, *headers: str) -> bytes:
    """The bytes of a GET."""
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *headers]).encode() + b"\r\n\r\n"


def read_until(client: socket.socket, mark: bytes) -> bytes:
    """All bytes up to `mark` and what came with it."""
    data = b""
    while mark not in data:
        piece = client.recv(65536)
        assert piece, f"closed before {mark!r}: {data!r}"
        data += piece
    return data


def read_all(client: socket.socket) -> bytes:
    """All bytes until the server closes; a reset counts as the end."""
    data = b""
    with suppress(ConnectionResetError):
        while piece := client.recv(65536):
            data += piece
    return data


def exchange(port: int, data: bytes) -> bytes:
    """Send, and read until the server closes."""
    with connected(port) as client:
        with suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(data)
        return read_all(client)


def status(answer: bytes) -> int:
    """The status code of the first answer."""
    return int(answer.split(b" ", 2)[1])
