"""OpenTelemetry traces: a span for each generation, with its time in the queue, in prefill and in decode.

Spans have counts and times, never text. Attributes follow the semantic conventions for generative AI. The SDK reads
its own variables too, such as OTEL_TRACES_SAMPLER and OTEL_EXPORTER_OTLP_HEADERS.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from engine.types.events import Finished
from server.metrics.timer import GenerationTimer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

MISSING = "--otlp-traces-endpoint needs the packages opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http"
# Operations of the semantic conventions by endpoint; the others have the name of the endpoint.
OPERATIONS = {
    "chat": "chat",
    "responses": "chat",
    "anthropic": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
}
# Time for one export, with its retries.
EXPORT_SECONDS = 2.0
# Headers of a request with the trace that it belongs to (W3C Trace Context).
TRACE_HEADERS = ("traceparent", "tracestate")


class GenerationTraces:
    """Exports the spans of generations in the background."""

    def __init__(self, exporter: SpanExporter, model: str, version: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model, self._propagator = model, TraceContextTextMapPropagator()
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "cellar", "service.version": version})
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("cellar", version)

    def record(self, timer: GenerationTimer, endpoint: str, request_id: str, headers: Mapping[str, str]) -> None:
        """Record a generation that has ended now.

        headers  TRACE_HEADERS of its request: the span belongs to the client's trace
        """
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        # From the clock of the times to nanoseconds since 1970.
        offset, end = time.time_ns() - time.monotonic_ns(), time.monotonic()
        operation = OPERATIONS.get(endpoint, endpoint)
        attributes = {**self._attributes(timer, operation, end), "cellar.request_id": request_id}
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            self._propagator.extract(headers),
            SpanKind.SERVER,
            attributes,
            start_time=_nanoseconds(timer.started, offset),
        )
        inside = set_span_in_context(span)
        for name, start, stop in _parts(timer, end):
            part = self._tracer.start_span(name, inside, start_time=_nanoseconds(start, offset))
            part.end(_nanoseconds(stop, offset))
        if timer.reason == "error":
            span.set_status(StatusCode.ERROR)
        span.end(_nanoseconds(end, offset))

    def close(self) -> None:
        """Export the remaining spans."""
        self._provider.shutdown()

    def _attributes(self, timer: GenerationTimer, operation: str, end: float) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "cellar",
            "gen_ai.request.model": self._model,
            "gen_ai.response.finish_reasons": [timer.reason],
        }
        if isinstance(timer.finished, Finished):
            usage = timer.finished.usage
            attributes |= {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
            }
        if timer.first_token_at is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = timer.first_token_at - timer.started
        return attributes


def make_traces(url: str, model: str, version: str) -> GenerationTraces:
    """The traces of a server, exported to this URL by OTLP over HTTP; ValueError without OpenTelemetry."""
    try:
        exporter = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        return GenerationTraces(exporter.OTLPSpanExporter(endpoint=url, timeout=EXPORT_SECONDS), model, version)
    except ImportError as error:
        raise ValueError(MISSING) from error


def _parts(timer: GenerationTimer, end: float) -> Iterator[tuple[str, float, float]]:
    """Name, start and end of the parts that the generation has reached."""
    slot_at, first_token_at = timer.slot_at, timer.first_token_at
    if timer.finished is not None:
        # Measured by the engine; events arrive once a step.
        slot_at = timer.started + timer.finished.timings.queue_seconds
        first_token_at = slot_at + timer.finished.timings.prompt_seconds
    yield "queue", timer.started, end if slot_at is None else slot_at
    if slot_at is not None:
        yield "prefill", slot_at, end if first_token_at is None else first_token_at
    if first_token_at is not None:
        yield "decode", first_token_at, end


def _nanoseconds(seconds: float, offset: int) -> int:
    return int(seconds * 1e9) + offset
