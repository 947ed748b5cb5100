"""The user's cache folder: files that can be rebuilt, with a size limit and least-recently-used removal.

It is `$XDG_CACHE_HOME/kvcellar`, else `~/.cache/kvcellar`, with a subfolder for each kind of file (kernels, weights,
checks, tokenizers).
Its files are executed or trusted, so a folder that other users can write to is neither read nor written.
The modification time of a file is the time of its last use. Advisory locks (flock) mark files in use and folders being
written; the system releases them when the process ends. Without file locks (on some file systems) nothing is removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

# Size limit in bytes of all files: the quantised weights of a few models with 8 billion parameters.
MAX_BYTES = 32 * 2**30
_SCRATCH = ".writing-"
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_folder(kind: str) -> Path:
    """The folder for one kind of file, which may not exist yet. Raises OSError if the user has no home folder, or other
    users can write to the folder.
    """
    root = _root()
    with suppress(FileNotFoundError):
        # A umask of 002 let the group write here. Folders that others put here are not owned by this user.
        if root.stat().st_mode & _WRITABLE_BY_OTHERS and root.stat().st_uid == os.geteuid():
            root.chmod(root.stat().st_mode & 0o7777 & ~_WRITABLE_BY_OTHERS)
    for folder in (root, root / kind):
        with suppress(FileNotFoundError):
            _check_private(folder)
    return root / kind


def make_private(folder: Path) -> None:
    """Create a folder with its parents for this user alone. Raises OSError if other users can write to it."""
    for parent in reversed([path for path in folder.parents if not path.exists()]):
        parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    _check_private(folder)


def mark_used(file: Path) -> None:
    """Mark a file as used now, and as in use until this process ends; a missing file is ignored."""
    with suppress(OSError):
        os.utime(file)
    with suppress(OSError):
        fcntl.flock(_descriptor(file, file.stat().st_ino), fcntl.LOCK_SH)


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder inside `folder`, for files that are renamed when they are complete.

    It is removed at the end; after a killed process, when the next one is made.
    """
    with _locked(folder):
        _remove_abandoned(folder)
        scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=folder))
        lock = _open_locked(scratch, fcntl.LOCK_EX)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if lock is not None:
            os.close(lock)


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A path to write to; at the end, its file atomically replaces `file`, also in a folder that did not exist."""
    make_private(file.parent)
    with scratch_folder(file.parent) as folder:
        scratch = folder / file.name
        yield scratch
        replace_file(scratch, file)


def replace_file(scratch: Path, file: Path) -> None:
    """Replace a file by a complete one; after a power cut, it has its old or its new content. Raises OSError."""
    synchronise(scratch)
    os.replace(scratch, file)


def synchronise(file: Path) -> None:
    """Write the content of a file to the disk. Raises OSError."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def trim(max_bytes: int = MAX_BYTES) -> None:
    """Remove the least recently used files down to `max_bytes`, but no files in use."""
    with suppress(OSError):
        files = sorted(_files(_root()), key=lambda entry: entry[1].st_mtime_ns)
        excess = sum(status.st_size for _, status in files) - max_bytes
        for file, status in files:
            if excess <= 0:
                return
            if _remove_unused(file):
                excess -= status.st_size


def _root() -> Path:
    # The XDG base directory specification says to ignore relative paths.
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (named if named.is_absolute() else Path.home() / ".cache") / "kvcellar"
    except RuntimeError as error:
        raise FileNotFoundError("no home folder to keep it in") from error


def _check_private(folder: Path) -> None:
    """Raise OSError if a folder is missing, or other users can write to it."""
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & _WRITABLE_BY_OTHERS:
        raise PermissionError(f"other users can write to {folder}")


def _files(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if not name.startswith(_SCRATCH)]
        for file in (Path(folder, name) for name in names):
            # Another process may remove the file at the same time.
            with suppress(OSError):
                yield file, file.stat()


def _remove_unused(file: Path) -> bool:
    """Remove a file that is not in use; returns whether it was removed."""
    lock = _open_locked(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if lock is None:
        return False
    try:
        file.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def _remove_abandoned(folder: Path) -> None:
    """Remove the scratch folders of ended processes."""
    for left in folder.glob(f"{_SCRATCH}*"):
        lock = _open_locked(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if lock is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Exclude other processes from making or removing scratch folders."""
    lock = _open_locked(folder, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _open_locked(path: Path, operation: int) -> int | None:
    """A descriptor that has the lock until it is closed; None if it cannot be locked."""
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
    """A descriptor that stays open until the process ends, one for each file."""
    return os.open(file, os.O_RDONLY)
