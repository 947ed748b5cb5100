"""Measures what loads of LoRA adapters cost the streams that run meanwhile.

    python -m benchmarks.cpu.adapter_loads MODEL [--streams 8] [--rank 16] [--loads 100]

In one process, without HTTP, with one thread: streams, each with an adapter of its own, decode without loads and then
beside loads and unloads of another adapter, one after the other. Times are processor times of the engine thread, since
other work disturbs the machine: from the end of a step to that of the next one, which is the gap between two tokens,
and of the loads and unloads themselves. Reading files happens in another thread.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.cpu.adapters import write_adapter
from benchmarks.result import add_json_option, add_rows, command_parser, measured, model_name
from engine.adapters.modules import AdaptableLayers
from engine.config import EngineConfig
from engine.core import Core
from engine.engine import Engine
from engine.types.events import Delta
from engine.types.request import Request, SamplingParams

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MODES = ("without", "loads")


@dataclass
class EngineTimes:
    """Seconds of the engine thread: at the ends of steps, and of each load and unload."""

    step_ends: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record inside the block."""
        with (
            patch.object(Core, "step", self._with_end(Core.step)),
            patch.object(Core, "load_adapter", self._timed(Core.load_adapter)),
            patch.object(Core, "unload_adapter", self._timed(Core.unload_adapter)),
        ):
            yield

    def _with_end(self, step: Callable[[Core], Any]) -> Callable[[Core], Any]:
        def call(core: Core) -> Any:
            events = step(core)
            self.step_ends.append(time.thread_time())
            return events

        return call

    def _timed(self, method: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            began = time.thread_time()
            method(*arguments)
            self.loads.append(time.thread_time() - began)

        return call


def write_adapters(model: str, folder: Path, count: int, rank: int) -> None:
    """Write adapters with the names 0, 1, ... in a folder."""
    with torch.device("meta"):
        shapes = AdaptableLayers(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))).shapes
    for number in range(count):
        write_adapter(folder / f"{number}", shapes, TARGETS, rank, torch.float32)


async def measure(options: Any, folder: Path) -> dict[str, list[float]]:
    """The gaps between steps in both modes, and the times of loads and unloads."""
    times, streams = EngineTimes(), options.streams
    config = EngineConfig(
        model=options.model,
        slots=streams,
        threads=1,
        drafter="none",
        itl_target_ms=0.0,
        lora_dir=str(folder),
        max_loras=streams + 1,
    )
    engine = Engine(config)
    engine.start()
    try:
        with times.recorded():
            await engine.wait_ready()
            started = asyncio.Barrier(streams + 1)
            running = [asyncio.create_task(_stream(engine, f"{number}", started)) for number in range(streams)]
            await started.wait()
            first = len(times.step_ends)
            while len(times.step_ends) < first + options.steps:
                await asyncio.sleep(0.01)
            second = len(times.step_ends)
            times.loads.clear()
            for _ in range(options.loads):
                await engine.load_adapter("other", f"{streams}", in_place=False)
                engine.unload_adapter("other")
            # The loads wait for the step in progress, and those of a tiny model may all fall between two steps.
            while len(times.loads) < 2 * options.loads and not any(task.done() for task in running):
                await asyncio.sleep(0.01)
            loaded = len(times.step_ends)
            while len(times.step_ends) == loaded and not any(task.done() for task in running):
                await asyncio.sleep(0.01)
            last = len(times.step_ends)
            if any(task.done() for task in running):
                raise SystemExit("a stream ended: use fewer --loads or --steps")
            for task in running:
                task.cancel()
            await asyncio.wait(running)
    finally:
        await asyncio.to_thread(engine.close)
    # The first gap beside loads begins before them.
    parts = times.step_ends[first:second], times.step_ends[second - 1 : last]
    gaps = [[after - before for before, after in itertools.pairwise(ends)] for ends in parts]
    return {**dict(zip(MODES, gaps, strict=True)), "held": times.loads}


async def _stream(engine: Engine, name: str, started: asyncio.Barrier) -> None:
    """Decode with the adapter of the name until the context is full."""
    sampling, prompt = SamplingParams(temperature=0.0), tuple(range(300, 364))
    request = Request(name, prompt, sampling=sampling, max_tokens=None, ignore_eos=True, adapter=name)
    async with engine.open(request) as stream:
        is_first = True
        async for event in stream:
            if is_first and isinstance(event, Delta):
                is_first = False
                await started.wait()


def rows(seconds: dict[str, list[float]], options: Any) -> list[dict[str, Any]]:
    """A row for each mode."""
    return [
        {
            "model": model_name(options.model),
            "streams": options.streams,
            "rank": options.rank,
            "loads": options.loads if mode == "loads" else 0,
            "mode": mode,
            "gap_ms": round(1e3 * statistics.median(seconds[mode]), 2),
            "longest_gap_ms": round(1e3 * max(seconds[mode]), 2),
            "longest_load_ms": round(1e3 * max(seconds["held"]), 2) if mode == "loads" else 0.0,
        }
        for mode in MODES
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = command_parser("cpu.adapter_loads", __doc__)
    parser.add_argument("model", help="a folder")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--loads", type=int, default=100)
    parser.add_argument("--steps", type=int, default=300, help="without loads")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        write_adapters(options.model, Path(folder), options.streams + 1, options.rank)
        result = rows(asyncio.run(measure(options, Path(folder))), options)
    for row in result:
        print(
            f"{row['mode']:8} gap {row['gap_ms']:7.2f} ms, longest {row['longest_gap_ms']:7.2f} ms, "
            f"longest load {row['longest_load_ms']:6.2f} ms"
        )
    if options.json:
        add_rows(options.json, measured("adapter_loads", result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
