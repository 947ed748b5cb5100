"""The user's cache folder: files that can be made again, bounded in bytes, the least recently used removed first.

It is `$XDG_CACHE_HOME/kvcellar`, else `~/.cache/kvcellar`, with one subfolder a kind of file (kernels, weights). The
modification time of a file is its last use. Advisory locks (flock) mark files in use and folders being written to; the
system releases them with the process, however that ends. A file system without such locks has nothing removed from it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

# Bytes of all files together: the quantised weights of a few models of 8 billion parameters.
MAX_BYTES = 32 * 2**30
_SCRATCH = ".writing-"


def cache_folder(kind: str) -> Path:
    """The folder for one kind of file, which may not exist yet. Raises OSError where the user has no home."""
    return _root() / kind


def mark_used(file: Path) -> None:
    """Mark a file as used now, and as in use while this process lives; nothing where it is missing."""
    with suppress(OSError):
        os.utime(file)
    with suppress(OSError):
        fcntl.flock(_descriptor(file, file.stat().st_ino), fcntl.LOCK_SH)


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder inside `folder`, to write files in before they are renamed.

    It is removed at the end. That of a process that was killed is removed when the next one is made.
    """
    with _locked(folder):
        _remove_abandoned(folder)
        made = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=folder))
        writing = _open_locked(made, fcntl.LOCK_EX)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        if writing is not None:
            os.close(writing)


def trim(max_bytes: int = MAX_BYTES) -> None:
    """Remove the least recently used files until all take at most `max_bytes`, but none that a process uses."""
    with suppress(OSError):
        files = sorted(_files(_root()), key=lambda found: found[1].st_mtime_ns)
        excess = sum(status.st_size for _, status in files) - max_bytes
        for file, status in files:
            if excess <= 0:
                return
            if _remove_unused(file):
                excess -= status.st_size


def _root() -> Path:
    """By the XDG base directory specification, relative paths are ignored."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (named if named.is_absolute() else Path.home() / ".cache") / "kvcellar"
    except RuntimeError as error:
        raise FileNotFoundError("no home folder to keep it in") from error


def _files(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if not name.startswith(_SCRATCH)]
        for file in (Path(folder, name) for name in names):
            # Another process may remove it at the same time.
            with suppress(OSError):
                yield file, file.stat()


def _remove_unused(file: Path) -> bool:
    """Remove a file unless a process uses it; whether it is gone."""
    held = _open_locked(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if held is None:
        return False
    try:
        file.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        os.close(held)
    return True


def _remove_abandoned(folder: Path) -> None:
    """Remove the scratch folders whose process has ended."""
    for left in folder.glob(f"{_SCRATCH}*"):
        held = _open_locked(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if held is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(held)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from making or removing scratch folders."""
    held = _open_locked(folder, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if held is not None:
            os.close(held)


def _open_locked(path: Path, operation: int) -> int | None:
    """A descriptor that holds the lock until it is closed; None where the lock cannot be had."""
    try:
        opened = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(opened, operation)
    except OSError:
        os.close(opened)
        return None
    return opened


@cache
def _descriptor(file: Path, inode: int) -> int:
    """A descriptor that stays open as long as the process lives, one a file."""
    return os.open(file, os.O_RDONLY)
