"""Streams through `cellar route` while replicas end: by `kill -9` in rounds, then by SIGTERM.

    python -m benchmarks.fleet.kills [--rounds 10] [--json FILE]

Three servers of the bundled model with one thread each. Every round opens 24 streams (chats and completions, greedy and
seeded, with and without log-probabilities, JSON), ends one replica while they run, and starts it again. Then
8 clients send one request after the other while SIGTERM ends each replica in turn and it starts again (a rolling
redeploy), and while it ends one that does not return (a scale-down). Texts, finish reasons, usage and log-probabilities
are compared with those of the same requests to a replica alone.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.launch import CELLAR, READY_SECONDS, started
from benchmarks.fleet.page import load_note
from benchmarks.result import add_json_option, command_parser, measured

REPLICAS, STREAMS, TOKENS = 3, 24, 240
SERVER = ("--threads", "1", "--context", "2048", "--slots", "8", "--store", "none", "--drafter", "none")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"names": {"type": "array", "minItems": 60, "items": {"type": "string"}}}}
SEEDED: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True}
KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"temperature": 0, "ignore_eos": True}),
    (CHAT, SEEDED),
    (CHAT, {**SEEDED, "logprobs": True, "top_logprobs": 2}),
    (
        CHAT,
        {
            "temperature": 1.0,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        },
    ),
    (TEXT, {"temperature": 0, "ignore_eos": True}),
    (TEXT, {**SEEDED, "logprobs": 1, "frequency_penalty": 0.5}),
)
# Log-probabilities of another batch differ by rounding.
TOLERANCE = 1e-3
# Tokens of every stream, on average, at the time of a kill.
TOKENS_AT_KILL = 40


@dataclass
class Streamed:
    """What a client has of a stream."""

    replica: str = ""
    text: str = ""
    chunks: int = 0
    roles: int = 0
    ids: set[str] = field(default_factory=set)
    finish: list[str] = field(default_factory=list)
    completion_tokens: int = 0
    entries: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: str = "cut"

    def add(self, event: dict[str, Any]) -> None:
        """Add a chunk."""
        self.ids.add(event["id"])
        self.completion_tokens = (event.get("usage") or {}).get("completion_tokens", self.completion_tokens)
        for choice in event["choices"]:
            self.chunks += 1
            delta = choice.get("delta", choice)
            self.roles += "role" in delta
            self.text += delta.get("content") or delta.get("text") or ""
            self.finish += [choice["finish_reason"]] if choice["finish_reason"] else []
            logprobs = choice.get("logprobs") or {}
            self.entries += [entry["token"] for entry in logprobs.get("content") or ()] + [*logprobs.get("tokens", ())]
            self.logprobs += [entry["logprob"] for entry in logprobs.get("content") or ()]
            self.logprobs += logprobs.get("token_logprobs", ())

    def equals(self, other: Streamed) -> bool:
        """Whether a client cannot tell the two answers apart, except by their ids."""
        names = ("text", "roles", "finish", "completion_tokens", "entries", "end")
        pairs = zip(self.logprobs, other.logprobs, strict=False)
        close = len(self.logprobs) == len(other.logprobs) and all(abs(one - two) <= TOLERANCE for one, two in pairs)
        return close and len(self.ids) == 1 and all(getattr(self, name) == getattr(other, name) for name in names)


async def stream(client: httpx.AsyncClient, number: int, found: Streamed) -> Streamed:
    """Read the stream of a number."""
    path, fields = KINDS[number % len(KINDS)]
    text = f"{number} Tell me about wine, cache and slots."
    prompt = {"prompt": text} if path == TEXT else {"messages": [{"role": "user", "content": text}]}
    body = {**prompt, "seed": number, "max_tokens": TOKENS, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", path, json={**body, **fields}) as answer:
            found.replica = answer.headers.get("x-cellar-replica", "")
            if answer.status_code != httpx.codes.OK:
                found.end = f"refused: {answer.status_code}"
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    found.end = "ok"
                elif line.startswith('data: {"error"'):
                    found.end = "error event"
                elif line.startswith("data: "):
                    found.add(json.loads(line[6:]))
    except httpx.HTTPError as error:
        found.end = f"cut: {type(error).__name__}"
    return found


class Replica:
    """A server on a port of its own, which can be ended and started again."""

    def __init__(self, log: Path) -> None:
        self._log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        """Start the process."""
        with self._log.open("ab") as out:
            command = (*CELLAR, *SERVER, "--host", "127.0.0.1", "--port", str(self._port))
            self._process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, process_group=0)

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        self._process.send_signal(number)

    async def ended(self) -> int:
        """Wait for the end of the process; its exit code."""
        return await asyncio.to_thread(self._process.wait)

    async def restart(self) -> None:
        """Wait for the end of the process, start another one, and wait until it serves."""
        await self.ended()
        self.start()
        await self.wait_until_ready()

    async def wait_until_ready(self) -> None:
        """Wait until the server answers. Raises TimeoutError."""
        async with asyncio.timeout(READY_SECONDS), httpx.AsyncClient(trust_env=False) as client:
            while not await is_ready(client, self.url):
                await asyncio.sleep(0.2)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


async def is_ready(client: httpx.AsyncClient, url: str) -> bool:
    """Whether a server answers and has its model."""
    try:
        return (await client.get(f"{url}/ready")).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


@contextmanager
def fleet(logs: Path) -> Iterator[tuple[list[Replica], str]]:
    """Three replicas, and the URL of `cellar route` in front of them."""
    with ExitStack() as stack:
        replicas = []
        for number in range(REPLICAS):
            replicas.append(Replica(logs / f"replica-{number}.log"))
            stack.callback(replicas[-1].close)
        urls = [replica.url for replica in replicas]
        command = (*CELLAR[:-1], "route", *urls, "--port", "{port}")
        yield (
            replicas,
            stack.enter_context(started(command, ready="/ready", log=logs / "route.log")).removesuffix("/v1"),
        )


async def expected_streams(replica: Replica) -> list[Streamed]:
    """The answers of one replica, four at a time."""
    limit = asyncio.Semaphore(4)
    async with httpx.AsyncClient(base_url=replica.url, timeout=300, trust_env=False) as client:

        async def limited(number: int) -> Streamed:
            async with limit:
                return await stream(client, number, Streamed())

        return await asyncio.gather(*(limited(number) for number in range(STREAMS)))


def compared(found: list[Streamed], expected: list[Streamed]) -> dict[str, Any]:
    """How streams ended, and how many equal those of a replica alone."""
    equal = sum(one.equals(other) for one, other in zip(found, expected, strict=True))
    return {"streams": dict(Counter(one.end for one in found)), "equal": equal}


async def killed(client: httpx.AsyncClient, replica: Replica, name: str, expected: list[Streamed]) -> dict[str, Any]:
    """One round: a replica is killed once the streams have TOKENS_AT_KILL tokens on average."""
    found = [Streamed() for _ in range(STREAMS)]
    tasks = [asyncio.create_task(stream(client, number, one)) for number, one in enumerate(found)]
    while sum(one.chunks for one in found) < TOKENS_AT_KILL * STREAMS and not all(task.done() for task in tasks):
        await asyncio.sleep(0.01)
    replica.signal(signal.SIGKILL)
    cut = sum(one.replica == name and one.chunks > 0 and one.end == "cut" for one in found)
    unbegun = sum(not one.replica for one in found)
    began = time.perf_counter()
    await asyncio.gather(*tasks)
    row = {**compared(found, expected), "resumed": cut, "not begun": unbegun}
    return {**row, "seconds after the kill": round(time.perf_counter() - began, 1)}


async def redeploy(replicas: list[Replica]) -> dict[str, Any]:
    """End each replica by SIGTERM and start it again."""
    for replica in replicas:
        replica.signal(signal.SIGTERM)
        await replica.restart()
        # The door looks at its replicas once a second.
        await asyncio.sleep(2)
    return {"step": "rolling redeploy"}


async def scale_down(replicas: list[Replica]) -> dict[str, Any]:
    """End the last replica by SIGTERM; the others serve for 5 s without it. Its exit code."""
    replicas[-1].signal(signal.SIGTERM)
    code = await replicas[-1].ended()
    await asyncio.sleep(5)
    return {"step": "scale-down", "exit code": code}


async def during(
    change: Callable[[list[Replica]], Awaitable[dict[str, Any]]],
    client: httpx.AsyncClient,
    replicas: list[Replica],
    expected: list[Streamed],
) -> dict[str, Any]:
    """Streams one after the other, from 8 clients, while the replicas change."""
    found: list[Streamed] = []
    matching: list[Streamed] = []
    over, began = asyncio.Event(), time.perf_counter()

    async def ask(first: int) -> None:
        number = first
        while not over.is_set():
            found.append(await stream(client, number, Streamed()))
            matching.append(expected[number])
            number = (number + 8) % STREAMS

    # Each pair of lists grows in one step of the event loop, so their places correspond.
    clients = [asyncio.create_task(ask(number)) for number in range(8)]
    # Every replica has streams.
    await asyncio.sleep(1)
    row = await change(replicas)
    over.set()
    await asyncio.gather(*clients)
    return {**row, **compared(found, matching), "seconds": round(time.perf_counter() - began)}


async def run(
    replicas: list[Replica], url: str, rounds: int, show: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """The rows: all rounds of kills as one, the rolling redeploy, and the scale-down."""
    for replica in replicas:
        await replica.wait_until_ready()
    expected = await expected_streams(replicas[0])
    rows = []
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as client:
        # Until the door has seen all replicas.
        await asyncio.sleep(2)
        for number in range(rounds):
            place = number % REPLICAS
            rows.append(await killed(client, replicas[place], str(place + 1), expected))
            show(rows[-1])
            await replicas[place].restart()
            await asyncio.sleep(2)
        changes = []
        for change in (redeploy, scale_down):
            changes.append(await during(change, client, replicas, expected))
            show(changes[-1])
    ends: Counter[str] = Counter()
    for row in rows:
        ends.update(row["streams"])
    totals = {name: sum(row[name] for row in rows) for name in ("equal", "resumed", "not begun")}
    return [{"step": f"kill -9 of one, {rounds} rounds", "streams": dict(ends), **totals}, *changes]


def main() -> None:
    """Start the replicas, run the rounds, and stop."""
    parser = command_parser("fleet.kills", __doc__)
    parser.add_argument("--rounds", type=int, default=10)
    add_json_option(parser)
    args = parser.parse_args()
    note = load_note()
    with tempfile.TemporaryDirectory() as logs, fleet(Path(logs)) as (replicas, url):
        rows = asyncio.run(run(replicas, url, args.rounds, lambda row: print(row, flush=True)))
    if args.json:
        measured("kills", rows, note).write(args.json)


if __name__ == "__main__":
    main()
