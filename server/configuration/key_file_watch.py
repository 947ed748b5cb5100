"""Reads the key file again when it has changed, while the server runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.configuration.settings import ConfiguredKeys, Settings

logger = logging.getLogger("cellar.keys")

CHECK_SECONDS = 1.0


class KeyFileWatch:
    """Looks for changes of the key file, at most once a second.

    An invalid file is logged once, without keys. Belongs to the event loop's thread: the size of a key file is bounded.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._clock = settings, clock
        self._path = Path(settings.key_file) if settings.key_file else None
        self._state, self._next_check = self._file_state(), clock() + CHECK_SECONDS

    def read_if_changed(self) -> ConfiguredKeys | None:
        """The keys of the settings with a changed and valid key file; None: the earlier keys stay."""
        if self._path is None or (now := self._clock()) < self._next_check:
            return None
        self._next_check = now + CHECK_SECONDS
        state = self._file_state()
        if state == self._state:
            return None
        self._state = state
        try:
            keys = self._settings.read_keys()
            keys.check()
        except (OSError, ValueError) as error:
            logger.error("the changed key file is not used, its earlier keys stay valid: %s", error)
            return None
        logger.info("the API keys of %s have changed", self._path)
        return keys

    def _file_state(self) -> tuple[int, int, int] | None:
        """What a change of the file changes; None: there is no file."""
        try:
            status = self._path.stat() if self._path is not None else None
        except OSError:
            return None
        return None if status is None else (status.st_mtime_ns, status.st_size, status.st_ino)
