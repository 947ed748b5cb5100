"""Times the Triton attention of decoded tokens for sizes of tiles, blocks and splits, and lists the best of each shape.

    python -m benchmarks.gpu_sweep [--device cuda] [--lengths 512 4096 32768] [--sequences 1 64] [--json FILE]

The sizes are set in `kernel_sizes` and `Tiling` of engine/kernels/triton. Without a GPU, with Triton and
TRITON_INTERPRET=1, `--device cpu --lengths 40 --sequences 2 --choices 2` tries the script.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.result import add_json_option, add_rows, measured
from engine.kernels.triton import launch
from engine.kernels.triton.batch import Tiling
from engine.kernels.triton.kernels import TritonKernels
from engine.kernels.triton.launch import KernelSizes
from kvcache.forward import Segment
from kvcache.kv_buffer import LayerKV, allocate_kv_buffers
from kvcache.spec import AttentionRange, GroupSpec

# Heads, key heads and width.
SHAPES = {"qwen3-0.6b": (16, 8, 128), "qwen3-8b": (32, 8, 128), "gemma3": (8, 4, 256)}
TILES, BLOCKS, WARPS, STAGES, SPLITS = (16, 32), (32, 64, 128), (4, 8), (1, 2, 3), (512, 1024)
REPEATS = {"cuda": 20, "cpu": 1}


@dataclass(frozen=True, slots=True)
class Sizes:
    """One choice of sizes."""

    tile: int
    block: int
    warps: int
    stages: int
    split: int


def main(arguments: list[str] | None = None) -> int:
    """Print the best sizes of each shape beside the present ones, and add the rows to a file."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_sweep", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lengths", type=int, nargs="+", default=(512, 4096, 32768))
    parser.add_argument("--sequences", type=int, nargs="+", default=(1, 64))
    parser.add_argument("--choices", type=int, default=None, help="the first choices of sizes only")
    add_json_option(parser)
    given = parser.parse_args(arguments)
    rows = []
    for row in sweep(given.device, given.lengths, given.sequences, given.choices):
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        rows.append(row)
    if given.json:
        add_rows(given.json, measured("gpu_sweep", rows))
    return 0


def sweep(
    device: str, lengths: Sequence[int], sequences: Sequence[int], most: int | None = None
) -> Iterator[dict[str, Any]]:
    """The best sizes of each shape, with their microseconds and those of the present sizes."""
    choices = [Sizes(*own) for own in itertools.product(TILES, BLOCKS, WARPS, STAGES, SPLITS)][:most]
    for (name, shape), length, count in itertools.product(SHAPES.items(), lengths, sequences):
        call = attention(shape, length, count, device)
        found = {own: microseconds(call, own, device) for own in choices}
        best = min(found, key=lambda own: found[own])
        yield {
            "device": torch.cuda.get_device_name(device) if device != "cpu" else device,
            "shape": name,
            "cell": f"{count} sequences of {length}",
            "present_us": round(microseconds(call, None, device), 1),
            "best_us": round(found[best], 1),
            **asdict(best),
            "failed": sum(own == float("inf") for own in found.values()),
        }


def attention(shape: tuple[int, int, int], length: int, count: int, device: str) -> Callable[[TritonKernels], object]:
    """The attention of one token of some sequences, in cells at random places of the pool."""
    heads, key_heads, width = shape
    spec = GroupSpec(key_heads, width, width, AttentionRange(), (0,), (None,))
    buffers = allocate_kv_buffers(spec, length * count, torch.bfloat16, torch.device(device))
    keys, values = (LayerKV(buffer, 0) for buffer in buffers)
    places = torch.randperm(length * count, device=device).view(count, length)
    segments = tuple(Segment(slice(row, row + 1), length - 1, places[row]) for row in range(count))
    query = torch.randn(heads, count, width, device=device, dtype=torch.bfloat16)
    return lambda kernels: kernels(query, keys, values, segments, AttentionRange(), scale=width**-0.5)


def microseconds(call: Callable[[TritonKernels], object], sizes: Sizes | None, device: str) -> float:
    """The median of a launch; infinite for sizes that exceed the GPU. None: the present sizes."""
    kernels, chosen = TritonKernels(), launch.kernel_sizes
    if sizes is not None:
        kernels = TritonKernels(Tiling(sizes.tile, sizes.tile, sizes.split, sizes.block))
        own = KernelSizes(sizes.block, sizes.warps, sizes.stages)
        chosen = lambda *_, **__: own  # noqa: E731
    with patch.object(launch, "kernel_sizes", chosen):
        try:
            call(kernels)
            return (
                median(seconds(lambda: call(kernels), device) for _ in range(REPEATS[device.partition(":")[0]])) * 1e6
            )
        except Exception as error:
            if "out of resource" not in str(error):
                raise
            return float("inf")


def seconds(run: Callable[[], object], device: str) -> float:
    """Of a call, to the end of the device's work."""
    if device == "cpu":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


if __name__ == "__main__":
    sys.exit(main())
