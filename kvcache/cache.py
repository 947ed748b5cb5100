"""The shared cache: slots over pools of cells. It keeps the first two of the six laws in ARCHITECTURE.md.

1. Whatever moves a slot leaves it standing at a length at most the one asked for, and returns that length. The caller
   computes what is missing and never asks why.
2. Every forward is a transaction (kvcache/forward.py), and a refused operation has changed nothing.

What a slot computed is passed on by reference. `copy_prefix` gives it to another slot; with the prefix tree in between
these are two steps: `remember` puts it there under its tokens, `recall` gives it to any slot whose tokens begin alike,
whether the one that computed it is still running or long gone.

One thread owns a cache. Between `begin` and `end` of a forward only that forward may use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from kvcache.attention_group import AttentionGroup
from kvcache.component import CacheComponent
from kvcache.components import CacheComponents, shortfall
from kvcache.errors import BadSpan, CacheError
from kvcache.forward import Forward
from kvcache.offload import OffloadConfig
from kvcache.prefix import PrefixCounts, PrefixMatch, PrefixTree
from kvcache.recurrent import RecurrentStates
from kvcache.spec import LayerSpec, Span, group_layers

# A long remembered text gives up cells in pieces of a 64th of all cells, 256 at most: so much less is remembered at
# worst, and 8 running sequences look for cells every 32nd step instead of every step.
_MAX_EVICTION_DIVISOR, _MAX_EVICTION_CELLS = 64, 256


class Cache:
    """Memory for `slots` sequences of up to `capacity` tokens each, in `cells` shared cells.

    layers       one spec an attention layer of the model, in the model's order
    cells        tokens that all sequences may hold together: a cell each, in groups that see everything; groups that
                 see less need fewer cells (GroupSpec.pool_cells). slots x capacity is always enough
    rows         of one forward at most; None: as many as a slot holds
    state_bytes  of recurrent states that may be remembered; None: the model has no recurrent layers
    shelf        where remembered content goes for which there are no cells; None: nowhere
    dtype        how keys and values are stored: any floating type, or int8 (kvcache/kv_buffer.py)

    Errors besides those that a method names: IndexError, there is no such slot; CacheError, a forward is open.
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
        offload: OffloadConfig | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.slots, self.capacity, self.cells = slots, capacity, cells
        specs = group_layers([layer.limited_to(capacity) for layer in layers])
        place = torch.device(device)
        sizes = [
            spec.pool_cells(
                cells, slots=slots, max_batch_tokens=capacity if max_batch_tokens is None else max_batch_tokens
            )
            for spec in specs
        ]
        self._groups = tuple(
            AttentionGroup(spec, slots=slots, capacity=capacity, cells=size, dtype=dtype, device=place)
            for spec, size in zip(specs, sizes, strict=True)
        )
        # Those whose need for cells grows as long as a sequence does.
        self._full_groups = [group for group in self._groups if group.spec.attention_range.kind == "full"]
        self.recurrent_states = None if state_bytes is None else RecurrentStates(slots, state_bytes, place)
        self._components = CacheComponents(
            self._groups if self.recurrent_states is None else (*self._groups, self.recurrent_states)
        )
        self._layer_groups = {
            layer: (group, own) for group in self._groups for own, layer in enumerate(group.spec.layers)
        }
        token_bytes = sum(spec.cell_bytes(dtype) for spec in specs)
        piece = max(min(cells // _MAX_EVICTION_DIVISOR, _MAX_EVICTION_CELLS), 1)
        self._tree = PrefixTree(
            self._components, offload or OffloadConfig(), token_bytes=token_bytes, min_eviction=piece
        )
        self._open_forward: Forward | None = None

    @property
    def free_cells(self) -> int:
        """Tokens by which sequences may grow, together; whether a forward's rows fit at once, `evict_for` says.

        Groups that do not see everything are no limit to that, for their sequences release what they do not see.
        """
        return min((group.pool.free_cells for group in self._full_groups), default=self.cells)

    @property
    def appendable_tokens(self) -> int:
        """Rows for which every group has free cells, whoever they belong to; more of them may need `evict_for`."""
        return min([group.pool.free_cells for group in self._groups], default=self.cells)

    @property
    def groups(self) -> tuple[AttentionGroup, ...]:
        """The groups of attention layers: always the same object."""
        return self._groups

    def cached_length(self, slot: int) -> int:
        """Tokens that the slot holds: the next row goes to this position."""
        self._check_slot(slot)
        standing = self.capacity
        for component in self._components:
            standing = min(standing, component.length(slot))
        return standing

    def copy_prefix(self, source: int, target: int, length: int) -> int:
        """Let `target` hold the first tokens of `source`, which may be running; nothing is copied. Returns the length.

        What `target` held is forgotten. Who knows the tokens but not the slot asks `recall`.
        """
        self._check_idle()
        self._check_slot(target)
        standing = self._resume_length(source, length)
        held = self._components.acquire(source, 0, standing)
        self._components.truncate(target, 0)
        self._components.attach(target, held)
        self._components.release(held)
        return standing

    def rewind(self, slot: int, length: int) -> int:
        """Forget what lies behind `length`. Returns the length at which the slot stands then; ValueError: below 0."""
        self._check_idle()
        standing = self._resume_length(slot, length)
        self._components.truncate(slot, standing)
        return standing

    def clear(self, slot: int) -> None:
        """Forget everything in the slot. Cannot fail."""
        self.rewind(slot, 0)

    def shift(self, slot: int, keep: int, drop: int, *, states: Literal["rebuild", "carry"] = "rebuild") -> int:
        """Forget [keep, keep + drop) and move what follows to its place. Returns the length at which the slot stands.

        That is `length - drop`; where the model cannot be shifted, or a window at the new end would see what is
        released, it is `keep` or less, and the rest must be computed anew.
        Recurrent states cannot forget: they are rebuilt from the tokens that stay, or carried over as they are.
        What is remembered makes room for private copies of shared cells; raises OutOfCells if they do not fit even so,
        ValueError if there is nothing to drop.
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
        """Extend the slot with what is remembered of `tokens`, of which it holds the first ones; its new length.

        As `copy_prefix`: cells are referenced once more, nothing is copied. Only what lies on the shelf alone is read
        into fresh cells. What was remembered under another salt does not exist here.
        """
        self._check_idle()
        return self._tree.extend_slot(slot, self.cached_length(slot), np.asarray(tokens, dtype=np.int64), salt)

    def insert_prefix(self, slot: int, tokens: Sequence[int], *, salt: bytes = b"", checkpoint: bool = False) -> None:
        """Keep what the slot holds for its first `len(tokens)` tokens, which are these, beyond the slot's own life.

        seal  their end is a place worth resuming at: what it takes to go on there is the last to be given up

        Raises ValueError if the slot holds fewer.
        """
        self._check_idle()
        if len(tokens) > self.cached_length(slot):
            raise ValueError(f"slot {slot} holds {self.cached_length(slot)} tokens, not {len(tokens)}")
        self._tree.insert(slot, np.asarray(tokens, dtype=np.int64), salt, checkpoint=checkpoint)

    def match_prefix(self, tokens: Sequence[int], *, salt: bytes = b"") -> PrefixMatch:
        """How many of the tokens are remembered, though `recall` may not be able to go on that far."""
        return self._tree.match(np.asarray(tokens, dtype=np.int64), salt)

    def evict_for(self, spans: Sequence[Span]) -> int:
        """Forget what is remembered and wanted least until the spans fit; the cells still lacking (0: they fit)."""
        self._check_idle()
        self._check_spans(spans)
        return self._evict_until(lambda component: component.check_append(spans))

    def evict(self, cells: int) -> int:
        """Forget what was remembered and is wanted least, until `cells` more are free or no more can be; how many."""
        self._check_idle()
        free = self.free_cells
        self._tree.evict([cells if component in self._full_groups else 0 for component in self._components])
        return self.free_cells - free

    def reset_prefix_cache(self) -> None:
        """Forget all that was remembered: what slots hold is theirs alone then, but for what they share."""
        self._check_idle()
        self._tree.reset()

    def flush_to_disk(self, budget_bytes: int) -> int:
        """Write so much of what is remembered to the shelf's files, most wanted first; the bytes, 0: nothing was left.

        No failure is raised: the shelf reports it, and goes on after a pause.
        """
        self._check_idle()
        return self._tree.offload.flush(budget_bytes)

    @property
    def offloaded_bytes(self) -> tuple[int, int]:
        """What the shelf takes in memory and on disk."""
        return self._tree.offload.memory_bytes, self._tree.offload.disk_bytes

    @property
    def prefix_counts(self) -> PrefixCounts:
        """What became of remembered tokens, since the start."""
        return self._tree.counts

    def evictable_cells(self) -> int:
        """By how much `free_cells` would grow if all were forgotten that belongs to no slot."""
        used = (group.pool.cells - group.pool.free_cells - group.used_by_slots() for group in self._full_groups)
        return min(used, default=0)

    def forward(self, spans: Sequence[Span]) -> Forward:
        """A transaction that appends the rows of the spans, at most one span a slot, each starting where it stands."""
        return Forward(self, spans)

    def layer_group(self, layer: int) -> tuple[AttentionGroup, int]:
        """The group that stores a layer of the model, and the layer's place in it."""
        return self._layer_groups[layer]

    def begin_forward(self, forward: Forward) -> None:
        """Make room for a forward's rows; called by its `with`. Raises BadSpan or OutOfCells, changing nothing."""
        self._check_idle()
        self._check_spans(forward.spans)
        for component in self._components:
            component.check_append(forward.spans)
        for component in self._components:
            component.append(forward.spans)
        self._open_forward = forward

    def end_forward(self, forward: Forward, kept: Mapping[int, int]) -> None:
        """Let every slot of the forward stand at its kept length, or below; called at the end of its `with`."""
        assert self._open_forward is forward, "a forward ends that is not open"
        self._open_forward = None
        for slot, length in kept.items():
            if self.recurrent_states is None and length == self.cached_length(slot):
                continue  # all rows stay, and cells need nothing for that
            self._components.truncate(slot, self._resume_length(slot, length))

    def _evict_until(self, check: Callable[[CacheComponent[Any]], None]) -> int:
        """Forget what is wanted least until a check passes for all components; the cells still lacking."""
        while any(missing := self._missing_cells(check)):
            for component in self._components:
                component.release_out_of_reach()
            if not self._tree.evict(missing):
                return max(self._missing_cells(check))
        return 0

    def _missing_cells(self, check: Callable[[CacheComponent[Any]], None]) -> list[int]:
        """By how many cells each component falls short of what a check asks for."""
        return [shortfall(partial(check, component)) for component in self._components]

    def _resume_length(self, slot: int, length: int) -> int:
        """The deepest length, at most the one asked for, at which the slot can stand."""
        self._check_slot(slot)
        if length < 0:
            raise ValueError(f"a slot cannot stand at {length}")
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
            standing = self.cached_length(span.slot)
            if span.slot in seen or span.start != standing or span.stop > self.capacity:
                raise BadSpan(f"{span} does not continue its slot, which stands at {standing} of {self.capacity}")
            if not 0 <= span.draft_tokens < span.length:
                raise BadSpan(f"{span} needs at least one row that is not guessed")
            if span.bidirectional and not all(
                span.start <= start < stop <= span.stop for start, stop in span.bidirectional
            ):
                raise BadSpan(f"{span} has a mutual range that is not wholly among its rows")
            seen.add(span.slot)
        if not seen:
            raise BadSpan("a forward without spans")
