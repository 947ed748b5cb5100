"""Finds the models of the folder of models while the server runs."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence

from server.configuration.settings import Settings
from server.models.configured import folder_entries
from server.models.entry import ModelEntry

logger = logging.getLogger("cellar")

# Clients that ask for names that do not exist do not read the disk more often.
SCAN_SECONDS = 2.0


class FolderScan:
    """Reads the folder of models of the settings. Belongs to the event loop's thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = asyncio.Lock()
        self._read_at = -math.inf

    async def read(self) -> Sequence[ModelEntry] | None:
        """The models in the folder; None if it was read less than SCAN_SECONDS ago, or cannot be read."""
        if self._settings.models_dir is None:
            return None
        async with self._lock:
            if time.monotonic() - self._read_at < SCAN_SECONDS:
                return None
            try:
                return await asyncio.to_thread(lambda: tuple(folder_entries(self._settings)))
            except (OSError, ValueError) as error:
                logger.warning("the models in %s were not read: %s", self._settings.models_dir, error)
                return None
            finally:
                self._read_at = time.monotonic()
