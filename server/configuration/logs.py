"""Logs of the process, on the standard error stream."""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

from server.configuration.settings import LogFormat, LogLevel

# Between two records of one level about exports to a collector, each of which fails where there is none.
EXPORT_SECONDS = 600.0
TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to sys.stderr of the moment: while a progress line is drawn, it is another stream."""

    @property
    def stream(self) -> TextIO:
        """The stream."""
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None:
        """The constructor of the base class sets it."""


class ExportFilter(logging.Filter):
    """Drops records of OpenTelemetry that follow one of the same logger and level within EXPORT_SECONDS."""

    def __init__(self) -> None:
        super().__init__()
        self._logged: dict[tuple[str, int], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        if not record.name.startswith("opentelemetry."):
            return True
        kind, now = (record.name, record.levelno), time.monotonic()
        if now - self._logged.get(kind, -EXPORT_SECONDS) < EXPORT_SECONDS:
            return False
        self._logged[kind] = now
        return True


def configure_logging(level: LogLevel, form: LogFormat) -> None:
    """Log to the standard error stream, as lines of text or as a JSON object a line."""
    handler = StderrHandler()
    handler.setFormatter(_json_formatter() if form == "json" else logging.Formatter(TEXT))
    handler.addFilter(ExportFilter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # At DEBUG they log every chunk of every response, or every packet.
    for name in ("sse_starlette", "asyncio", "urllib3", "httpcore"):
        logging.getLogger(name).setLevel(logging.INFO)
    # At INFO they log a line for each request of a batch and for each address of the hub.
    for name in ("httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # A warning for every malformed request would let any client fill the log.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)


def _json_formatter() -> logging.Formatter:
    from pythonjsonlogger.json import JsonFormatter  # only needed here

    names = {"levelname": "level", "name": "logger"}
    return JsonFormatter("%(levelname)s %(name)s %(message)s", rename_fields=names, timestamp="time")
