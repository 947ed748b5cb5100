"""Raw HTTP: every ambiguous request gets one error response and a closed connection."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import h11
import pytest

from server.http.protocol import StrictConnection
from tests.server.fakes import WORDS, FakeEngine, Gate, serve_in_thread, settings
from tests.server.wire import CHAT, connected, exchange, get, post, read_all, read_until, status

BODY = {"messages": [{"role": "user", "content": "hi"}]}
SMUGGLED = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serve_in_thread(FakeEngine(), settings(limits={"head_seconds": 0.5, "body_seconds": 0.5})) as port:
        yield port


def head(*lines: str, request: str = f"POST {CHAT} HTTP/1.1") -> bytes:
    return "\r\n".join([request, "Host: localhost", "Content-Type: application/json", *lines]).encode() + b"\r\n\r\n"


def assert_refused(answer: bytes, expected: int, code: str) -> None:
    """One error envelope, and no response to the bytes behind it."""
    top, _, body = answer.partition(b"\r\n\r\n")
    assert expected == status(answer)
    assert code == json.loads(body)["error"]["code"]
    assert b"connection: close" in top.lower()
    assert b"x-request-id: " in top.lower()
    assert 1 == len(re.findall(rb"HTTP/1\.1 \d", answer))


@pytest.mark.parametrize(
    "data",
    [
        head("Content-Length: 5", "Transfer-Encoding: chunked") + b"0\r\n\r\n" + SMUGGLED,
        head("Transfer-Encoding: chunked", "Content-Length: 5") + b"0\r\n\r\n" + SMUGGLED,
        head("Content-Length: 2", "Content-Length: 2") + b"{}" + SMUGGLED,
        head("Content-Length: 2", "Content-Length: 3") + b"{}" + SMUGGLED,
        head("Content-Length: 2, 2") + b"{}" + SMUGGLED,
        head("Content-Length: +14") + b"{}" + SMUGGLED,
        head("Content-Length: -1") + SMUGGLED,
        head("Content-Length: 0x2") + b"{}" + SMUGGLED,
        head("Content-Length: " + "9" * 30) + SMUGGLED,
        head("Content-Length : 2") + b"{}" + SMUGGLED,
        head("Transfer-Encoding: xchunked") + b"0\r\n\r\n" + SMUGGLED,
        head("Transfer-Encoding: chunked, identity") + b"0\r\n\r\n" + SMUGGLED,
        head("Transfer-Encoding: chunked", "Transfer-Encoding: chunked") + b"0\r\n\r\n" + SMUGGLED,
        head("X-A: b\r\n folded", "Content-Length: 0") + SMUGGLED,
        head("Content-Length:\r\n 5") + SMUGGLED,
        get("/health").replace(b"\r\n", b"\n"),
        b"GET /health HTTP/1.1\r\nHost: localhost\nX: y\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\rX: y\r\n\r\n",
        head("X-A: b\x00c", "Content-Length: 0"),
        head("X A: b", "Content-Length: 0"),
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        head("Transfer-Encoding: chunked").replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n" + SMUGGLED,
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/2.0\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50,
        b"\r\n\r\n",
    ],
    ids=lambda data: repr(data[:90]),
)
def test_an_ambiguous_head_is_a_400_and_closes(port: int, data: bytes) -> None:
    """Two parsers may read it differently, so the following bytes are not parsed."""
    assert_refused(exchange(port, data), 400, "invalid_http")


@pytest.mark.parametrize(
    "chunks", [b"2\r\n{}XX\r\n0\r\n\r\n", b"-2\r\n{}\r\n0\r\n\r\n", b"zz\r\n{}\r\n0\r\n\r\n", b"2\n{}\n0\n\n" + b"\r\n"]
)
def test_a_broken_chunk_is_a_400_and_closes(port: int, chunks: bytes) -> None:
    """The following bytes cannot be parsed."""
    assert_refused(exchange(port, head("Transfer-Encoding: chunked") + chunks + SMUGGLED), 400, "invalid_http")


@pytest.mark.parametrize(
    "data",
    [
        get("/health", *(f"X-{number}: y" for number in range(100))),
        get("/health", *(f"X-{number}: y" for number in range(3000))),
        get("/health", "X-Large: " + "y" * 16 * 1024),
        get("/" + "y" * 16 * 1024),
        get("/health", "X-Huge: " + "y" * 5_000_000),
        b"y" * 20_000,
        head("Transfer-Encoding: chunked") + b"1;" + b"x" * 1_000_000,
    ],
    ids=["101 headers", "3000 headers", "16 KiB", "long url", "5 MB", "no line end", "chunk extension"],
)
def test_a_head_above_the_limits_is_a_431(port: int, data: bytes) -> None:
    """While the client still sends, a TCP reset may lose the response."""
    answer = exchange(port, data)

    if answer:
        assert_refused(answer, 431, "headers_too_large")


def test_a_head_at_the_limits_is_served(port: int) -> None:
    """100 headers, or nearly 16 KiB."""
    for data in (
        get("/health", "Connection: close", *(f"X-{number}: y" for number in range(98))),
        get("/health", "Connection: close", "X-Large: " + "y" * 16_000),
    ):
        assert 200 == status(exchange(port, data))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", None),
        (b"GET /health HTTP/1.1\r\nHost: loc", 408),
        (head("Content-Length: 50") + b'{"a":', 408),
        (head("Transfer-Encoding: chunked") + b"5\r\n{", 408),
        (head("Transfer-Encoding: chunked") + b"ffffffffffffffffff\r\n{", 408),
        (head("Content-Length: 50", "Expect: 100-continue"), 408),
    ],
    ids=["nothing", "half a head", "half a body", "half a chunk", "endless chunk", "silent after 100"],
)
def test_an_incomplete_request_ends_at_its_deadline(port: int, data: bytes, expected: int | None) -> None:
    """A connection without a byte is closed; an incomplete request gets a 408."""
    answer = exchange(port, data).removeprefix(b"HTTP/1.1 100 \r\n\r\n").removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")

    if expected is None:
        assert b"" == answer
    else:
        assert_refused(answer, expected, "request_timeout")


def test_single_bytes_do_not_reset_the_deadline(port: int) -> None:
    """The deadline is for the whole head."""
    with connected(port) as client:
        client.settimeout(0.05)
        answer = b""
        for byte in get("/health", "X: " + "y" * 200):
            try:
                client.sendall(bytes([byte]))
                answer += client.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                break
            if answer:
                break

    assert 408 == status(answer)


def test_two_requests_on_one_connection(port: int) -> None:
    """Pipelined or sequential; the deadline of the first has been stopped."""
    with connected(port) as client:
        client.sendall(get("/health") + post(CHAT, BODY) + get("/ready", "Connection: close"))
        answers = read_all(client)

    assert 3 == answers.count(b"HTTP/1.1 200 ")


def test_a_large_announced_body_is_refused_at_once(port: int) -> None:
    """413 before the first byte of the body, and the connection closes."""
    assert_refused(exchange(port, head("Content-Length: 50000000")), 413, "body_too_large")


def test_a_client_that_sends_on_receives_the_error(port: int) -> None:
    """A connection that is closed with unread bytes would be reset, and the error lost."""
    with connected(port) as client:
        client.sendall(head("Content-Length: 50000000"))
        read_until(client, b"body_too_large")
        for _ in range(20):
            client.sendall(bytes(100_000))
        assert client.recv(1000) == b""
        client.shutdown(socket.SHUT_WR)

    with connected(port) as client:
        client.sendall(head("Content-Length: 50000000") + bytes(2_000_000))
        time.sleep(0.3)
        assert_refused(read_all(client), 413, "body_too_large")


def test_a_large_chunked_body_is_refused_while_it_comes(port: int) -> None:
    """413 at the limit, without Content-Length."""
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"

    answer = exchange(port, head("Transfer-Encoding: chunked") + chunk * 65)

    assert_refused(answer, 413, "body_too_large")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], 404),
        (["Content-Length: 0"], 404),
        (["Content-Type: text/plain"], 415),
        (["Content-Length: 2"], 415),
        (["Transfer-Encoding: chunked"], 415),
    ],
)
def test_no_body_needs_no_content_type(port: int, lines: list[str], expected: int) -> None:
    """openai-node cancels a response without body and type; an announced body must be JSON."""
    request = "\r\n".join(["POST /v1/responses/resp_1/cancel HTTP/1.1", "Host: localhost", "Connection: close", *lines])

    assert expected == status(exchange(port, request.encode() + b"\r\n\r\n"))


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("http://localhost/health", 200),
        ("HTTP://localhost/v1/models?x=1", 200),
        ("http://localhost/nope", 404),
        ("http://localhost/v1/chat/completions", 405),
        # Its host differs from the Host header.
        ("http://evil.example/health", 404),
        ("http://localhost@evil.example/health", 404),
        ("ftp://localhost/health", 404),
        ("http:///health", 404),
        ("localhost:80", 404),
        ("*", 404),
    ],
)
def test_a_target_may_be_the_whole_url(port: int, target: str, expected: int) -> None:
    """As clients of a proxy send it (RFC 9112), with the same host as the Host header."""
    lines = [f"GET {target} HTTP/1.1", "Host: localhost", "Connection: close"]

    assert expected == status(exchange(port, "\r\n".join(lines).encode() + b"\r\n\r\n"))


def test_a_half_close_is_a_disconnect() -> None:
    gate = Gate()
    engine = FakeEngine(lambda request: [gate])
    with serve_in_thread(engine) as port, connected(port) as client:
        client.sendall(post(CHAT, {**BODY, "stream": True}))
        read_until(client, b"\r\n\r\n")
        client.shutdown(socket.SHUT_WR)

        assert engine.left.wait(20)


def test_idle_connections_do_not_block_others(port: int) -> None:
    """Fifty idle sockets do not block /health, unlike with uvicorn's own limit."""
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
    try:
        assert 200 == status(exchange(port, get("/health", "Connection: close")))
    finally:
        for client in idle:
            client.close()


def test_a_probe_may_send_head(port: int) -> None:
    answer = exchange(port, get("/ready", "Connection: close").replace(b"GET", b"HEAD"))

    assert 200 == status(answer)
    assert answer.endswith(b"\r\n\r\n")


def test_an_upgrade_to_another_protocol_is_ignored(port: int) -> None:
    """The request is answered as a plain GET."""
    upgrade = get("/health", "Connection: upgrade, close", "Upgrade: websocket", "Sec-WebSocket-Key: x")

    assert 200 == status(exchange(port, upgrade))


def test_connections_above_the_limit_are_closed() -> None:
    """If all connections have a running request, one more is for probes, and the next ones are closed."""
    gates = [Gate(), Gate()]
    left = iter(gates)
    with (
        serve_in_thread(FakeEngine(lambda request: [next(left)]), settings(limits={"connections": 2})) as port,
        connected(port) as first,
        connected(port) as second,
    ):
        for client in (first, second):
            client.sendall(post(CHAT, {**BODY, "stream": True}, "Connection: close"))
            read_until(client, b"\r\n\r\n")

        with connected(port) as probe:
            for path in ("/health", "/ready"):
                probe.sendall(get(path))
                assert 200 == status(read_until(probe, b"}"))
            probe.sendall(post(CHAT, BODY)[:-1])
            # A connection within a request is not idle: it is not closed for another one.
            assert b"" == exchange(port, get("/health"))
            probe.sendall(post(CHAT, BODY)[-1:])
            refused = read_all(probe)
        assert_refused(refused, 503, "too_many_connections")
        # Closed until the server has noticed the end of the previous connection.
        deadline, upgraded = time.monotonic() + 20, b""
        while not upgraded and time.monotonic() < deadline:
            upgraded = exchange(port, get("/v1/responses", "Upgrade: websocket", "Connection: upgrade"))
        assert_refused(upgraded, 503, "too_many_connections")
        for gate in gates:
            gate.open()
        assert b"data: " in read_all(first)


def test_the_longest_idle_connection_is_evicted() -> None:
    """A probe is answered, and connections with a running request stay open."""
    gate = Gate()
    with (
        serve_in_thread(FakeEngine(lambda request: [gate]), settings(limits={"connections": 3})) as port,
        connected(port) as busy,
        connected(port) as first,
        connected(port) as second,
    ):
        busy.sendall(post(CHAT, {**BODY, "stream": True}, "Connection: close"))
        read_until(busy, b"\r\n\r\n")
        for client in (second, first):
            client.sendall(get("/health"))
            assert 200 == status(read_until(client, b"}"))

        assert 200 == status(exchange(port, get("/health", "Connection: close")))
        assert b"" == read_all(second)
        first.sendall(get("/health", "Connection: close"))
        assert 200 == status(read_all(first))
        gate.open()
        assert b"data: " in read_all(busy)


def test_unfinished_bodies_of_one_client_make_room() -> None:
    """The longest one is closed for another connection, down to a quarter of all connections; the others go on."""
    with (
        serve_in_thread(FakeEngine(), settings(limits={"connections": 4})) as port,
        ExitStack() as stack,
    ):
        slow = [stack.enter_context(connected(port)) for _ in range(4)]
        for client in slow:
            client.sendall(post(CHAT, BODY, "Connection: close")[:-1])
            time.sleep(0.05)

        answers = [exchange(port, post(CHAT, BODY, "Connection: close")) for _ in range(2)]

        assert [status(answer) for answer in answers] == [200, 200]
        assert read_all(slow[0]) == b""
        slow[-1].sendall(post(CHAT, BODY)[-1:])
        assert status(read_all(slow[-1])) == 200


def test_the_server_is_still_there(port: int) -> None:
    """After all requests above."""
    answer = exchange(port, post(CHAT, BODY, "Connection: close"))

    assert "".join(WORDS) == json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("version", "headers"),
    [(b"1.1", []), (b"1.0", []), (b"1.1", [("Content-Length", "3")])],
    ids=["chunked", "HTTP/1.0", "known length"],
)
def test_a_body_is_written_as_h11_writes_it(version: bytes, headers: list[tuple[str, str]]) -> None:
    """The skipped state machine leads to the same bytes and the same state."""
    written = []
    for connection in (StrictConnection(settings().limits), h11.Connection(h11.SERVER)):
        connection.receive_data(b"GET / HTTP/%b\r\nHost: a\r\n\r\n" % version)
        assert isinstance(connection.next_event(), h11.Request)
        parts = [h11.Response(status_code=200, headers=headers), *(h11.Data(data=part) for part in (b"ab", b"", b"c"))]
        written.append([connection.send(part) for part in (*parts, h11.EndOfMessage())])
        assert connection.our_state in (h11.DONE, h11.MUST_CLOSE)
        with pytest.raises(h11.LocalProtocolError):
            connection.send(h11.Data(data=b"more"))

    assert written[1] == written[0]
