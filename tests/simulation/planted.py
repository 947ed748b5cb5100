"""Defects to plant in the product, each a patch: the simulation has to find every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from engine.core import Core
from engine.sample.penalties import PenaltyHistory
from engine.schedule.fairness import Fairness
from engine.schedule.scheduled import ScheduledSequence
from engine.schedule.sequence import Sequence
from engine.schedule.slots import Slots
from engine.types.events import Delta
from kvcache.attention_group import AttentionGroup
from kvcache.cell_pool import CellPool
from kvcache.forward import Forward
from kvcache.radix import RadixTree
from kvcache.recurrent import RecurrentStates


def _match_too_long(original: Callable) -> Callable:
    """A match of a prefix is one token too long where an edge differs."""

    def match(self: RadixTree, tokens: Any, salt: bytes) -> Any:
        path, depth = original(self, tokens, salt)
        longer = path and depth < min(path[-1].stop, len(tokens))
        return path, depth + 1 if longer else depth

    return match


def _match_other_salt(original: Callable) -> Callable:
    """The salt is ignored where prefixes are searched."""

    def match(self: RadixTree, tokens: Any, salt: bytes) -> Any:
        return max((original(self, tokens, root) for root in [salt, *self.roots]), key=lambda found: found[1])

    return match


def _abort_leaks(original: Callable) -> Callable:
    """The last cell of a slot that is cleared keeps its reference."""

    def truncate(self: AttentionGroup, slot: int, length: int) -> None:
        if length == 0 and self._lengths[slot] > 1:
            self._lengths[slot] -= 1
        original(self, slot, length)

    return truncate


def _keep_extra_draft(original: Callable) -> Callable:
    """One rejected draft token stays in the cache."""

    def keep(self: Forward, slot: int, length: int) -> None:
        stop = next(span.stop for span in self.spans if span.slot == slot)
        original(self, slot, min(length + 1, stop))

    return keep


def _rewind_too_little(original: Callable) -> Callable:
    """A slot that is shortened keeps one cell too many."""

    def truncate(self: AttentionGroup, slot: int, length: int) -> None:
        original(self, slot, length + 1 if 0 < length < self._lengths[slot] - 1 else length)

    return truncate


def _rotate_too_far(original: Callable) -> Callable:
    """A shift rotates keys by one position too many."""
    return lambda self, old, new, distance: original(self, old, new, distance - 1)


def _shift_writes_shared(original: Callable) -> Callable:
    """A shift rotates shared cells in place."""
    return lambda self, cells: cells.copy()


def _resend(original: Callable) -> Callable:
    """A preempted sequence sends its last token again."""

    def on_slot_assigned(self: Core, sequence: Sequence, cached_length: int) -> None:
        original(self, sequence, cached_length)
        if sequence.output and sequence.request.id in self._sequences:
            self._emit(sequence, Delta("", (sequence.output[-1],)))

    return on_slot_assigned


def _noise_by_computed(original: Callable) -> Callable:
    """After a hit in the prefix cache noise is that of another position."""

    def sampling_context(self: Sequence) -> Any:
        context = original(self)
        return replace(context, position=context.position - (self.stats.cached_tokens or 0))

    return sampling_context


def _sample_before_end(original: Any) -> Any:
    """The chunk before the last token of a prompt is sampled."""
    return property(lambda self: self.span.stop >= len(self.sequence.tokens) - 1)


def _evict_twice(original: Callable) -> Callable:
    """Eviction drops the references of slots too."""

    def take_references(self: RadixTree, node: Any) -> Any:
        references = original(self, node)
        for component, held in zip(self._components, references, strict=True):
            if isinstance(component, AttentionGroup):
                component.release(held[component.pool.reference_counts[held] > 1])
        return references

    return take_references


def _free_slot_twice(original: Callable) -> Callable:
    """A slot is freed twice if it is empty."""

    def release(self: Slots, slot: int) -> None:
        is_empty = self._cache.cached_length(slot) == 0
        original(self, slot)
        if is_empty:
            self._free.append(slot)

    return release


def _attach_without_reference(original: Callable) -> Callable:
    """Reused cells get no reference of the slot."""

    def attach(self: AttentionGroup, slot: int, references: Any) -> None:
        with patch.object(CellPool, "share", lambda self, cells: None):
            original(self, slot, references)

    return attach


def _keep_members(original: Callable) -> Callable:
    """A request that leaves the queue still counts in the shares of its owner."""

    def remove(self: Fairness, sequence: Sequence) -> None:
        if sequence.has_started:
            original(self, sequence)

    return remove


def _count_unqueued(original: Callable) -> Callable:
    """A request that could not be queued counts in the shares of its owner."""

    def add(self: Fairness, sequence: Sequence) -> None:
        self._owners.add(sequence.owner)
        self._requests.add(sequence.group)

    return add


def _count_rejected(original: Callable) -> Callable:
    """Penalties count rejected draft tokens."""

    def after(self: PenaltyHistory, tokens: Any) -> PenaltyHistory:
        if tokens and not self.inactive:
            self.append(tokens[-1])
        return original(self, tokens)

    return after


def _window_too_small(original: Callable) -> Callable:
    """A window releases the cell that the next token still attends to."""

    def release(self: AttentionGroup, slot: int, start: int) -> None:
        original(self, slot, start + 1 if self.spec.attention_range.kind == "window" and start else start)

    return release


def _finish_twice(original: Callable) -> Callable:
    """A request that ends by its length ends twice."""

    def finish(self: Core, sequence: Sequence, reason: str, *args: Any) -> None:
        original(self, sequence, reason, *args)
        if reason == "length":
            self._events.append(self._events[-1])

    return finish


def _state_of_draft(original: Callable) -> Callable:
    """The recurrent state after rejected draft tokens is kept."""

    def truncate(self: RecurrentStates, slot: int, length: int) -> None:
        states = self._slots[slot].states
        if 0 < length < self._slots[slot].length and max(states) == self._slots[slot].length:
            states[length] = states[max(states)]
        original(self, slot, length)

    return truncate


def _evict_nothing(original: Callable) -> Callable:
    """A node that is evicted keeps its references."""

    def take_references(self: RadixTree, node: Any) -> Any:
        references = original(self, node)
        for component, held in zip(self._components, references, strict=True):
            if isinstance(component, AttentionGroup):
                component.pool.share(held[held >= 0])
        return references

    return take_references


# By name: class, attribute, and what it is replaced by.
DEFECTS: dict[str, tuple[type, str, Callable]] = {
    "prefix match one token too long": (RadixTree, "match", _match_too_long),
    "salt ignored": (RadixTree, "match", _match_other_salt),
    "cleared slot keeps a reference": (AttentionGroup, "truncate", _abort_leaks),
    "rejected draft token stays": (Forward, "keep", _keep_extra_draft),
    "stale cell after a rewind": (AttentionGroup, "truncate", _rewind_too_little),
    "wrong rotation after a shift": (AttentionGroup, "move_cells", _rotate_too_far),
    "shift writes shared cells": (AttentionGroup, "_private_copies", _shift_writes_shared),
    "preempted output sent again": (Core, "_on_slot_assigned", _resend),
    "noise of another position after a hit": (Sequence, "sampling_context", _noise_by_computed),
    "chunk before the last token is sampled": (ScheduledSequence, "is_complete", _sample_before_end),
    "eviction of cells in use": (RadixTree, "take_references", _evict_twice),
    "eviction leaks cells": (RadixTree, "take_references", _evict_nothing),
    "slot freed twice": (Slots, "release", _free_slot_twice),
    "reused cells without a reference": (AttentionGroup, "attach", _attach_without_reference),
    "aborted request counts in the shares": (Fairness, "remove", _keep_members),
    "unqueued request counts in the shares": (Fairness, "add", _count_unqueued),
    "penalties count rejected drafts": (PenaltyHistory, "after", _count_rejected),
    "window one cell too small": (AttentionGroup, "_release_slot_out_of_reach", _window_too_small),
    "request ends twice": (Core, "_finish", _finish_twice),
    "recurrent state of a rejected draft": (RecurrentStates, "truncate", _state_of_draft),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a defect."""
    owner, attribute, make = DEFECTS[name]
    with patch.object(owner, attribute, make(owner.__dict__[attribute])):
        yield
