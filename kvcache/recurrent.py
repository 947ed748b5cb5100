"""The states of recurrent layers (convolutions, scans): what a slot needs to go on besides, or instead of, cells.

A state is a set of tensors that nobody ever writes in place: a forward makes new ones. So a checkpoint is a reference,
sharing is free, and taking back a forward means to go on with the old tensors. Unlike cells, states exist only at
some positions: `resume_length` and `deepest` answer with one of them, and the caller computes the rest.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from kvcache.component import SavedTensors
from kvcache.spec import Span

# One position's tensors, by whatever names the model's operations give them.
RecurrentState: TypeAlias = dict[Hashable, Tensor]

# Checkpoints of a running slot besides those that the prefix tree holds: for forks and rewinds.
_MAX_SLOT_CHECKPOINTS = 8


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The states inside a stretch of `length` tokens, each by the number of tokens before it: 1 to `length`."""

    length: int
    states: dict[int, RecurrentState]

    @property
    def bytes(self) -> int:
        """What the states hold alive, at most: tensors may be shared."""
        return sum(tensor.nbytes for state in self.states.values() for tensor in state.values())


@dataclass(slots=True)
class _SlotStates:
    """One slot: its states by position; the one at 0 is empty, and means zeros."""

    length: int = 0
    states: dict[int, RecurrentState] = field(default_factory=lambda: {0: {}})
    checkpoints: list[int] = field(default_factory=list)


class RecurrentStates:
    """A component (kvcache/component.py): states of all recurrent layers, for all slots.

    budget_bytes  of states that the prefix tree may hold
    device        where loaded states go
    """

    def __init__(self, slots: int, budget_bytes: int, device: torch.device | str = "cpu") -> None:
        self._slots = [_SlotStates() for _ in range(slots)]
        self._budget = budget_bytes
        self._device = torch.device(device)
        self._held_bytes = 0

    def length(self, slot: int) -> int:
        """Tokens that the slot holds."""
        return self._slots[slot].length

    def resume_length(self, slot: int, length: int) -> int:
        """The last position up to `length` that has a state."""
        return max(position for position in self._slots[slot].states if position <= length)

    def get_tensor(self, slot: int, position: int, name: Hashable) -> Tensor | None:
        """One tensor of the state at a position; None means zeros."""
        return self._slots[slot].states[position].get(name)

    def put_tensor(self, slot: int, position: int, name: Hashable, tensor: Tensor) -> None:
        """Store one tensor of the state at a position that the open forward has opened."""
        self._slots[slot].states[position][name] = tensor

    def truncate(self, slot: int, length: int) -> None:
        """Forget everything behind `length`, which must have a state."""
        row = self._slots[slot]
        row.length = length
        row.checkpoints = [mark for mark in row.checkpoints if mark <= length][-_MAX_SLOT_CHECKPOINTS:]
        kept = {0, length, *row.checkpoints}
        row.states = {position: state for position, state in row.states.items() if position in kept}

    def check_append(self, spans: Sequence[Span]) -> None:
        """States need no room in advance."""

    def append(self, spans: Sequence[Span]) -> None:
        """Open a state behind the rows of each span, and before each guess.

        The state before all rows stays until the forward ends.
        """
        for span in spans:
            row = self._slots[span.slot]
            row.length = span.stop
            row.states |= {stop: {} for _, stop in span.state_ranges}
            if span.length > 1 and not span.draft_tokens:
                row.checkpoints.append(span.stop)

    def release_out_of_reach(self) -> None:
        """Nothing to release: besides its last state a slot keeps marks only, for forks and rewinds."""

    def can_shift(self, slot: int, keep: int, drop: int) -> bool:
        """A state has no positions: it stays as it is, having seen what is dropped, for those who want that."""
        return True

    def check_shift(self, slot: int, keep: int, drop: int) -> None:
        """Nothing to check: no state is copied."""

    def shift(self, slot: int, keep: int, drop: int) -> None:
        """Carry the last state over. Those up to `keep` stay, for what they have seen stays; the others go.

        Where no token stays the slot begins anew.
        """
        row = self._slots[slot]
        length = row.length - drop
        states = {position: state for position, state in row.states.items() if position <= keep}
        marks = [mark for mark in row.checkpoints if mark <= keep and mark < length]
        self._slots[slot] = _SlotStates(length, states | {length: row.states[row.length]} | {0: {}}, marks)

    def acquire(self, slot: int, start: int, stop: int) -> Checkpoints:
        """The states that the slot has in (start, stop]."""
        states = self._slots[slot].states
        marks = Checkpoints(stop - start, {at - start: state for at, state in states.items() if start < at <= stop})
        self._held_bytes += marks.bytes
        return marks

    def release(self, references: Checkpoints) -> None:
        """Let go of the states."""
        self._held_bytes -= references.bytes

    def slice(self, references: Checkpoints, start: int, stop: int) -> Checkpoints:
        """The states in (start, stop] of a stretch."""
        return Checkpoints(
            stop - start, {at - start: state for at, state in references.states.items() if start < at <= stop}
        )

    def concat(self, first: Checkpoints, second: Checkpoints) -> Checkpoints:
        """All states of both."""
        later = {first.length + at: state for at, state in second.states.items()}
        return Checkpoints(first.length + second.length, first.states | later)

    def resume_depth(self, ranges: Sequence[tuple[int, Checkpoints]], cached_length: int, length: int) -> int:
        """The last position up to `length` that has a state in the stretches; else where the slot stands."""
        found = (begin + at for begin, held in ranges for at in held.states if begin + at <= length)
        return max(cached_length, *found, 0)

    def attach(self, slot: int, references: Checkpoints) -> None:
        """Append a stretch to the slot: only the last one of a path must end in a state."""
        row = self._slots[slot]
        for at, state in references.states.items():
            row.states[row.length + at] = state
            row.checkpoints.append(row.length + at)
        row.length += references.length

    def freeable(self, references: Checkpoints) -> int:
        """The bytes of the states."""
        return references.bytes

    def unused_by_slots(self, references: Checkpoints) -> int:
        """None: a held state counts wherever it is held, so releasing it always frees its bytes."""
        return 0

    def over_budget(self) -> int:
        """Bytes by which held states exceed their budget."""
        return max(self._held_bytes - self._budget, 0)

    def can_trim(self, references: Checkpoints, start: int) -> bool:
        """Whether there are states before the end."""
        return any(at < references.length for at in references.states)

    def trim(self, references: Checkpoints, start: int) -> Checkpoints:
        """The state at the end."""
        self._held_bytes -= references.bytes
        thin = Checkpoints(
            references.length, {at: state for at, state in references.states.items() if at == references.length}
        )
        self._held_bytes += thin.bytes
        return thin

    def save(self, references: Checkpoints) -> SavedTensors:
        """Every state's tensors under "tokens before it:name", the name as JSON."""
        return {
            f"{at}:{json.dumps(name)}": tensor.to("cpu", copy=True).contiguous()
            for at, state in references.states.items()
            for name, tensor in state.items()
        }

    def check_load(self, content: SavedTensors, start: int, stop: int) -> None:
        """States need no room in advance."""

    def placeholder(self, content: SavedTensors, length: int) -> Checkpoints:
        """Where a saved stretch has states."""
        return Checkpoints(length, {at: {} for at in {int(key.partition(":")[0]) for key in content}})

    def load(self, content: SavedTensors, start: int, stop: int) -> Checkpoints:
        """The states in (start, stop] of a saved stretch."""
        states: dict[int, RecurrentState] = {}
        for key, tensor in content.items():
            at, _, name = key.partition(":")
            if start < int(at) <= stop:
                state = states.setdefault(int(at) - start, {})
                state[_hashable(json.loads(name))] = tensor.to(self._device, copy=True)
        marks = Checkpoints(stop - start, states)
        self._held_bytes += marks.bytes
        return marks


def _hashable(name: object) -> Hashable:
    """A name as it was before JSON made lists of its tuples."""
    return tuple(_hashable(part) for part in name) if isinstance(name, list) else name
