"""The folder of `--lora-dir`: adapters by name, and paths of requests that must not leave it."""

from __future__ import annotations

import os
from pathlib import Path

from engine.adapters.config import CONFIG_FILE
from engine.errors import AdapterPathRefused


class AdapterFolder:
    """A folder of adapters. Symbolic links are followed within it only."""

    def __init__(self, folder: str) -> None:
        self.root = Path(folder).expanduser().resolve()

    def find(self, name: str) -> Path | None:
        """The adapter in the subfolder `name` or in the file `name`.gguf; None if there is none."""
        if any(part in ("", ".", "..") for part in name.split("/")):
            return None
        path, file = self.root / name, self.root / f"{name}.gguf"
        # Unlike pathlib's, it is False for a name that no file can have.
        present = [path for path, content in ((path, path / CONFIG_FILE), (file, file)) if os.path.isfile(content)]
        return next((path for path in present if path.resolve().is_relative_to(self.root)), None)

    def resolve(self, path: str) -> Path:
        """The path of an adapter, relative to the folder or absolute. Raises AdapterPathRefused outside of it."""
        try:
            resolved = (self.root / path).resolve()
        except (OSError, ValueError, RuntimeError):
            raise AdapterPathRefused from None
        if resolved == self.root or not resolved.is_relative_to(self.root):
            raise AdapterPathRefused
        return resolved
