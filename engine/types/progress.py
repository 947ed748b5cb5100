"""Progress of a load, from the loop that does the work to a listener such as a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

Unit = Literal["bytes", "items"]


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total` units of a step; `total` is 0 if it is unknown."""

    step: str
    done: int = 0
    total: int = 0
    unit: Unit = "items"

    @property
    def text(self) -> str:
        """The step with its percentage."""
        return f"{self.step} {100 * self.done // self.total} %" if self.total else self.step


Listener = Callable[[Progress], None]
_listener: ContextVar[Listener | None] = ContextVar("progress listener", default=None)


@contextmanager
def progress_to(listener: Listener) -> Iterator[None]:
    """Within the block, progress of this thread goes to a listener."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def progress_listener() -> Listener:
    """The listener of this thread; it may be called from other threads."""
    return _listener.get() or _ignore


def report_progress(step: str, done: int = 0, total: int = 0, unit: Unit = "items") -> None:
    """Report the progress of this thread to its listener, if there is one."""
    progress_listener()(Progress(step, done, total, unit))


def _ignore(_: Progress) -> None:
    pass
