"""Measures the resident memory of a server with a full cache, against the memory plan that it prints at the start.

    python -m benchmarks.memory [MODEL] [--quantize int8] [--slots 8] [--context 4096]

Every slot gets a prompt of the full context; the resident memory of the server's process is sampled meanwhile. The
goal: at most 15 % more than the planned weights and cells.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.client import RequestOptions, Server, send
from bench.launch import cellar
from bench.prompts import TokenIdPrompts
from bench.samples import OK
from bench.target import BenchError, find
from benchmarks.result import add_json_option, measured, model_name, weight_format

GOAL = 1.15
ANSWERED = 8
UNITS = {"MiB": 2**20, "GiB": 2**30, "KiB": 2**10}
PLAN = re.compile(r"memory +weights ([\d.]+) (\w+) \+ cache ([\d.]+) (\w+) .*\+ work ([\d.]+) (\w+) =")
BETWEEN_READINGS = 0.05


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The printed memory plan, in bytes."""

    weights: int
    cache: int
    work: int

    @classmethod
    def printed(cls, log: str) -> MemoryPlan:
        """Parse the plan in the log of a server; ValueError without one."""
        found = PLAN.search(log)
        if found is None:
            raise ValueError("the server printed no memory plan")
        groups = found.groups()
        return cls(*(int(float(number) * UNITS[unit]) for number, unit in zip(groups[::2], groups[1::2], strict=True)))


async def peak_resident(work: asyncio.Task[None], process: psutil.Process) -> int:
    """Return the peak resident bytes of a process until the task ends."""
    peak = 0
    while not work.done():
        peak = max(peak, process.memory_info().rss)
        await asyncio.sleep(BETWEEN_READINGS)
    await work
    return peak


async def fill(server: Server, *, slots: int, context: int) -> None:
    """Fill every slot; BenchError if an answer is incomplete."""
    ask, prompts = RequestOptions(timeout_seconds=3600, extra={"ignore_eos": True}), TokenIdPrompts(seed=0)
    sent = (
        send(server, ask, prompt=prompts.unshared(context - ANSWERED, at), max_tokens=ANSWERED, begun=0)
        for at in range(slots)
    )
    for answer in await asyncio.gather(*sent):
        sample = answer.read()
        if sample.outcome != OK:
            raise BenchError(f"the server answered {sample.outcome}: {sample.text}")


async def measure(url: str, *, slots: int, context: int) -> tuple[int, int]:
    """Return the resident bytes of the server, the only child of this process: idle and peak."""
    process = psutil.Process().children()[0]
    idle = process.memory_info().rss
    server = find("cellar", url, model=None, api_key=None, context=None)
    return idle, await peak_resident(asyncio.create_task(fill(server, slots=slots, context=context)), process)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 1 if the peak exceeds the goal."""
    parser = argparse.ArgumentParser(prog="benchmarks.memory", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default=None, help="a folder (default: the bundled model)")
    parser.add_argument("--quantize", default="none", choices=("auto", "int8", "int4", "none"))
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--context", type=int, default=4096)
    add_json_option(parser)
    given = parser.parse_args(arguments)
    sizes = ("--quantize", given.quantize, "--slots", str(given.slots), "--context", str(given.context))
    command = (*([given.model] if given.model else []), *sizes, "--drafter", "none")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with cellar(command, log) as url:
            plan = MemoryPlan.printed(log.read_text())
            idle, peak = asyncio.run(measure(url, slots=given.slots, context=given.context))
    if given.json:
        row = {
            "model": model_name(given.model or "bundled"),
            "weights": weight_format(given.quantize, "auto", given.model or ""),
            "slots": given.slots,
            "context": given.context,
            "weights_bytes": plan.weights,
            "cache_bytes": plan.cache,
            "idle_bytes": idle,
            "peak_bytes": peak,
        }
        measured("memory", [row]).write(given.json)
    ratio = peak / (plan.weights + plan.cache)
    gibibytes = {"weights": plan.weights, "cache": plan.cache, "work": plan.work, "idle": idle, "full": peak}
    print(", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in gibibytes.items()))
    print(f"{ratio:.2f} times weights and cache (goal {GOAL} at most)")
    return 0 if ratio <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
