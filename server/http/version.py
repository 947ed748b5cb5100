"""The version of this distribution."""

from __future__ import annotations

import functools
import importlib.metadata


@functools.cache
def version() -> str:
    """The installed version; "0" in a tree that is not installed."""
    try:
        return importlib.metadata.version("kvcellar")
    except importlib.metadata.PackageNotFoundError:
        return "0"
