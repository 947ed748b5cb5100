"""The prefix tree: content of running and former slots, found by its tokens.

Each node of a radix tree (kvcache/radix.py) owns references to the cells of its edge in every component: content
outlives its slot and is shared without a copy. A slot whose tokens are in the tree can be extended from it while other
slots run; prompts are inserted chunk by chunk. Content under different salts is never shared. Evicted content goes to
the offload tier (kvcache/offload.py) and is loaded into new cells when it is matched again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcache.component import CacheComponents, ComponentReferences
from kvcache.node import EntrySlice, Node, TokenArray
from kvcache.offload import OffloadConfig, OffloadTier
from kvcache.radix import RadixTree

# Fewer tokens are computed about as fast as a small file is read and verified (1 ms).
MIN_LOAD_TOKENS = 16
# Tokens evicted at once into the offload tier: decoding sequences need a cell or two at a time, far less than an entry.
MIN_OFFLOAD_TOKENS = 256


@dataclass(slots=True)
class PrefixCounts:
    """Totals of cached tokens since the start.

    evicted  evicted from the cells, into the offload tier or for good
    trimmed  on edges reduced to the content needed to resume at their ends, counted once for each component
    loaded   loaded from the offload tier
    written  written to files
    """

    evicted: int = 0
    trimmed: int = 0
    loaded: int = 0
    written: int = 0


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest match of a token sequence.

    diverged  the tree continues after the match, with other tokens
    """

    length: int
    diverged: bool


class PrefixTree:
    """Content of running and former slots by tokens. Owned by the cache.

    token_bytes   upper bound of one token's content
    min_eviction  tokens evicted at once from a long leaf, even if fewer are needed: decoding sequences then find
                  adjacent cells, and eviction runs rarely
    """

    def __init__(
        self, components: CacheComponents, offload: OffloadConfig, *, token_bytes: int, min_eviction: int = 1
    ) -> None:
        self._components, self._min_eviction = components, min_eviction
        self._radix = RadixTree(self._components, offload, token_bytes=token_bytes)
        self._counts = PrefixCounts()
        self._insert_files()

    @property
    def node_count(self) -> int:
        """Nodes of all salts, resident or offloaded."""
        return self._radix.node_count

    @property
    def counts(self) -> PrefixCounts:
        """A copy of the totals."""
        return replace(self._counts, written=self.offload.written_tokens)

    @property
    def offload(self) -> OffloadTier:
        """Content outside the cells."""
        return self._radix.offload

    def extend_slot(self, slot: int, cached_length: int, tokens: TokenArray, salt: bytes) -> int:
        """Extend a slot of `cached_length` tokens, the first of `tokens`, by matched content; its new length."""
        path, depth = self._radix.match(tokens, salt)
        self._radix.touch(path)
        if any(not node.resident for node in path):
            path, depth = self._load_path(path, cached_length, depth)
        goal = self._components.resume_depth([node.start_and_references for node in path], cached_length, depth)
        for node in path:
            start, stop = max(cached_length - node.start, 0), min(goal - node.start, len(node.tokens))
            if start < stop:
                self._components.attach(slot, self._components.slice(node.references, start, stop))
                cached_length = node.start + stop
        self._enforce_budgets()
        return cached_length

    def insert(self, slot: int, tokens: TokenArray, salt: bytes, *, checkpoint: bool = False) -> None:
        """Acquire the slot's content for its first `len(tokens)` tokens; content already in the tree stays.

        checkpoint  the last node ends there for good, so that trimming keeps the content needed to resume at its end
        """
        path, depth = self._radix.match(tokens, salt)
        if path and (checkpoint or depth < len(tokens)):
            path[-1] = self._radix.node_at_end(path, depth, salt)
        for node in path:
            if not node.resident and node.stop <= depth:
                self._radix.make_resident(node, self._components.acquire(slot, node.start, node.stop))
        if path and depth == path[-1].stop:
            self._fill_gaps(slot, path, depth)
        if depth < len(tokens):
            self._insert_tail(slot, path, tokens, salt)
            self._fill_gaps(slot, path, len(tokens))
        if path and checkpoint:
            path[-1].fixed_end = True
        self._radix.touch(path)
        self._enforce_budgets()

    def match(self, tokens: TokenArray, salt: bytes) -> PrefixMatch:
        """The longest match, resident or offloaded, whether or not a slot could resume at its end."""
        path, depth = self._radix.match(tokens, salt)
        continues = bool(path) and (depth < path[-1].stop or bool(path[-1].children))
        return PrefixMatch(depth, diverged=continues and depth < len(tokens))

    def remove(self, salt: bytes) -> None:
        """Remove all content of a salt, in cells, memory and files; slots keep their cells."""
        self._radix.remove_salt(salt)

    def recent_nodes(self, salt: bytes, limit: int) -> list[Node]:
        """Up to `limit` resident nodes of a salt, most recently used first: a node stands before its children."""
        return self._radix.recent_nodes(salt, limit)

    def evict(self, needed: Sequence[int]) -> bool:
        """Evict least recently used content until each component has what it needs; whether anything was freed.

        needed  for each component, in the unit of its `freeable`

        Nodes are trimmed first. Then leaves are evicted, long ones only in part, into the offload tier if there is one.
        Content that a slot uses frees no cell and stays, unless it is below content that can be freed.
        """
        remaining = list(needed)
        self._evict_until_freed(remaining)
        self.offload.enforce_budgets()
        return any(after < before for before, after in zip(needed, remaining, strict=True))

    def reset(self) -> None:
        """Evict all resident content, used by slots or not; offloaded content stays."""
        while self._radix.lru:
            self._offload_node(next(iter(self._radix.lru)))
        self.offload.enforce_budgets()

    def _insert_tail(self, slot: int, path: list[Node], tokens: TokenArray, salt: bytes) -> None:
        """Insert the slot's content after the end of a matched path."""
        above = self._radix.node_at_end(path, path[-1].stop if path else 0, salt)
        start = above.stop
        references = self._components.acquire(slot, start, len(tokens))
        node = self._radix.add_tokens(above, tokens[start:].copy())
        if node is above:
            node.references = self._components.concat(node.references, references)
            self.offload.track_unwritten(node)
            self._radix.add_to_lru(node)
        else:
            self._radix.make_resident(node, references)
            path.append(node)

    def _fill_gaps(self, slot: int, path: Sequence[Node], depth: int) -> None:
        """Replace references with gaps by the slot's own where only the slot can resume at the end of the path."""
        if self._components.resume_length(slot, depth) < depth:
            return
        for node in reversed(path):
            if self._components.resume_depth([path_node.start_and_references for path_node in path], 0, depth) == depth:
                return
            for index, component in enumerate(self._components):
                if (
                    component.resume_depth(
                        [(path_node.start, path_node.references[index]) for path_node in path], 0, depth
                    )
                    < depth
                ):
                    gapped, node.references[index] = (
                        node.references[index],
                        component.acquire(slot, node.start, node.stop),
                    )
                    component.release(gapped)
            self.offload.set_entry_slices(node, [])
            self._radix.add_to_lru(node)

    def _evict_until_freed(self, needed: list[int]) -> None:
        """Trim and evict, counting down `needed`; the offload tier may exceed its budget until it is enforced."""
        self._trim(needed)
        self._evict_leaves(needed)
        while any(count > 0 for count in needed) and (leaf := self._duplicate_leaf(needed)) is not None:
            self._offload_node(leaf)
            self._evict_leaves(needed)

    def _evict_leaves(self, needed: list[int]) -> None:
        """Evict leaves that free anything, or are below content that would, least recently used first."""
        skipped = []
        while any(count > 0 for count in needed) and self._radix.lru:
            leaf = next(iter(self._radix.lru))
            if leaf.resident_children or not self._frees_on_path(leaf, needed):
                del self._radix.lru[leaf]
                skipped.append(leaf)
            else:
                self._evict_tail(leaf, needed)
        for node in reversed(skipped):
            self._radix.lru[node] = None
            self._radix.lru.move_to_end(node, last=False)

    def _frees_on_path(self, leaf: Node, needed: Sequence[int]) -> bool:
        """Whether a leaf or content above it would free anything that is needed."""
        return any(self._components.frees_needed(node.references, needed) for node in reversed(leaf.path()))

    def _duplicate_leaf(self, needed: Sequence[int]) -> Node | None:
        """A leaf with cells that no slot uses, yet none would be freed: another salt has the same cells."""
        unused = self._components.has_unused_cells
        leaves = (node for node in self._radix.lru if not node.resident_children)
        return next((leaf for leaf in leaves if unused(leaf.references, needed)), None)

    def _trim(self, needed: list[int]) -> None:
        """Trim nodes, least recently used first, until each component has what it needs."""
        for index, (component, trimmable) in enumerate(zip(self._components, self._radix.trimmable, strict=True)):
            while needed[index] > 0 and trimmable:
                node, _ = trimmable.popitem(last=False)
                before = component.freeable(node.references[index])
                node.references[index] = component.trim(node.references[index], node.start)
                needed[index] -= before - component.freeable(node.references[index])
                self._counts.trimmed += len(node.tokens)

    def _evict_tail(self, leaf: Node, needed: list[int]) -> None:
        """Evict the needed tokens from the end of a leaf, at least a minimum, or the whole leaf."""
        least = MIN_OFFLOAD_TOKENS if self.offload.enabled else self._min_eviction
        keep = len(leaf.tokens) - max(*needed, least)
        if keep > 0:
            ranges = [node.start_and_references for node in leaf.path()]
            keep = self._components.resume_depth(ranges, 0, leaf.start + keep) - leaf.start
        if keep > 0:
            tail = self._components.slice(leaf.references, keep, len(leaf.tokens))
            if self._components.frees_needed(tail, needed):
                self._radix.lru.move_to_end(self._radix.split(leaf, keep), last=False)
        for index, count in enumerate(self._components.freeable(leaf.references)):
            needed[index] -= count
        self._offload_node(leaf)

    def _offload_node(self, node: Node) -> None:
        """Move a node's content from cells to the offload tier; without one it is lost."""
        if self.offload.enabled:
            node.references = self._components.trim(node.references, node.start)
            self.offload.offload(node)
        self._counts.evicted += len(node.tokens)
        self._components.release(self._radix.take_references(node))
        self._radix.prune(node)

    def _enforce_budgets(self) -> None:
        if any(surplus := self._components.over_budget()):
            self.evict(surplus)

    def _load_path(self, path: list[Node], cached_length: int, depth: int) -> tuple[list[Node], int]:
        """Load the offloaded content of a path as far as it fits; the resident part of the path and its depth.

        The nodes of the path are taken out of the LRU order meanwhile, so that loading does not evict them.
        """
        first = next(index for index, node in enumerate(path) if not node.resident)
        depth = self._loadable_depth(path, cached_length, depth)
        if depth - max(cached_length, path[first].start) < MIN_LOAD_TOKENS:
            return path[:first], min(depth, path[first].start)
        for node in path[:first]:
            del self._radix.lru[node]
        resident = path[:first]
        for node in path[first:]:
            # After an invalid file its node and all below it are no longer in the tree.
            if node.parent is None or depth <= node.start:
                break
            target = self._radix.split(node, depth - node.start) if depth < node.stop else node
            loaded = self._load_node(target)
            if loaded is None:
                break
            del self._radix.lru[loaded]
            resident.append(loaded)
            if loaded is not target:
                break
        for node in resident:
            self._radix.add_to_lru(node)
        self._radix.touch(resident)
        # Enforced only now: earlier, evicted content would displace offloaded content of this path.
        self.offload.enforce_budgets()
        return resident, min(depth, resident[-1].stop if resident else 0)

    def _loadable_depth(self, path: Sequence[Node], cached_length: int, depth: int) -> int:
        """The depth at which a slot could resume if the whole path were resident; `depth` if a file is unread yet."""
        ranges = []
        for node in path:
            if node.resident:
                ranges.append(node.start_and_references)
                continue
            for part in node.entry_slices:
                if part.entry.placeholder is None:
                    return depth
                references = self._components.slice(part.entry.placeholder, part.start, part.stop)
                ranges.append((part.entry.start + part.start, references))
        return self._components.resume_depth(ranges, cached_length, depth)

    def _load_node(self, node: Node) -> Node | None:
        """Load a node's content into cells; tokens that do not fit become a node below. None: no token was loaded."""
        references: ComponentReferences = []
        length = 0
        for part in tuple(node.entry_slices):
            loaded = self._load_slice(part)
            if loaded is None:
                break
            references = self._components.concat(references, loaded) if length else loaded
            length += part.stop - part.start
        if length == 0:
            return None
        if length < len(node.tokens):
            node = self._radix.split(node, length)
        self._radix.make_resident(node, references)
        self._counts.loaded += length
        return node

    def _load_slice(self, part: EntrySlice) -> ComponentReferences | None:
        """A slice's content in new cells, evicting other content; None if it is unreadable or does not fit."""
        content = self.offload.read(part.entry)
        if content is None:
            return None
        self._evict_until_freed(self._components.load_shortfall(content, part.start, part.stop))
        if any(self._components.load_shortfall(content, part.start, part.stop)):
            return None
        try:
            return self._components.load(content, part.start, part.stop)
        except (MemoryError, RuntimeError) as error:
            self.offload.report(f"cached tokens are not loaded ({type(error).__name__})")
            return None

    def _insert_files(self) -> None:
        """Insert the files of earlier processes; files without their prefix, and duplicates, are deleted."""
        files = list(self.offload.scan())
        for file, entry in files:
            tokens, start = file.header.tokens, file.header.start
            path, depth = self._radix.match(tokens, file.header.salt)
            if not start <= depth < len(tokens):
                self.offload.remove(entry)
                continue
            node = self._radix.add_tokens(self._radix.node_at_end(path, depth, file.header.salt), tokens[depth:])
            node.fixed_end = file.header.ends_edge
            slices = [*node.entry_slices, EntrySlice(entry, depth - start, len(tokens) - start)]
            self.offload.set_entry_slices(node, slices)
        for _, entry in sorted(files, key=lambda pair: pair[0].last_used):
            if entry.nodes:
                self._radix.touch(max(entry.nodes, key=lambda node: node.stop).path())
        self.offload.enforce_budgets()
