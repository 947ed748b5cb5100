"""A server process on the bundled model, as a user starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
# Kernels may have to be compiled first, on a machine that does other things too.
START_SECONDS = 900


@contextmanager
def serving(flags: Sequence[str], errors: IO[str], variables: Mapping[str, str] | None = None) -> Iterator[str]:
    """The address of a server with these flags and environment variables, once it is ready. It must exit with 0 after
    SIGTERM.
    """
    port = [] if "--port" in flags else ["--port", "0"]
    command = [sys.executable, "-c", "from server.cli import main; main()", "serve", *port, *flags]
    with start_process(command, errors, variables) as server:
        try:
            yield read_address(server)
        finally:
            server.terminate()
            assert 0 == server.wait(30)


def start_process(
    command: Sequence[str], errors: IO[str], variables: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """A server process with these environment variables, whose start-up lines `read_address` reads."""
    environment = {**os.environ, **(variables or {})}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)


def read_address(server: subprocess.Popen[str]) -> str:
    """The address of a server process, once it is ready: read from its start-up lines."""
    assert server.stdout is not None
    output: list[str] = []
    stuck = threading.Timer(START_SECONDS, server.kill)
    stuck.start()
    try:
        for line in server.stdout:
            output.append(line)
            if found := re.search(r"API +(http://\S+)/v1", line):
                return found.group(1)
    finally:
        stuck.cancel()
    raise AssertionError("the server did not start:\n" + "".join(output))
