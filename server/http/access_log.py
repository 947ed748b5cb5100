"""The access log: a line for each request, without contents."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from engine.types.events import Finished

logger = logging.getLogger("cellar.http")

REFUSAL_LINE_SECONDS = 1.0


@dataclass(slots=True)
class AccessRecord:
    """One HTTP request, for its log line.

    id      of the request
    client  address of the connection
    key     name of the API key; "": there are no keys
    trace   headers with the client's trace
    model   name of the model, of requests to one
    count   of the requests that the line stands for
    """

    id: str
    method: str
    client: str
    trace: Mapping[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    key: str = ""
    model: str = ""
    count: int = 1
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    decode_seconds: float = 0.0

    def add(self, model: str, finished: Finished) -> None:
        """Add a generation; the choices of a request have one prompt."""
        self.model = model
        self.prompt_tokens = max(self.prompt_tokens, finished.usage.prompt_tokens)
        self.cached_tokens = max(self.cached_tokens, finished.usage.cached_tokens)
        self.generated_tokens += finished.usage.completion_tokens
        self.decode_seconds = max(self.decode_seconds, finished.timings.generation_seconds)

    def log(self, level: int, route: str, status: int) -> None:
        """Write the line; a JSON log has each value under its name."""
        if not logger.isEnabledFor(level):
            return
        milliseconds = round((time.monotonic() - self.started) * 1000, 1)
        known = {
            "client": self.client,
            "key": self.key,
            "count": self.count if self.count > 1 else "",
            **self._generation(),
        }
        details = {name: value for name, value in known.items() if value != ""}
        request = {"request_id": self.id, "method": self.method, "route": route, "status": status}
        logger.log(
            level,
            "%s %s %s %d %.1fms%s",
            *request.values(),
            milliseconds,
            "".join(f" {name}={value}" for name, value in details.items()),
            extra={**request, "milliseconds": milliseconds, **details},
        )

    def _generation(self) -> dict[str, str | int | float]:
        if not self.model:
            return {}
        rate = self.generated_tokens / self.decode_seconds if self.decode_seconds else 0.0
        return {
            "model": self.model,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            **({"tokens_per_second": round(rate, 1)} if rate else {}),
        }


class RefusalLog:
    """Logs the first refusal of a client and route at once, and those of the next second as one line, with their count.

    Clients that retry at once would otherwise write hundreds of lines a second, half of the cost of their refusals. At
    DEBUG each has its line.
    """

    def __init__(self) -> None:
        # By route, client and key: the latest record since the last line, if any.
        self._latest: dict[tuple[str, str, str], AccessRecord | None] = {}

    def log(self, record: AccessRecord, route: str, status: int) -> None:
        """Log a refusal, or count it for the next line. Belongs to the event loop's thread."""
        kind = (route, record.client, record.key)
        if logger.isEnabledFor(logging.DEBUG):
            record.log(logging.INFO, route, status)
        elif kind in self._latest:
            earlier = self._latest[kind]
            record.count += earlier.count if earlier is not None else 0
            self._latest[kind] = record
        else:
            record.log(logging.INFO, route, status)
            self._latest[kind] = None
            asyncio.get_running_loop().call_later(REFUSAL_LINE_SECONDS, self._log_latest, kind, status)

    def _log_latest(self, kind: tuple[str, str, str], status: int) -> None:
        record = self._latest.pop(kind)
        if record is not None:
            # Not the time that it waited for its line.
            record.started = time.monotonic()
            record.log(logging.INFO, kind[0], status)


# Tasks of a request inherit it, so the generation reaches it from every route.
_current: ContextVar[AccessRecord | None] = ContextVar("access_record", default=None)


def begin(record: AccessRecord) -> None:
    """Make this the record of the current request."""
    _current.set(record)


def current() -> AccessRecord | None:
    """The record of the current request; None outside a request."""
    return _current.get()
