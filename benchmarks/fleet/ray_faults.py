"""Requests lost by replicas on Ray Serve when one is killed, when all are replaced, and when their number changes.

    python -m benchmarks.fleet.ray_faults [--steps conversations,kill,redeploy,scale] [--json FILE] [--page]

Needs the extra `ray`. Each replica has the bundled model and one thread. Conversations are held over two and three
replicas, the other steps begin with three, `scale` with one. A stream ends "ok", with an "error event"
behind its first bytes, "cut" without one, or "refused" before its first byte: "cut" and "refused" are lost unnoticed.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import httpx
import psutil

from benchmarks.fleet.page import add_page_option, load_note, write_page
from benchmarks.fleet.routers import LONG_TOKENS, STREAM_TOKENS, STREAMS, Result, all_conversations, read_stream
from benchmarks.result import add_json_option, command_parser, measured
from server.configuration.settings import Settings
from server.replicas import cluster

PORT = 18850
URL = f"http://127.0.0.1:{PORT}"
SETTINGS = Settings(port=PORT, threads=1, context=2048, slots=8, store="none", grace_seconds=30)
MOST = 3
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


async def kill(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """End one of three replicas by SIGKILL once all streams have begun."""
    await deploy(MOST)
    streams = [asyncio.create_task(stream_of_replica(client, number)) for number in range(STREAMS)]
    await asyncio.sleep(KILL_AFTER_SECONDS)
    replicas()[0].send_signal(signal.SIGKILL)
    found = await asyncio.gather(*streams)
    ends = Counter(end for end, _ in found)
    lost = {replica for end, replica in found if end != "ok"}
    well = sum(end == "ok" for end, replica in found if replica in lost)
    return [
        {"step": "kill -9 of one", "replicas": MOST, "streams": dict(ends), "losing": len(lost), "its others": well}
    ]


async def stream_of_replica(client: httpx.AsyncClient, number: int) -> tuple[str, str]:
    """The end of a long stream, and the replica that began it."""
    heads: list[str] = []
    content = f"{number} kill {time.time_ns()}"
    end, _, _ = await read_stream(
        client, content, LONG_TOKENS, lambda answer: heads.append(answer.headers.get("x-cellar-replica", ""))
    )
    return end, "".join(heads)


async def redeploy(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """Replace all replicas one by one while clients stream."""
    await deploy(MOST)
    before, began = {each.pid for each in replicas()}, time.perf_counter()
    ends = await under_load(client, 4, deploy(MOST, revision="2"))
    left = len(before & {each.pid for each in replicas()})
    seconds = round(time.perf_counter() - began)
    return [{"step": "rolling redeploy", "replicas": MOST, "streams": ends, "seconds": seconds, "old replicas": left}]


async def scale(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """From one replica with two slots to three by 6 streams, and back to one by one stream."""
    small = replace(SETTINGS, slots=2)
    await asyncio.to_thread(cluster.deploy, small, (1, MOST), revision="3", downscale_seconds=5.0)
    await wait_for(1)
    rows = []
    for step, streams, count in (("1 to 3", 6, MOST), ("3 to 1", 1, 1)):
        began = time.perf_counter()
        ends = await under_load(client, streams, wait_for(count))
        seconds = round(time.perf_counter() - began)
        rows.append({"step": f"scale {step}", "replicas": cluster.running(), "streams": ends, "seconds": seconds})
    return rows


async def deploy(count: int, *, revision: str = "1") -> None:
    """A number of replicas, all of which serve."""
    await asyncio.to_thread(cluster.deploy, SETTINGS, (count, count), revision=revision)
    await wait_for(count)


async def wait_for(count: int) -> None:
    """Wait for a number of replicas, at most SCALE_SECONDS."""
    deadline = time.monotonic() + SCALE_SECONDS
    while time.monotonic() < deadline and await asyncio.to_thread(cluster.running) != count:
        await asyncio.sleep(1)


async def conversations(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """Errors and cached share of conversations over two and three replicas."""
    rows = []
    for count in (2, MOST):
        await deploy(count)
        result = Result("ray")
        await all_conversations(client, result)
        found = {"requests": result.requests, "errors": len(result.errors), "cached_share": result.cached_share}
        rows.append({"step": "conversations", "replicas": count, **found})
    return rows


async def run(steps: list[str]) -> list[dict[str, Any]]:
    """The rows of each step."""
    rows: list[dict[str, Any]] = []
    async with httpx.AsyncClient(base_url=URL, timeout=300, trust_env=False) as client:
        for step in steps:
            for row in await STEPS[step](client):
                rows.append(row)
                print(row, flush=True)
    return rows


STEPS = {"conversations": conversations, "kill": kill, "redeploy": redeploy, "scale": scale}


def main() -> None:
    """Start the replicas, run the steps, and stop."""
    parser = command_parser("fleet.ray_faults", __doc__)
    parser.add_argument("--steps", default=",".join(STEPS), help="comma-separated")
    add_json_option(parser)
    add_page_option(parser)
    args = parser.parse_args()
    note = load_note()
    cluster.start(SETTINGS, MOST + 1)
    try:
        cluster.open_port(SETTINGS)
        rows = asyncio.run(run(args.steps.split(",")))
    finally:
        cluster.stop(SETTINGS.grace_seconds)
    if args.json:
        measured("ray_faults", rows, note).write(args.json)
    if args.page:
        write_page()


if __name__ == "__main__":
    main()
