"""Measures attention on the CPU: the C++ kernel against torch operations, both through the same pool.

    python -m benchmarks.cpu.attention [--dtype float32] [--variant avx2] [--rounds 15]

Both implementations alternate call by call, since other work disturbs the machine: the ratio is of the medians, the
time is the minimum. Calls cycle through the layers of a pool larger than the processor caches. GB/s: bytes of keys and
values of a call over its minimum time. The limit of a call is the time in which torch.sum reads its bytes, or in which
torch computes its products in matrix multiplications, whichever is longer; "of limit" is the limit over the minimum
time.

A second table has sequences with a shared prefix: in one call, which reads the shared cells once, and in a call for
each sequence.

Rejected: prefetching the next float32 tile (0.53 to 1.40 of the speed), and reading values only for weights that are
not negligible (4 to 6 % faster, the error 12 to 87 % higher).
"""

from __future__ import annotations

import itertools
import statistics
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.result import command_parser
from engine.kernels import reference
from engine.kernels.attention_input import AttentionInput
from engine.kernels.cpu.attention.attention import NativeAttention
from engine.kernels.cpu.build import libraries
from engine.load.machine.resources import processor_count
from kvcache.cell_pool import CellPool
from kvcache.forward import Segment
from kvcache.kv_buffer import LayerKV
from kvcache.spec import AttentionRange, GroupSpec

# Larger than last-level caches.
POOL_BYTES = 160 * 2**20
# Side of the matrices that measure the limit of products.
_SIDE = 1024
Call = Callable[[], object]


@dataclass(frozen=True)
class AttentionShape:
    """Heads and head width of a model."""

    name: str
    heads: int
    key_heads: int
    width: int


@dataclass(frozen=True)
class AttentionBatch:
    """A batch: `rows` queries of each sequence after `depth` cells; the first `prefix` cells are shared."""

    name: str
    rows: int
    depth: int
    sequences: int = 1
    prefix: int = 0


@dataclass(frozen=True)
class Limits:
    """Bytes per second that torch reads, and products per second that it computes."""

    bytes: float
    products: float

    def seconds(self, bench: AttentionBench) -> float:
        """The minimum time of a call."""
        return max(bench.bytes / self.bytes, bench.products / self.products)


SHAPES = (
    AttentionShape("Qwen3-0.6B", 16, 8, 128),
    AttentionShape("Llama-3.2-1B", 32, 8, 64),
    AttentionShape("SmolLM2-135M", 9, 3, 64),
)
BATCHES = (
    AttentionBatch("decode", 1, 512),
    AttentionBatch("decode", 1, 2048),
    AttentionBatch("decode", 1, 8192),
    AttentionBatch("decode", 1, 512, sequences=8),
    AttentionBatch("verify", 4, 2048),
    AttentionBatch("verify", 8, 2048),
    AttentionBatch("prefill", 512, 0),
    AttentionBatch("prefill", 512, 2048),
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
SHARED = tuple(AttentionBatch("decode", 1, 2112, sequences, prefix=2048) for sequences in (2, 8, 16, 64))


class AttentionBench:
    """One pool, and calls that attend to it."""

    def __init__(self, shape: AttentionShape, batch: AttentionBatch, dtype: torch.dtype) -> None:
        self.length = batch.rows + batch.depth
        cells = batch.prefix + (self.length - batch.prefix) * batch.sequences
        self.bytes = 2 * shape.key_heads * cells * shape.width * dtype.itemsize
        seen = batch.rows * batch.depth + batch.rows * (batch.rows + 1) // 2
        self.products = 2 * shape.heads * shape.width * seen * batch.sequences
        self.layers = max(POOL_BYTES // self.bytes, 1)
        numbers = tuple(range(self.layers))
        spec = GroupSpec(shape.key_heads, shape.width, shape.width, AttentionRange(), numbers, (None,) * self.layers)
        self.pool = CellPool(spec, cells, dtype, torch.device("cpu"))
        for layer, buffer in itertools.product(numbers, (self.pool.keys, self.pool.values)):
            buffer.write(layer, slice(0, cells), torch.randn(shape.key_heads, cells, shape.width))
        query = torch.randn(shape.heads, batch.rows * batch.sequences, shape.width)
        # Queries of a bfloat16 model are bfloat16, for which torch has its own kernels.
        self.query = query.bfloat16() if dtype == torch.bfloat16 else query
        self._batch, self._cells, self._layer = batch, cells, itertools.cycle(numbers)

    def runs(self) -> list[Segment]:
        """Contiguous cells for each sequence, none shared."""
        return self._segments([slice(at * self.length, (at + 1) * self.length) for at in range(self._batch.sequences)])

    def tables(self) -> list[Segment]:
        """Scattered cells for each sequence, the prefix shared."""
        own = self.length - self._batch.prefix
        shuffled = torch.randperm(self._cells, generator=torch.Generator().manual_seed(0))
        shared, remaining = shuffled[: self._batch.prefix], shuffled[self._batch.prefix :]
        return self._segments([torch.cat((shared, part)) for part in torch.split(remaining, own)])

    def call(self, attend: Callable[..., Tensor], segments: Sequence[Segment]) -> Call:
        """A call that uses the next layer each time."""

        def run() -> Tensor:
            layer = next(self._layer)
            keys, values = LayerKV(self.pool.keys, layer), LayerKV(self.pool.values, layer)
            scale = self.query.shape[-1] ** -0.5
            return attend(AttentionInput(self.query, keys, values, segments, AttentionRange(), scale))

        return run

    def each(self, attend: Callable[..., Tensor], segments: Sequence[Segment]) -> Call:
        """The same, with a call for each sequence."""
        calls = [self.call(attend, [segment]) for segment in segments]
        return lambda: [call() for call in calls]

    def _segments(self, cells: Sequence[slice | Tensor]) -> list[Segment]:
        rows = self._batch.rows
        return [Segment(slice(at * rows, (at + 1) * rows), self._batch.depth, own) for at, own in enumerate(cells)]


def alternate(calls: Sequence[Call], rounds: int) -> list[list[float]]:
    """Seconds of each call in each round: processor time with one thread, else wall-clock time."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: list[list[float]] = [[] for _ in calls]
    for round_ in range(rounds + 1):
        for call, own in zip(calls, times, strict=True):
            begin = clock()
            call()
            if round_:
                own.append(clock() - begin)
    return times


def row(
    shape: AttentionShape,
    batch: AttentionBatch,
    dtype: torch.dtype,
    native: NativeAttention,
    limits: Limits,
    rounds: int,
) -> str:
    """One line of the table: microseconds, ratios, GB/s and shares of the limit."""
    bench = AttentionBench(shape, batch, dtype)
    runs, tables = bench.runs(), bench.tables()
    sides = [(native.attend, runs), (reference.attend, runs), (native.attend, tables), (reference.attend, tables)]
    times = alternate([bench.call(attend, segments) for attend, segments in sides], rounds)
    least, middle = [min(own) for own in times], [statistics.median(own) for own in times]
    name = f"{batch.name} {batch.rows}" + (f" x{batch.sequences}" if batch.sequences > 1 else "")
    cells = [
        *(shape.name, name, str(batch.depth)),
        *(f"{1e6 * seconds:.0f}" for seconds in least),
        f"{middle[1] / middle[0]:.2f}",
        f"{middle[3] / middle[2]:.2f}",
        f"{bench.bytes / least[0] / 1e9:.1f}",
        f"{bench.bytes / least[2] / 1e9:.1f}",
        f"{limits.seconds(bench) / least[0]:.2f}",
        f"{limits.seconds(bench) / least[2]:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def shared_row(
    shape: AttentionShape, batch: AttentionBatch, dtype: torch.dtype, native: NativeAttention, rounds: int
) -> str:
    """One line of the table of shared prefixes: microseconds and their ratio."""
    bench = AttentionBench(shape, batch, dtype)
    tables = bench.tables()
    times = alternate([bench.call(native.attend, tables), bench.each(native.attend, tables)], rounds)
    together, each = (1e6 * statistics.median(own) for own in times)
    cells = (
        shape.name,
        str(batch.sequences),
        str(batch.prefix),
        f"{together:.0f}",
        f"{each:.0f}",
        f"{each / together:.2f}",
    )
    return "| " + " | ".join(cells) + " |"


def limits_of(dtype: torch.dtype) -> Limits:
    """The limits of this machine for a pool of a dtype; int8 is multiplied in float32."""
    numbers = torch.ones(POOL_BYTES // 4)
    matrix = torch.ones(_SIDE, _SIDE, dtype=dtype if dtype.is_floating_point else torch.float32)
    read, multiplied = (min(own) for own in alternate([numbers.sum, lambda: matrix @ matrix], 10))
    return Limits(POOL_BYTES / read, _SIDE**3 / multiplied)


def add_kernel_options(parser: ArgumentParser, kernel: str, *, rounds: int) -> None:
    """Add --variant, --threads, --rounds and --library."""
    variants = libraries.variants(kernel)
    parser.add_argument("--variant", default=variants[0], choices=variants)
    parser.add_argument("--threads", type=int, default=processor_count())
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--library", type=Path, help="library to measure (default: the built one)")


def main() -> None:
    """Print the table."""
    parser = command_parser("cpu.attention", __doc__)
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16", "int8"), help="of the pool (default float32)"
    )
    add_kernel_options(parser, "attention", rounds=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    native = NativeAttention(options.library or libraries.library("attention", options.variant))
    print(f"{options.variant}, {options.threads} threads, pool of {options.dtype}")
    dtype = getattr(torch, options.dtype)
    limits = limits_of(dtype)
    print(f"torch reads {limits.bytes / 1e9:.1f} GB/s and multiplies {limits.products / 1e9:.0f} G products/s\n")
    print(f"| {' | '.join(TITLES)} |")
    print("|---" * len(TITLES) + "|")
    with torch.inference_mode():
        for shape, batch in itertools.product(SHAPES, BATCHES):
            print(row(shape, batch, dtype, native, limits, options.rounds), flush=True)
        print(
            "\n| model | sequences | shared cells | one call us | a call each us | times |\n|---|---|---|---|---|---|"
        )
        for shape, batch in itertools.product(SHAPES, SHARED):
            print(shared_row(shape, batch, dtype, native, options.rounds), flush=True)


if __name__ == "__main__":
    main()
