"""Finds the vision towers beside a language model, without reading them."""

from __future__ import annotations

from pathlib import Path


def tower_files(path: Path) -> list[Path]:
    """The files beside a language model that are named as vision towers."""
    files = (file for file in path.parent.glob("*") if "mmproj" in file.name.lower() and file != path)
    return sorted(file for file in files if file.suffix.lower() == ".gguf" and file.is_file())
