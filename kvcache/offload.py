"""The offload tier of the prefix tree: evicted content in host memory and in files.

Evicted content is saved in host memory, from a device by copies concurrent with steps (host_copies.py). Recently used
content is written to files when the engine is idle, and found again by the next process. Memory and files have a budget
each; least recently used entries go first. `on_lost` reports entries without content to the tree. A node's file is
written before the files of its children: the prefix of every file is in files too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvcache.component import CacheComponents, SavedTensors
from kvcache.disk import DiskFolder, FileHeader, FoundFile, InvalidFile
from kvcache.file_order import FileOrder
from kvcache.host_copies import HostCopies
from kvcache.node import EntrySlice, Node, OffloadEntry

# Size of an entry, so that writing or loading one never blocks the engine for long: 80 ms to write and 85 ms to load,
# digest included, on one core.
MAX_ENTRY_BYTES = 16 * 2**20
# Host memory for evicted content that is not written to a file yet, besides any memory budget.
WRITE_BUFFER_BYTES = 64 * 2**20


def _ignore(message: str) -> None:
    """Drop a report."""


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """Where evicted content goes.

    memory_bytes  budget in host memory; 0: with a folder, content stays there until it is written; else none is kept
    folder        of the files; None: nothing survives the process
    disk_bytes    budget of all files; files of other identities count when the process starts
    identity      what the content depends on besides the tokens: weights, model configuration, dtypes, cache layout
    report        called with a sentence about each failed read or write; no request fails for it
    """

    memory_bytes: int = 0
    folder: Path | None = None
    disk_bytes: int = 0
    identity: str = ""
    report: Callable[[str], None] = _ignore


class OffloadTier:
    """Entries in memory and in files, by last use. Owned by the radix tree.

    token_bytes     upper bound of one token's content
    on_lost         called with an entry that has lost its content, while nodes still refer to it
    report          see OffloadConfig
    written_tokens  total since the start
    """

    def __init__(
        self,
        config: OffloadConfig,
        components: CacheComponents,
        *,
        token_bytes: int,
        on_lost: Callable[[OffloadEntry], None],
    ) -> None:
        self._config, self._components, self._on_lost = config, components, on_lost
        self.report = config.report
        self._disk = None if config.folder is None else DiskFolder(config.folder, config.identity)
        write_buffer = 0 if self._disk is None else min(WRITE_BUFFER_BYTES, config.disk_bytes)
        self.memory_budget = max(config.memory_bytes, write_buffer)
        self._token_bytes = token_bytes
        self.max_entry_tokens = max(MAX_ENTRY_BYTES // max(token_bytes, 1), 1)
        self._copies = HostCopies()
        self._memory: OrderedDict[OffloadEntry, None] = OrderedDict()
        self._files = FileOrder()
        # Nodes with content in no file yet, by last use.
        self._unwritten: OrderedDict[Node, None] = OrderedDict()
        self._clock = 0
        # Time of the last write that found no older file to delete: it cannot succeed before another use.
        self._disk_full_at = -1
        self.written_tokens = 0
        self.memory_bytes = 0

    @property
    def enabled(self) -> bool:
        """Whether evicted content is saved."""
        return self.memory_budget > 0

    @property
    def disk_bytes(self) -> int:
        """Bytes of all files."""
        return self._files.bytes

    def scan(self) -> Iterator[tuple[FoundFile, OffloadEntry]]:
        """The files of earlier processes, prefixes first; the caller gives each entry nodes or removes it."""
        if self._disk is None:
            return
        files = self._disk.scan()
        self._disk.limit_other_identities(self._config.disk_bytes - sum(file.bytes for file in files))
        # Of two files with one start the shorter is newer: an edge was split and its upper part computed again.
        for file in sorted(files, key=lambda file: (file.header.start, len(file.header.tokens))):
            entry = OffloadEntry(file.header.start, file.header.tokens[file.header.start :])
            entry.file, entry.file_bytes = file.name, file.bytes
            self._files.add(entry)
            yield file, entry

    def enforce_budgets(self) -> None:
        """Drop least recently used entries beyond the budgets."""
        while self.memory_bytes > self.memory_budget:
            self._drop_from_memory(next(iter(self._memory)))
        if self.disk_bytes > self._config.disk_bytes:
            self._delete_oldest(self.disk_bytes - self._config.disk_bytes)

    def touch(self, node: Node) -> None:
        """Mark a node as used; a parent is touched after its children."""
        self._clock += 1
        node.last_used = self._clock
        for part in reversed(node.entry_slices):
            part.entry.last_used = self._clock
            if part.entry in self._memory:
                self._memory.move_to_end(part.entry)
            if part.entry.file is not None and self._disk is not None:
                self._files.move(part.entry)
                self._disk.touch(part.entry.file)
        if node in self._unwritten:
            self._unwritten.move_to_end(node)

    def set_entry_slices(self, node: Node, slices: Sequence[EntrySlice]) -> None:
        """Replace a node's slices, and remove entries that no node refers to any more."""
        before = [part.entry for part in node.entry_slices]
        node.set_entry_slices(slices)
        for entry in before:
            if not entry.nodes:
                self.remove(entry)
        self.track_unwritten(node)

    def track_unwritten(self, node: Node) -> None:
        """Update whether a node is to be written; called when its tokens or slices have changed."""
        slices = node.entry_slices
        written = slices and len(node.written_slices) == len(slices) and node.offloaded_tokens == len(node.tokens)
        if self._disk is None or node.parent is None or written:
            self._unwritten.pop(node, None)
        else:
            self._unwritten[node] = None

    def offload(self, node: Node) -> None:
        """Save the content of a resident node that has no entry yet, as far as it fits the memory budget."""
        remaining, slices = self.memory_budget, list(node.entry_slices)
        for start in range(node.offloaded_tokens, len(node.tokens), self.max_entry_tokens):
            try:
                entry = self._save(node, start)
            except (MemoryError, RuntimeError) as error:
                self.report(f"evicted tokens are not kept ({type(error).__name__})")
                break
            if (remaining := remaining - entry.memory_bytes) < 0:
                break
            self.memory_bytes += entry.memory_bytes
            entry.last_used = node.last_used
            slices.append(EntrySlice(entry, 0, len(entry.tokens)))
        node.set_entry_slices(slices)
        # In LRU order the end of an edge comes before its start.
        for part in reversed(node.entry_slices):
            if part.entry.content is not None:
                self._memory[part.entry] = None
                self._memory.move_to_end(part.entry)

    def read(self, entry: OffloadEntry) -> Sequence[SavedTensors] | None:
        """The saved tensors of each component; None if it is unreadable; an invalid file is deleted."""
        if entry.content is not None:
            self._copies.wait()
        if entry.content is not None or entry.file is None or self._disk is None:
            return entry.content
        try:
            content = self._disk.read(entry.file)
            entry.placeholder = self._components.placeholder(content, len(entry.tokens))
            return content
        except InvalidFile as error:
            self.report(f"a file of the disk cache is invalid and was deleted: {error}")
        except OSError as error:
            self.report(f"a file of the disk cache cannot be read: {error}")
        except MemoryError:
            self.report("a file of the disk cache is not read: out of memory")
            return None
        self._delete_file(entry)
        return None

    def remove(self, entry: OffloadEntry) -> None:
        """Remove an entry from memory and disk."""
        if entry in self._memory:
            self._drop_from_memory(entry)
        if entry in self._files:
            self._delete_file(entry)

    def flush(self, budget_bytes: int) -> int:
        """Write entries to files, most recently used first, at most `budget_bytes` or one entry; the bytes written."""
        written = 0
        while (node := self._next_unwritten()) is not None:
            max_bytes = min(len(node.tokens), self.max_entry_tokens) * self._token_bytes
            if written and written + max_bytes > budget_bytes:
                break
            size = self._write_entry(node)
            if not size:
                break
            written += size
        return written

    def _next_unwritten(self) -> Node | None:
        if self._disk is None or not self._disk.writable or not self._unwritten or self._disk_full_at == self._clock:
            return None
        latest = next(reversed(self._unwritten))
        return next(node for node in latest.path() if node in self._unwritten)

    def _write_entry(self, node: Node) -> int:
        """Write the first entry of a node without a file; its bytes, 0 if it does not fit or failed."""
        assert self._disk is not None, "without a folder nothing is written"
        slices = node.written_slices
        begin = sum(part.stop - part.start for part in slices)
        fresh = len(slices) == len(node.entry_slices)
        entry = self._save(node, begin) if fresh else node.entry_slices[len(slices)].entry
        assert entry.content is not None, "an entry without a file is in memory"
        path = np.concatenate([other.tokens for other in node.path()])
        ends_edge = any(entry.stop == other.stop for other in (node, *entry.nodes))
        header = FileHeader(node.salt, entry.start, np.concatenate((path[: entry.start], entry.tokens)), ends_edge)
        self._copies.wait()
        data = self._disk.encode(header, entry.content)
        if not self._free_disk(len(data), node.last_used):
            self._disk_full_at = self._clock
            return 0
        try:
            entry.file, entry.file_bytes = self._disk.write(data), len(data)
        except OSError as error:
            self.report(f"the disk cache cannot write to its folder, and pauses: {error}")
            return 0
        entry.last_used = node.last_used
        self._files.add(entry)
        self.written_tokens += len(entry.tokens)
        if fresh:
            entry.content = None
            node.set_entry_slices([*node.entry_slices, EntrySlice(entry, 0, len(entry.tokens))])
        elif self.memory_bytes > self._config.memory_bytes:
            self._drop_from_memory(entry)
        for other in tuple(entry.nodes):
            self.track_unwritten(other)
        return entry.file_bytes

    def _free_disk(self, size: int, last_used: int) -> bool:
        """Delete files used before `last_used` until `size` bytes fit; False, deleting none, if that is not enough."""
        missing = excess = self.disk_bytes + size - self._config.disk_bytes
        if missing <= 0:
            return True
        for entry in self._files:
            if missing <= 0 or entry.last_used >= last_used:
                break
            missing -= entry.file_bytes
        if missing > 0:
            return False
        self._delete_oldest(excess)
        return True

    def _delete_oldest(self, size: int) -> None:
        """Delete at least `size` bytes of files, least recently used first."""
        goal = max(self.disk_bytes - size, 0)
        while self.disk_bytes > goal:
            self._delete_file(self._files.oldest)

    def _save(self, node: Node, start: int) -> OffloadEntry:
        """A new entry with a resident node's content from `start` on, up to `max_entry_tokens`."""
        stop = min(start + self.max_entry_tokens, len(node.tokens))
        entry = OffloadEntry(node.start + start, node.tokens[start:stop].copy())
        saved = self._components.save(self._components.slice(node.references, start, stop))
        entry.content = [self._copies.copy(part) for part in saved]
        entry.placeholder = self._components.placeholder(entry.content, stop - start)
        return entry

    def _drop_from_memory(self, entry: OffloadEntry) -> None:
        del self._memory[entry]
        self.memory_bytes -= entry.memory_bytes
        entry.content = None
        if entry.file is None:
            self._on_lost(entry)

    def _delete_file(self, entry: OffloadEntry) -> None:
        assert self._disk is not None, "without a folder there are no files"
        assert entry.file is not None, "the entry has no file"
        self._disk.delete(entry.file)
        self._files.remove(entry)
        entry.file, entry.file_bytes = None, 0
        if entry.content is None:
            self._on_lost(entry)
        else:
            for node in tuple(entry.nodes):
                self.track_unwritten(node)
