"""Files of encoder entries, so that media are not encoded anew by the next process.

They have a folder of their own beside those of the prefix tree, and are as safe: named by the digest of all their
bytes, written under another name first, refused if a bit is wrong (kvcache/disk.py).
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor

from kvcache.disk import DiskFolder, FileHeader, InvalidFile
from kvcache.encoder_cache import EncoderEntry
from kvcache.offload import OffloadConfig

# Entries may take an eighth of the files' budget: they are large, and few are looked at again.
_BUDGET_DIVISOR = 8
# Entries that wait to be written keep their tensors alive.
_MAX_UNWRITTEN = 4
# Disk's files are about tokens; these are about none, and one must stand there.
_PLACEHOLDER_TOKENS = np.zeros(1, dtype=np.int64)


class EncoderFiles:
    """Entries by their digest, least recently used first. Belongs to the thread that owns the cache."""

    def __init__(self, config: OffloadConfig, device: torch.device) -> None:
        self._report, self._device = config.report, device
        self._budget = config.disk_bytes // _BUDGET_DIVISOR
        self._disk = None if config.folder is None else DiskFolder(config.folder, f"{config.identity} encoder")
        self._files: OrderedDict[bytes, tuple[str, int]] = OrderedDict()
        self._unwritten: OrderedDict[bytes, EncoderEntry] = OrderedDict()
        for found in sorted(self._disk.scan() if self._disk else (), key=lambda found: found.last_used):
            self._files[found.header.salt] = (found.name, found.bytes)
        self._enforce_budget()

    def read(self, digest: bytes) -> EncoderEntry | None:
        """The entry of a digest, read and checked; None if there is none that can be trusted."""
        if self._disk is None or digest not in self._files:
            return None
        name, _ = self._files[digest]
        try:
            (content,) = self._disk.read(name)
            self._disk.touch(name)
            self._files.move_to_end(digest)
            return _entry(digest, {name: tensor.to(self._device) for name, tensor in content.items()})
        except (InvalidFile, OSError, ValueError) as error:
            self._report(f"an encoder's file is refused and deleted: {error}")
            self._delete(digest)
            return None

    def enqueue(self, entry: EncoderEntry) -> None:
        """Take an entry that is new; it is written when there is time."""
        if self._disk is not None and entry.digest not in self._files:
            self._unwritten[entry.digest] = entry
            while len(self._unwritten) > _MAX_UNWRITTEN:
                self._unwritten.popitem(last=False)

    def flush_one(self) -> bool:
        """Write one entry that waits; False: none does, or the folder cannot be written to."""
        if self._disk is None or not self._disk.writable or not self._unwritten:
            return False
        digest, entry = self._unwritten.popitem()
        data = self._disk.encode(FileHeader(digest, 0, _PLACEHOLDER_TOKENS, ends_edge=True), [_content(entry)])
        if len(data) > self._budget:
            return bool(self._unwritten)
        try:
            self._files[digest] = (self._disk.write(data), len(data))
        except OSError as error:
            self._report(f"an encoder's entry cannot be written: {error}")
            return False
        self._enforce_budget()
        return bool(self._unwritten)

    def _enforce_budget(self) -> None:
        while sum(size for _, size in self._files.values()) > self._budget:
            self._delete(next(iter(self._files)))

    def _delete(self, digest: bytes) -> None:
        assert self._disk is not None, "there are files"
        name, _ = self._files.pop(digest)
        self._disk.delete(name)


def _content(entry: EncoderEntry) -> dict[str, Tensor]:
    content: dict[str, Tensor] = {}
    for layer, (keys, values) in entry.layers.items():
        content |= {f"{layer}.keys": keys.contiguous().cpu(), f"{layer}.values": values.contiguous().cpu()}
    return content


def _entry(digest: bytes, content: dict[str, Tensor]) -> EncoderEntry:
    layers = sorted({int(name.partition(".")[0]) for name in content})
    return EncoderEntry(digest, {layer: (content[f"{layer}.keys"], content[f"{layer}.values"]) for layer in layers})
