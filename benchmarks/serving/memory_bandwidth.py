"""The memory bandwidth during a run; it bounds decoding, and on a shared machine it changes by the minute."""

from __future__ import annotations

import time

import torch

BYTES, READS = 1 << 28, 8


class MemoryBandwidth:
    """Reads a block larger than the processor caches, with the threads of the servers.

    rates  bytes per second of each measurement
    """

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        # numpy allocates in huge pages where the system has them; torch does not.
        self._block = torch.from_numpy(torch.zeros(BYTES // 4).numpy().copy())
        self.rates: list[float] = []

    def measure(self) -> None:
        """Add the best rate of a few reads."""
        self.rates.append(max(self._once() for _ in range(READS)))

    def _once(self) -> float:
        began = time.perf_counter()
        self._block.sum()
        return BYTES / (time.perf_counter() - began)
