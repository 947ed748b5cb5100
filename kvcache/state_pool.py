"""Recurrent states of running slots in tensors of fixed memory, which a recorded step reads and writes by row.

Each slot has two rows: a step of one token reads one and writes the other, so the state before it is still there if the
step fails.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

# The tensors of one position, by the names that the model's operations choose.
RecurrentState: TypeAlias = Mapping[Hashable, Tensor]


class PooledState(Mapping[Hashable, Tensor]):
    """A state in a row of a pool; its tensors are views, and a later step overwrites them."""

    def __init__(self, tensors: Mapping[Hashable, Tensor], row: int) -> None:
        self._tensors, self.row = tensors, row

    def __getitem__(self, name: Hashable) -> Tensor:
        return self._tensors[name][self.row]

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def copy(self) -> RecurrentState:
        """A copy of the state in separate memory."""
        return dict(zip(self, torch._foreach_clone([*self.values()]), strict=True))


class StatePool:
    """Rows for the states of `slots` slots.

    tensors    by name [rows, ...], from the first state on
    zero_row   of zeros: rows of no sequence read it
    spare_row  rows of no sequence write it
    """

    def __init__(self, slots: int) -> None:
        self.tensors: dict[Hashable, Tensor] = {}
        self.zero_row, self.spare_row = 2 * slots, 2 * slots + 1
        self._states = [PooledState(self.tensors, row) for row in range(2 * slots)]

    @staticmethod
    def rows(slots: int) -> int:
        """Rows of the tensors of a pool."""
        return 2 * slots + 2

    def insert(self, slot: int, state: RecurrentState) -> PooledState:
        """The state in a row of the slot, copied if it is not there yet."""
        if isinstance(state, PooledState):
            return state
        for name in state.keys() - self.tensors.keys():
            self.tensors[name] = state[name].new_zeros(len(self._states) + 2, *state[name].shape)
        pooled = self._states[2 * slot]
        torch._foreach_copy_([pooled[name] for name in state], [*state.values()])
        return pooled

    def other(self, state: PooledState) -> PooledState:
        """The other row of the slot that has a state."""
        return self._states[state.row ^ 1]
