"""Refusals of a full queue from the bytes of a connection: no HTTP parser, task or middleware runs for them.

An overloaded server spends most of its refusals' time there (benchmarks/serving/overload.py). Only usual requests
are refused here, by their head: many clients send the body in a separate segment. All others pass the middleware,
whose response is the same (admission.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from http import HTTPStatus
from typing import NamedTuple

from engine.errors import Overloaded
from server.configuration.settings import ClientLimits
from server.http.access_log import AccessRecord, RefusalLog
from server.http.admission import GENERATION_PATHS
from server.http.auth import ApiKeys
from server.http.encoding import JsonResponse, dumps
from server.http.errors import QUEUE_FULL, ApiError, error_body, from_engine_error
from server.http.middleware import AUDIO_PATHS, host_of, request_id
from server.metrics.key_usage import KeyUsage
from server.metrics.metrics import Metrics
from server.metrics.traces import TRACE_HEADERS

# Paths with bodies of JSON, whose requests may be refused before the app reads them.
EARLY_PATHS = GENERATION_PATHS - AUDIO_PATHS
REQUEST_LINE = rb"POST (/[a-z0-9/_]+) HTTP/1\.1\r\n"
# Unlike h11's grammar without bytes above 0x7e.
HEADERS = rb"((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e]*\r\n)+)"
_head = re.compile(REQUEST_LINE + HEADERS + rb"\r\n")
_content_length = re.compile(r"[0-9]{1,9}")
# They change how a request is read or answered.
_unusual_headers = frozenset(
    {"transfer-encoding", "content-encoding", "expect", "upgrade", "origin", "http2-settings", "te", "trailer"}
)
_STATUS_LINE = f"HTTP/1.1 {QUEUE_FULL.status} {HTTPStatus(QUEUE_FULL.status).phrase}".encode()


class Refusal(NamedTuple):
    """The response to a refused request, and how many bytes of its body are still to come."""

    response: bytes
    unread_bytes: int


# (received bytes, address of the client, headers that every response has) -> the refusal; None: not refused here.
Refuse = Callable[[bytes, str, Iterable[tuple[bytes, bytes]]], Refusal | None]


class EarlyRefusal:
    """Answers 429 to requests that the engine would refuse; counts and logs them like the middleware."""

    def __init__(
        self,
        check_admission: Callable[[str], None],
        keys: ApiKeys,
        hosts: Iterable[str],
        limits: ClientLimits,
        metrics: Metrics,
        log: RefusalLog,
        usage: KeyUsage,
    ) -> None:
        self._check_admission, self._keys, self._hosts = check_admission, keys, frozenset(hosts)
        self._limits, self._metrics, self._log = limits, metrics, log
        self._usage = usage

    def __call__(self, data: bytes, client: str, default_headers: Iterable[tuple[bytes, bytes]]) -> Refusal | None:
        """The refusal of the request that `data` starts, if nothing follows it; None if the app shall answer it."""
        match = _head.match(data)
        if match is None or match.end() > self._limits.head_bytes:
            return None
        path = match[1].decode()
        headers = self._usual_headers(match[2]) if path in EARLY_PATHS else None
        if headers is None:
            return None
        unread_bytes = int(headers["content-length"]) - (len(data) - match.end())
        if unread_bytes < 0:
            return None
        key = self._keys.find([(name.encode(), value.encode()) for name, value in headers.items()])
        if key is None:
            return None
        try:
            self._check_admission(key.owner)
        except Overloaded as error:
            label = self._keys.label(key.owner)
            if key.owner:
                self._usage.count_request(label)
                self._usage.count_refusal(label, "queue_full")
            record = AccessRecord(request_id(headers), "POST", client, _trace(headers), key=label)
            self._metrics.count_response(path, QUEUE_FULL.status)
            self._log.log(record, path, QUEUE_FULL.status)
            limits = {} if key.limits is None else key.limits.headers()
            response = _response(
                from_engine_error(error, path), path, {**limits, "x-request-id": record.id}, default_headers
            )
            return Refusal(response, unread_bytes)
        return None

    def _usual_headers(self, text: bytes) -> dict[str, str] | None:
        """The headers of a request that is checked as the middleware would; None if the middleware has to."""
        lines = text.decode().split("\r\n")[:-1]
        pairs = (line.split(":", 1) for line in lines)
        headers = {name.lower(): value.strip(" \t") for name, value in pairs}
        is_usual = (
            len(headers) == len(lines) <= self._limits.headers
            and headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
            and _content_length.fullmatch(headers.get("content-length", ""))
            and int(headers["content-length"]) <= self._limits.body_bytes
            and headers.get("connection", "keep-alive").lower() == "keep-alive"
            and "host" in headers
            and ("*" in self._hosts or host_of(headers) in self._hosts)
            and _unusual_headers.isdisjoint(headers)
        )
        return headers if is_usual else None


def _trace(headers: dict[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in TRACE_HEADERS if name in headers}


def _response(
    error: ApiError, path: str, added: dict[str, str], default_headers: Iterable[tuple[bytes, bytes]]
) -> bytes:
    body = _body(error.message, path)
    headers = {
        **(error.headers or {}),
        "content-length": str(len(body)),
        "content-type": JsonResponse.media_type,
        **added,
    }
    lines = [
        _STATUS_LINE,
        *(name + b": " + value for name, value in default_headers),
        *(f"{name.lower()}: {value}".encode("ascii") for name, value in headers.items()),
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


@lru_cache(maxsize=256)
def _body(message: str, path: str) -> bytes:
    return dumps(error_body(ApiError(QUEUE_FULL, message), path))
