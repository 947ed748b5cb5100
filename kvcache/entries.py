"""Files of encoder entries, so that media are not encoded anew by the next process.

They have a folder of their own beside those of the prefix tree, and are as safe: named by the digest of all their
bytes, written under another name first, refused if a bit is wrong (kvcache/disk.py).
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor

from kvcache.disk import Disk, Refused, Stretch
from kvcache.encoder import Entry
from kvcache.shelf import ShelfConfig

# Entries may take an eighth of the files' budget: they are large, and few are looked at again.
_SHARE = 8
# Entries that wait to be written keep their tensors alive.
_MOST_WAITING = 4
# Disk's files are about tokens; these are about none, and one must stand there.
_NO_TOKENS = np.zeros(1, dtype=np.int64)


class EntryFiles:
    """Entries by their digest, least recently used first. Belongs to the thread that owns the cache."""

    def __init__(self, config: ShelfConfig, device: torch.device) -> None:
        self._report, self._device = config.report, device
        self._budget = config.disk_bytes // _SHARE
        self._disk = None if config.folder is None else Disk(config.folder, f"{config.identity} encoder")
        self._files: OrderedDict[bytes, tuple[str, int]] = OrderedDict()
        self._waiting: OrderedDict[bytes, Entry] = OrderedDict()
        for found in sorted(self._disk.scan() if self._disk else (), key=lambda found: found.used):
            self._files[found.stretch.salt] = (found.name, found.bytes)
        self._fit()

    def find(self, digest: bytes) -> Entry | None:
        """The entry of a digest, read and checked; None if there is none that can be trusted."""
        if self._disk is None or digest not in self._files:
            return None
        name, _ = self._files[digest]
        try:
            (content,) = self._disk.read(name)
            self._disk.stamp(name)
            self._files.move_to_end(digest)
            return _entry(digest, {name: tensor.to(self._device) for name, tensor in content.items()})
        except (Refused, OSError, ValueError) as error:
            self._report(f"an encoder's file is refused and deleted: {error}")
            self._delete(digest)
            return None

    def offer(self, entry: Entry) -> None:
        """Take an entry that is new; it is written when there is time."""
        if self._disk is not None and entry.digest not in self._files:
            self._waiting[entry.digest] = entry
            while len(self._waiting) > _MOST_WAITING:
                self._waiting.popitem(last=False)

    def write(self) -> bool:
        """Write one entry that waits; False: none does, or the folder cannot be written to."""
        if self._disk is None or not self._disk.ready or not self._waiting:
            return False
        digest, entry = self._waiting.popitem()
        data = self._disk.encode(Stretch(digest, 0, _NO_TOKENS, ends=True), [_content(entry)])
        if len(data) > self._budget:
            return bool(self._waiting)
        try:
            self._files[digest] = (self._disk.write(data), len(data))
        except OSError as error:
            self._report(f"an encoder's entry cannot be written: {error}")
            return False
        self._fit()
        return bool(self._waiting)

    def _fit(self) -> None:
        while sum(size for _, size in self._files.values()) > self._budget:
            self._delete(next(iter(self._files)))

    def _delete(self, digest: bytes) -> None:
        assert self._disk is not None, "there are files"
        name, _ = self._files.pop(digest)
        self._disk.delete(name)


def _content(entry: Entry) -> dict[str, Tensor]:
    content: dict[str, Tensor] = {}
    for layer, (keys, values) in entry.layers.items():
        content |= {f"{layer}.keys": keys.contiguous().cpu(), f"{layer}.values": values.contiguous().cpu()}
    return content


def _entry(digest: bytes, content: dict[str, Tensor]) -> Entry:
    layers = sorted({int(name.partition(".")[0]) for name in content})
    return Entry(digest, {layer: (content[f"{layer}.keys"], content[f"{layer}.values"]) for layer in layers})
