"""States of recurrent layers (convolutions, scans) by slot and position.

A state is a set of tensors that are never written in place: a forward stores new ones. A checkpoint is therefore a
reference, sharing needs no copy, and a rollback returns to the old tensors. Unlike cells, states exist only at some
positions: `resume_length` and `resume_depth` return one of them, and the caller recomputes the tokens after it.

On a device the last states of decoding slots are in a pool (kvcache/state_pool.py), which later steps overwrite; they
are copied out of it when they are acquired.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcache.component import SavedTensors
from kvcache.spec import Span
from kvcache.state_pool import PooledState, RecurrentState, StatePool

# Checkpoints of a running slot, for copies and rewinds; the prefix tree has its own.
_MAX_SLOT_CHECKPOINTS = 8


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The states in a range of `length` tokens, by the number of tokens before each: 1 to `length`."""

    length: int
    states: dict[int, RecurrentState]

    @property
    def bytes(self) -> int:
        """Upper bound of the memory of the states; tensors may be shared."""
        return sum(tensor.nbytes for state in self.states.values() for tensor in state.values())


@dataclass(slots=True)
class _SlotStates:
    """The states of one slot by position; the state at 0 is empty and stands for zeros."""

    length: int = 0
    states: dict[int, RecurrentState] = field(default_factory=lambda: {0: {}})
    checkpoints: list[int] = field(default_factory=list)


class RecurrentStates:
    """CacheComponent of all recurrent layers.

    budget_bytes  of states in the prefix tree
    device        of loaded states
    spacing       minimum tokens between two states of a slot or of a node of the prefix tree, except the last one

    pool  of the slots whose tokens are computed by `token_rows`
    """

    def __init__(self, slots: int, budget_bytes: int, device: torch.device | str = "cpu", *, spacing: int = 1) -> None:
        self._slots = [_SlotStates() for _ in range(slots)]
        self._budget, self._spacing = budget_bytes, spacing
        self._device = torch.device(device)
        self._held_bytes = 0
        self.pool = StatePool(slots)

    def length(self, slot: int) -> int:
        """Tokens in the slot."""
        return self._slots[slot].length

    def resume_length(self, slot: int, length: int) -> int:
        """The last position up to `length` that has a state."""
        return max(position for position in self._slots[slot].states if position <= length)

    def get_tensor(self, slot: int, position: int, name: Hashable) -> Tensor | None:
        """One tensor of the state at a position; None stands for zeros."""
        return self._slots[slot].states[position].get(name)

    def put_tensor(self, slot: int, position: int, name: Hashable, tensor: Tensor) -> None:
        """Store one tensor of the state at a position created by `append`."""
        state = self._slots[slot].states[position]
        assert isinstance(state, dict), "a state in the pool is written by its row"
        state[name] = tensor

    def token_rows(self, spans: Sequence[Span]) -> NDArray[np.int64]:
        """The rows of the pool [2, spans] that the tokens of spans read and write.

        The spans have been appended, and have one token each that is not the first of its slot.
        """
        rows = np.empty((2, len(spans)), np.int64)
        for index, span in enumerate(spans):
            states = self._slots[span.slot].states
            before = self.pool.insert(span.slot, states[span.start])
            states[span.stop] = after = self.pool.other(before)
            rows[:, index] = before.row, after.row
        return rows

    def truncate(self, slot: int, length: int) -> None:
        """Release the states after `length`, which must have a state."""
        slot_states = self._slots[slot]
        slot_states.length = length
        slot_states.checkpoints = [position for position in slot_states.checkpoints if position <= length][
            -_MAX_SLOT_CHECKPOINTS:
        ]
        kept = {0, length, *slot_states.checkpoints}
        slot_states.states = {position: state for position, state in slot_states.states.items() if position in kept}

    def check_append(self, spans: Sequence[Span]) -> None:
        """Never raises: states are not allocated in advance."""

    def append(self, spans: Sequence[Span]) -> None:
        """Create an empty state after each span and before each of its draft tokens.

        The state before the span is kept until the forward ends.
        """
        for span in spans:
            slot_states = self._slots[span.slot]
            slot_states.length = span.stop
            slot_states.states |= {stop: {} for _, stop in span.state_ranges}
            if span.length > 1 and not span.draft_tokens:
                if self._is_too_close(slot_states.checkpoints):
                    slot_states.checkpoints.pop()
                slot_states.checkpoints.append(span.stop)

    def release_out_of_reach(self) -> None:
        """Nothing to release: besides its last state a slot has checkpoints only."""

    def can_shift(self, slot: int, keep: int, drop: int) -> bool:
        """True: the last state is carried over unchanged; it still contains the dropped tokens."""
        return True

    def check_shift(self, slot: int, keep: int, drop: int) -> None:
        """Never raises: no state is copied."""

    def shift(self, slot: int, keep: int, drop: int) -> None:
        """Carry the last state over; states up to `keep` stay, all others are released.

        A slot without remaining tokens starts from zeros.
        """
        slot_states = self._slots[slot]
        length = slot_states.length - drop
        states = {position: state for position, state in slot_states.states.items() if position <= keep}
        checkpoints = [position for position in slot_states.checkpoints if position <= keep and position < length]
        self._slots[slot] = _SlotStates(
            length, states | {length: slot_states.states[slot_states.length]} | {0: {}}, checkpoints
        )

    def acquire(self, slot: int, start: int, stop: int) -> Checkpoints:
        """The slot's states in (start, stop]."""
        states = self._slots[slot].states
        for position, state in states.items():
            if start < position <= stop and isinstance(state, PooledState):
                states[position] = state.copy()
        acquired = Checkpoints(
            stop - start, {position - start: state for position, state in states.items() if start < position <= stop}
        )
        self._held_bytes += acquired.bytes
        return acquired

    def release(self, references: Checkpoints) -> None:
        """Release acquired states."""
        self._held_bytes -= references.bytes

    def slice(self, references: Checkpoints, start: int, stop: int) -> Checkpoints:
        """The states in (start, stop] of a range."""
        states = references.states.items()
        return Checkpoints(
            stop - start, {position - start: state for position, state in states if start < position <= stop}
        )

    def concat(self, first: Checkpoints, second: Checkpoints) -> Checkpoints:
        """The states of two adjacent ranges.

        The state at the end of the first is released if it is too close to the one before it and the second range ends
        at a state.
        """
        earlier = dict(first.states)
        if first.length in earlier and second.length in second.states and self._is_too_close(sorted(earlier)):
            self._held_bytes -= Checkpoints(first.length, {first.length: earlier.pop(first.length)}).bytes
        later = {first.length + position: state for position, state in second.states.items()}
        return Checkpoints(first.length + second.length, earlier | later)

    def resume_depth(self, ranges: Sequence[tuple[int, Checkpoints]], cached_length: int, length: int) -> int:
        """The last position up to `length` that has a state in the ranges; else `cached_length`."""
        positions = (
            begin + position for begin, part in ranges for position in part.states if begin + position <= length
        )
        return max(cached_length, *positions, 0)

    def attach(self, slot: int, references: Checkpoints) -> None:
        """Append a range to the slot; the last range of a path must end at a state."""
        slot_states = self._slots[slot]
        for position, state in references.states.items():
            slot_states.states[slot_states.length + position] = state
            slot_states.checkpoints.append(slot_states.length + position)
        slot_states.length += references.length

    def freeable(self, references: Checkpoints) -> int:
        """Bytes of the states."""
        return references.bytes

    def unused_by_slots(self, references: Checkpoints) -> int:
        """0: the budget counts every acquired state, so that a release always frees its bytes."""
        return 0

    def over_budget(self) -> int:
        """Bytes by which acquired states exceed the budget."""
        return max(self._held_bytes - self._budget, 0)

    def can_trim(self, references: Checkpoints, start: int) -> bool:
        """Whether there are states before the end of the range."""
        return any(position < references.length for position in references.states)

    def trim(self, references: Checkpoints, start: int) -> Checkpoints:
        """Release all states but the one at the end of the range."""
        self._held_bytes -= references.bytes
        last = {position: state for position, state in references.states.items() if position == references.length}
        trimmed = Checkpoints(references.length, last)
        self._held_bytes += trimmed.bytes
        return trimmed

    def save(self, references: Checkpoints) -> SavedTensors:
        """The tensors of all states, by "tokens before it:name" with the name as JSON."""
        return {
            f"{position}:{json.dumps(name)}": tensor.clone(memory_format=torch.contiguous_format)
            for position, state in references.states.items()
            for name, tensor in state.items()
        }

    def check_load(self, content: SavedTensors, start: int, stop: int) -> None:
        """Never raises: states are not allocated in advance."""

    def placeholder(self, content: SavedTensors, length: int) -> Checkpoints:
        """Empty states at the positions of the saved ones."""
        return Checkpoints(length, {position: {} for position in {int(key.partition(":")[0]) for key in content}})

    def load(self, content: SavedTensors, start: int, stop: int) -> Checkpoints:
        """The states in (start, stop] of a saved range."""
        states: dict[int, dict[Hashable, Tensor]] = {}
        for key, tensor in content.items():
            position, _, name = key.partition(":")
            if start < int(position) <= stop:
                state = states.setdefault(int(position) - start, {})
                state[_hashable(json.loads(name))] = tensor.to(self._device, copy=True)
        loaded = Checkpoints(stop - start, {**states})
        self._held_bytes += loaded.bytes
        return loaded

    def _is_too_close(self, positions: Sequence[int]) -> bool:
        """Whether the last of ascending positions is closer than the spacing to its predecessor, or to 0."""
        return bool(positions) and positions[-1] - (positions[-2] if len(positions) > 1 else 0) < self._spacing


def _hashable(name: object) -> Hashable:
    """A name read from JSON, with its lists as tuples again."""
    return tuple(_hashable(part) for part in name) if isinstance(name, list) else name
