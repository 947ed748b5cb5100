"""Measures quantised matrix products on the CPU: the C++ kernel beside memory bandwidth and torch's int8 product.

    python -m benchmarks.cpu.linear [--variant avx2] [--threads 1] [--rounds 9]

All calls alternate, since other work disturbs the machine; figures are medians. Calls cycle through copies of a matrix
that exceed the processor caches. One row is bound by memory: its GB/s of codes and scales are compared with torch.sum.
512 rows are bound by arithmetic: their GOP/s are compared with torch._int_mm, a product of int8 matrices without group
scales. A table of all weight formats compares them with int4: GB/s with one row, times with 8 and 256 rows.

Two of ten operations of a product with group scales are the scales, so 0.80 of int_mm is its limit on Zen 4. Rejected:
integer scaling of a group's sum (int8 2 % faster, int4 6 % slower), and quantising few rows by rows instead of by
columns (threads share cache lines, 10 % of a step of 8 rows).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.cpu.attention import POOL_BYTES, Call, add_kernel_options, alternate
from benchmarks.result import command_parser
from engine.kernels import linear
from engine.kernels.cpu.build import libraries
from engine.kernels.cpu.products.linear import NativeLinear
from engine.kernels.formats import LAYOUTS, WeightFormat
from engine.kernels.packing import PackedMatrix, PackedStorage
from engine.kernels.rounding import Bits, pack_floats
from tests.engine.kernels.weights import random_matrix

# Outputs and columns of Qwen3-0.6B: gate and up, down, and the rows of query, key and value.
SHAPES = ((6144, 1024), (1024, 3072), (4096, 1024))
BITS: tuple[Bits, ...] = (8, 4)
FEW, MANY = (1, 2, 4, 8, 16), 512
FORMAT_SHAPE, FORMAT_ROWS = (4096, 1024), (1, 8, 256)
FORMAT_HEADS = ("format", "bits of a weight", "1 row us", "8", "256", "GB/s", "GB/s to int4", "8 rows to int4", "256")
HEADS = (
    *("outputs x columns", "bits", "1 row us", "2", "4", "8", "16", "4 to 1", "8 to 1", "16 to 1"),
    *("GB/s", "read", "share", "GOP/s", "int_mm", "share"),
)


def copies(packed: PackedMatrix, bytes_: int) -> Iterator[PackedMatrix]:
    """Cycle through copies of a matrix that take `bytes_` of memory together."""
    shape, count = (packed.outputs, packed.columns, packed.format), bytes_ // packed.size_bytes + 1
    storage = PackedStorage([shape] * count)
    there = [storage.allocate(*shape) for _ in range(count)]
    for one in there:
        one.codes.copy_(packed.codes)
        one.scales.copy_(packed.scales)
    return itertools.cycle(there)


def call(native: NativeLinear, rows: Tensor, matrices: Iterator[PackedMatrix]) -> Call:
    """A call that uses the next matrix each time."""
    return lambda: native.multiply(rows, [next(matrices)])


def line(native: NativeLinear, outputs: int, columns: int, bits: Bits, rounds: int) -> str:
    """One line of the table."""
    packed = pack_floats(torch.randn(outputs, columns), bits)
    matrices, zeros = copies(packed, POOL_BYTES), copies(pack_floats(torch.zeros(outputs, columns), bits), POOL_BYTES)
    few = [call(native, torch.randn(count, columns), matrices) for count in FEW]
    plain = torch.randint(-128, 128, (outputs, columns), dtype=torch.int8)
    codes = torch.randint(-128, 128, (MANY, columns), dtype=torch.int8)
    # The read comes first: every call of one row starts with the caches in the same state.
    alternating = alternate([lambda: next(zeros).codes.flatten().view(torch.float32).sum(), *few], rounds * 4)
    read, *times = (statistics.median(own) for own in alternating)
    slow = [call(native, torch.randn(MANY, columns), matrices), lambda: torch._int_mm(codes, plain.T)]
    many, library = (statistics.median(own) for own in alternate(slow, rounds))
    speed, work = packed.codes.nbytes / read, 2 * MANY * outputs * columns
    cells = [
        *(f"{outputs} x {columns}", f"int{bits}"),
        *(f"{1e6 * seconds:.0f}" for seconds in times),
        *(f"{times[at] / times[0]:.2f}" for at in (2, 3, 4)),
        *(
            f"{packed.size_bytes / times[0] / 1e9:.1f}",
            f"{speed / 1e9:.1f}",
            f"{packed.size_bytes / times[0] / speed:.2f}",
        ),
        *(f"{work / many / 1e9:.0f}", f"{work / library / 1e9:.0f}", f"{library / many:.2f}"),
    ]
    return "| " + " | ".join(cells) + " |"


def format_lines(
    native: NativeLinear, formats: Sequence[WeightFormat], shape: tuple[int, int], rounds: int
) -> Iterator[str]:
    """Lines of the table of formats, compared with the first one."""
    packed = [random_matrix(format, *shape) for format in formats]
    matrices = [copies(own, POOL_BYTES) for own in packed]
    calls = [[call(native, torch.randn(count, shape[1]), own) for own in matrices] for count in FORMAT_ROWS]
    by_rows = [alternate(own, rounds if at == 2 else 4 * rounds) for at, own in enumerate(calls)]
    times = [[statistics.median(own) for own in formats_times] for formats_times in by_rows]
    speeds = [own.size_bytes / seconds / 1e9 for own, seconds in zip(packed, times[0], strict=True)]
    for at, format in enumerate(formats):
        cells = [
            *(format, f"{LAYOUTS[format].weight_bits:.2f}"),
            *(f"{1e6 * own[at]:.0f}" for own in times),
            *(f"{speeds[at]:.1f}", f"{speeds[at] / speeds[0]:.2f}"),
            *(f"{own[at] / own[0]:.2f}" for own in times[1:]),
        ]
        yield "| " + " | ".join(cells) + " |"


def error(outputs: int, columns: int, bits: Bits, outliers: float, times: float) -> float:
    """Relative error of a product; a share `outliers` of the columns is scaled by `times`."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, columns, generator=generator, dtype=torch.float64)
    rows = torch.randn(64, columns, generator=generator, dtype=torch.float64)
    rows[:, torch.rand(columns, generator=generator) < outliers] *= times
    [product] = linear.multiply(rows, [pack_floats(weight, bits)])
    exact = rows @ weight.T
    return float((product - exact).norm() / exact.norm())


def main() -> None:
    """Print the tables."""
    parser = command_parser("cpu.linear", __doc__)
    add_kernel_options(parser, "linear", rounds=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    native = NativeLinear(options.library or libraries.library("linear", options.variant))
    print(f"{options.variant}, {options.threads} threads\n")
    print("| " + " | ".join(HEADS) + " |")
    print("|" + "---|" * len(HEADS))
    with torch.inference_mode():
        for (outputs, columns), bits in itertools.product(SHAPES, BITS):
            print(line(native, outputs, columns, bits, options.rounds), flush=True)
        outputs, columns = FORMAT_SHAPE
        print(f"\n{outputs} x {columns}, all formats\n\n| " + " | ".join(FORMAT_HEADS) + " |")
        print("|" + "---|" * len(FORMAT_HEADS))
        formats = ("int4", *(format for format in LAYOUTS if format != "int4"))
        for text in format_lines(native, formats, FORMAT_SHAPE, options.rounds):
            print(text, flush=True)
        print("\n| error of a product, 1024 x 1024 | int8 | int4 |\n|---|---|---|")
        for name, share, times in (("normal numbers", 0.0, 1.0), ("0.3 % of columns 50 times as large", 0.003, 50.0)):
            errors = (error(1024, 1024, bits, share, times) for bits in BITS)
            print(f"| {name} | {' | '.join(f'{100 * one:.2f} %' for one in errors)} |")


if __name__ == "__main__":
    main()
