"""What all clients are tried on. Found by PYTHONPATH, for the environments of the clients do not know this project."""

from __future__ import annotations

import base64
import json
import struct
import urllib.request
import zlib
from dataclasses import dataclass

_SIDE = 56


@dataclass(frozen=True)
class Server:
    """The server under test, the folder of its model, and things that this model was taught."""

    url: str
    key: str
    model: str
    folder: str
    question: str = "Hello"
    weather: str = "What is the weather in Paris?"


def image_prompt_tokens(server: Server) -> int:
    """Prompt tokens of a chat with IMAGE before the question, by plain HTTP."""
    content = [
        {"type": "image_url", "image_url": {"url": data_url(IMAGE)}},
        {"type": "text", "text": server.question},
    ]
    body = {"model": server.model, "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(json.load(answer)["usage"]["prompt_tokens"])


def data_url(image: bytes) -> str:
    """A PNG as a data URL."""
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def _png() -> bytes:
    """A gradient, without a library of images."""
    rows = b"".join(b"\0" + bytes(value for x in range(_SIDE) for value in (4 * x, 4 * y, 128)) for y in range(_SIDE))
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", _SIDE, _SIDE, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


IMAGE = _png()
