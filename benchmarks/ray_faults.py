"""Requests lost by replicas on Ray Serve when one is killed, when all are replaced, and when their number changes.

    python -m benchmarks.ray_faults [--steps conversations,overhead,kill,redeploy,scale] [--out FILE]

Needs the extra `ray`. Each replica has the bundled model and one thread. A stream ends "ok", with an "error event"
behind its first bytes, "cut" without one, or "refused" before its first byte: "cut" and "refused" are lost unnoticed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
from ray import serve

from benchmarks.routers import (
    LONG_TOKENS,
    STREAM_TOKENS,
    STREAMS,
    Result,
    all_conversations,
    measure,
    read_stream,
)
from server.configuration.settings import Settings
from server.replicas import cluster

PORT = 18850
URL = f"http://127.0.0.1:{PORT}"
SETTINGS = Settings(port=PORT, threads=1, context=2048, slots=8, store="memory", grace_seconds=30)
REPLICA_TITLE = "ray::ServeReplica:cellar"
SCALE_SECONDS = 420
KILL_AFTER_SECONDS = 3.0
# Of a client between two streams under load.
PAUSE_SECONDS = 0.5


def replicas() -> list[psutil.Process]:
    """The processes of the replicas that were started from this one."""
    return [each for each in psutil.Process().children(recursive=True) if title(each).startswith(REPLICA_TITLE)]


def title(process: psutil.Process) -> str:
    """The title of a process; "" if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def running() -> int:
    """Replicas that serve."""
    states = serve.status().applications[cluster.NAME].deployments[cluster.NAME].replica_states
    return states.get("RUNNING", 0)


async def loaded(client: httpx.AsyncClient, streams: int, stop: asyncio.Event, ends: Counter[str]) -> None:
    """Keep `streams` streams open until the event, and count how they end."""

    async def one(number: int) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            await asyncio.sleep(PAUSE_SECONDS)
            ends[(await read_stream(client, f"stream {number} turn {turn}", STREAM_TOKENS))[0]] += 1

    await asyncio.gather(*(one(number) for number in range(streams)))


async def under_load(client: httpx.AsyncClient, streams: int, work: Any) -> dict[str, int]:
    """How the streams end that are open while `work` runs."""
    stop, ends = asyncio.Event(), Counter[str]()
    load = asyncio.create_task(loaded(client, streams, stop, ends))
    try:
        await work
    finally:
        stop.set()
        await load
    return dict(ends)


async def kill(client: httpx.AsyncClient) -> dict[str, Any]:
    """End one of three replicas by SIGKILL once all streams have begun."""
    began: Counter[str] = Counter()
    streams = [
        asyncio.create_task(read_stream(client, f"{number} kill {time.time_ns()}", LONG_TOKENS))
        for number in range(STREAMS)
    ]
    await asyncio.sleep(KILL_AFTER_SECONDS)
    on_victim = await replica_load(client)
    victim = replicas()[0]
    victim.send_signal(signal.SIGKILL)
    for end, _, _ in await asyncio.gather(*streams):
        began[end] += 1
    return {"streams": dict(began), "running requests of the replicas before": on_victim}


async def replica_load(client: httpx.AsyncClient) -> list[int]:
    """Running requests of each replica, by its own metrics."""
    seen: dict[str, int] = {}
    for _ in range(12):
        answer = await client.get("/v1/engine")
        if answer.status_code == 200:
            seen[answer.headers["x-cellar-replica"]] = answer.json()["counts"]["running"]
    return list(seen.values())


async def redeploy(client: httpx.AsyncClient) -> dict[str, Any]:
    """Replace all replicas one by one while clients stream."""
    before, began = {each.pid for each in replicas()}, time.perf_counter()
    count = running()
    ends = await under_load(client, 4, asyncio.to_thread(cluster.deploy, SETTINGS, (count, count), revision="2"))
    kept = before & {each.pid for each in replicas()}
    return {"streams": ends, "seconds": round(time.perf_counter() - began), "old replicas left": len(kept)}


async def scale(client: httpx.AsyncClient) -> dict[str, Any]:
    """From one replica with two slots to three by 6 streams, and back to one by one stream."""
    small = replace(SETTINGS, slots=2)
    await asyncio.to_thread(cluster.deploy, small, (1, 3), revision="2", downscale_seconds=5.0)
    await wait_for(1)
    began = time.perf_counter()
    up = await under_load(client, 6, wait_for(3))
    top, middle = running(), time.perf_counter()
    down = await under_load(client, 1, wait_for(1))
    return {
        "up": {"streams": up, "replicas": top, "seconds": round(middle - began)},
        "down": {"streams": down, "replicas": running(), "seconds": round(time.perf_counter() - middle)},
    }


async def wait_for(count: int) -> None:
    """Wait for a number of replicas, at most SCALE_SECONDS."""
    deadline = time.monotonic() + SCALE_SECONDS
    while time.monotonic() < deadline and await asyncio.to_thread(running) != count:
        await asyncio.sleep(1)


async def conversations(client: httpx.AsyncClient) -> dict[str, Any]:
    """Errors and cached share of conversations."""
    result = Result("ray")
    await all_conversations(client, result)
    return {"requests": result.requests, "errors": result.errors, "cached_share": result.cached_share}


async def run(steps: list[str], direct: str | None) -> dict[str, Any]:
    """The outcome of each step."""
    outcome: dict[str, Any] = {}
    client = httpx.AsyncClient(base_url=URL, timeout=300, trust_env=False)
    for step in steps:
        if step == "overhead":
            base = {"direct": direct} if direct else {}
            outcome[step] = [vars(each) for each in await measure({**base, "ray": URL}, {"texts", "overhead"}, None)]
        else:
            outcome[step] = await STEPS[step](client)
        print(step, json.dumps(outcome[step]), flush=True)
    return outcome


STEPS = {"conversations": conversations, "kill": kill, "redeploy": redeploy, "scale": scale}


def main() -> None:
    """Start the replicas, run the steps, and stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default="conversations,overhead,kill,redeploy,scale", help="comma-separated")
    parser.add_argument("--replicas", type=int, default=3, metavar="N", help="of all steps but scale")
    parser.add_argument("--direct", metavar="URL", help="a server to compare the overhead with")
    parser.add_argument("--out", type=Path, metavar="FILE")
    args = parser.parse_args()
    cluster.start(SETTINGS, args.replicas + 1)
    try:
        cluster.deploy(SETTINGS, (args.replicas, args.replicas), revision="1")
        outcome = asyncio.run(run(args.steps.split(","), args.direct))
    finally:
        cluster.stop()
    if args.out:
        args.out.write_text(json.dumps(outcome, indent=1) + "\n")


if __name__ == "__main__":
    main()
