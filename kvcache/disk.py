"""Files of saved stretches, so that what was computed survives the process.

A file is named by the digest of all its bytes, and written under another name first: one that was torn or changed is
refused, and two processes that share a folder never write different things to one name. Files of another model, or of
another way to store its cells, lie in another folder: `identity` says which. A file is a safetensors file; its header
and its tokens are read at the start, the rest when it is wanted.
"""

from __future__ import annotations

import hashlib
import json
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

# Changes when the same bytes mean something else.
FORMAT = "cellar-shelf-1"
_SUFFIX = ".safetensors"
# The only key of the files' metadata: several would be written in any order, and equal content get different names.
_METADATA_KEY = "cellar"
_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
_MAX_HEADER_BYTES = 8 * 2**20
# A temporary file that is older belongs to nobody who lives.
_STALE_TEMPORARY_SECONDS = 600.0
# How exactly times of use are kept; each costs a system call.
_TOUCH_INTERVAL_SECONDS = 60.0
_MIN_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = 1.0, 600.0


class InvalidFile(Exception):
    """A file is not what its name says, or not for us."""


@dataclass(frozen=True, slots=True)
class FileHeader:
    """What a file says about itself: the stretch from `start` on of a path with these tokens, all from position 0.

    ends_edge  the tree's edge ended with the stretch
    """

    salt: bytes
    start: int
    tokens: TokenArray
    ends_edge: bool


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file that was there at the start, and when it was used last (seconds since 1970)."""

    name: str
    bytes: int
    last_used: float
    header: FileHeader


class DiskFolder:
    """The files of one identity in a folder. After a failed write comes a pause, longer with every further one."""

    def __init__(self, folder: Path, identity: str) -> None:
        self._identity = hashlib.sha256(identity.encode()).hexdigest()
        self._folder = folder / self._identity[:32]
        self._touched: dict[str, float] = {}
        self._backoff, self._retry_at = _MIN_BACKOFF_SECONDS, 0.0

    @property
    def writable(self) -> bool:
        """Whether writing is worth a try."""
        return time.monotonic() >= self._retry_at

    def scan(self) -> list[FoundFile]:
        """All files that may be of use. Those that cannot be are deleted; nothing is raised."""
        found: list[FoundFile] = []
        with suppress(OSError):
            for entry in sorted(os.scandir(self._folder), key=lambda entry: entry.name):
                with suppress(OSError):
                    found += self._inspect(entry)
        return found

    def limit_other_identities(self, budget_bytes: int) -> None:
        """Delete files of other identities, those used longest ago first, until all of them fit a budget."""
        with suppress(OSError):
            others = [file for file in self._folder.parent.glob("*/*") if _NAME.fullmatch(file.name)]
            files = [(file.stat(), file) for file in others if file.parent != self._folder]
            for status, file in sorted(files, key=lambda pair: pair[0].st_mtime, reverse=True):
                budget_bytes -= status.st_size
                if budget_bytes < 0:
                    file.unlink()

    def encode(self, header: FileHeader, content: Sequence[SavedTensors]) -> bytes:
        """A file's bytes: what each component saved of a stretch."""
        tensors = {f"{at}/{name}": tensor for at, part in enumerate(content) for name, tensor in part.items()}
        tensors["tokens"] = torch.from_numpy(header.tokens.astype(np.int32))
        about = {
            "format": FORMAT,
            "identity": self._identity,
            "components": len(content),
            "salt": header.salt.hex(),
            "start": header.start,
            "ends": header.ends_edge,
        }
        data: bytes = save(tensors, {_METADATA_KEY: json.dumps(about)})
        return data

    def write(self, data: bytes) -> str:
        """Write a file so that it is there whole or not at all; its name. Raises OSError."""
        name = hashlib.sha256(data).hexdigest() + _SUFFIX
        temporary = self._folder / f".{name}.{os.getpid()}"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
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
        """What each component saved, after every byte was checked. Raises Refused or OSError."""
        with self._open(name) as file:
            data = file.read()
        if hashlib.sha256(data).hexdigest() + _SUFFIX != name:
            raise InvalidFile(f"{name} was changed")
        return _decode(data)

    def delete(self, name: str) -> None:
        """Delete a file, if it is there and can be."""
        self._touched.pop(name, None)
        with suppress(OSError):
            (self._folder / name).unlink()

    def touch(self, name: str) -> None:
        """Note in the file's times that it is wanted now."""
        now = time.time()
        if now - self._touched.get(name, 0.0) >= _TOUCH_INTERVAL_SECONDS:
            self._touched[name] = now
            with suppress(OSError):
                os.utime(self._folder / name)

    def _inspect(self, entry: os.DirEntry[str]) -> Iterator[FoundFile]:
        """The file, if it may be of use."""
        status = entry.stat(follow_symlinks=False)
        if entry.name.startswith(".") and time.time() - status.st_mtime > _STALE_TEMPORARY_SECONDS:
            self.delete(entry.name)
        if not _NAME.fullmatch(entry.name):
            return
        try:
            with self._open(entry.name) as file:
                stretch = _read_header(file, status.st_size, self._identity)
        except InvalidFile:
            self.delete(entry.name)
            return
        self._touched[entry.name] = time.time()
        yield FoundFile(entry.name, status.st_size, status.st_mtime, stretch)

    def _open(self, name: str) -> BinaryIO:
        return os.fdopen(os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")

    def _sync_folder(self) -> None:
        """Make a new name as lasting as the file that it names."""
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _decode(data: bytes) -> list[SavedTensors]:
    """The parts of a file whose bytes are those that were written."""
    size = int.from_bytes(data[:8], "little")
    about = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][_METADATA_KEY])
    content: list[SavedTensors] = [{} for _ in range(about["components"])]
    tensors: Mapping[str, Tensor] = load(data)
    for key, tensor in tensors.items():
        at, _, name = key.partition("/")
        if name:
            content[int(at)][name] = tensor
    return content


def _read_header(file: BinaryIO, size: int, identity: str) -> FileHeader:
    """What a file says about itself. Nothing of it is checked yet but that it could be ours; raises Refused."""
    try:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size, _MAX_HEADER_BYTES):
            raise InvalidFile("its header is too long")
        header = json.loads(file.read(length))
        about, (begin, end) = json.loads(header["__metadata__"][_METADATA_KEY]), header["tokens"]["data_offsets"]
        if about["format"] != FORMAT or about["identity"] != identity:
            raise InvalidFile("it belongs to another model or version")
        file.seek(8 + length + begin)
        tokens = np.frombuffer(file.read(min(end - begin, size)), dtype=np.int32).astype(np.int64)
        stretch = FileHeader(bytes.fromhex(about["salt"]), int(about["start"]), tokens, bool(about["ends"]))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise InvalidFile("its header is damaged") from error
    if not 0 <= stretch.start < len(tokens):
        raise InvalidFile("it holds no tokens")
    return stretch
