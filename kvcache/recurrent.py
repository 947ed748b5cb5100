"""The states of recurrent layers (convolutions, scans): what a slot needs to go on besides, or instead of, cells.

A state is a set of tensors that nobody ever writes in place: a forward makes new ones. So a checkpoint is a reference,
sharing is free, and taking back a forward means to go on with the old tensors. Unlike cells, states exist only at
some positions: `standing` and `deepest` answer with one of them, and the caller computes the rest.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from kvcache.component import Content
from kvcache.spec import Span

# One position's tensors, by whatever names the model's operations give them.
State: TypeAlias = dict[Hashable, Tensor]

# Checkpoints of a running slot besides those that the prefix tree holds: for forks and rewinds.
_MOST_MARKS = 8


@dataclass(frozen=True, slots=True)
class Marks:
    """The states inside a stretch of `length` tokens, each by the number of tokens before it: 1 to `length`."""

    length: int
    states: dict[int, State]

    @property
    def bytes(self) -> int:
        """What the states hold alive, at most: tensors may be shared."""
        return sum(tensor.nbytes for state in self.states.values() for tensor in state.values())


@dataclass(slots=True)
class _Row:
    """One slot: its states by position; the one at 0 is empty, and means zeros."""

    length: int = 0
    states: dict[int, State] = field(default_factory=lambda: {0: {}})
    marks: list[int] = field(default_factory=list)


class RecurrentStates:
    """A component (kvcache/component.py): states of all recurrent layers, for all slots.

    budget_bytes  of states that the prefix tree may hold
    device        where loaded states go
    """

    def __init__(self, slots: int, budget_bytes: int, device: torch.device | str = "cpu") -> None:
        self._rows = [_Row() for _ in range(slots)]
        self._budget = budget_bytes
        self._device = torch.device(device)
        self._held = 0

    def length(self, slot: int) -> int:
        """Tokens that the slot holds."""
        return self._rows[slot].length

    def standing(self, slot: int, length: int) -> int:
        """The last position up to `length` that has a state."""
        return max(position for position in self._rows[slot].states if position <= length)

    def state(self, slot: int, position: int, name: Hashable) -> Tensor | None:
        """One tensor of the state at a position; None means zeros."""
        return self._rows[slot].states[position].get(name)

    def put(self, slot: int, position: int, name: Hashable, tensor: Tensor) -> None:
        """Store one tensor of the state at a position that the open forward has opened."""
        self._rows[slot].states[position][name] = tensor

    def truncate(self, slot: int, length: int) -> None:
        """Forget everything behind `length`, which must have a state."""
        row = self._rows[slot]
        row.length = length
        row.marks = [mark for mark in row.marks if mark <= length][-_MOST_MARKS:]
        kept = {0, length, *row.marks}
        row.states = {position: state for position, state in row.states.items() if position in kept}

    def check_append(self, spans: Sequence[Span]) -> None:
        """States need no room in advance."""

    def append(self, spans: Sequence[Span]) -> None:
        """Open a state behind the rows of each span, and before each guess.

        The state before all rows stays until the forward ends.
        """
        for span in spans:
            row = self._rows[span.slot]
            row.length = span.stop
            row.states |= {stop: {} for _, stop in span.pieces}
            if span.length > 1 and not span.guessed:
                row.marks.append(span.stop)

    def shed(self) -> None:
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
        row = self._rows[slot]
        length = row.length - drop
        states = {position: state for position, state in row.states.items() if position <= keep}
        marks = [mark for mark in row.marks if mark <= keep and mark < length]
        self._rows[slot] = _Row(length, states | {length: row.states[row.length]} | {0: {}}, marks)

    def hold(self, slot: int, start: int, stop: int) -> Marks:
        """The states that the slot has in (start, stop]."""
        states = self._rows[slot].states
        marks = Marks(stop - start, {at - start: state for at, state in states.items() if start < at <= stop})
        self._held += marks.bytes
        return marks

    def release(self, held: Marks) -> None:
        """Let go of the states."""
        self._held -= held.bytes

    def part(self, held: Marks, start: int, stop: int) -> Marks:
        """The states in (start, stop] of a stretch."""
        return Marks(stop - start, {at - start: state for at, state in held.states.items() if start < at <= stop})

    def joined(self, first: Marks, second: Marks) -> Marks:
        """All states of both."""
        later = {first.length + at: state for at, state in second.states.items()}
        return Marks(first.length + second.length, first.states | later)

    def deepest(self, stretches: Sequence[tuple[int, Marks]], standing: int, length: int) -> int:
        """The last position up to `length` that has a state in the stretches; else where the slot stands."""
        found = (begin + at for begin, held in stretches for at in held.states if begin + at <= length)
        return max(standing, *found, 0)

    def restore(self, slot: int, held: Marks) -> None:
        """Append a stretch to the slot: only the last one of a path must end in a state."""
        row = self._rows[slot]
        for at, state in held.states.items():
            row.states[row.length + at] = state
            row.marks.append(row.length + at)
        row.length += held.length

    def freeable(self, held: Marks) -> int:
        """The bytes of the states."""
        return held.bytes

    def idle(self, held: Marks) -> int:
        """None: a held state counts wherever it is held, so releasing it always frees its bytes."""
        return 0

    def surplus(self) -> int:
        """Bytes by which held states exceed their budget."""
        return max(self._held - self._budget, 0)

    def thinnable(self, held: Marks, start: int) -> bool:
        """Whether there are states before the end."""
        return any(at < held.length for at in held.states)

    def thin(self, held: Marks, start: int) -> Marks:
        """The state at the end."""
        self._held -= held.bytes
        thin = Marks(held.length, {at: state for at, state in held.states.items() if at == held.length})
        self._held += thin.bytes
        return thin

    def save(self, held: Marks) -> Content:
        """Every state's tensors under "tokens before it:name", the name as JSON."""
        return {
            f"{at}:{json.dumps(name)}": tensor.to("cpu", copy=True).contiguous()
            for at, state in held.states.items()
            for name, tensor in state.items()
        }

    def check_load(self, content: Content, start: int, stop: int) -> None:
        """States need no room in advance."""

    def outline(self, content: Content, length: int) -> Marks:
        """Where a saved stretch has states."""
        return Marks(length, {at: {} for at in {int(key.partition(":")[0]) for key in content}})

    def load(self, content: Content, start: int, stop: int) -> Marks:
        """The states in (start, stop] of a saved stretch."""
        states: dict[int, State] = {}
        for key, tensor in content.items():
            at, _, name = key.partition(":")
            if start < int(at) <= stop:
                state = states.setdefault(int(at) - start, {})
                state[_hashable(json.loads(name))] = tensor.to(self._device, copy=True)
        marks = Marks(stop - start, states)
        self._held += marks.bytes
        return marks


def _hashable(name: object) -> Hashable:
    """A name as it was before JSON made lists of its tuples."""
    return tuple(_hashable(part) for part in name) if isinstance(name, list) else name
