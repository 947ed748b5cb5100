"""What benchmarks of a loaded server have in common: a cheap client, a process that asks /health, and its resources."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import multiprocessing
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import psutil

HOST = "127.0.0.1"
EVENT, DONE, ERROR = b"data: ", b"data: [DONE]", b'"error":'
PROBE_SECONDS, PROBE_TIMEOUT_SECONDS = 0.05, 10.0
READ_BYTES = 2**16
_completion_tokens = re.compile(rb'"completion_tokens":([0-9]+)')


def request_bytes(path: str, fields: Mapping[str, Any] | None) -> bytes:
    """A POST of JSON, or a GET without fields."""
    content = b"" if fields is None else json.dumps(fields).encode()
    lines = [f"{'GET' if fields is None else 'POST'} {path} HTTP/1.1", "Host: localhost"]
    if fields is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers of an answer; the names are in lower case."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    return int(first.split(" ")[1]), headers


async def read_body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    """The body of an answer, with a length or in chunks."""
    if "chunked" not in headers.get("transfer-encoding", ""):
        return await reader.readexactly(int(headers.get("content-length", "0")))
    body = b""
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return body


@dataclass(frozen=True, slots=True)
class Loaded:
    """A running server."""

    port: int
    process: psutil.Process

    def tree(self) -> list[psutil.Process]:
        """All its processes."""
        return [self.process, *self.process.children(recursive=True)]

    def process_pss_mb(self) -> dict[int, float]:
        """The memory of each, by its id: pages that several share count once in their sum."""
        return {process.pid: process.memory_full_info().pss / 1e6 for process in self.tree()}

    def descriptors(self) -> int:
        """Their open files and connections."""
        return sum(process.num_fds() for process in self.tree())

    def processor_seconds(self) -> float:
        """The processor time of the server's process."""
        times = self.process.cpu_times()
        return times.user + times.system


@dataclass(slots=True)
class Streamed:
    """What a client received of a stream of server-sent events. times: of the reads with events, by perf_counter."""

    status: int = 0
    tokens: int = 0
    is_complete: bool = False
    has_error: bool = False
    times: list[float] = field(default_factory=list)


async def read_stream(port: int, path: str, fields: Mapping[str, Any], streamed: Streamed) -> Streamed:
    """Send a request, and fill `streamed` up to [DONE] or the end of the connection."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(request_bytes(path, fields))
        streamed.status, headers = await read_head(reader)
        if streamed.status != http.client.OK:
            await read_body(reader, headers)
            return streamed
        tail = b""
        while not streamed.is_complete and (piece := await reader.read(READ_BYTES)):
            # The end of one read and the start of the next one may share a word.
            text = tail + piece
            if EVENT in text:
                streamed.times.append(time.perf_counter())
            streamed.has_error |= ERROR in text
            if counts := _completion_tokens.findall(text):
                streamed.tokens = int(counts[-1])
            streamed.is_complete = DONE in text
            tail = text[-64:]
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()
    return streamed


async def get_json(port: int, path: str) -> Any:
    """The answer to a GET."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(request_bytes(path, None))
    _, headers = await read_head(reader)
    content = await read_body(reader, headers)
    writer.close()
    return json.loads(content)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of the values does not exceed; NaN without values."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)] if values else math.nan


class HealthProbe:
    """Milliseconds of GET /health, twenty times a second; those of failed requests are infinite."""

    def __init__(self) -> None:
        self.milliseconds: list[float] = []

    def summary(self) -> dict[str, Any]:
        """Fields of a row."""
        answered = [value for value in self.milliseconds if value < math.inf]
        return {
            "health_requests": len(self.milliseconds),
            "health_failures": len(self.milliseconds) - len(answered),
            "health_p50_ms": round(percentile(answered, 0.5), 2),
            "health_p99_ms": round(percentile(answered, 0.99), 2),
        }


@contextmanager
def health_probe(port: int) -> Iterator[HealthProbe]:
    """Ask during the block, in another process, whose times do not depend on this one's load."""
    context, probe = multiprocessing.get_context("spawn"), HealthProbe()
    ours, theirs = context.Pipe()
    process = context.Process(target=_probe, args=(port, theirs), daemon=True)
    process.start()
    ours.recv()
    try:
        yield probe
    finally:
        ours.send(None)
        probe.milliseconds = ours.recv()
        process.join()


def _probe(port: int, pipe: Connection) -> None:
    pipe.send(None)
    milliseconds: list[float] = []
    connection = http.client.HTTPConnection(HOST, port, timeout=PROBE_TIMEOUT_SECONDS)
    while not pipe.poll(PROBE_SECONDS):
        began = time.perf_counter()
        try:
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            is_ok = answer.status == http.client.OK
        except (OSError, http.client.HTTPException):
            connection.close()
            is_ok = False
        milliseconds.append(1000 * (time.perf_counter() - began) if is_ok else math.inf)
    pipe.send(milliseconds)
