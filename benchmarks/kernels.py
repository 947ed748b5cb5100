"""Measures attention on the CPU: the C++ kernel against torch operations, both through the same pool.

    python -m benchmarks.kernels [--dtype float32] [--variant avx2] [--rounds 15]

Both sides take turns, call by call, because a machine is rarely quiet: the ratio is that of their medians, the time the
least. Calls go round the layers of a pool that no processor cache holds. GB/s are bytes of keys and values that a call
has to read once, over the least time. What a call cannot be faster than is the time in which torch.sum reads as many
bytes, or torch multiplies matrices of the pool's numbers with as many products, whichever is more; "of limit" is that
over the least time.

A second table has sequences that begin with the same cells: in one call, where the kernel reads these once, and each in
a call of its own.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.cpu import build
from engine.kernels.cpu.attention import NativeAttention
from engine.load.resources import processor_count
from kvcache.cell_pool import CellPool
from kvcache.forward import Segment
from kvcache.kv_buffer import LayerKV
from kvcache.spec import AttentionRange, GroupSpec

# More than the last-level caches of the machines that this runs on.
POOL_BYTES = 160 * 2**20
# Of the matrices whose product is the limit of all products.
_SIDE = 1024
Call = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """The attention of one model."""

    name: str
    heads: int
    key_heads: int
    width: int


@dataclass(frozen=True)
class Work:
    """What each sequence of a batch does: `rows` queries behind `depth` cells; all share the first `prefix`."""

    name: str
    rows: int
    depth: int
    sequences: int = 1
    prefix: int = 0


@dataclass(frozen=True)
class Limits:
    """What torch reads, in bytes a second, and multiplies, in products a second."""

    bytes: float
    products: float

    def seconds(self, bench: Bench) -> float:
        """No call of a bench takes less."""
        return max(bench.bytes / self.bytes, bench.products / self.products)


SHAPES = (Shape("Qwen3-0.6B", 16, 8, 128), Shape("Llama-3.2-1B", 32, 8, 64), Shape("SmolLM2-135M", 9, 3, 64))
WORKS = (
    Work("decode", 1, 512),
    Work("decode", 1, 2048),
    Work("decode", 1, 8192),
    Work("decode", 1, 512, sequences=8),
    Work("verify", 4, 2048),
    Work("verify", 8, 2048),
    Work("prefill", 512, 0),
    Work("prefill", 512, 2048),
)

TITLES = (
    *(
        "model",
        "rows",
        "depth",
        "run us",
        "reference",
        "table us",
        "reference",
        "run x",
        "table x",
        "run GB/s",
        "table",
    ),
    *("run of limit", "table"),
)
SHARED = tuple(Work("decode", 1, 2112, sequences, prefix=2048) for sequences in (2, 8, 16, 64))


class Bench:
    """One pool, and calls that attend to it."""

    def __init__(self, shape: Shape, work: Work, dtype: torch.dtype) -> None:
        self.length = work.rows + work.depth
        cells = work.prefix + (self.length - work.prefix) * work.sequences
        self.bytes = 2 * shape.key_heads * cells * shape.width * dtype.itemsize
        seen = work.rows * work.depth + work.rows * (work.rows + 1) // 2
        self.products = 2 * shape.heads * shape.width * seen * work.sequences
        self.layers = max(POOL_BYTES // self.bytes, 1)
        numbers = tuple(range(self.layers))
        spec = GroupSpec(shape.key_heads, shape.width, shape.width, AttentionRange(), numbers, (None,) * self.layers)
        self.pool = CellPool(spec, cells, dtype, torch.device("cpu"))
        for layer, plane in itertools.product(numbers, (self.pool.keys, self.pool.values)):
            plane.write(layer, slice(0, cells), torch.randn(shape.key_heads, cells, shape.width))
        query = torch.randn(shape.heads, work.rows * work.sequences, shape.width)
        # A model in bfloat16 asks in bfloat16, for which torch has instructions of its own.
        self.query = query.bfloat16() if dtype == torch.bfloat16 else query
        self._work, self._cells, self._turn = work, cells, itertools.cycle(numbers)

    def runs(self) -> list[Segment]:
        """Every sequence's cells side by side; it shares none."""
        return self._segments([slice(at * self.length, (at + 1) * self.length) for at in range(self._work.sequences)])

    def tables(self) -> list[Segment]:
        """Every sequence's cells all over the pool."""
        own = self.length - self._work.prefix
        shuffled = torch.randperm(self._cells, generator=torch.Generator().manual_seed(0))
        shared, rest = shuffled[: self._work.prefix], shuffled[self._work.prefix :]
        return self._segments([torch.cat((shared, part)) for part in torch.split(rest, own)])

    def call(self, attend: Callable[..., Tensor], segments: Sequence[Segment]) -> Call:
        """A call that takes the next layer each time."""

        def run() -> Tensor:
            layer = next(self._turn)
            keys, values = LayerKV(self.pool.keys, layer), LayerKV(self.pool.values, layer)
            return attend(self.query, keys, values, segments, AttentionRange(), scale=self.query.shape[-1] ** -0.5)

        return run

    def each(self, attend: Callable[..., Tensor], segments: Sequence[Segment]) -> Call:
        """The same in a call for each sequence."""
        calls = [self.call(attend, [segment]) for segment in segments]
        return lambda: [call() for call in calls]

    def _segments(self, cells: Sequence[slice | Tensor]) -> list[Segment]:
        rows = self._work.rows
        return [Segment(slice(at * rows, (at + 1) * rows), self._work.depth, own) for at, own in enumerate(cells)]


def take_turns(calls: Sequence[Call], rounds: int) -> list[list[float]]:
    """Seconds of each call in each round: of one thread's own processor time, of the clock where there are more."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: list[list[float]] = [[] for _ in calls]
    for round_ in range(rounds + 1):
        for call, own in zip(calls, times, strict=True):
            begin = clock()
            call()
            if round_:
                own.append(clock() - begin)
    return times


def row(shape: Shape, work: Work, dtype: torch.dtype, native: NativeAttention, limits: Limits, rounds: int) -> str:
    """One line of the table: microseconds, ratios, GB/s and shares of the limit of a work."""
    bench = Bench(shape, work, dtype)
    runs, tables = bench.runs(), bench.tables()
    sides = [(native.attend, runs), (reference.attend, runs), (native.attend, tables), (reference.attend, tables)]
    times = take_turns([bench.call(attend, segments) for attend, segments in sides], rounds)
    least, middle = [min(own) for own in times], [statistics.median(own) for own in times]
    name = f"{work.name} {work.rows}" + (f" x{work.sequences}" if work.sequences > 1 else "")
    cells = [
        *(shape.name, name, str(work.depth)),
        *(f"{1e6 * seconds:.0f}" for seconds in least),
        f"{middle[1] / middle[0]:.2f}",
        f"{middle[3] / middle[2]:.2f}",
        f"{bench.bytes / least[0] / 1e9:.1f}",
        f"{bench.bytes / least[2] / 1e9:.1f}",
        f"{limits.seconds(bench) / least[0]:.2f}",
        f"{limits.seconds(bench) / least[2]:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def shared_row(shape: Shape, work: Work, dtype: torch.dtype, native: NativeAttention, rounds: int) -> str:
    """One line of the table of those that share: microseconds and their ratio."""
    bench = Bench(shape, work, dtype)
    tables = bench.tables()
    times = take_turns([bench.call(native.attend, tables), bench.each(native.attend, tables)], rounds)
    together, each = (1e6 * statistics.median(own) for own in times)
    cells = (
        shape.name,
        str(work.sequences),
        str(work.prefix),
        f"{together:.0f}",
        f"{each:.0f}",
        f"{each / together:.2f}",
    )
    return "| " + " | ".join(cells) + " |"


def limits_of(dtype: torch.dtype) -> Limits:
    """Of this machine now, for a pool of such numbers; int8 is multiplied in float32."""
    numbers = torch.ones(POOL_BYTES // 4)
    matrix = torch.ones(_SIDE, _SIDE, dtype=dtype if dtype.is_floating_point else torch.float32)
    read, multiplied = (min(own) for own in take_turns([numbers.sum, lambda: matrix @ matrix], 10))
    return Limits(POOL_BYTES / read, _SIDE**3 / multiplied)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "int8"), help="of the pool")
    parser.add_argument("--variant", default=build.variants("attention")[0], choices=build.variants("attention"))
    parser.add_argument("--threads", type=int, default=processor_count())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--library", type=Path, help="instead of the one that is built")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    native = NativeAttention(options.library or build.library("attention", options.variant))
    print(f"{options.variant}, {options.threads} threads, pool of {options.dtype}")
    dtype = getattr(torch, options.dtype)
    limits = limits_of(dtype)
    print(f"torch reads {limits.bytes / 1e9:.1f} GB/s and multiplies {limits.products / 1e9:.0f} G products/s\n")
    print(f"| {' | '.join(TITLES)} |")
    print("|---" * len(TITLES) + "|")
    with torch.inference_mode():
        for shape, work in itertools.product(SHAPES, WORKS):
            print(row(shape, work, dtype, native, limits, options.rounds), flush=True)
        print("\n| model | sequences | shared cells | together us | each alone us | times |\n|---|---|---|---|---|---|")
        for shape, work in itertools.product(SHAPES, SHARED):
            print(shared_row(shape, work, dtype, native, options.rounds), flush=True)


if __name__ == "__main__":
    main()
