"""Profiles decoding steps on a GPU: kernels of a step, the time between them, and the kernels that take most of it.

    python -m benchmarks.gpu.profile [SHAPE] [--device cuda] [--streams 8] [--enforce-eager]

`--device cpu tiny` tries the script: it counts operations of torch in place of kernels.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import throughput
from benchmarks.result import command_parser
from benchmarks.shapes import SHAPES, write_folder
from engine.config import EngineConfig
from engine.core import Core
from engine.load.load import load
from engine.load.recording import record_steps

STEPS, LISTED = 20, 10


def main(arguments: list[str] | None = None) -> int:
    """Print the profile of a shape."""
    parser = command_parser("gpu.profile", __doc__)
    parser.add_argument("shape", nargs="?", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--enforce-eager", action="store_true")
    given = parser.parse_args(arguments)
    for name, value in profiled(given.shape, given.device, given.streams, enforce_eager=given.enforce_eager).items():
        print(name, *(value if isinstance(value, list) else [value]), sep="\n  " if isinstance(value, list) else " ")
    return 0


def profiled(shape: str, device: str, streams: int, *, enforce_eager: bool) -> dict[str, Any]:
    """Kernels a step, milliseconds of a step on the device and between its kernels, and the largest kernels."""
    with tempfile.TemporaryDirectory() as folder:
        write_folder(SHAPES[shape], Path(folder))
        config = EngineConfig(
            model=folder,
            device=device,
            enforce_eager=enforce_eager,
            slots=streams,
            context=throughput.BEHIND + throughput.STEPS + throughput.WARM_STEPS + streams + 8,
            drafter="none",
            # On a CPU one native call would hide the operations.
            kernels="torch" if device == "cpu" else "auto",
        )
        loaded = load(config, lambda phase: None)
        core = Core(loaded, config)
        record_steps(config, loaded, core.cache, lambda phase: None)
        return summary(decoding_events(core, streams, device))


def decoding_events(core: Core, streams: int, device: str) -> list[Any]:
    """The events of the profiler in STEPS decoding steps: kernels, or on a CPU operations."""
    throughput.start_streams(core, streams)
    kinds = [ProfilerActivity.CPU] if device == "cpu" else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=kinds) as profiler:
        for _ in range(STEPS):
            core.step()
    if device == "cpu":
        return [event for event in profiler.events() if event.cpu_parent is None]
    return [event for event in profiler.events() if event.device_type == DeviceType.CUDA]


def summary(events: Iterable[Any]) -> dict[str, Any]:
    """The figures of the events of STEPS steps."""
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
    counts, times = Counter[str](), Counter[str]()
    busy, last = 0.0, spans[0][0]
    for start, end, name in spans:
        counts[name] += 1
        times[name] += end - start
        # Kernels may overlap.
        busy += max(end - max(start, last), 0)
        last = max(last, end)
    whole = last - spans[0][0]
    return {
        "kernels a step": round(len(spans) / STEPS, 1),
        "ms a step": round(whole / STEPS / 1000, 3),
        "ms a step between kernels": round((whole - busy) / STEPS / 1000, 3),
        "largest": [
            f"{time / STEPS:.1f} us a step, {counts[name] / STEPS:.1f} calls: {name[:100]}"
            for name, time in times.most_common(LISTED)
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
