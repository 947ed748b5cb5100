"""How fast memory is read now: one token waits for it, and on a shared machine it changes by the minute."""

from __future__ import annotations

import time

import torch

BYTES, TURNS = 1 << 28, 8


class Reading:
    """Reads a block that no processor cache holds, with as many threads as the servers that are measured.

    rates  what was read, bytes a second, one for each time it was asked
    """

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        # numpy's memory lies in huge pages where the system grants any; torch's does not.
        self._block = torch.from_numpy(torch.zeros(BYTES // 4).numpy().copy())
        self.rates: list[float] = []

    def ask(self) -> None:
        """Read, a few times, and keep the best: a pause of the machine says nothing of its memory."""
        self.rates.append(max(self._once() for _ in range(TURNS)))

    def _once(self) -> float:
        began = time.perf_counter()
        self._block.sum()
        return BYTES / (time.perf_counter() - began)
