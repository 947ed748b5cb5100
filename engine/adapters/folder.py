"""The folder of `--lora-dir`: adapters by name, and paths of requests that must not leave it."""

from __future__ import annotations

import os
from pathlib import Path

from engine.adapters.checkpoint import CONFIG_FILE
from engine.errors import AdapterPathRefused


class AdapterFolder:
    """A folder of adapters. Symbolic links are followed within it only."""

    def __init__(self, folder: str) -> None:
        self.root = Path(folder).expanduser().resolve()

    def find(self, name: str) -> Path | None:
        """The adapter in the subfolder `name`; None if there is none."""
        if any(part in ("", ".", "..") for part in name.split("/")):
            return None
        path = self.root / name
        # Unlike pathlib's, it is False for a name that no file can have.
        if not os.path.isfile(path / CONFIG_FILE):
            return None
        return path if path.resolve().is_relative_to(self.root) else None

    def resolve(self, path: str) -> Path:
        """The path of an adapter, relative to the folder or absolute. Raises AdapterPathRefused outside of it."""
        try:
            resolved = (self.root / path).resolve()
        except (OSError, ValueError, RuntimeError):
            raise AdapterPathRefused from None
        if resolved == self.root or not resolved.is_relative_to(self.root):
            raise AdapterPathRefused
        return resolved
