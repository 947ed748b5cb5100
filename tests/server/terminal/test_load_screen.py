"""The display of a load: lines in a pipe, one changing line on a terminal."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import httpx
import pytest
from rich.console import Console

from engine.types.progress import Progress, progress_to, report_progress
from server.terminal import load_screen
from server.terminal.load_screen import BarScreen, LineScreen
from tests.server.terminal.session import CTRL_C, ROOT, TerminalSession

Home = dict[str, str]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the time of the screens."""
    now = [100.0]
    monkeypatch.setattr(load_screen.time, "monotonic", lambda: now[0])

    def forward(seconds: float) -> None:
        now[0] += seconds

    return forward


def test_a_pipe_gets_a_line_for_each_tenth_of_a_long_step(clock: Callable[[float], None]) -> None:
    """Short steps have no lines; a step without total has one."""
    lines: list[str] = []
    screen = LineScreen(lines.append)
    screen.set_phase("weights")
    for done in range(11):
        screen.set_progress(Progress("weights", done, 10))
    screen.set_progress(Progress("compile the attention kernel"))
    screen.set_progress(Progress("download", 0, 1000, "bytes"))
    for done in range(0, 1001, 50):
        clock(0.2)
        screen.set_progress(Progress("download", done, 1000, "bytes"))
    screen.set_phase("ready")

    assert ["cellar: weights", "cellar: compile the attention kernel"] == lines[:2]
    assert "cellar: download 20 % (200 bytes of 1.0 kB)" == lines[2]
    assert "cellar: download 100 % (1.0 kB of 1.0 kB)" == lines[-1]
    assert 9 == len(lines[2:])


def test_a_terminal_keeps_long_phases_only(clock: Callable[[float], None]) -> None:
    """With their durations; printed text replaces the line."""
    output = io.StringIO()
    screen = BarScreen(Console(file=output, force_terminal=True, width=80, color_system=None), "import")
    clock(2)
    screen.set_phase("weights")
    screen.set_progress(Progress("weights", 1, 2))
    screen.set_phase("self-test")
    clock(3)
    screen.print("Cellar serves")
    shown = [line.strip() for line in output.getvalue().replace("\x1b[2K", "").splitlines()]

    assert "cellar: import, 2.0 s" in shown
    assert not any(line.startswith("cellar: weights") for line in shown)
    assert shown[-1].endswith("Cellar serves")
    assert "\x1b[?25l" not in output.getvalue()


def test_progress_reaches_the_listener_of_its_block() -> None:
    """Without a listener it goes nowhere."""
    seen: list[Progress] = []
    report_progress("before")
    with progress_to(seen.append):
        report_progress("step", 1, 3)
    report_progress("after")

    assert [Progress("step", 1, 3)] == seen
    assert "step 33 %" == seen[0].text


@pytest.mark.slow
def test_a_start_in_a_pipe_is_plain_lines(home: Home) -> None:
    """The phases, then the start-up screen, without escape sequences."""
    command = [sys.executable, "-c", "from server.cli import main; main()", "serve", "--port", "0", "--store", "none"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **home}
    ) as server:
        assert server.stdout is not None
        lines = []
        for line in server.stdout:
            lines.append(line.rstrip("\n"))
            if line.startswith("  try"):
                break
        server.send_signal(signal.SIGTERM)
        assert 0 == server.wait(60)

    assert ["cellar: resolve", "cellar: weights"] == lines[:2]
    assert any(line.startswith("Cellar ") for line in lines)
    assert not any("\x1b" in line or "\r" in line for line in lines)


@pytest.mark.slow
def test_a_start_on_a_terminal_ends_with_the_start_up_screen(home: Home) -> None:
    """Log lines after it are whole lines, and Ctrl-C ends the server with exit code 0."""
    with TerminalSession(["serve", "--port", "0", "--store", "none"], {**home, "COLUMNS": "300"}) as session:
        session.wait("import torch and transformers")
        session.wait("serves cellar-tiny")
        url = session.wait("/v1 ").split()[-1].removesuffix("/v1")
        session.wait("try")
        assert "ready" == httpx.get(f"{url}/ready", trust_env=False).json()["status"]
        session.type(CTRL_C)
        session.wait("draining: running requests have 30 s to finish")
        assert 0 == session.end()


def test_the_phase_of_a_load_has_its_percentage() -> None:
    """As in /health and /ready."""
    assert "download 45 %" == Progress("download", 45, 100, "bytes").text
    assert "compile" == Progress("compile").text
