"""The user's folders by the XDG base directory specification."""

from __future__ import annotations

import os
from pathlib import Path


def config_folder() -> Path:
    """The folder of cellar.toml. Raises RuntimeError without a home folder."""
    return _folder("XDG_CONFIG_HOME", ".config")


def data_folder() -> Path:
    """The folder of stored responses. Raises RuntimeError without a home folder."""
    return _folder("XDG_DATA_HOME", ".local/share")


def state_folder() -> Path:
    """The folder of the chat history. Raises RuntimeError without a home folder."""
    return _folder("XDG_STATE_HOME", ".local/state")


def _folder(variable: str, default: str) -> Path:
    named = Path(os.environ.get(variable, ""))
    # The specification says to ignore a relative path.
    return (named if named.is_absolute() else Path.home() / default) / "cellar"
