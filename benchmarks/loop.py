"""Measures the processor time of the event loop for a request with one output token, without a model.

    python -m benchmarks.loop [--requests 300] [--rounds 7] [--profile tottime]

A request passes through the whole server in this thread: the protocol reads bytes and writes to a transport without a
socket, and a scripted engine answers. Worker threads do not count. The minimum over the rounds is reported.

Rejected: uvloop (at most a tenth of the time), and waking the loop before or after a step (no difference).
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import logging
import os
import pstats
import sys
import time
from collections.abc import Iterator
from typing import Any

from uvicorn.lifespan.on import LifespanOn
from uvicorn.server import ServerState

from engine.types.events import Delta, Event, Started
from engine.types.request import Request
from server.http.protocol import StrictProtocol
from server.lifecycle import _config
from tests.server.fakes import FakeEngine, finished, settings
from tests.server.wire import post

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
REQUESTS = {
    "completion": post("/v1/completions", {"model": "fake", "prompt": "hello", "max_tokens": 1}),
    "chat": post("/v1/chat/completions", CHAT),
    "streamed chat": post("/v1/chat/completions", {**CHAT, "stream": True}),
}
WARM = 50
# Iterations of the loop until the end of a request is handled.
TAIL = 8


class Sink(asyncio.Transport):
    """A transport with a client that reads at once."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 80)})
        self.written: list[bytes] = []
        self.over = asyncio.Event()

    def write(self, data: Any) -> None:
        """Store bytes; an answer ends with its last chunk, or with the JSON object."""
        self.written.append(bytes(data))
        if self.written[-1].endswith((b"0\r\n\r\n", b"}")):
            self.over.set()

    def is_closing(self) -> bool:
        """Return False: it stays open."""
        return False

    def close(self) -> None:
        """Stay open."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Ignore the limits."""


def one_token(request: Request) -> Iterator[Event]:
    """Yield the events of an output of one token."""
    yield Started(len(request.prompt), 0, 7)
    yield Delta("Hi", (5,), ())
    yield finished(request)


async def exchange(protocol: StrictProtocol, sink: Sink, data: bytes) -> None:
    """Send a request and wait for the end of its answer and of the cleanup."""
    sink.over.clear()
    sink.written.clear()
    protocol.data_received(data)
    await sink.over.wait()
    for _ in range(TAIL):
        await asyncio.sleep(0)


async def measure(given: argparse.Namespace) -> dict[str, float]:
    """Return microseconds of processor time by request."""
    config = _config(FakeEngine(script=one_token), settings())  # type: ignore[arg-type]
    config.load()
    await LifespanOn(config).startup()
    found = {}
    for name, data in REQUESTS.items():
        sink = Sink()
        protocol = StrictProtocol(
            settings().limits, {}, True, config, ServerState(), {}, _loop=asyncio.get_running_loop()
        )
        protocol.connection_made(sink)
        for _ in range(WARM):
            await exchange(protocol, sink, data)
        assert b"200 OK" in b"".join(sink.written), sink.written
        rounds = []
        for _ in range(given.rounds):
            begin = time.thread_time()
            for _ in range(given.requests):
                await exchange(protocol, sink, data)
            rounds.append((time.thread_time() - begin) / given.requests)
        found[name] = 1e6 * min(rounds)
        if given.profile:
            with cProfile.Profile() as profile:
                for _ in range(given.requests):
                    await exchange(protocol, sink, data)
            pstats.Stats(profile).sort_stats(given.profile).print_stats(40)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    summary, _, epilog = (__doc__ or "").partition("\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("benchmarks.loop", description=summary, epilog=epilog, formatter_class=raw)
    parser.add_argument("--requests", type=int, default=300, help="in a round (default 300)")
    parser.add_argument("--rounds", type=int, default=7, help="default 7")
    parser.add_argument("--profile", choices=("tottime", "cumtime"), help="also print a profile")
    given = parser.parse_args(arguments)
    with open(os.devnull, "w") as nowhere:
        logging.basicConfig(level=logging.INFO, stream=nowhere)
        found = asyncio.run(measure(given))
    print(json.dumps({name: round(microseconds) for name, microseconds in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
