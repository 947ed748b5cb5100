"""Files of saved token ranges: the disk cache.

A file is named by the SHA-256 of all its bytes and is written under a temporary name first: a torn or changed file is
rejected, and processes that share a folder never write different content to one name. Each identity (model, dtypes,
cache layout) has its own folder. Files are safetensors; header and tokens are read at the start, the tensors on
demand.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from kvcache.component import SavedTensors
from kvcache.node import TokenArray

# Changes with the meaning of a file's bytes.
FORMAT = "cellar-shelf-1"
_SUFFIX = ".safetensors"
# The only metadata key: with several, their order would vary, and equal content would get different names.
_METADATA_KEY = "cellar"
_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
_MAX_HEADER_BYTES = 8 * 2**20
_TOKEN_DTYPES = {"I32": np.int32, "I64": np.int64}
# Older temporary files were left by a process that was killed.
_STALE_TEMPORARY_SECONDS = 600.0
# Precision of a file's time of last use; each update costs a system call.
_TOUCH_INTERVAL_SECONDS = 60.0
# Pause after a failed write; doubled by each further failure.
_MIN_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = 1.0, 600.0


class InvalidFile(Exception):
    """A file was changed, is damaged, or belongs to another identity."""


@dataclass(frozen=True, slots=True)
class FileHeader:
    """What a file contains: the content of `tokens` from position `start` on.

    tokens     of the whole path, from position 0
    ends_edge  the last token was the end of an edge of the prefix tree
    """

    salt: bytes
    start: int
    tokens: TokenArray
    ends_edge: bool


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of an earlier process; `last_used` is in seconds since 1970, 0: unknown."""

    name: str
    bytes: int
    last_used: float
    header: FileHeader


class DiskFolder:
    """The files of one identity. A failed write is followed by a pause with exponential backoff."""

    def __init__(self, folder: Path, identity: str) -> None:
        self._identity = hashlib.sha256(identity.encode()).hexdigest()
        self._folder = folder / self._identity[:32]
        self._touched: dict[str, float] = {}
        self._backoff, self._retry_at = _MIN_BACKOFF_SECONDS, 0.0

    @property
    def writable(self) -> bool:
        """Whether no pause after a failed write is running."""
        return time.monotonic() >= self._retry_at

    def scan(self) -> list[FoundFile]:
        """All files with a valid header; others are deleted. Never raises."""
        files: list[FoundFile] = []
        with suppress(OSError):
            for entry in sorted(os.scandir(self._folder), key=lambda entry: entry.name):
                with suppress(OSError):
                    files += self._inspect(entry)
        return files

    def limit_other_identities(self, budget_bytes: int) -> None:
        """Delete files of other identities beyond a budget, least recently used first."""
        with suppress(OSError):
            others = [file for file in self._folder.parent.glob("*/*") if _NAME.fullmatch(file.name)]
            files = [(file.stat(), file) for file in others if file.parent != self._folder]
            for status, file in sorted(files, key=lambda pair: _last_used(pair[0]), reverse=True):
                budget_bytes -= status.st_size
                if budget_bytes < 0:
                    file.unlink()

    def encode(self, header: FileHeader, content: Sequence[SavedTensors]) -> bytes:
        """The bytes of a file with the saved tensors of each component."""
        tensors = {f"{index}/{name}": tensor for index, part in enumerate(content) for name, tensor in part.items()}
        narrow = header.tokens.astype(np.int32)
        # Keys of bidirectional ranges need 64 bits, tokens 32.
        tensors["tokens"] = torch.from_numpy(narrow if (narrow == header.tokens).all() else header.tokens)
        metadata = {
            "format": FORMAT,
            "identity": self._identity,
            "components": len(content),
            "salt": header.salt.hex(),
            "start": header.start,
            "ends": header.ends_edge,
        }
        data: bytes = save(tensors, {_METADATA_KEY: json.dumps(metadata)})
        return data

    def write(self, data: bytes) -> str:
        """Write a file atomically and durably; its name. Raises OSError."""
        name = hashlib.sha256(data).hexdigest() + _SUFFIX
        temporary = self._folder / f".{name}.{os.getpid()}"
        try:
            # The mode applies to the last folder of a path only.
            for folder in (self._folder.parent, self._folder):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._folder / name)
            self._sync_folder()
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            self._retry_at = time.monotonic() + self._backoff
            self._backoff = min(2 * self._backoff, _MAX_BACKOFF_SECONDS)
            raise
        self._backoff = _MIN_BACKOFF_SECONDS
        return name

    def read(self, name: str) -> list[SavedTensors]:
        """The saved tensors of each component, after the digest was verified. Raises InvalidFile or OSError."""
        with self._open(name) as file:
            data = file.read()
        if hashlib.sha256(data).hexdigest() + _SUFFIX != name:
            raise InvalidFile(f"{name} was changed")
        return _decode(data)

    def delete(self, name: str) -> None:
        """Delete a file. Never raises."""
        self._touched.pop(name, None)
        with suppress(OSError):
            (self._folder / name).unlink()

    def touch(self, name: str) -> None:
        """Set a file's time of last use to now."""
        now = time.monotonic()
        if now - self._touched.get(name, -math.inf) >= _TOUCH_INTERVAL_SECONDS:
            self._touched[name] = now
            with suppress(OSError):
                os.utime(self._folder / name)

    def _inspect(self, entry: os.DirEntry[str]) -> Iterator[FoundFile]:
        """The file, if its header is valid."""
        status = entry.stat(follow_symlinks=False)
        # A time in the future was set before the clock went back: how old the file is nobody knows.
        if entry.name.startswith(".") and abs(time.time() - status.st_mtime) > _STALE_TEMPORARY_SECONDS:
            self.delete(entry.name)
        if not _NAME.fullmatch(entry.name):
            return
        try:
            with self._open(entry.name) as file:
                header = _read_header(file, status.st_size, self._identity)
        except InvalidFile:
            self.delete(entry.name)
            return
        self._touched[entry.name] = time.monotonic()
        yield FoundFile(entry.name, status.st_size, _last_used(status), header)

    def _open(self, name: str) -> BinaryIO:
        return os.fdopen(os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")

    def _sync_folder(self) -> None:
        """Make a new name durable."""
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _last_used(status: os.stat_result) -> float:
    """When a file was last used; 0 for a time in the future, which was set before the clock went back."""
    return status.st_mtime if status.st_mtime < time.time() + _TOUCH_INTERVAL_SECONDS else 0.0


def _decode(data: bytes) -> list[SavedTensors]:
    """The saved tensors of each component from verified bytes."""
    size = int.from_bytes(data[:8], "little")
    metadata = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][_METADATA_KEY])
    content: list[SavedTensors] = [{} for _ in range(metadata["components"])]
    tensors: Mapping[str, Tensor] = load(data)
    for key, tensor in tensors.items():
        index, _, name = key.partition("/")
        if name:
            content[int(index)][name] = tensor
    return content


def _read_header(file: BinaryIO, size: int, identity: str) -> FileHeader:
    """The header of a file, whose digest is not verified yet. Raises InvalidFile."""
    try:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size, _MAX_HEADER_BYTES):
            raise InvalidFile("its header is too long")
        header = json.loads(file.read(length))
        metadata, (begin, end) = json.loads(header["__metadata__"][_METADATA_KEY]), header["tokens"]["data_offsets"]
        if metadata["format"] != FORMAT or metadata["identity"] != identity:
            raise InvalidFile("it belongs to another model or version")
        file.seek(8 + length + begin)
        dtype = _TOKEN_DTYPES[header["tokens"]["dtype"]]
        tokens = np.frombuffer(file.read(min(end - begin, size)), dtype=dtype).astype(np.int64)
        salt, start = bytes.fromhex(metadata["salt"]), int(metadata["start"])
        parsed = FileHeader(salt, start, tokens, bool(metadata["ends"]))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise InvalidFile("its header is damaged") from error
    if not 0 <= parsed.start < len(tokens):
        raise InvalidFile("it holds no tokens")
    return parsed
