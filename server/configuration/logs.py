"""Logs of the process, on the standard error stream."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from server.configuration.settings import LogFormat, LogLevel

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


def configure_logging(level: LogLevel, form: LogFormat) -> None:
    """Log to the standard error stream, as lines of text or as a JSON object a line."""
    handler = StderrHandler()
    handler.setFormatter(_json_formatter() if form == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # At DEBUG these log every chunk of every response, or every packet.
    for name in ("sse_starlette", "asyncio", "urllib3", "httpcore"):
        logging.getLogger(name).setLevel(logging.INFO)
    # At INFO it logs a line for each request of a batch and for each address of the hub.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # A warning for every malformed request would let any client fill the log.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)


def _json_formatter() -> logging.Formatter:
    from pythonjsonlogger.json import JsonFormatter  # only needed here

    names = {"levelname": "level", "name": "logger"}
    return JsonFormatter("%(levelname)s %(name)s %(message)s", rename_fields=names, timestamp="time")
