"""Mixed requests by the openai client to a server with random weights on a device: no error, and memory that stays."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import psutil
import torch

from benchmarks.shapes import SHAPES, write_folder
from tests.e2e.serving import serving

# Requests at a time, and the growth of memory that is no leak: buffers of the allocator and of the longest prompt.
_CONCURRENT, _GROWTH_BYTES = 16, 256 * 2**20
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
_KINDS = ("stream", "logprobs", "choices", "schema", "penalties", "left", "shared prefix")


def serve_mixed(shape: str, device: str, requests: int) -> dict[str, Any]:
    """Send requests of all kinds, and compare the memory after a quarter of them with that at the end."""
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "errors.log", "w+") as errors:
        path = Path(folder) / "model"
        write_folder(SHAPES[shape], path)
        flags = [str(path), "--device", device, "--context", "4096", "--slots", "16", "--drafter", "lookup"]
        with serving(flags, errors) as url:
            tokens, grown = asyncio.run(_send_all(url, device, requests))
        errors.seek(0)
        lines = [line for line in errors if "ERROR" in line or "Traceback" in line]
    assert not lines, f"the log of the server has errors: {lines[:3]}"
    assert grown < _GROWTH_BYTES, f"memory grew by {grown / 2**20:.0f} MiB"
    return {"requests": requests, "tokens": tokens, "grown_mib": round(grown / 2**20, 1)}


async def _send_all(url: str, device: str, requests: int) -> tuple[int, int]:
    """The tokens of all answers, and the growth of memory in bytes behind the first quarter of the requests."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        tokens = await _send(client, range(requests // 4))
        before = _used_bytes(device)
        tokens += await _send(client, range(requests // 4, requests))
        return tokens, _used_bytes(device) - before


async def _send(client: openai.AsyncOpenAI, numbers: Sequence[int]) -> int:
    """The tokens of all answers."""
    gate = asyncio.Semaphore(_CONCURRENT)

    async def send(number: int) -> int:
        async with gate:
            return await _answer(client, number)

    return sum(await asyncio.gather(*(send(number) for number in numbers)))


async def _answer(client: openai.AsyncOpenAI, number: int) -> int:
    """One request, whose kind follows from its number; the tokens of its answer."""
    kind, words = _KINDS[number % len(_KINDS)], " ".join(["abcd", "aefg", "abij"] * (1 + number % 20))
    text = words * 8 if kind == "shared prefix" else f"{number} {words}"
    given: dict[str, Any] = {
        "model": "model",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 16 + number % 48,
        "temperature": number % 3 / 2,
        "seed": number,
    }
    match kind:
        case "stream" | "left":
            return await _streamed(client, given, leaves=kind == "left")
        case "logprobs":
            given |= {"logprobs": True, "top_logprobs": 3}
        case "choices":
            given |= {"n": 3, "temperature": 1.0, "top_p": 0.9}
        case "schema":
            schema = {"type": "json_schema", "json_schema": {"name": "own", "schema": _SCHEMA, "strict": True}}
            given |= {"response_format": schema}
        case "penalties":
            given |= {"frequency_penalty": 0.5, "presence_penalty": 0.5}
    answer = await client.chat.completions.create(**given)
    assert answer.usage is not None
    assert len(answer.choices) == given.get("n", 1)
    assert all(choice.finish_reason in ("stop", "length") for choice in answer.choices)
    if kind == "logprobs":
        assert answer.choices[0].logprobs is not None
    return answer.usage.completion_tokens


async def _streamed(client: openai.AsyncOpenAI, given: dict[str, Any], *, leaves: bool) -> int:
    """The chunks of a streamed answer; `leaves` closes it behind the third."""
    count = 0
    async with await client.chat.completions.create(**given, stream=True) as stream:
        async for _ in stream:
            count += 1
            if leaves and count == 3:
                break
    assert count > 1
    return count


def _used_bytes(device: str) -> int:
    """Of the GPU by all processes, or of the server on a CPU."""
    if device == "cpu":
        return sum(process.memory_info().rss for process in psutil.Process().children(recursive=True))
    free, total = torch.cuda.mem_get_info(device)
    return total - free
