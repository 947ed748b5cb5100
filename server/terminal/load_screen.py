"""Shows phases and progress of a load: one line with a bar on a terminal, lines of text elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from engine.types import progress
from server.terminal.sizes import format_file_size

# Shorter phases and steps leave no line.
SHOWN_SECONDS = 1.0
LINES_PER_STEP = 10


def print_line(text: str) -> None:
    """Print a line at once, also into a pipe."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def print_error(text: str) -> None:
    """Print a line to stderr."""
    sys.stderr.write(f"{text}\n")


class LoadScreen(Protocol):
    """Shows a load. Its methods may be called from any thread."""

    def set_phase(self, phase: str) -> None:
        """Begin a phase."""

    def set_progress(self, report: progress.Progress) -> None:
        """Show the progress of a step within the phase."""

    def print(self, text: str) -> None:
        """Print text for good; the load is over."""

    def stop(self) -> None:
        """Remove what is not printed for good."""


def load_screen(console: Console, print_line: Callable[[str], None], name: str) -> LoadScreen:
    """A screen for a console. `name` is the first phase, which has no line of text."""
    return BarScreen(console, name) if console.is_terminal else LineScreen(print_line)


class LineScreen:
    """Each phase is a line; a long step has a line for every tenth of it."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self.print = print_line
        self._step, self._begun, self._tenths = "", 0.0, 0

    def set_phase(self, phase: str) -> None:
        """Print a phase."""
        self._step = ""
        if phase != "ready":
            self.print(f"cellar: {phase}")

    def set_progress(self, report: progress.Progress) -> None:
        """Print a step without total once, and tenths of a long one."""
        if report.step != self._step:
            self._step, self._begun, self._tenths = report.step, time.monotonic(), 0
            if not report.total:
                self.print(f"cellar: {report.step}")
        tenths = LINES_PER_STEP * report.done // report.total if report.total else 0
        if tenths > self._tenths and time.monotonic() - self._begun >= SHOWN_SECONDS:
            self._tenths = tenths
            self.print(f"cellar: {report.step} {tenths * 100 // LINES_PER_STEP} %{amounts(report)}")

    def stop(self) -> None:
        """Nothing to remove."""


class BarScreen:
    """One line with the phase, its progress and time. A long phase leaves a line with its duration."""

    def __init__(self, console: Console, name: str) -> None:
        self._console = console
        columns = (SpinnerColumn(), TextColumn("{task.description}"), _Bar(), TextColumn("{task.fields[amounts]}"))
        # The process may end while it loads, and a hidden cursor would stay hidden.
        console.show_cursor = lambda show=True: False  # type: ignore[method-assign]
        self._progress = Progress(
            *columns,
            TimeElapsedColumn(),
            console=console,
            transient=True,
            # Log lines on the terminal stand above this line; a log file is not redirected.
            redirect_stderr=sys.stderr.isatty(),
        )
        self._name, self._begun = name, time.monotonic()
        self._task = self._progress.add_task(name, total=None, amounts="")
        self._progress.start()

    def set_phase(self, phase: str) -> None:
        """Show another phase."""
        self._begin(phase)

    def set_progress(self, report: progress.Progress) -> None:
        """Show a bar for a step with a total."""
        if report.step != self._name:
            self._begin(report.step)
        self._progress.update(
            self._task, completed=report.done, total=report.total or None, amounts=amounts(report).strip(" ()")
        )

    def print(self, text: str) -> None:
        """Print text in place of the line."""
        self.stop()
        self._console.print(Text(text), soft_wrap=True)

    def stop(self) -> None:
        """Remove the line."""
        self._progress.stop()

    def _begin(self, name: str) -> None:
        seconds = time.monotonic() - self._begun
        if seconds >= SHOWN_SECONDS:
            self._progress.console.print(Text(f"cellar: {self._name}, {seconds:.1f} s", style="dim"), soft_wrap=True)
        self._name, self._begun = name, time.monotonic()
        # The total of a task cannot be unset.
        self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=None, amounts="")


class _Bar(ProgressColumn):
    """A bar and a percentage for steps with a total, nothing for others."""

    def __init__(self) -> None:
        super().__init__()
        self._bar = BarColumn(bar_width=30)

    def render(self, task: Task) -> Text | object:  # type: ignore[override]
        """The bar of a task."""
        return self._bar.render(task) if task.total else Text("")


def amounts(report: progress.Progress) -> str:
    """Done and total of a step in bytes, in brackets; empty for other units."""
    if report.unit != "bytes" or not report.total:
        return ""
    return f" ({format_file_size(report.done)} of {format_file_size(report.total)})"
