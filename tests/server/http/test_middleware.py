"""Host, content type, size of the body, and a request id in every response."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import re
from typing import Any

import pytest

from engine.errors import Draining, EngineDead, Loading, Overloaded
from engine.types.request import Request
from server.app import create_app
from tests.server.fakes import Answer, FakeEngine, ask, settings

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def app() -> Any:
    using = settings(limits={"body_bytes": 1000}, allowed_hosts=("cellar.example",), host="::1")
    return create_app(FakeEngine(), using)  # type: ignore[arg-type]


def envelope(answer: Answer, status: int, code: str) -> str:
    """The message of a checked error envelope."""
    assert (status, code, None) == (answer.status, answer.json["error"]["code"], answer.json["error"]["param"])
    assert {"message", "type", "param", "code"} <= answer.json["error"].keys()
    return str(answer.json["error"]["message"])


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:9", "[::1]:8000", "[::1]", "cellar.example:80"]
)
def test_allowed_hosts_are_served(app: Any, host: str) -> None:
    """localhost, the loopback addresses, the bound host and the allowed ones, with any port."""
    assert 200 == ask(app, "GET", "/health", headers={"host": host}).status


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "evil.example:8000", "", "127.0.0.1.evil", "[::2]", "localhost@"]
    + [
        "localhost:evil.example",
        "localhost:80:80",
        "localhost:80@evil.example",
        "[::1]:x",
        "[::1]evil.example",
        "[::1",
    ],
)
@pytest.mark.parametrize("path", ["/", "/v1/models", "/nope"])
def test_other_hosts_are_rejected(app: Any, host: str, path: str) -> None:
    """A page that rebinds its name to this machine (DNS rebinding) gets 421."""
    envelope(ask(app, "GET", path, headers={"host": host}), 421, "host_not_allowed")


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_probes_may_have_any_host(app: Any, path: str) -> None:
    """Kubernetes and Prometheus send the pod's address as Host; similar paths are rejected."""
    assert 200 == ask(app, "GET", path, headers={"host": "10.1.2.3:8000"}).status
    envelope(ask(app, "GET", f"{path}/x", headers={"host": "10.1.2.3:8000"}), 421, "host_not_allowed")


def test_the_error_names_the_host_and_the_option(app: Any) -> None:
    message = ask(app, "GET", "/v1/models", headers={"host": "192.168.1.5:8000"}).json["error"]["message"]

    assert "'192.168.1.5'" in message
    assert "--allowed-host 192.168.1.5," in message


@pytest.mark.parametrize("host", ["192.168.1.5:8000", "cellar.local", "evil.example", ""])
def test_a_server_with_keys_accepts_every_host(host: str) -> None:
    """A machine has names and addresses that its server does not know; a rebound page has no key."""
    app = create_app(FakeEngine(), settings(keys=("secret",), host="0.0.0.0"))  # type: ignore[arg-type]
    headers = {"host": host, "authorization": "Bearer secret"}

    assert ask(app, "GET", "/v1/models", headers=headers).status == 200
    assert ask(app, "GET", "/v1/models", headers={"host": host}).status == 401


def test_a_star_allows_every_host() -> None:
    """For servers behind a proxy with its own check."""
    app = create_app(FakeEngine(), settings(allowed_hosts=("*",)))  # type: ignore[arg-type]

    assert 200 == ask(app, "GET", "/health", headers={"host": "any.example"}).status


@pytest.mark.parametrize(
    "kind", ["text/plain", "", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/json"]
)
def test_a_body_must_be_json(app: Any, kind: str) -> None:
    """Types that a browser sends to other origins without a preflight request are 415."""
    envelope(ask(app, "POST", CHAT, json_body=BODY, headers={"content-type": kind}), 415, "unsupported_media_type")


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
def test_json_may_name_its_charset(app: Any, kind: str) -> None:
    """Parameters and case of the type do not matter."""
    assert 200 == ask(app, "POST", CHAT, json_body=BODY, headers={"content-type": kind}).status


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v1/audio/speech", 404, "unknown_url"),
        ("POST", "/images/edits", 404, "unknown_url"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/v1/embeddings", 415, "unsupported_media_type"),
        ("POST", "/embeddings", 415, "unsupported_media_type"),
    ],
)
@pytest.mark.parametrize("headers", [{"content-type": "multipart/form-data; boundary=x"}, {"content-encoding": "gzip"}])
def test_an_unknown_url_precedes_other_errors(
    app: Any, method: str, path: str, status: int, code: str, headers: dict[str, str]
) -> None:
    """The content type matters only for an existing route."""
    envelope(ask(app, method, path, body=b"--x--", headers=headers), status, code)


def test_the_prefix_of_openai_paths_may_be_left_out(app: Any) -> None:
    """Every path under /v1 has the same response without it, errors included; existing routes keep their meaning."""
    asked: list[tuple[str, str, object]] = [
        ("GET", "/models", None),
        ("GET", "/models/none", None),
        ("POST", "/chat/completions", {**BODY, "seed": 1}),
        ("POST", "/completions", {"prompt": "x", "seed": 1}),
        ("POST", "/embeddings", {"input": ""}),
        ("POST", "/messages", {"messages": []}),
        ("GET", "/responses/resp_1", None),
        ("GET", "/chat/completions", None),
        ("GET", "/capabilities", None),
    ]
    for method, path, body in asked:
        short, full = (ask(app, method, begin + path, json_body=body) for begin in ("", "/v1"))
        reply = [{**answer.json, "id": "", "created": 0, "timings": ""} for answer in (short, full)]
        assert (full.status, reply[1]) == (short.status, reply[0]), path
    assert "Cellar is running" == ask(app, "GET", "/").body.decode()
    for path in ("/v1", "/v1/v1/models", "/v1/chat", "/chat", "/nothing", "//models", "/Models"):
        envelope(ask(app, "GET", path), 404, "unknown_url")


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "identity"])
def test_encoded_bodies_are_refused(app: Any, encoding: str) -> None:
    """No decompression, so no decompression bomb."""
    answer = ask(app, "POST", CHAT, body=b"\x1f\x8b", headers={"content-encoding": encoding})

    envelope(answer, 415, "unsupported_media_type")


@pytest.mark.parametrize("announce", [True, False])
@pytest.mark.parametrize(("size", "status"), [(999, 200), (1000, 200), (1001, 413)])
def test_the_size_of_a_body_is_counted(app: Any, announce: bool, size: int, status: int) -> None:
    """One byte above the limit is 413, with or without Content-Length."""
    head, tail = b'{"messages": [{"role": "user", "content": "', b'"}]}'
    padding = b" " * (size - len(head) - len(tail) - 1)
    body = head + b"x" + tail + padding
    headers = {"content-length": str(len(body))} if announce else {}

    answer = ask(app, "POST", CHAT, body=body, headers=headers)

    assert (size, status) == (len(body), answer.status)
    if status == 413:
        assert "The body is larger than 1000 bytes." == envelope(answer, 413, "body_too_large")
        assert "close" == answer.headers["connection"]


def test_every_answer_has_a_request_id(app: Any) -> None:
    """A new one, or the client's if it is safe to log."""
    for method, path in (("GET", "/health"), ("GET", "/nope"), ("POST", CHAT), ("GET", CHAT)):
        assert re.fullmatch(r"req_[0-9a-f]{32}", ask(app, method, path).headers["x-request-id"])
    for given, kept in (("abc-1", True), ("a b", False), ("x" * 128, True), ("x" * 129, False), ("a\x1bb", False)):
        answer = ask(app, "GET", "/health", headers={"x-request-id": given})

        assert kept == (answer.headers["x-request-id"] == given)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "unknown_url"),
        ("GET", "/docs", 404, "unknown_url"),
        ("POST", "/v1/nothing", 404, "unknown_url"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("OPTIONS", CHAT, 405, "method_not_allowed"),
    ],
)
def test_other_urls_and_methods_have_the_envelope_too(app: Any, method: str, path: str, status: int, code: str) -> None:
    """Not FastAPI's {"detail": ...}; a 405 names the allowed methods."""
    answer = ask(app, method, path)

    assert (status, code) == (answer.status, answer.json["error"]["code"])
    assert (status == 405) == ("allow" in answer.headers)
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("refusal", "status", "code", "type", "retry"),
    [
        (Overloaded(9, 3.2), 429, "queue_full", "rate_limit_error", (4, 6)),
        (Overloaded(9, 0.0), 429, "queue_full", "rate_limit_error", (1, 2)),
        (Overloaded(9, 1e9), 429, "queue_full", "rate_limit_error", (40, 60)),
        (Loading("weights"), 503, "model_loading", "unavailable_error", (1, 2)),
        (Draining(), 503, "server_draining", "unavailable_error", (5, 8)),
        (EngineDead("oops"), 503, "engine_dead", "unavailable_error", (30, 45)),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_refusal_has_an_error_status_and_retry_after(
    refusal: Any, status: int, code: str, type: str, retry: tuple[int, int], stream: bool
) -> None:
    """Also for a stream: no 200 is sent before the engine accepts the request."""
    app = create_app(FakeEngine(refusal=refusal), settings())  # type: ignore[arg-type]

    answer = ask(app, "POST", CHAT, json_body={**BODY, "stream": stream})

    envelope(answer, status, code)
    assert type == answer.json["error"]["type"]
    assert retry[0] <= int(answer.headers["retry-after"]) <= retry[1]


def test_a_loading_server_answers_before_it_renders_anything() -> None:
    """503 with the phase, without a tokenizer."""
    engine = FakeEngine(phase="weights")
    app = create_app(engine, settings())  # type: ignore[arg-type]

    answer = ask(app, "POST", CHAT, json_body=BODY)

    assert "The model is loading (weights)." == envelope(answer, 503, "model_loading")
    assert "weights" == answer.json["error"]["phase"]
    assert [] == engine.tokenizer.rendered


def test_an_unexpected_exception_is_a_500_without_details(caplog: pytest.LogCaptureFixture) -> None:
    """The response has the request id; only the log has the traceback."""
    engine = FakeEngine()
    app = create_app(engine, settings())  # type: ignore[arg-type]

    def broken(request: Request) -> Any:
        raise RuntimeError("/home/secret 0xdeadbeef")

    engine.open = broken  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR, "cellar.http"):
        answer = ask(app, "POST", CHAT, json_body=BODY)

    message = envelope(answer, 500, "internal_error")
    assert "The server had an error while processing your request." == message
    assert answer.headers["x-request-id"] in caplog.text
    assert "RuntimeError" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), BlockingIOError(errno.EAGAIN, "fork")])
def test_a_thread_or_process_that_cannot_be_started_is_a_503(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has one line, without a traceback."""
    engine = FakeEngine()
    app = create_app(engine, settings())  # type: ignore[arg-type]

    def broken(request: Request) -> Any:
        raise error

    engine.open = broken  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR, "cellar.http"):
        answer = ask(app, "POST", CHAT, json_body=BODY)

    message = envelope(answer, 503, "threads_exhausted")
    assert message == "The system gives the server no further threads or processes. Try again later."
    assert 5 <= int(answer.headers["retry-after"]) <= 8
    assert answer.headers["x-request-id"] in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/engine"])
def test_repeated_requests_are_logged_at_debug(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """Monitoring and the live view of the page would fill the log."""
    with caplog.at_level(logging.DEBUG, "cellar.http"):
        ask(create_app(FakeEngine(), settings()), "GET", path)  # type: ignore[arg-type]

    assert [logging.DEBUG] == [record.levelno for record in caplog.records if record.name == "cellar.http"]


def test_a_request_is_one_line_in_the_log_without_its_content(caplog: pytest.LogCaptureFixture) -> None:
    """No path, prompt or key of a client is logged at any level."""
    app = create_app(FakeEngine(), settings(keys=("CANARY",)))  # type: ignore[arg-type]
    key = {"Authorization": "Bearer CANARY"}

    with caplog.at_level(logging.DEBUG, "cellar.http"):
        ask(app, "POST", CHAT, json_body={"messages": [{"role": "user", "content": "CANARY"}]}, headers=key)
        ask(app, "GET", "/CANARY\r\ninjected", headers=key)
        ask(app, "POST", CHAT, json_body={"model": "CANARY", **BODY}, headers=key)

    lines = [record.getMessage() for record in caplog.records if record.name == "cellar.http"]
    assert 3 == len(lines)
    assert not [line for line in lines if "CANARY" in line or "\n" in line]


def test_a_request_that_the_end_of_the_server_cancels_is_answered(app: Any) -> None:
    """uvicorn cancels it when its time is over: its body has not arrived as a whole."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("nothing arrives")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def scene() -> None:
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"9")]
        scope = {"type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "query_string": b""}
        task = asyncio.create_task(app({**scope, "headers": headers, "client": ("::1", 1), "state": {}}, receive, send))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scene())

    assert [503] == [message["status"] for message in sent if message["type"] == "http.response.start"]
    assert "server_draining" == json.loads(sent[1]["body"])["error"]["code"]
