"""The shelf: content of the prefix tree outside the cells, in host memory and in files.

What the tree gives up is saved in memory; what is wanted most is written to files when there is time for it, and found
again by the next process. Both have a budget, and what was wanted longest ago goes first. Content that is on no shelf
any more the tree must forget: `lose` tells it.
A node's file is written before its children's: there is no file whose beginning is in none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvcache.component import SavedTensors
from kvcache.components import CacheComponents
from kvcache.disk import DiskFolder, FileHeader, FoundFile, InvalidFile
from kvcache.node import EntrySlice, Node, OffloadEntry

# Long edges are saved in pieces, so that the engine is never busy with one for long: with this much, measured on one
# core, for 80 ms to write it and 85 ms to load it, digests included.
MAX_ENTRY_BYTES = 16 * 2**20
# What is evicted before it is in a file waits in memory, whatever the budget: up to this much.
WRITE_BUFFER_BYTES = 64 * 2**20


def _ignore(message: str) -> None:
    """Report to nobody."""


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """Where content goes for which there are no cells.

    memory_bytes  of host memory; 0: what is evicted stays there only until it is written, if there is a folder
    folder        of the files; None: nothing survives the process
    disk_bytes    of all files together; what other identities left in the folder counts at the start only
    identity      all that the content depends on besides tokens: weights, model configuration, types, cache layout
    report        is told in a sentence what went wrong with a file; no request fails for it
    """

    memory_bytes: int = 0
    folder: Path | None = None
    disk_bytes: int = 0
    identity: str = ""
    report: Callable[[str], None] = _ignore


class OffloadTier:
    """Entries by last use, in memory and in files. Belongs to the prefix tree.

    token_bytes  that one token takes on the shelf, at most
    lose         is called with an entry that is gone, while its nodes still name it
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
        self._disk = None if config.folder is None else DiskFolder(config.folder, config.identity)
        waiting = 0 if self._disk is None else min(WRITE_BUFFER_BYTES, config.disk_bytes)
        self.memory_budget = max(config.memory_bytes, waiting)
        self.max_entry_tokens = max(MAX_ENTRY_BYTES // max(token_bytes, 1), 1)
        self._memory: OrderedDict[OffloadEntry, None] = OrderedDict()
        self._files: set[OffloadEntry] = set()
        # Nodes that are not wholly in files, by last use.
        self._unwritten: OrderedDict[Node, None] = OrderedDict()
        self._clock = 0
        # When there was no room for what is wanted most: until something else is wanted, there is none.
        self._disk_full_at = -1
        # Tokens that were written to files, since the start.
        self.written_tokens = 0
        self.memory_bytes = self.disk_bytes = 0

    @property
    def enabled(self) -> bool:
        """Whether evicted content is saved."""
        return self.memory_budget > 0

    def scan(self) -> Iterator[tuple[FoundFile, OffloadEntry]]:
        """What earlier processes left: beginnings first, to be linked to nodes or dropped."""
        if self._disk is None:
            return
        every = self._disk.scan()
        self._disk.limit_other_identities(self._config.disk_bytes - sum(found.bytes for found in every))
        # Of two that begin together the shorter one is newer: an edge that was split, and its upper part healed.
        for found in sorted(every, key=lambda found: (found.header.start, len(found.header.tokens))):
            entry = OffloadEntry(found.header.start, found.header.tokens[found.header.start :])
            entry.file, entry.file_bytes = found.name, found.bytes
            self._files.add(entry)
            self.disk_bytes += found.bytes
            yield found, entry

    def enforce_budgets(self) -> None:
        """Give up what exceeds the budgets, longest unused first."""
        while self.memory_bytes > self.memory_budget:
            self._drop_from_memory(next(iter(self._memory)))
        if self.disk_bytes > self._config.disk_bytes:
            self._delete_oldest(self.disk_bytes - self._config.disk_bytes)

    def touch(self, node: Node) -> None:
        """Note that a node is wanted; one must touch it after its children."""
        self._clock += 1
        node.last_used = self._clock
        for piece in reversed(node.entry_slices):
            piece.entry.last_used = self._clock
            if piece.entry in self._memory:
                self._memory.move_to_end(piece.entry)
            if piece.entry.file is not None and self._disk is not None:
                self._disk.touch(piece.entry.file)
        if node in self._unwritten:
            self._unwritten.move_to_end(node)

    def set_entry_slices(self, node: Node, pieces: Sequence[EntrySlice]) -> None:
        """Let these be the node's pieces, and drop entries that no node needs any more."""
        before = [piece.entry for piece in node.entry_slices]
        node.set_entry_slices(pieces)
        for entry in before:
            if not entry.nodes:
                self.remove(entry)
        self.track_unwritten(node)

    def track_unwritten(self, node: Node) -> None:
        """Take note of a node that is new, or has other tokens or pieces than before."""
        filed = (
            node.entry_slices
            and len(node.written_slices) == len(node.entry_slices)
            and node.offloaded_tokens == len(node.tokens)
        )
        if self._disk is None or node.parent is None or filed:
            self._unwritten.pop(node, None)
        else:
            self._unwritten[node] = None

    def offload(self, node: Node) -> None:
        """Save what of a resident node is not on the shelf, as far as the memory may hold it at all."""
        room, pieces = self.memory_budget, list(node.entry_slices)
        for start in range(node.offloaded_tokens, len(node.tokens), self.max_entry_tokens):
            entry = self._save(node, start)
            if (room := room - entry.memory_bytes) < 0:
                break
            self.memory_bytes += entry.memory_bytes
            entry.last_used = node.last_used
            pieces.append(EntrySlice(entry, 0, len(entry.tokens)))
        node.set_entry_slices(pieces)
        # The end of an edge is given up before its start.
        for piece in reversed(node.entry_slices):
            if piece.entry.content is not None:
                self._memory[piece.entry] = None
                self._memory.move_to_end(piece.entry)

    def read(self, entry: OffloadEntry) -> Sequence[SavedTensors] | None:
        """What was saved; None if it cannot be read, and then the entry is lost."""
        if entry.content is not None or entry.file is None or self._disk is None:
            return entry.content
        try:
            content = self._disk.read(entry.file)
            entry.placeholder = self._components.placeholder(content, len(entry.tokens))
            return content
        except InvalidFile as error:
            self._config.report(f"a file of the shelf is refused and deleted: {error}")
        except OSError as error:
            self._config.report(f"a file of the shelf cannot be read: {error}")
        self._delete_file(entry)
        return None

    def remove(self, entry: OffloadEntry) -> None:
        """Remove an entry from memory and disk."""
        if entry in self._memory:
            self._drop_from_memory(entry)
        if entry in self._files:
            self._delete_file(entry)

    def flush(self, budget_bytes: int) -> int:
        """Write what is wanted most and in no file yet, until that many bytes are written; how many were."""
        written, size = 0, 1
        while size and written < budget_bytes and (node := self._next_unwritten()) is not None:
            size = self._write_entry(node)
            written += size
        return written

    def _next_unwritten(self) -> Node | None:
        if self._disk is None or not self._disk.writable or not self._unwritten or self._disk_full_at == self._clock:
            return None
        wanted = next(reversed(self._unwritten))
        return next(node for node in wanted.path() if node in self._unwritten)

    def _write_entry(self, node: Node) -> int:
        """Write the first piece of a node that is in no file; the bytes, 0 if it is not worth it or failed."""
        assert self._disk is not None, "there is somewhere to write"
        filed = node.written_slices
        begin = sum(piece.stop - piece.start for piece in filed)
        fresh = len(filed) == len(node.entry_slices)
        entry = self._save(node, begin) if fresh else node.entry_slices[len(filed)].entry
        assert entry.content is not None, "what is in no file is in memory"
        path = np.concatenate([each.tokens for each in node.path()])
        ends = any(entry.stop == each.stop for each in (node, *entry.nodes))
        stretch = FileHeader(node.salt, entry.start, np.concatenate((path[: entry.start], entry.tokens)), ends)
        data = self._disk.encode(stretch, entry.content)
        if not self._free_disk(len(data), node.last_used):
            self._disk_full_at = self._clock
            return 0
        try:
            entry.file, entry.file_bytes = self._disk.write(data), len(data)
        except OSError as error:
            self._config.report(f"the shelf cannot write to its folder, and pauses: {error}")
            return 0
        entry.last_used = node.last_used
        self._files.add(entry)
        self.disk_bytes += entry.file_bytes
        self.written_tokens += len(entry.tokens)
        if fresh:
            entry.content = None
            node.set_entry_slices([*node.entry_slices, EntrySlice(entry, 0, len(entry.tokens))])
        elif self.memory_bytes > self._config.memory_bytes:
            self._drop_from_memory(entry)
        for each in tuple(entry.nodes):
            self.track_unwritten(each)
        return entry.file_bytes

    def _free_disk(self, size: int, used: int) -> bool:
        """Make room for a file by deleting those that were wanted before it; whether there is any."""
        lacking = self.disk_bytes + size - self._config.disk_bytes
        older = sum(entry.file_bytes for entry in self._files if entry.last_used < used)
        if lacking > older:
            return False
        self._delete_oldest(lacking)
        return True

    def _delete_oldest(self, size: int) -> None:
        """Delete at least so many bytes of files; of one edge's, the last first."""
        goal = self.disk_bytes - size
        for entry in sorted(self._files, key=lambda entry: (entry.last_used, -entry.start)):
            if self.disk_bytes <= goal:
                return
            if entry in self._files:
                self._delete_file(entry)

    def _save(self, node: Node, start: int) -> OffloadEntry:
        """A piece of a resident node's edge from `start` on."""
        stop = min(start + self.max_entry_tokens, len(node.tokens))
        entry = OffloadEntry(node.start + start, node.tokens[start:stop].copy())
        entry.content = self._components.save(self._components.slice(node.references, start, stop))
        entry.placeholder = self._components.placeholder(entry.content, stop - start)
        return entry

    def _drop_from_memory(self, entry: OffloadEntry) -> None:
        """Take an entry out of memory."""
        del self._memory[entry]
        self.memory_bytes -= entry.memory_bytes
        entry.content = None
        if entry.file is None:
            self._on_lost(entry)

    def _delete_file(self, entry: OffloadEntry) -> None:
        """Delete an entry's file."""
        assert self._disk is not None, "there are files"
        assert entry.file is not None, "only what is in a file can be deleted"
        self._disk.delete(entry.file)
        self._files.remove(entry)
        self.disk_bytes -= entry.file_bytes
        entry.file, entry.file_bytes = None, 0
        if entry.content is None:
            self._on_lost(entry)
        else:
            for node in tuple(entry.nodes):
                self.track_unwritten(node)
