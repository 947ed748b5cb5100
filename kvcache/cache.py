"""The KV cache: slots over pools of reference-counted cells, and a prefix tree for reuse between slots.

1. An operation on a slot (copy, rewind, shift, reuse) returns the cached length that it reached, which may be less than
   the length asked for; the caller computes the missing tokens.
2. Every forward is a transaction (kvcache/forward.py), and a refused operation has changed nothing.

Reuse shares cells by reference. `copy_prefix` shares them between two slots. `insert_prefix` puts a slot's cells into
the prefix tree under their tokens; `reuse_prefix` attaches them to any slot that begins with the same tokens, whether
the slot that computed them still runs or has been cleared.

One thread owns a cache. While a forward is open, no other operation may run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from kvcache.attention_group import AttentionGroup
from kvcache.cell_pool import CellArray
from kvcache.component import CacheComponent, CacheComponents, shortfall
from kvcache.errors import BadSpan, CacheError
from kvcache.forward import Forward
from kvcache.node import Node
from kvcache.offload import OffloadConfig
from kvcache.prefix import PrefixCounts, PrefixMatch, PrefixTree
from kvcache.recurrent import RecurrentStates
from kvcache.snapshot import PrefixNode
from kvcache.spec import LayerSpec, Span, group_layers

# Tokens evicted at once from a long leaf: a 64th of all cells, up to 256. Eviction then runs every 32nd step of 8
# decoding sequences instead of every step, and at most 256 cached tokens are lost early.
_EVICTION_SHARE, _MAX_EVICTION_TOKENS = 64, 256


class Cache:
    """KV cache for `slots` sequences of up to `capacity` tokens each.

    layers            one spec for each attention layer of the model, in the model's order
    cells             tokens of all sequences together, one cell each in groups with full attention; groups with a
                      window need fewer (GroupSpec.pool_cells). slots x capacity is always enough
    max_batch_tokens  tokens of one forward; None: capacity
    state_bytes       of recurrent states in the prefix tree; None: the model has no recurrent layers
    state_spacing     minimum tokens between two of its recurrent states, besides the ends of prompts and answers
    offload           host memory and disk for evicted prefixes; None: neither
    dtype             storage of keys and values: any floating type, or int8 (kvcache/kv_buffer.py)
    on_move           called with (group, old cells, new cells, distance) before a shift moves keys

    Besides the errors named by a method: IndexError for a slot that does not exist, CacheError while a forward is open.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        *,
        slots: int,
        capacity: int,
        cells: int,
        max_batch_tokens: int | None = None,
        state_bytes: int | None = None,
        state_spacing: int = 1,
        offload: OffloadConfig | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        on_move: Callable[[int, CellArray, CellArray, int], None] | None = None,
    ) -> None:
        self.slots, self.capacity, self.cells = slots, capacity, cells
        specs = group_layers([layer.limited_to(capacity) for layer in layers])
        target, max_tokens = torch.device(device), capacity if max_batch_tokens is None else max_batch_tokens
        sizes = [spec.pool_cells(cells, slots=slots, max_batch_tokens=max_tokens) for spec in specs]
        self._groups = tuple(
            AttentionGroup(
                spec,
                slots=slots,
                capacity=capacity,
                cells=size,
                dtype=dtype,
                device=target,
                on_move=None if on_move is None else partial(on_move, index),
            )
            for index, (spec, size) in enumerate(zip(specs, sizes, strict=True))
        )
        self._full_groups = [group for group in self._groups if group.spec.attention_range.kind == "full"]
        self.recurrent_states = (
            None if state_bytes is None else RecurrentStates(slots, state_bytes, target, spacing=state_spacing)
        )
        self._components = CacheComponents(
            self._groups if self.recurrent_states is None else (*self._groups, self.recurrent_states)
        )
        self._layer_groups = {
            layer: (group, group_layer) for group in self._groups for group_layer, layer in enumerate(group.spec.layers)
        }
        token_bytes = sum(spec.cell_bytes(dtype) for spec in specs)
        min_eviction = max(min(cells // _EVICTION_SHARE, _MAX_EVICTION_TOKENS), 1)
        self._tree = PrefixTree(
            self._components, offload or OffloadConfig(), token_bytes=token_bytes, min_eviction=min_eviction
        )
        self._open_forward: Forward | None = None

    @property
    def free_cells(self) -> int:
        """Tokens by which all sequences together may grow.

        Groups with full attention alone count: in all others a growing sequence releases the cells out of its window.
        """
        return min((group.pool.free_cells for group in self._full_groups), default=self.cells)

    @property
    def appendable_tokens(self) -> int:
        """Tokens that fit the free cells of every group now, in any slot; a larger batch may need `evict_for`."""
        return min([group.pool.free_cells for group in self._groups], default=self.cells)

    @property
    def groups(self) -> tuple[AttentionGroup, ...]:
        """The groups of attention layers: always the same object."""
        return self._groups

    def cached_length(self, slot: int) -> int:
        """Tokens in the slot: the position of the next token."""
        self._check_slot(slot)
        return min([self.capacity, *[component.length(slot) for component in self._components]])

    def copy_prefix(self, source: int, target: int, length: int) -> int:
        """Replace the content of `target` by the first tokens of `source`, sharing its cells. Returns the length.

        The source may be running. `reuse_prefix` does the same by tokens instead of by slot.
        """
        self._check_idle()
        self._check_slot(target)
        resumed = self._resume_length(source, length)
        references = self._components.acquire(source, 0, resumed)
        self._components.truncate(target, 0)
        self._components.attach(target, references)
        self._components.release(references)
        return resumed

    def rewind(self, slot: int, length: int) -> int:
        """Truncate the slot to at most `length` tokens. Returns its new length; ValueError if `length` is negative."""
        self._check_idle()
        resumed = self._resume_length(slot, length)
        self._components.truncate(slot, resumed)
        return resumed

    def clear(self, slot: int) -> None:
        """Remove all tokens of the slot. Never fails."""
        self.rewind(slot, 0)

    def shift(self, slot: int, keep: int, drop: int, *, states: Literal["rebuild", "carry"] = "rebuild") -> int:
        """Remove the tokens [keep, keep + drop) and move the tokens after them. Returns the slot's new length.

        The new length is `length - drop`. It is `keep` or less, and the rest must be recomputed, if the model cannot be
        shifted, if a window at the new end would include released cells, or with `states="rebuild"` if the model has
        recurrent layers: their states cannot drop tokens. `states="carry"` keeps the last state, which still contains
        the dropped tokens.

        Cached prefixes are evicted for private copies of shared cells. Raises OutOfCells if that is not enough,
        ValueError if there are no tokens to drop.
        """
        self._check_idle()
        length = self.cached_length(slot)
        if keep < 0 or drop < 1 or keep + drop > length:
            raise ValueError(f"cannot drop [{keep}, {keep + drop}) of {length} tokens")
        rebuilt = self.recurrent_states is not None and states == "rebuild"
        if rebuilt or not all(component.can_shift(slot, keep, drop) for component in self._components):
            return self.rewind(slot, keep)
        self._evict_until(lambda component: component.check_shift(slot, keep, drop))
        for component in self._components:
            component.check_shift(slot, keep, drop)
        for component in self._components:
            component.shift(slot, keep, drop)
        return length - drop

    def reuse_prefix(self, slot: int, tokens: Sequence[int], *, salt: bytes = b"") -> int:
        """Extend the slot, which holds the first of `tokens`, by cells of the prefix tree. Returns its new length.

        Cells are shared by reference; offloaded content is loaded into new cells. Content inserted under another salt
        is never found.
        """
        self._check_idle()
        return self._tree.extend_slot(slot, self.cached_length(slot), np.asarray(tokens, dtype=np.int64), salt)

    def insert_prefix(self, slot: int, tokens: Sequence[int], *, salt: bytes = b"", checkpoint: bool = False) -> None:
        """Add the slot's first `len(tokens)` tokens, which are `tokens`, to the prefix tree.

        checkpoint  their end is a likely resume point (end of a message); trimming keeps the content needed there

        Raises ValueError if the slot has fewer tokens.
        """
        self._check_idle()
        if len(tokens) > self.cached_length(slot):
            raise ValueError(f"slot {slot} holds {self.cached_length(slot)} tokens, not {len(tokens)}")
        self._tree.insert(slot, np.asarray(tokens, dtype=np.int64), salt, checkpoint=checkpoint)

    def remove_prefixes(self, salt: bytes) -> None:
        """Remove all content of a salt from the prefix tree and its files; slots keep their cells."""
        self._check_idle()
        self._tree.remove(salt)

    def match_prefix(self, tokens: Sequence[int], *, salt: bytes = b"") -> PrefixMatch:
        """The longest match in the prefix tree; `reuse_prefix` may reach less."""
        return self._tree.match(np.asarray(tokens, dtype=np.int64), salt)

    def prefix_nodes(self, salt: bytes, limit: int) -> list[PrefixNode]:
        """Up to `limit` resident nodes of the prefix tree, most recently used first: a node stands before its children.

        Slots are found by the cells of layers with full attention; without such layers `slots` is empty.
        """
        return [self._prefix_node(node) for node in self._tree.recent_nodes(salt, limit)]

    def evict_for(self, spans: Sequence[Span]) -> int:
        """Evict cached prefixes, least recently used first, until the spans fit; the missing cells (0: they fit)."""
        self._check_idle()
        self._check_spans(spans)
        return self._evict_until(lambda component: component.check_append(spans))

    def evict(self, cells: int) -> int:
        """Evict cached prefixes, least recently used first, until `cells` more are free; the cells freed."""
        self._check_idle()
        free = self.free_cells
        self._tree.evict([cells if component in self._full_groups else 0 for component in self._components])
        return self.free_cells - free

    def reset_prefix_cache(self) -> None:
        """Evict all cached prefixes; slots keep their cells."""
        self._check_idle()
        self._tree.reset()

    def flush_to_disk(self, budget_bytes: int) -> int:
        """Write up to about `budget_bytes` of cached prefixes to files, most recently used first; the bytes written.

        0: there was nothing to write. Failures are reported through OffloadConfig.report and retried after a pause.
        """
        self._check_idle()
        return self._tree.offload.flush(budget_bytes)

    @property
    def offloaded_bytes(self) -> tuple[int, int]:
        """Offloaded bytes in host memory and on disk."""
        return self._tree.offload.memory_bytes, self._tree.offload.disk_bytes

    @property
    def prefix_counts(self) -> PrefixCounts:
        """Totals of evicted, trimmed, loaded and written tokens."""
        return self._tree.counts

    def evictable_cells(self) -> int:
        """Cells that `reset_prefix_cache` would free."""
        used = (group.pool.cells - group.pool.free_cells - group.used_by_slots() for group in self._full_groups)
        return min(used, default=0)

    def forward(self, spans: Sequence[Span]) -> Forward:
        """A transaction that appends the tokens of the spans: at most one span a slot, at the slot's cached length."""
        return Forward(self, spans)

    def layer_group(self, layer: int) -> tuple[AttentionGroup, int]:
        """The group of a model layer, and the layer's index in the group."""
        return self._layer_groups[layer]

    def begin_forward(self, forward: Forward) -> None:
        """Allocate cells for a forward; called by its `with`. Raises BadSpan or OutOfCells, changing nothing."""
        self._check_idle()
        self._check_spans(forward.spans)
        for component in self._components:
            component.check_append(forward.spans)
        try:
            for component in self._components:
                component.append(forward.spans)
        except (MemoryError, RuntimeError):
            for span in forward.spans:
                self._components.truncate(span.slot, span.start)
            raise
        self._open_forward = forward

    def end_forward(self, forward: Forward, kept: Mapping[int, int]) -> None:
        """Truncate each slot of the forward to its kept length or less; called at the end of its `with`."""
        assert self._open_forward is forward, "the forward that ends is not open"
        self._open_forward = None
        for slot, length in kept.items():
            if self.recurrent_states is None and length == self.cached_length(slot):
                continue  # all tokens stay, and there are no states to release
            self._components.truncate(slot, self._resume_length(slot, length))

    def _prefix_node(self, node: Node) -> PrefixNode:
        assert node.parent is not None, "a root is not resident"
        parent = None if node.parent.parent is None else node.parent.id
        slots: tuple[int, ...] = ()
        if self._full_groups:
            group = self._full_groups[0]
            cells = node.references[self._components.index(group)]
            slots = group.slots_with(int(cells[0]), node.start)
        return PrefixNode(node.id, parent, node.start, len(node.tokens), slots)

    def _evict_until(self, check: Callable[[CacheComponent[Any]], None]) -> int:
        """Evict cached prefixes until a check passes for all components; the missing cells."""
        while any(missing := self._missing_cells(check)):
            for component in self._components:
                component.release_out_of_reach()
            if not self._tree.evict(missing):
                return max(self._missing_cells(check))
        return 0

    def _missing_cells(self, check: Callable[[CacheComponent[Any]], None]) -> list[int]:
        """The missing cells of each component for a check."""
        return [shortfall(partial(check, component)) for component in self._components]

    def _resume_length(self, slot: int, length: int) -> int:
        """The largest length up to `length` at which the slot can resume."""
        self._check_slot(slot)
        if length < 0:
            raise ValueError(f"a slot cannot be cut to {length} tokens")
        return self._components.resume_length(slot, length)

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.slots:
            raise IndexError(f"no slot {slot}: there are {self.slots}")

    def _check_idle(self) -> None:
        if self._open_forward is not None:
            raise CacheError("a forward is open")

    def _check_spans(self, spans: Sequence[Span]) -> None:
        seen: set[int] = set()
        for span in spans:
            length = self.cached_length(span.slot)
            if span.slot in seen or span.start != length or span.stop > self.capacity:
                raise BadSpan(f"{span} does not continue its slot, which has {length} of {self.capacity} tokens")
            if not 0 <= span.draft_tokens < span.length:
                raise BadSpan(f"{span} needs at least one token that is no draft")
            if span.bidirectional and not all(
                span.start <= start < stop <= span.stop for start, stop in span.bidirectional
            ):
                raise BadSpan(f"{span} has a bidirectional range that is not wholly inside")
            seen.add(span.slot)
        if not seen:
            raise BadSpan("a forward without spans")
