"""Files of encoder cache entries, so that the next process does not encode the same media again.

They have a folder next to those of the prefix tree, with the same safety: names are digests of all bytes, writes are
atomic, damaged files are rejected (kvcache/disk.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

import numpy as np
import torch

from kvcache.component import SavedTensors
from kvcache.disk import DiskFolder, FileHeader, InvalidFile
from kvcache.encoder_cache import EncoderEntry, Entry
from kvcache.offload import OffloadConfig

# Share of the disk budget: entries are large, and few are used again.
_BUDGET_DIVISOR = 8
# Entries in the write queue keep their tensors in memory.
_MAX_UNWRITTEN = 4
# The file format needs at least one token.
_PLACEHOLDER_TOKENS = np.zeros(1, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class EntryCodec(Generic[Entry]):
    """How entries of one type are written.

    name    of the type, in the identity of its folder
    encode  the tensors of an entry, contiguous on the CPU and with memory of their own; ValueError: it has other values
    decode  the entry of a digest from its tensors on the CPU, on a device. Raises ValueError or KeyError
    """

    name: str
    encode: Callable[[Entry], SavedTensors]
    decode: Callable[[bytes, SavedTensors, torch.device], Entry]


class EncoderFiles(Generic[Entry]):
    """Encoder entries on disk by digest, least recently used first. Owned by the thread that owns the cache."""

    def __init__(self, config: OffloadConfig, device: torch.device, codec: EntryCodec[Entry]) -> None:
        self._report, self._device, self._codec = config.report, device, codec
        self._budget = config.disk_bytes // _BUDGET_DIVISOR
        self._disk = None if config.folder is None else DiskFolder(config.folder, f"{config.identity} {codec.name}")
        self._files: OrderedDict[bytes, tuple[str, int]] = OrderedDict()
        self._bytes = 0
        self._unwritten: OrderedDict[bytes, Entry] = OrderedDict()
        for file in sorted(self._disk.scan() if self._disk else (), key=lambda file: file.last_used):
            self._add(file.header.salt, file.name, file.bytes)
        self._enforce_budget()

    def read(self, digest: bytes) -> Entry | None:
        """The entry of a digest; None if there is no valid file."""
        if self._disk is None or digest not in self._files:
            return None
        name, _ = self._files[digest]
        try:
            (content,) = self._disk.read(name)
            self._disk.touch(name)
            self._files.move_to_end(digest)
            return self._codec.decode(digest, content, self._device)
        except (InvalidFile, OSError, ValueError, KeyError) as error:
            self._report(f"a file of the encoder cache is invalid and was deleted: {error}")
            self._delete(digest)
            return None

    def enqueue(self, entry: Entry) -> None:
        """Queue a new entry for `flush_one`."""
        if self._disk is not None and entry.digest not in self._files:
            self._unwritten[entry.digest] = entry
            while len(self._unwritten) > _MAX_UNWRITTEN:
                self._unwritten.popitem(last=False)

    def flush_one(self) -> bool:
        """Write one queued entry; whether more are queued. False after a failed write too."""
        if self._disk is None or not self._disk.writable or not self._unwritten:
            return False
        digest, entry = self._unwritten.popitem()
        try:
            data = self._disk.encode(
                FileHeader(digest, 0, _PLACEHOLDER_TOKENS, ends_edge=True), [self._codec.encode(entry)]
            )
            if len(data) > self._budget:
                return bool(self._unwritten)
            self._add(digest, self._disk.write(data), len(data))
        except (OSError, ValueError) as error:
            self._report(f"an entry of the encoder cache cannot be written: {error}")
            return False
        self._enforce_budget()
        return bool(self._unwritten)

    def _enforce_budget(self) -> None:
        while self._bytes > self._budget:
            self._delete(next(iter(self._files)))

    def _add(self, digest: bytes, name: str, size: int) -> None:
        """Add the file of an entry as the most recently used one; an earlier file of the entry goes."""
        if digest in self._files and self._files[digest][0] != name:
            self._delete(digest)
        self._bytes += size if digest not in self._files else 0
        self._files[digest] = (name, size)

    def _delete(self, digest: bytes) -> None:
        assert self._disk is not None, "without a folder there are no files"
        name, size = self._files.pop(digest)
        self._bytes -= size
        self._disk.delete(name)


def _encode(entry: EncoderEntry) -> SavedTensors:
    content: SavedTensors = {}
    for layer, (keys, values) in entry.layers.items():
        content |= {f"{layer}.keys": keys.contiguous().cpu(), f"{layer}.values": values.contiguous().cpu()}
    return content


def _decode(digest: bytes, content: SavedTensors, device: torch.device) -> EncoderEntry:
    content = {name: tensor.to(device) for name, tensor in content.items()}
    layers = sorted({int(name.partition(".")[0]) for name in content})
    return EncoderEntry(digest, {layer: (content[f"{layer}.keys"], content[f"{layer}.values"]) for layer in layers})


# Of cross-attention keys and values.
ENCODER_CODEC = EntryCodec("encoder", _encode, _decode)
