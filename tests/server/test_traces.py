"""OpenTelemetry traces, as a collector receives them."""

from __future__ import annotations

import gzip
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest

from engine.types.events import Delta, Event, Failed, Started
from engine.types.request import Request
from server.app import create_app
from tests.server.fakes import FakeEngine, Gate, serve_in_thread, settings

proto = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

BODY = {"model": "fake", "messages": [{"role": "user", "content": "secret words"}]}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(HTTPServer):
    """Keeps the spans that it receives."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.raw = b""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"

    def named(self, name: str) -> Any:
        [span] = [span for span in self.spans if span.name == name]
        return span


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.raw += body
        received = proto.ExportTraceServiceRequest.FromString(body)
        for resource in received.resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def attributes(span: Any) -> dict[str, Any]:
    """The attributes of a span, by name."""
    found = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


def post(collector: Collector, engine: FakeEngine, *, stream: bool = False, **headers: str) -> int:
    """The status of a chat request; the server has ended after it, so all spans are exported."""
    with serve_in_thread(engine, settings(otlp_traces_endpoint=collector.url)) as port:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        return httpx.post(url, json={**BODY, "stream": stream}, headers=headers, trust_env=False).status_code


@pytest.mark.parametrize("stream", [False, True])
def test_queue_prefill_and_decode_of_a_request(collector: Collector, stream: bool) -> None:
    """The parts follow each other inside the request's span, which belongs to the client's trace; no text is sent."""
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    assert 200 == post(collector, FakeEngine(), stream=stream, **headers)

    span = collector.named("chat fake")
    parts = [collector.named(name) for name in ("queue", "prefill", "decode")]
    assert (TRACE, PARENT) == (span.trace_id.hex(), span.parent_span_id.hex())
    assert {span.span_id} == {part.parent_span_id for part in parts}
    assert {span.trace_id} == {part.trace_id for part in parts}
    times = [(part.start_time_unix_nano, part.end_time_unix_nano) for part in parts]
    assert span.start_time_unix_nano == times[0][0]
    assert [end for _, end in times[:2]] == [start for start, _ in times[1:]]
    assert times[2][1] == span.end_time_unix_nano
    found = attributes(span)
    assert {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "fake",
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ["stop"],
        "cellar.request_id": "mine",
    }.items() <= found.items()
    assert found["gen_ai.usage.input_tokens"] > 0
    assert b"secret" not in collector.raw


def test_a_failed_request_has_an_error(collector: Collector) -> None:
    """Its span ends with the part that it reached."""

    def fails(request: Request) -> Iterator[Event]:
        yield Started(1, 0, 0)
        yield Failed("broken")

    assert 500 == post(collector, FakeEngine(script=fails))

    assert ["prefill", "queue"] == sorted(span.name for span in collector.spans if span.name != "chat fake")
    assert 2 == collector.named("chat fake").status.code


def test_a_cancelled_stream_has_a_span(collector: Collector) -> None:
    """The client leaves in the middle."""

    def stuck(request: Request) -> Iterator[Event | Gate]:
        yield Started(1, 0, 0)
        yield Delta("a", (1,))
        yield Gate()

    engine = FakeEngine(script=stuck)
    with serve_in_thread(engine, settings(otlp_traces_endpoint=collector.url)) as port:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        with httpx.stream("POST", url, json={**BODY, "stream": True}, trust_env=False) as response:
            assert next(response.iter_lines())
        assert engine.left.wait(20)

    assert ["cancelled"] == attributes(collector.named("chat fake"))["gen_ai.response.finish_reasons"]


def test_a_collector_that_is_gone_harms_no_request() -> None:
    """Spans are dropped."""
    with serve_in_thread(FakeEngine(), settings(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces")) as port:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        answer = httpx.post(url, json=BODY, trust_env=False)

    assert 200 == answer.status_code
    assert json.loads(answer.text)["choices"][0]["message"]["content"]


def test_without_opentelemetry_the_error_names_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server does not start."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ValueError, match="opentelemetry-sdk"):
        create_app(FakeEngine(), settings(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces"))  # type: ignore[arg-type]
