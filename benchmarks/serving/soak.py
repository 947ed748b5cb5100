"""The soak of benchmarks.serving.load: whether the memory of a server grows with its requests."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks.serving.bodies import SEEDS, words
from benchmarks.serving.raw_client import HOST, Loaded, get_json, read_body, read_head, request_bytes

FIRST_SERVER_ERROR = 500
SOAK_CLIENTS, SOAK_WARM_SHARE, IDLE_SECONDS = 16, 0.2, 8.0
# Paths that change what the server has, or need another model.
NOT_SOAKED = {"/v1/batches", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/api/show", "/infill"}


async def soak(server: Loaded, given: argparse.Namespace) -> dict[str, Any]:
    """Requests of every kind, one after another by each of a few clients."""
    chance, statuses = random.Random(0), Counter[int]()
    names = (await get_json(server.port, "/v1/models"))["data"]
    paths = sorted(set(SEEDS) - NOT_SOAKED)
    points: list[dict[int, float]] = []

    async def send(requests: Iterable[bytes]) -> None:
        left = iter(requests)

        async def client() -> None:
            reader, writer = await asyncio.open_connection(HOST, server.port)
            for request in left:
                writer.write(request)
                status, headers = await read_head(reader)
                await read_body(reader, headers)
                statuses[status] += 1
                if headers.get("connection", "").lower() == "close":
                    writer.close()
                    reader, writer = await asyncio.open_connection(HOST, server.port)
            writer.close()

        await asyncio.gather(*(client() for _ in range(SOAK_CLIENTS)))

    def requests(count: int) -> Iterator[bytes]:
        return (soaking_request(chance, chance.choice(paths), names[0]["id"]) for _ in range(count))

    warm = int(given.count * SOAK_WARM_SHARE)
    began = time.perf_counter()
    # Each kind by all clients at once, so that the second process of a kind starts as well.
    for path in paths:
        await send([soaking_request(chance, path, names[0]["id"]) for _ in range(SOAK_CLIENTS)])
    await send(requests(warm))
    # The tables of grammars are built, and garbage is collected, while no request runs.
    await asyncio.sleep(IDLE_SECONDS)
    points.append(server.process_pss_mb())
    for _ in range(4):
        await send(requests((given.count - warm) // 4))
        await asyncio.sleep(IDLE_SECONDS)
        points.append(server.process_pss_mb())
    first, last = points[0], points[-1]
    return {
        "requests": sum(statuses.values()),
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "errors": sum(count for status, count in statuses.items() if status >= FIRST_SERVER_ERROR),
        "seconds": round(time.perf_counter() - began, 1),
        "main_mb": [round(point[server.process.pid], 1) for point in points],
        "pss_mb": [round(sum(point.values()), 1) for point in points],
        "processes": [len(point) for point in points],
        # A process that was replaced counts as one that was there.
        "growth_mb": round(sum(last.values()) - sum(first.values()) - of_further_processes(first, last), 1),
        "of_further_processes_mb": round(of_further_processes(first, last), 1),
    }


def of_further_processes(first: Mapping[int, float], last: Mapping[int, float]) -> float:
    """The memory of the processes by which there are more at the last point: of the largest new ones."""
    started = sorted((size for process, size in last.items() if process not in first), reverse=True)
    return sum(started[: max(len(last) - len(first), 0)])


def soaking_request(chance: random.Random, path: str, model: str) -> bytes:
    """A request of a path with random words, streamed where it can be; a few are invalid."""
    text = words(chance, int(100 ** chance.random()))
    fields = json.loads(json.dumps(SEEDS[path]).replace('"a"', json.dumps(text)).replace('"cellar"', json.dumps(model)))
    if chance.random() < 0.05:
        fields["temperature"] = "hot"
    for name in ("max_tokens", "max_output_tokens", "n_predict"):
        if name in fields:
            fields[name] = chance.randint(1, 24)
            fields["stream"] = chance.random() < 0.5
    return request_bytes(path, fields)
