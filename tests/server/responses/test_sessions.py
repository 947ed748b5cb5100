"""WebSocket mode of /v1/responses: handshakes, the order of requests, the state of a connection."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from socket import create_connection
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from engine.types.events import Delta, Event, Failed, Started
from engine.types.request import Request
from server.http.errors import ApiError
from server.responses import websocket
from tests.server.fakes import WORDS, FakeEngine, FakeTokenizer, Gate, finished, serve_in_thread, settings
from tests.server.wire import exchange as raw
from tests.server.wire import get, post, status

PATIENCE_SECONDS = 20.0
PAGE = "https://chat.example.org"
TERMINAL = ("response.completed", "response.failed", "response.incomplete", "error")


@contextmanager
def connected(port: int, path: str = "/v1/responses", **headers: str) -> Iterator[ClientConnection]:
    """A WebSocket to the server; underscores in argument names stand for hyphens in header names."""
    host = headers.pop("Host", "127.0.0.1")
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    line = create_connection(("127.0.0.1", port))
    with connect(f"ws://{host}{path}", sock=line, additional_headers=sent, compression=None) as socket:
        yield socket


def create(socket: ClientConnection, **body: Any) -> None:
    """Request a response, by default without store."""
    socket.send(json.dumps({"type": "response.create", "store": False, **body}))


def turn(socket: ClientConnection, **body: Any) -> list[Any]:
    """All events of one response."""
    create(socket, **body)
    return terminal_events(socket)


def terminal_events(socket: ClientConnection) -> list[Any]:
    """The events up to a terminal event."""
    events: list[Any] = []
    while not events or events[-1]["type"] not in TERMINAL:
        events.append(json.loads(socket.recv(PATIENCE_SECONDS)))
    return events


def drain(socket: ClientConnection) -> None:
    """Read until the connection ends."""
    while True:
        socket.recv(PATIENCE_SECONDS)


def refusal(socket: ClientConnection, **body: Any) -> tuple[int, str, str | None]:
    """Status, code and parameter of the only event."""
    [event] = turn(socket, **body)
    return event["status"], event["error"]["code"], event["error"]["param"]


def conversation(engine: FakeEngine) -> list[str]:
    """The texts of the last prompt."""
    return [message["content"] for message in engine.tokenizer.rendered[-1]["messages"]]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeEngine, int]]:
    engine = FakeEngine()
    with serve_in_thread(engine) as port:
        yield engine, port


@pytest.fixture(scope="module")
def keyed() -> Iterator[int]:
    """A server with two keys, and an allowed origin."""
    with serve_in_thread(FakeEngine(), settings(keys=("one", "two"), allowed_hosts=(PAGE,))) as port:
        yield port


def test_websocket_events_equal_the_stream(served: tuple[FakeEngine, int]) -> None:
    """One message for each server-sent event, none after the terminal event."""
    _, port = served
    with connected(port) as socket:
        events = turn(socket, input="hi", stream=True)
    streamed = raw(port, post("/v1/responses", {"input": "hi", "stream": True, "store": False}, "Connection: close"))

    assert [event["type"] for event in events] == [
        line.removeprefix(b"event: ").strip().decode() for line in streamed.split(b"\n") if line.startswith(b"event: ")
    ]
    assert list(range(len(events))) == [event["sequence_number"] for event in events]
    assert "".join(WORDS) == events[-1]["response"]["output"][0]["content"][0]["text"]


def test_a_connection_continues_its_latest_response(served: tuple[FakeEngine, int]) -> None:
    """Without a store the history is on the connection only."""
    engine, port = served
    with connected(port) as socket:
        first = turn(socket, input="one")[-1]["response"]
        second = turn(socket, input="two", previous_response_id=first["id"])[-1]["response"]
        answer = conversation(engine)
        gone = refusal(socket, input="x", previous_response_id=first["id"])
        turn(socket, input="three", previous_response_id=second["id"])

    assert ["one", "".join(WORDS), "two"] == answer
    assert (400, "previous_response_not_found", "previous_response_id") == gone
    assert 5 == len(conversation(engine))
    with connected(port) as socket:
        assert gone == refusal(socket, input="x", previous_response_id=second["id"])
        assert "response.completed" == turn(socket, input="anew")[-1]["type"]


def test_stored_responses_are_found_by_every_connection(served: tuple[FakeEngine, int]) -> None:
    """With store=true a conversation continues on any connection."""
    _, port = served
    with connected(port) as socket:
        kept = turn(socket, input="one", store=True)[-1]["response"]
    with connected(port) as socket:
        later = turn(socket, input="two", previous_response_id=kept["id"])[-1]["response"]

    assert kept["id"] == later["previous_response_id"]
    assert 200 == status(raw(port, get(f"/v1/responses/{kept['id']}", "Connection: close")))


def test_a_failed_continuation_starts_a_new_conversation(served: tuple[FakeEngine, int]) -> None:
    """After a rejected or failed request its conversation cannot be continued; other conversations can."""
    _, port = served
    orphan = {"type": "function_call_output", "call_id": "call_1", "output": "x"}
    with connected(port) as socket:
        first = turn(socket, input="one")[-1]["response"]["id"]
        assert 400 == refusal(socket, input="x", previous_response_id="resp_other")[0]
        assert "response.completed" == turn(socket, input="two", previous_response_id=first)[-1]["type"]
        second = turn(socket, input="three")[-1]["response"]["id"]
        refused = refusal(socket, input=[orphan], previous_response_id=second)
        again = refusal(socket, input="x", previous_response_id=second)

    assert (400, "invalid_value", "input") == refused
    assert "previous_response_not_found" == again[1]


def test_a_failed_generation_ends_its_conversation() -> None:
    """The connection accepts the next request."""
    scripts = iter([[finished], [Failed("broken")], [finished]])

    def script(request: Request) -> Iterator[Event]:
        yield Started(len(request.prompt), 0, 7)
        for event in next(scripts):
            yield event if isinstance(event, Failed) else event(request)

    with serve_in_thread(FakeEngine(script)) as port, connected(port) as socket:
        first = turn(socket, input="one")[-1]["response"]["id"]
        broken = turn(socket, input="two", previous_response_id=first)
        assert "response.failed" == terminal_events(socket)[-1]["type"]
        assert "previous_response_not_found" == refusal(socket, input="x", previous_response_id=first)[1]
        assert "response.completed" == turn(socket, input="three")[-1]["type"]

    assert "error" == broken[-1]["type"]


def test_an_exception_ends_the_connection_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """With the id of the connection, as for any request."""

    class Broken(FakeTokenizer):
        def render_chat(self, *given: Any, **options: Any) -> Any:
            raise ZeroDivisionError("a bug")

    with serve_in_thread(FakeEngine(tokenizer=Broken())) as port, connected(port, x_request_id="mine") as socket:
        create(socket, input="hi")
        with pytest.raises(ConnectionClosed):
            socket.recv(PATIENCE_SECONDS)

    assert any("request mine failed" in line for line in caplog.messages)


def test_requests_of_a_connection_are_sequential() -> None:
    """Their events never mix; connections are independent."""
    gate = Gate()

    def script(request: Request) -> Iterator[Event | Gate]:
        yield Started(len(request.prompt), 0, 7)
        if b"slow" in bytes(request.prompt):
            yield gate
        yield Delta("x", (1,))
        yield finished(request)

    with serve_in_thread(FakeEngine(script)) as port, connected(port) as socket, connected(port) as other:
        create(socket, input="slow")
        create(socket, input="quick")
        assert gate.reached.wait(PATIENCE_SECONDS)
        assert "response.completed" == turn(other, input="quick")[-1]["type"]
        gate.open()
        first, second = terminal_events(socket), terminal_events(socket)

    assert 1 == len({event["response"]["id"] for event in first if "response" in event})
    assert ["response.completed"] * 2 == [first[-1]["type"], second[-1]["type"]]
    assert 0 == second[0]["sequence_number"]


def test_a_disconnect_cancels_the_current_request() -> None:
    """As with a stream over HTTP."""
    gate = Gate()
    engine = FakeEngine(lambda request: [Started(1, 0, 7), gate, finished(request)])
    with serve_in_thread(engine) as port:
        with connected(port) as socket:
            create(socket, input="hi")
            assert gate.reached.wait(PATIENCE_SECONDS)
            assert not engine.left.is_set()

        assert engine.left.wait(PATIENCE_SECONDS)


def test_a_blocked_websocket_send_closes_the_connection() -> None:
    """Its request is cancelled."""
    much = [Delta("x" * 2**20, (1,)) for _ in range(64)]
    engine = FakeEngine(lambda request: [Started(1, 0, 7), *much, finished(request)])
    with serve_in_thread(engine, settings(limits={"write_seconds": 0.3})) as port:
        handshake = get(
            "/v1/responses",
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        )
        # A text frame with a mask of zeros.
        asked = b'{"type": "response.create", "input": "hi", "store": false}'
        with create_connection(("127.0.0.1", port)) as line:
            line.settimeout(PATIENCE_SECONDS)
            line.sendall(handshake)
            assert b" 101 " in line.recv(2**16)
            line.sendall(b"\x81" + bytes([0x80 | len(asked)]) + bytes(4) + asked)
            assert engine.left.wait(PATIENCE_SECONDS)

            taken = 0
            with suppress(ConnectionResetError):
                while piece := line.recv(2**20):
                    taken += len(piece)
    assert taken < 2**25


@pytest.mark.parametrize(
    ("text", "code", "param"),
    [
        ("{", "invalid_json", None),
        ("[]", "invalid_value", None),
        ('{"input": "hi"}', "invalid_value", "type"),
        ('{"type": "response.cancel"}', "invalid_value", "type"),
        ('{"type": "response.create"}', "invalid_value", "input"),
        ('{"type": "response.create", "input": "hi", "nothing": 1}', "unknown_parameter", "nothing"),
        ('{"type": "response.create", "input": "hi", "stream": false}', "invalid_value", "stream"),
        ('{"type": "response.create", "input": "hi", "background": true}', "invalid_value", "background"),
        ('{"type": "response.create", "input": "hi", "model": "other"}', "model_not_found", "model"),
        ('{"type": "response.create", "input": "hi", "temperature": 9}', "invalid_value", "temperature"),
    ],
)
def test_an_invalid_message_gets_an_error_event(
    served: tuple[FakeEngine, int], text: str, code: str, param: str | None
) -> None:
    """An error event with status, code and field."""
    with connected(served[1]) as socket:
        socket.send(text)
        [event] = terminal_events(socket)

        assert ("error", code, param) == (event["type"], event["error"]["code"], event["error"]["param"])
        assert event["status"] in (400, 404)
        assert "response.completed" == turn(socket, input="hi")[-1]["type"]


def test_binary_excess_and_large_messages_close_the_socket() -> None:
    """Close codes 1008 and 1009; the current request is cancelled."""
    gate = Gate()
    engine = FakeEngine(lambda request: [Started(1, 0, 7), gate, finished(request)])
    with serve_in_thread(engine, settings(limits={"body_bytes": 1000})) as port:
        for message, count, code in ((b"{}", 1, 1008), ("x" * 1001, 1, 1009), ("", websocket.MAX_QUEUED + 1, 1008)):
            with connected(port) as socket:
                if not message:
                    create(socket, input="hi")
                    assert gate.reached.wait(PATIENCE_SECONDS)
                for _ in range(count):
                    socket.send(message)
                with pytest.raises(ConnectionClosed) as closed:
                    drain(socket)
            assert closed.value.rcvd is not None
            assert code == closed.value.rcvd.code


def test_an_idle_connection_stays_open() -> None:
    """The deadlines for heads and bodies of HTTP end with the handshake."""
    caps = {"body_seconds": 0.1, "head_seconds": 0.1}
    with serve_in_thread(FakeEngine(), settings(limits=caps)) as port, connected(port) as socket:
        with pytest.raises(TimeoutError):
            socket.recv(0.4)

        assert "response.completed" == turn(socket, input="hi")[-1]["type"]


def test_a_connection_has_a_time_limit(served: tuple[FakeEngine, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The last event tells clients to reconnect."""
    monkeypatch.setattr(websocket, "SESSION_SECONDS", 0.05)
    with connected(served[1]) as socket:
        [event] = terminal_events(socket)
        with pytest.raises(ConnectionClosed):
            socket.recv(PATIENCE_SECONDS)

    assert "websocket_connection_limit_reached" == event["error"]["code"]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Authorization": "Bearer one"}, 101),
        ({"Authorization": "Bearer one", "Origin": PAGE}, 101),
        ({"x_api_key": "two"}, 101),
        ({}, 401),
        ({"Authorization": "Bearer three"}, 401),
        ({"Authorization": "Bearer one", "Origin": "https://evil.example"}, 403),
        ({"Authorization": "Bearer one", "Origin": "null"}, 403),
        ({"Authorization": "Bearer one", "Host": "192.168.1.5"}, 101),
    ],
)
def test_a_handshake_is_checked_like_a_request(keyed: int, headers: dict[str, str], expected: int) -> None:
    """A key, with any host; no other origin, since browsers let any page connect."""
    if expected == 101:
        with connected(keyed, **headers) as socket:
            assert "response.completed" == turn(socket, input="hi")[-1]["type"]
        return
    with pytest.raises(InvalidStatus) as refused, connected(keyed, **headers):
        pass

    assert expected == refused.value.response.status_code
    assert "error" in json.loads(refused.value.response.body or b"")


def test_keys_do_not_share_stored_responses(keyed: int) -> None:
    """A response belongs to the key of its connection."""
    with connected(keyed, Authorization="Bearer one") as socket:
        kept = turn(socket, input="hi", store=True)[-1]["response"]["id"]
        assert "response.completed" == turn(socket, input="x", previous_response_id=kept)[-1]["type"]
    with connected(keyed, Authorization="Bearer two") as socket:
        assert "previous_response_not_found" == refusal(socket, input="x", previous_response_id=kept)[1]


def test_without_a_store_history_is_on_the_connection() -> None:
    """`--store none` behaves like the default store with store=false."""
    with serve_in_thread(FakeEngine(), settings(store="none")) as port, connected(port) as socket:
        first = turn(socket, input="one")[-1]["response"]["id"]
        assert "response.completed" == turn(socket, input="two", previous_response_id=first)[-1]["type"]
        assert "previous_response_not_found" == refusal(socket, input="x", previous_response_id=first)[1]


def test_a_connection_is_one_line_in_the_log(served: tuple[FakeEngine, int], caplog: pytest.LogCaptureFixture) -> None:
    """With its route and 101, after its end; also for a URL without /v1."""
    with caplog.at_level(logging.INFO, "cellar.http"):
        with connected(served[1], "/responses") as socket:
            turn(socket, input="hi")
        # The session's tasks end after the closing handshake.
        deadline = time.monotonic() + PATIENCE_SECONDS
        while "WEBSOCKET" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)

    assert [True] == ["WEBSOCKET /v1/responses 101" in line for line in caplog.messages if "WEBSOCKET" in line]


@pytest.mark.parametrize("fragments", [[b"\xff{}"], [b"{", b"\xc3", b"}"]], ids=["one frame", "fragments"])
def test_a_text_outside_utf8_closes_with_1007(
    fragments: list[bytes], served: tuple[FakeEngine, int], caplog: pytest.LogCaptureFixture
) -> None:
    """No traceback in the log: any client could fill it."""
    with connected(served[1]) as socket:
        socket.send(fragments if len(fragments) > 1 else fragments[0], text=True)
        with pytest.raises(ConnectionClosed) as closed:
            drain(socket)

    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1007
    assert [record for record in caplog.records if record.exc_info] == []


def test_websockets_of_one_client_leave_connections_for_others() -> None:
    """Above a quarter of the connections the handshake is refused; probes and open ones are served."""
    with serve_in_thread(FakeEngine(), settings(limits={"connections": 8})) as port:  # noqa: SIM117
        with connected(port) as first, connected(port):
            with pytest.raises(InvalidStatus) as refused, connected(port):
                pass
            assert refused.value.response.status_code == 429
            assert b"too_many_websockets" in refused.value.response.body
            assert status(raw(port, get("/health", "Connection: close"))) == 200
            assert turn(first, input="hi")[-1]["type"] == "response.completed"


def test_a_closed_websocket_makes_room() -> None:
    limit = websocket.WebSocketLimit(4, owners=2)
    for _ in range(2):
        with limit.hold("a", "1"), pytest.raises(ApiError), limit.hold("a", "2"):
            raise AssertionError("it is above the limit")


@pytest.mark.parametrize(("owners", "allowed"), [(0, 2), (1, 6), (2, 2)])
def test_clients_behind_a_proxy_are_told_apart_by_their_keys(owners: int, allowed: int) -> None:
    """A single owner may have most connections; without keys all clients of an address are one."""
    limit = websocket.WebSocketLimit(8, owners)
    names = [str(number) for number in range(1, owners + 1)] or [""]
    with ExitStack() as stack:
        for owner in names:
            for _ in range(allowed):
                stack.enter_context(limit.hold(owner, "proxy"))
        for owner in names:
            with pytest.raises(ApiError), limit.hold(owner, "proxy"):
                raise AssertionError("it is above the limit")


def test_an_idle_websocket_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "IDLE_SECONDS", 0.1)
    with (
        serve_in_thread(FakeEngine()) as port,
        connected(port) as socket,
        pytest.raises(ConnectionClosed) as closed,
    ):
        drain(socket)

    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == websocket.TRY_AGAIN_LATER
