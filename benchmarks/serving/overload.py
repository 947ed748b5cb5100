"""Measures what refused requests cost: goodput per second of the server's processor time under overload.

    python -m benchmarks.serving.overload [MODEL] [--clients 500] [--seconds 20] [--retry 1] [--json FILE]

Clients in a closed loop send chats of about 700 tokens that nobody else has sent, and wait for each answer; a refused
client waits for the seconds of Retry-After, or for --retry, and sends its next chat. Goodput are the tokens of complete
answers. The same server first has as many clients as slots, then --clients; the goal is a ratio of at least 0.85.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from bench.launch import cellar
from benchmarks.result import add_json_option, command_parser, measured, model_name

GOAL = 0.85
SLOTS, ANSWERED, PROMPT_WORDS = 8, 32, 500
WARM_SECONDS, FEW_SECONDS = 5.0, 15.0
OK, REFUSED = 200, 429
WORDS = ["water", "cheese", "server", "token", "memory", "table", "window", "garden", "river", "letter"]


@dataclass(slots=True)
class Load:
    """Clients of one server, and what they got since the last `reset`."""

    port: int
    retry_seconds: float | None
    tokens: int = 0
    statuses: dict[int, int] = field(default_factory=dict)

    def reset(self) -> None:
        """Start counting anew."""
        self.tokens, self.statuses = 0, {}

    async def client(self, seed: int) -> None:
        """Send chats one after another, until it is cancelled."""
        words = random.Random(seed)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            while True:
                writer.write(chat(" ".join(words.choices(WORDS, k=PROMPT_WORDS))))
                status, headers, body = await read_answer(reader)
                self.statuses[status] = self.statuses.get(status, 0) + 1
                if status == OK:
                    self.tokens += json.loads(body)["usage"]["completion_tokens"]
                else:
                    waits = self.retry_seconds is None
                    await asyncio.sleep(float(headers.get("retry-after", 1)) if waits else self.retry_seconds)
        finally:
            writer.close()


def chat(text: str) -> bytes:
    """The bytes of a request."""
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": ANSWERED,
        "ignore_eos": True,
        "temperature": 0,
    }
    content = json.dumps(body).encode()
    lines = (
        "POST /v1/chat/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer with Content-Length."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(first.split(" ")[1]), headers, await reader.readexactly(int(headers["content-length"]))


async def measure(load: Load, clients: int, seconds: float) -> dict[str, Any]:
    """One row: the load of this many clients."""
    process = psutil.Process().children()[0]
    tasks = [asyncio.create_task(load.client(clients * 1000 + number)) for number in range(clients)]
    await asyncio.sleep(WARM_SECONDS)
    load.reset()
    before, began = process.cpu_times(), time.perf_counter()
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    after, wall = process.cpu_times(), time.perf_counter() - began
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
    processor = after.user + after.system - before.user - before.system
    return {
        "clients": clients,
        "retry": "Retry-After" if load.retry_seconds is None else f"{load.retry_seconds:g} s",
        "answers": load.statuses.get(OK, 0),
        "refusals": load.statuses.get(REFUSED, 0),
        "errors": sum(count for status, count in load.statuses.items() if status not in (OK, REFUSED)),
        "wall_seconds": round(wall, 2),
        "processor_seconds": round(processor, 2),
        "tokens_per_processor_second": round(load.tokens / processor, 2),
    }


async def compare(load: Load, clients: int, seconds: float) -> list[dict[str, Any]]:
    """Rows of few clients and of many; `ratio` is that of their goodput per second of processor time."""
    few = await measure(load, SLOTS, min(seconds, FEW_SECONDS))
    many = await measure(load, clients, seconds)
    ratio = many["tokens_per_processor_second"] / few["tokens_per_processor_second"]
    return [few, {**many, "ratio": round(ratio, 3)}]


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 1 if the goal is missed."""
    parser = command_parser("serving.overload", __doc__)
    parser.add_argument("model", nargs="?", default=None, help="a folder (default: the bundled model)")
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=20.0, help="with --clients (default 20)")
    parser.add_argument("--retry", type=float, help="seconds that a refused client waits (default: Retry-After)")
    add_json_option(parser)
    given = parser.parse_args(arguments)
    command = (*([given.model] if given.model else []), "--slots", str(SLOTS), "--drafter", "none")
    with tempfile.TemporaryDirectory() as folder, cellar(command, Path(folder) / "server.log") as url:
        port = urlsplit(url).port
        assert port is not None, "the server listens on a port"
        rows = asyncio.run(compare(Load(port, given.retry), given.clients, given.seconds))
    for row in rows:
        print(json.dumps(row))
    if given.json:
        model = model_name(given.model or "bundled")
        measured("overload", [{"model": model, **row} for row in rows]).write(given.json)
    return 0 if rows[1]["ratio"] >= GOAL and not rows[1]["errors"] else 1


if __name__ == "__main__":
    sys.exit(main())
