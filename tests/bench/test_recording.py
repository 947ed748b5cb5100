"""What the benchmark's client makes of answers that a server wrote byte by byte."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing

import pytest

from bench.client import RequestOptions, Server, send
from bench.samples import Sample

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
TEXT, LAST = (b'data: {"choices":[{"text":"a","finish_reason":%b}]}\n\n' % end for end in (b"null", b'"stop"'))
END = b"0\r\n\r\n"
REFUSED = b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """A piece of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def asked(writes: Sequence[bytes], *, seconds: float = 20.0, stays: bool = False) -> tuple[Sample, bytes]:
    """What came of one request to a server that writes this, and the request; with `stays` it does not close."""
    requests: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            requests.append(await reader.readuntil(b"}}"))
            for data in writes:
                writer.write(data)
                await writer.drain()
            if stays:
                await reader.read()

    async def measured() -> Sample:
        listening = await asyncio.start_server(answer, "127.0.0.1")
        async with listening:
            port = listening.sockets[0].getsockname()[1]
            server = Server("x", f"http://127.0.0.1:{port}/v1", "m", "key")
            return (
                await send(server, RequestOptions(timeout_seconds=seconds), prompt=[1], max_tokens=2, begun=0.0)
            ).read()

    sample = asyncio.run(measured())
    return sample, requests[0]


def test_a_whole_answer_is_read_however_it_was_cut() -> None:
    """Blocks that end anywhere make the same text; every piece of text has a moment."""
    written = HEAD + chunk(TEXT) + chunk(TEXT + LAST) + END
    samples = [asked([written])[0], asked([written[at : at + 1] for at in range(len(written))])[0]]

    assert [("ok", "aaa", 3)] * 2 == [(one.outcome, one.text, len(one.arrivals)) for one in samples]


def test_requests_have_the_header_connection_close() -> None:
    """Also the key, one length, and no compression, which would merge events."""
    _, request = asked([HEAD + END])
    head, body = request.lower().split(b"\r\n\r\n")

    assert b"post /v1/completions http/1.1" == head.split(b"\r\n")[0]
    assert {b"connection: close", b"accept-encoding: identity", b"authorization: bearer key"} <= set(
        head.split(b"\r\n")
    )
    assert b"content-length: %d" % len(body) in head


@pytest.mark.parametrize(
    ("writes", "outcome", "text"),
    [
        ([HEAD + chunk(TEXT) + END], "cut", "a"),
        ([HEAD + chunk(TEXT)], "connection", "incomplete"),
        ([], "connection", "without an answer"),
        ([b"SSH-2.0-server\r\n\r\n"], "connection", "illegal status line"),
        ([HEAD + chunk(b"data: {\n\n") + END], "unreadable event", "JSONDecodeError"),
        ([HEAD + chunk(b'data: {"error":"it broke"}\n\n') + END], "error event", "it broke"),
        ([REFUSED + b"full"], "http 503", "full"),
        ([REFUSED], "connection", "expected 4"),
        ([b"HTTP/1.1 200 OK\r\n\r\n" + LAST], "ok", "a"),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + chunk(LAST) + END], "ok", "a"),
    ],
)
def test_every_failure_is_an_outcome(writes: list[bytes], outcome: str, text: str) -> None:
    """An incomplete answer is a failure, with its reason."""
    sample, _ = asked(writes)

    assert outcome == sample.outcome
    assert text in sample.text


@pytest.mark.parametrize("writes", [[], [HEAD + chunk(TEXT)]], ids=["nothing", "half"])
def test_patience_ends(writes: list[bytes]) -> None:
    """What came until then is there."""
    sample, _ = asked(writes, seconds=0.1, stays=True)

    assert ("timeout", len(writes)) == (sample.outcome, len(sample.arrivals))
    assert sample.finished >= 0.1


def test_a_server_that_is_not_there_is_an_outcome() -> None:
    """Nothing is raised, and the reason is told."""
    server = Server("x", "http://127.0.0.1:9/v1", "m")
    sample = asyncio.run(send(server, RequestOptions(timeout_seconds=20), prompt=[1], max_tokens=1, begun=0.0)).read()

    assert "connection" == sample.outcome
    assert "ConnectionRefused" in sample.text
