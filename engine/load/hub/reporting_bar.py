"""Progress bars of other libraries, as reports to the listener of a load."""

from __future__ import annotations

import io
from typing import Any

from tqdm import tqdm

from engine.types.progress import Progress, Unit, progress_listener


class ReportingBar(tqdm):  # type: ignore[misc]
    """A bar of tqdm that draws nothing: each drawing, up to ten a second, is a report of `step`."""

    step = "download"
    # No thread of tqdm's own.
    monitor_interval = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        self._listener = progress_listener()
        super().__init__(*args, **{**options, "file": io.StringIO(), "disable": False})

    def display(self, *_: Any, **__: Any) -> bool:
        """Report the state of the bar."""
        unit: Unit = "bytes" if self.unit == "B" else "items"
        self._listener(Progress(self.step, int(self.n), int(self.total or 0), unit))
        return True
