"""Measures how long a new request waits beside 64 long ones of the same owner, and what their time slices cost.

    python -m benchmarks.serving.sharing [MODEL] [--requests 64] [--newcomers 20] [--rounds 3] [--json FILE]

`frozen` and `busy`: clients of a server stream answers of 4,000 tokens with 20 log-probabilities each and read nothing,
or everything, while completions of one token arrive one after another. `slices`: two engines alone, in this process,
compute the same number of answers with and without time slices, a few steps in turns; the median ratio of their tokens
per second counts.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from bench.launch import cellar
from benchmarks.result import add_json_option, command_parser, measured, model_name
from engine.config import EngineConfig
from engine.core import Core
from engine.load.load import load
from engine.schedule import fairness
from engine.types.events import Delta
from engine.types.request import Request, SamplingParams

SLOTS, CONTEXT, WARM_SECONDS = 8, 512, 5.0
LONG = {"max_tokens": 4000, "ignore_eos": True, "stream": True, "logprobs": 20, "overflow": "shift"}
ANSWER_TOKENS, PROMPT_TOKENS = 192, 32
# Steps of one engine before those of the other, and the length of a time slice that no answer reaches.
STEPS_IN_TURN, ENDLESS_STEPS = 16, 10**9


async def open_stream(port: int, number: int, *, reads: bool) -> tuple[asyncio.Task[None] | None, asyncio.StreamWriter]:
    """Send a long request; read its answer if `reads`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps({**LONG, "prompt": f"f{number}"}).encode()
    lines = (
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    )
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)

    async def read() -> None:
        while await reader.read(2**16):
            pass

    return asyncio.create_task(read()) if reads else None, writer


async def wait_for_newcomers(url: str, requests: int, newcomers: int, *, reads: bool) -> dict[str, Any]:
    """One row: seconds until completions of one token are answered."""
    port = urlsplit(url).port
    assert port is not None, "the server listens on a port"
    streams = [await open_stream(port, number, reads=reads) for number in range(requests)]
    await asyncio.sleep(WARM_SECONDS)
    seconds = []
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        for number in range(newcomers):
            began = time.perf_counter()
            answer = await client.post("/completions", json={"prompt": f"new {number}", "max_tokens": 1})
            answer.raise_for_status()
            seconds.append(time.perf_counter() - began)
            await asyncio.sleep(0.2)
    for task, writer in streams:
        if task is not None:
            task.cancel()
        writer.close()
    return {"newcomers": newcomers, "median_seconds": statistics.median(seconds), "worst_seconds": max(seconds)}


def submit(core: Core, requests: int, round_number: int) -> None:
    """Submit equal requests with prompts that are not in the cache."""
    for number in range(requests):
        prompt = tuple((7 * at + 31 * number + 101 * round_number) % 250 for at in range(PROMPT_TOKENS))
        sampling = SamplingParams(temperature=0.0)
        core.submit(Request(f"{number}", prompt, sampling, max_tokens=ANSWER_TOKENS, ignore_eos=True))


def tokens_per_second(cores: dict[int, Core]) -> dict[int, float]:
    """Generated tokens per second of cores by their length of a time slice.

    They compute a few steps in turns, so that other load of the machine slows all of them alike.
    """
    seconds, tokens = dict.fromkeys(cores, 0.0), Counter[int]()
    while any(core.busy for core in cores.values()):
        for length, core in cores.items():
            fairness.TIME_SLICE_STEPS = length
            began = time.perf_counter()
            for _ in range(STEPS_IN_TURN):
                events = core.step() if core.busy else []
                tokens[length] += sum(len(event.tokens) for _, event in events if isinstance(event, Delta))
            seconds[length] += time.perf_counter() - began
    return {length: tokens[length] / seconds[length] for length in cores}


def compare_slices(model: str | None, requests: int, rounds: int) -> dict[str, Any]:
    """One row: tokens per second with and without time slices."""
    config = EngineConfig(model=model, slots=SLOTS, context=CONTEXT, cells=requests * CONTEXT, drafter="none")
    loaded = load(config, lambda _: None)
    steps = fairness.TIME_SLICE_STEPS
    cores = {steps: Core(loaded, config), ENDLESS_STEPS: Core(loaded, config)}
    figures = []
    for number in range(rounds + 1):
        for core in cores.values():
            submit(core, requests, number)
        figures.append(tokens_per_second(cores))
    fairness.TIME_SLICE_STEPS = steps
    # The first round warms up.
    figures = figures[1:]
    return {
        "with_slices": statistics.median(figure[steps] for figure in figures),
        "without_slices": statistics.median(figure[ENDLESS_STEPS] for figure in figures),
        "ratio": statistics.median(figure[steps] / figure[ENDLESS_STEPS] for figure in figures),
        "time_slices": cores[steps].stats().time_slices_total,
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = command_parser("serving.sharing", __doc__)
    parser.add_argument("model", nargs="?", default=None, help="a folder or GGUF file (default: the bundled model)")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--newcomers", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    add_json_option(parser)
    given = parser.parse_args(arguments)
    rows = [{"cell": "slices", **compare_slices(given.model, given.requests, given.rounds)}]
    command = (*([given.model] if given.model else []), "--slots", str(SLOTS), "--context", str(CONTEXT))
    for cell in ("frozen", "busy"):
        with tempfile.TemporaryDirectory() as folder, cellar(command, Path(folder) / "server.log") as url:
            row = asyncio.run(wait_for_newcomers(url, given.requests, given.newcomers, reads=cell == "busy"))
            rows.append({"cell": cell, **row})
    rows = [
        {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()} for row in rows
    ]
    for row in rows:
        print(json.dumps(row))
    if given.json:
        model = model_name(given.model or "bundled")
        measured("sharing", [{"model": model, "requests": given.requests, **row} for row in rows]).write(given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
