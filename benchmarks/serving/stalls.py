"""Measures how long large request bodies stall other streams, and their memory.

    python -m benchmarks.serving.stalls table [MODEL] [--mebibytes 4] [--rounds 3]    # known bodies, over HTTP
    python -m benchmarks.serving.stalls fuzz [MODEL] [--count 10000] [--minutes 15]   # random ones, inside this process

`table` starts a server and streams one answer beside each body. The longest gap between two chunks is compared with the
gap of the same stream before the body; the best of the rounds counts, since other work on the machine only adds time.
`fuzz` runs the application in this process and measures the processor time of single callbacks of its event loop, and
the gaps of a stream of the engine, of which only the processor time of this process counts: the smaller of the two
times. So other work on the machine adds little. The worst bodies are sent again, and the smaller value counts.
Results go to --out as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import sys
import tempfile
import threading
import time
from asyncio.events import Handle
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from bench.launch import cellar
from benchmarks.result import command_parser, measured
from benchmarks.serving.bodies import JSON, Body, known, random_body
from engine.engine import Engine
from engine.types.request import Request, SamplingParams
from server.app import create_app
from server.configuration.settings import Settings
from server.lifecycle import SWITCH_SECONDS, freeze_garbage_collector

GOAL_GAP_MS, GOAL_MEMORY_BYTES = 100.0, 50 * 2**20
QUIET_SECONDS, AFTER_SECONDS, QUIET_FUZZ_SECONDS = 1.5, 0.5, 0.05
ANSWER_SECONDS = 120.0
WORST, AGAIN, TRIES = 20, 40, 3
# Additional time for repeating the worst bodies, as a share of --minutes.
AGAIN_SHARE = 0.25
VICTIM = {"prompt": "Once", "max_tokens": 100000, "ignore_eos": True, "overflow": "shift", "stream": True}
MEBIBYTE = 2**20
# Seconds on the clock, and of the processor time of this process.
Instant = tuple[float, float]
# Rows of the result, and a note with totals.
Measurement = tuple[list[dict[str, Any]], str]


def post(path: str, content: bytes, content_type: str = JSON) -> bytes:
    """Return the bytes of a request with Connection: close."""
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(content)}",
        "Connection: close",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


class StreamReader:
    """Reads a stream in another thread and records the times of its chunks."""

    def __init__(self, port: int) -> None:
        self._port, self._over = port, threading.Event()
        self.times: list[float] = []
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> StreamReader:
        self._thread.start()
        while not self.times:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def worst(self, begin: float, end: float) -> float:
        """Return the longest gap between chunks that overlaps [begin, end], in milliseconds."""
        times = [begin, *(at for at in list(self.times) if begin < at < end), end]
        return 1000 * max(later - earlier for earlier, later in pairwise(times))

    def _read(self) -> None:
        while not self._over.is_set():
            with socket.create_connection(("127.0.0.1", self._port), timeout=ANSWER_SECONDS) as connection:
                connection.sendall(post("/v1/completions", json.dumps(VICTIM).encode()))
                while connection.recv(65536) and not self._over.is_set():
                    self.times.append(time.perf_counter())


class Memory:
    """The peak resident bytes of a process during a block."""

    def __init__(self, process: psutil.Process) -> None:
        self._process, self._over = process, threading.Event()
        self.before = self.most = process.memory_info().rss
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self.most = max(self.most, self._process.memory_info().rss)


@dataclass
class BodyFigures:
    """The figures of one body; lists have one for each round.

    loop_ms  processor time of the server's event loop, without that of the stream beside it
    """

    name: str
    path: str
    bytes: int
    status: int = 0
    said: str = ""
    quiet_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)
    answer_ms: list[float] = field(default_factory=list)
    loop_ms: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    left_bytes: int = 0

    @property
    def excess_ms(self) -> float:
        """Return the increase of the gap by the body, in the best round."""
        return min(gap - quiet for gap, quiet in zip(self.gap_ms, self.quiet_ms, strict=True))


def table(given: argparse.Namespace) -> Measurement:
    """Measure the known bodies against a server; returns the rows."""
    arguments = (*([given.model] if given.model else []), "--drafter", "none", "--slots", "4")
    rows = []
    with tempfile.TemporaryDirectory() as folder, cellar(arguments, Path(folder) / "log") as url:
        process, port = psutil.Process().children()[0], urlsplit(url).port or 0
        with StreamReader(port) as reader:
            for body in known(int(given.mebibytes * MEBIBYTE)):
                row = BodyFigures(body.name, body.path, len(body.content))
                for _ in range(given.rounds):
                    measure(row, body, reader, process, port)
                rows.append(row)
                print(line(row), flush=True)
    return [{**asdict(row), "excess_ms": row.excess_ms} for row in rows], ""


def measure(row: BodyFigures, body: Body, reader: StreamReader, process: psutil.Process, port: int) -> None:
    """Send a body once and add the figures to its row."""
    loop_before, quiet = loop_seconds(process), time.perf_counter()
    time.sleep(QUIET_SECONDS)
    begin, loop_begin = time.perf_counter(), loop_seconds(process)
    row.quiet_ms.append(reader.worst(quiet, begin))
    with Memory(process) as memory:
        answer = exchange(port, body)
        answered = time.perf_counter()
        time.sleep(AFTER_SECONDS)
    end, loop_end = time.perf_counter(), loop_seconds(process)
    row.status, row.said = (
        int(answer.split(b" ", 2)[1] or 0),
        answer.partition(b"\r\n\r\n")[2][:160].decode("utf-8", "replace"),
    )
    row.gap_ms.append(reader.worst(begin, end))
    row.answer_ms.append(1000 * (answered - begin))
    usual = (loop_begin - loop_before) / (begin - quiet) * (end - begin)
    row.loop_ms.append(1000 * (loop_end - loop_begin - usual))
    row.peak_bytes = max(row.peak_bytes, memory.most - memory.before)
    row.left_bytes = process.memory_info().rss - memory.before


def exchange(port: int, body: Body) -> bytes:
    """Return the whole answer to a body."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_SECONDS) as connection:
        connection.sendall(post(body.path, body.content, body.content_type))
        while piece := connection.recv(65536):
            answer = answer if len(answer) > 65536 else answer + piece
    return answer


def loop_seconds(process: psutil.Process) -> float:
    """Return the processor time of a server's first thread, which runs its event loop."""
    return next(each.user_time + each.system_time for each in process.threads() if each.id == process.pid)


def line(row: BodyFigures) -> str:
    """Return a row of the table."""
    figures = (row.excess_ms, min(row.gap_ms), min(row.quiet_ms), min(row.answer_ms), min(row.loop_ms))
    memory = f"{row.peak_bytes / MEBIBYTE:7.0f} {row.left_bytes / MEBIBYTE:7.0f}"
    return f"{row.path + ' ' + row.name:48.48} {row.status} {' '.join(f'{each:8.1f}' for each in figures)} {memory}"


class CallbackTimer:
    """The processor time of the longest callback of the event loops since the last `reset`."""

    def __init__(self) -> None:
        self._longest = 0.0

    def reset(self) -> float:
        """Return the time in milliseconds and set it to 0."""
        longest, self._longest = self._longest, 0.0
        return 1000 * longest

    @contextmanager
    def installed(self) -> Iterator[CallbackTimer]:
        """Time every callback of the loops of this process."""
        run = Handle._run

        def timed(handle: Handle) -> None:
            begin = time.thread_time()
            run(handle)
            self._longest = max(self._longest, time.thread_time() - begin)

        Handle._run = timed  # type: ignore[method-assign,assignment]
        try:
            yield self
        finally:
            Handle._run = run  # type: ignore[method-assign]


@dataclass
class FuzzedBody:
    """The figures of a random body, the smaller ones of two tries."""

    name: str
    path: str
    bytes: int
    status: int
    callback_ms: float
    gap_ms: float
    quiet_ms: float
    seconds: float

    @property
    def badness(self) -> float:
        """Return the figure by which the worst bodies are selected."""
        return max(self.callback_ms, self.gap_ms - self.quiet_ms)

    def join(self, again: FuzzedBody) -> None:
        """Keep the smaller figures of this try and another."""
        self.callback_ms = min(self.callback_ms, again.callback_ms)
        if again.gap_ms - again.quiet_ms < self.gap_ms - self.quiet_ms:
            self.gap_ms, self.quiet_ms = again.gap_ms, again.quiet_ms


async def fuzz(given: argparse.Namespace) -> Measurement:
    """Send random bodies to the application, one after the other; returns the worst."""
    chance, found, tries = random.Random(given.seed), [], []
    process, until = psutil.Process(), time.monotonic() + 60 * given.minutes
    async with application(given.model) as (engine, client):
        with CallbackTimer().installed() as timer:
            async with streamed(engine) as times:
                before = process.memory_info().rss
                while len(found) < given.count and time.monotonic() < until:
                    body = random_body(chance, int(given.mebibytes * MEBIBYTE))
                    found.append(await attempt(body, client, timer, times))
                    tries.append((found[-1].badness, len(found) - 1, body))
                    tries = sorted(tries)[-AGAIN:]
                after = process.memory_info().rss
                until += 60 * given.minutes * AGAIN_SHARE
                for _, number, body in reversed(tries * TRIES):
                    if time.monotonic() < until:
                        found[number].join(await attempt(body, client, timer, times))
    worst = sorted(found, key=lambda one: -one.badness)[:WORST]
    statuses = {status: sum(one.status == status for one in found) for status in sorted({one.status for one in found})}
    for one in worst:
        print(f"{one.path:28} {one.name:44.44} {one.bytes:8} {one.status} {one.callback_ms:7.1f} {one.badness:7.1f}")
    totals = f"{len(found)} random bodies, statuses {statuses}, memory {(after - before) / MEBIBYTE:+.0f} MiB"
    print(totals)
    return [{**asdict(one), "excess_ms": one.badness} for one in worst], totals


@asynccontextmanager
async def application(model: str | None) -> AsyncIterator[tuple[Engine, httpx.AsyncClient]]:
    """Run an engine and its application; yield both."""
    settings = Settings(model=model, drafter="none", slots=4, store="memory", served_names=("cellar",))
    engine = Engine(settings.engine_config())
    engine.start()
    try:
        await engine.wait_ready()
        freeze_garbage_collector()
        sys.setswitchinterval(SWITCH_SECONDS)
        transport = httpx.ASGITransport(create_app(engine, settings))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=ANSWER_SECONDS
        ) as client:
            yield engine, client
    finally:
        await asyncio.to_thread(engine.close)


@asynccontextmanager
async def streamed(engine: Engine) -> AsyncIterator[list[Instant]]:
    """Keep one sequence decoding; yield the list of the instants of its tokens, one for each step."""
    times: list[Instant] = []

    async def follow() -> None:
        for number in range(10**9):
            greedy = SamplingParams(temperature=0.0)
            request = Request(
                f"reader-{number}", (1, 2, 3), greedy, max_tokens=2000, ignore_eos=True, tokens_at_once=True
            )
            async with engine.open(request) as stream:
                async for _ in stream:
                    times.append(now())

    following = asyncio.create_task(follow())
    try:
        yield times
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def attempt(body: Body, client: httpx.AsyncClient, timer: CallbackTimer, times: list[Instant]) -> FuzzedBody:
    """Send a body and measure it."""
    headers = {"content-type": body.content_type}
    # End the callback that created the body.
    await asyncio.sleep(0)
    times.clear()
    before = now()
    await asyncio.sleep(QUIET_FUZZ_SECONDS)
    begin = now()
    quiet = longest([before, *times, begin])
    times.clear()
    timer.reset()
    answer = await client.post(body.path, content=body.content, headers=headers)
    end = now()
    # End the callback that received the answer, and perhaps ran the whole request.
    await asyncio.sleep(0)
    gap, size = longest([begin, *times, end]), len(body.content)
    return FuzzedBody(body.name, body.path, size, answer.status_code, timer.reset(), gap, quiet, end[0] - begin[0])


def now() -> Instant:
    """Return this instant."""
    return time.perf_counter(), time.process_time()


def longest(instants: list[Instant]) -> float:
    """Return the longest gap between consecutive instants in milliseconds: the smaller time of each."""
    return 1000 * max(min(later[0] - earlier[0], later[1] - earlier[1]) for earlier, later in pairwise(instants))


def make_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = command_parser("serving.stalls", __doc__)
    parser.add_argument("what", choices=("table", "fuzz"))
    parser.add_argument("model", nargs="?", default=None, help="folder (default: the bundled model)")
    parser.add_argument("--mebibytes", type=float, default=3.99, help="of the largest bodies (default 3.99)")
    parser.add_argument("--rounds", type=int, default=3, help="of each body of the table (default 3)")
    parser.add_argument("--count", type=int, default=10000, help="of random bodies (default 10000)")
    parser.add_argument("--minutes", type=float, default=15.0, help="limit for random bodies (default 15)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="file for the result as JSON")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 1 if a body misses a goal."""
    given = make_parser().parse_args(arguments)
    rows, note = table(given) if given.what == "table" else asyncio.run(fuzz(given))
    if given.out is not None:
        measured("stalls", rows, note).write(given.out)
    missed = [row for row in rows if misses(row)]
    print(f"{len(missed)} bodies miss a goal: {', '.join(row['path'] + ' ' + row['name'] for row in missed) or 'none'}")
    return 1 if missed else 0


def misses(row: dict[str, Any]) -> bool:
    """Whether a body misses a goal; the memory is measured for the bodies of the table."""
    return bool(row["excess_ms"] > GOAL_GAP_MS or row.get("left_bytes", 0) > GOAL_MEMORY_BYTES)


if __name__ == "__main__":
    sys.exit(main())
