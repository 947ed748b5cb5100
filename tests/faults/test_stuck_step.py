"""A native call of a step that never returns, in a real server: the watchdog ends the process, streams have an end."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import read_address, start_process

pytestmark = pytest.mark.slow

LIMIT_SECONDS = 5.0
# The next step waits in libc without the interpreter lock, as for a device that does not answer, after SIGUSR1.
PROGRAM = f"""
import ctypes, functools, signal, threading
import engine.engine
from engine.schedule.step import Stepper
from engine.watchdog import Watchdog
from server.cli import main

engine.engine.Watchdog = functools.partial(Watchdog, limit_seconds={LIMIT_SECONDS})
engine.engine._LIVENESS_CHECK_SECONDS = 0.2
stuck, run = threading.Event(), Stepper.run

def hang(*arguments, **options):
    if stuck.is_set():
        ctypes.CDLL(None).sleep(600)
    return run(*arguments, **options)

Stepper.run = hang
signal.signal(signal.SIGUSR1, lambda *_: stuck.set())
main()
"""
BODY = {
    "messages": [{"role": "user", "content": "Tell a story."}],
    "max_tokens": 900,
    "ignore_eos": True,
    "stream": True,
}


class Stream:
    """A stream with a request id, read by a thread to its end."""

    def __init__(self, address: str, id: str) -> None:
        self._address, self._id = address, id
        self._events: list[str] = []
        self.begun = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        path, headers = f"{self._address}/v1/chat/completions", {"x-request-id": self._id}
        with httpx.stream("POST", path, json=BODY, headers=headers, timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    self._events.append(line.removeprefix("data: "))
                    if len(self._events) == 3:
                        self.begun.set()

    def error(self) -> str:
        """The code of the error event that ends it."""
        self._thread.join(120)
        assert not self._thread.is_alive()
        code: str = json.loads(self._events[-1])["error"]["code"]
        return code


def test_a_step_that_never_returns_ends_the_process(tmp_path: Path) -> None:
    """/health and the log name the requests of the step; each stream ends with an error event; the exit code is 70."""
    ids = ["first-stuck-request", "second-stuck-request"]
    options = ["serve", "--port", "0", "--context", "1024", "--slots", "4", "--threads", "1", "--store", "memory"]
    with (
        (tmp_path / "log").open("w") as log,
        start_process([sys.executable, "-c", PROGRAM, *options], log) as server,
    ):
        try:
            address = read_address(server)
            streams = [Stream(address, id) for id in ids]
            assert all(stream.begun.wait(120) for stream in streams)
            server.send_signal(signal.SIGUSR1)
            before = httpx.get(f"{address}/health", timeout=60)
            health = before
            while health.status_code == 200:
                time.sleep(0.1)
                health = httpx.get(f"{address}/health", timeout=60)
            errors = [stream.error() for stream in streams]
            code = server.wait(60)
        finally:
            server.kill()
    text = (tmp_path / "log").read_text()

    assert before.status_code == 200
    assert health.status_code == 503
    assert all(id in health.text for id in ids), health.text
    assert errors == ["engine_dead"] * 2
    assert code == 70
    [line] = [line for line in text.splitlines() if "the engine ended" in line]
    assert f"longer than {LIMIT_SECONDS:g} s" in line
    assert all(id in line for id in ids)
