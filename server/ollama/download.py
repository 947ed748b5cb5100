"""Downloads a model of the hub into its cache, as `cellar pull` does, in a process that can be ended at any time.

It writes JSON lines: {"done", "total"} in bytes, at last {"path"}, or {"error"} with its "kind":
"missing", "unreachable" or "disk".
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from types import FrameType

from engine.errors import CacheNotWritable, HubUnreachable, ModelMissing
from engine.load.hub.hub import download
from engine.load.hub.hub_cache import remove_partial_files
from engine.types.progress import Progress, progress_to

REPORT_SECONDS = 0.1
EXIT_FAILED = 1


class _Report:
    """Writes progress, at most every REPORT_SECONDS."""

    def __init__(self) -> None:
        self._reported_at = 0.0

    def __call__(self, progress: Progress) -> None:
        """Called by the download threads."""
        if progress.done == progress.total or time.monotonic() - self._reported_at >= REPORT_SECONDS:
            self._reported_at = time.monotonic()
            _write(done=progress.done, total=progress.total)


def main(model: str) -> int:
    """Download a model; the exit code."""
    signal.signal(signal.SIGTERM, _end)
    try:
        with progress_to(_Report()):
            path = download(model)
    except ModelMissing as error:
        _write(error=str(error), kind=_kind(error))
        return EXIT_FAILED
    _write(path=str(path))
    return 0


def _kind(error: ModelMissing) -> str:
    match error:
        case HubUnreachable():
            return "unreachable"
        case CacheNotWritable():
            return "disk"
        case _:
            return "missing"


def _end(number: int, _: FrameType | None) -> None:
    remove_partial_files()
    # An exception would wait for the download threads, which end with their files.
    os._exit(128 + number)


def _write(**fields: object) -> None:
    # One call: lines of several threads do not mix.
    os.write(sys.stdout.fileno(), json.dumps(fields).encode() + b"\n")
