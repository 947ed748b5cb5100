"""Replicas behind routers: cached share of conversations, equal text, overhead, and requests lost when one ends.

    python -m benchmarks.fleet.routers --programs FOLDER --json FILE --page    starts servers and routers, measures all
    python -m benchmarks.fleet.routers NAME=URL ...                 measures servers and routers, the first is the base
    python -m benchmarks.fleet.routers NAME=URL --kill PID          also ends a process with SIGKILL under 24 streams

FOLDER has the programs sglang-router and vllm-router; with the extra `ray` Ray Serve is measured, too. A replica is
`cellar serve --threads 1`; docs/scale.md has the commands of the routers, and with --page the figures.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.fleet.page import add_page_option, load_note, write_page
from benchmarks.fleet.router_stack import router_stack
from benchmarks.result import add_json_option, command_parser, measured

CONVERSATIONS, TURNS, ANSWER_TOKENS = 16, 4, 24
CONCURRENCY = 8
STREAMS, STREAM_TOKENS = 24, 200
# Of the streams of a kill: long enough that all are open when it happens.
LONG_TOKENS = 1800
SAMPLES, ROUNDS = 60, 3
SUBJECTS = ["cache", "prefix", "slot", "token", "router", "replica", "prompt", "model", "context", "batch", "step"]
CHAT = "/v1/chat/completions"


@dataclass
class Result:
    """The figures of one server or router."""

    name: str
    requests: int = 0
    errors: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_share: float = 0.0
    equal_texts: bool | None = None
    unary_p50_ms: float = 0.0
    first_chunk_p50_ms: float = 0.0
    tokens_per_second: float = 0.0
    rates: list[float] = field(default_factory=list)
    streams: dict[str, int] = field(default_factory=dict)


def sentence(draw: random.Random, words: int) -> str:
    """A user message."""
    return " ".join(draw.choice(SUBJECTS) for _ in range(words))


async def converse(client: httpx.AsyncClient, result: Result, nonce: str, number: int) -> None:
    """One conversation, turn by turn, with the history in each request."""
    draw = random.Random(f"{nonce} {number}")
    messages = [{"role": "system", "content": f"{nonce}. " + sentence(random.Random(nonce), 60)}]
    for _ in range(TURNS):
        messages.append({"role": "user", "content": f"{number}: {sentence(draw, 40)}"})
        body = {"messages": messages, "max_tokens": ANSWER_TOKENS, "seed": number, "temperature": 0.7}
        answer = await ask(client, result, body, headers={"x-session-id": f"{nonce}-{number}"})
        if answer is None:
            return
        usage = answer["usage"]
        result.prompt_tokens += usage["prompt_tokens"]
        result.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})


async def ask(client: httpx.AsyncClient, result: Result, body: dict[str, Any], **options: Any) -> Any:
    """The answer in one piece; an error is counted and gives None."""
    result.requests += 1
    try:
        answer = await client.post(CHAT, json={"model": MODEL, **body}, **options)
        if answer.status_code == 200:
            return answer.json()
        result.errors.append(f"{answer.status_code} {answer.text[:200]}")
    except httpx.HTTPError as error:
        result.errors.append(repr(error)[:200])
    return None


async def all_conversations(client: httpx.AsyncClient, result: Result) -> None:
    """CONVERSATIONS conversations, CONCURRENCY at a time, with a system prompt that no earlier run has cached."""
    limit, nonce = asyncio.Semaphore(CONCURRENCY), f"{time.time_ns()}"

    async def one(number: int) -> None:
        async with limit:
            await converse(client, result, nonce, number)

    await asyncio.gather(*(one(number) for number in range(CONVERSATIONS)))
    result.cached_share = round(result.cached_tokens / max(result.prompt_tokens, 1), 4)


async def seeded_texts(client: httpx.AsyncClient, result: Result) -> list[str | None]:
    """Sampled texts with a seed: each prompt twice, on whichever replica the router chooses."""
    texts: list[str | None] = []
    for number in range(8):
        for session in range(2):
            message = {"role": "user", "content": sentence(random.Random(number), 12)}
            body = {"messages": [message], "max_tokens": ANSWER_TOKENS, "seed": number, "temperature": 1.0}
            answer = await ask(client, result, body, headers={"x-session-id": f"{number} {session}"})
            texts.append(None if answer is None else answer["choices"][0]["message"]["content"])
    return texts


def ignore_head(answer: httpx.Response) -> None:
    """Do nothing."""


async def read_stream(
    client: httpx.AsyncClient,
    content: str,
    tokens: int,
    on_head: Callable[[httpx.Response], None] = ignore_head,
) -> tuple[str, float, int]:
    """The end of a stream ("ok", "error event", "cut" or "refused"), the seconds to its first chunk, and its tokens.

    Of a stream that is not "ok", the chunks count as tokens.
    """
    body = {
        "model": MODEL,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": tokens,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": content}],
    }
    began, first, chunks, end, usage = time.perf_counter(), 0.0, 0, "cut", None
    try:
        async with client.stream("POST", CHAT, json=body, headers={"x-session-id": content}) as answer:
            if answer.status_code != 200:
                return "refused", 0.0, 0
            on_head(answer)
            async for line in answer.aiter_lines():
                if line.startswith('data: {"error"'):
                    end = "error event"
                elif line == "data: [DONE]":
                    end = "ok"
                elif line.startswith("data: "):
                    first = first or time.perf_counter() - began
                    event = json.loads(line[6:])
                    chunks += bool(event["choices"])
                    usage = event.get("usage") or usage
    except httpx.HTTPError:
        pass
    count = usage["completion_tokens"] if usage else chunks
    return end if chunks or end != "cut" else "refused", first, count


async def overhead(client: httpx.AsyncClient, result: Result) -> None:
    """One sample: a unary request of one token, and the first chunk of a stream."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    began = time.perf_counter()
    await ask(client, result, body)
    SAMPLED.setdefault(result.name, ([], []))[0].append(time.perf_counter() - began)
    SAMPLED[result.name][1].append((await read_stream(client, "hi", 2))[1])


async def throughput(client: httpx.AsyncClient, result: Result) -> None:
    """Tokens per second of 8 streams."""
    began = time.perf_counter()
    ends = await asyncio.gather(*(read_stream(client, f"{number} cellar", STREAM_TOKENS) for number in range(8)))
    result.rates.append(sum(tokens for _, _, tokens in ends) / (time.perf_counter() - began))
    result.tokens_per_second = round(statistics.median(result.rates), 1)
    result.errors += [end for end, _, _ in ends if end != "ok"]


async def killed(client: httpx.AsyncClient, result: Result, pid: int) -> None:
    """STREAMS streams, of which a process is ended by SIGKILL once all have had the time to begin."""
    streams = [
        asyncio.create_task(read_stream(client, f"{number} {sentence(random.Random(number), 9)}", LONG_TOKENS))
        for number in range(STREAMS)
    ]
    await asyncio.sleep(KILL_AFTER)
    os.kill(pid, signal.SIGKILL)
    for end, _, _ in await asyncio.gather(*streams):
        result.streams[end] = result.streams.get(end, 0) + 1


async def measure(targets: dict[str, str], parts: set[str], pid: int | None) -> list[Result]:
    """The figures of all targets; samples of overhead are taken in turn, so that other load meets all alike."""
    results = [Result(name) for name in targets]
    clients = [httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) for url in targets.values()]
    pairs = list(zip(clients, results, strict=True))
    if "conversations" in parts:
        for client, result in pairs:
            await all_conversations(client, result)
            print(result.name, result.requests, len(result.errors), result.cached_share, flush=True)
    if "texts" in parts:
        texts = [await seeded_texts(client, result) for client, result in pairs]
        for result, own in zip(results, texts, strict=True):
            result.equal_texts = own == texts[0] and None not in own
    if "overhead" in parts:
        for _ in range(SAMPLES):
            for client, result in pairs:
                await overhead(client, result)
        for _ in range(ROUNDS):
            for client, result in pairs:
                await throughput(client, result)
        for _, result in pairs:
            unary, first = SAMPLED[result.name]
            result.unary_p50_ms = round(1e3 * statistics.median(unary), 1)
            result.first_chunk_p50_ms = round(1e3 * statistics.median(first), 1)
    if pid is not None:
        await killed(*pairs[0], pid)
    return results


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = command_parser("fleet.routers", __doc__)
    parser.add_argument("targets", nargs="*", metavar="NAME=URL")
    parser.add_argument("--programs", type=Path, metavar="FOLDER", help="of sglang-router and vllm-router")
    parser.add_argument("--parts", default="conversations,texts,overhead", help="comma-separated")
    parser.add_argument("--kill", type=int, metavar="PID", help="of a replica behind the first target")
    parser.add_argument("--kill-after", type=float, default=3.0, metavar="SECONDS")
    parser.add_argument("--model", default="cellar-tiny")
    add_json_option(parser)
    add_page_option(parser)
    args = parser.parse_args()
    global MODEL, KILL_AFTER
    MODEL, KILL_AFTER = args.model, args.kill_after
    note = load_note()
    targets, parts = dict(each.split("=", 1) for each in args.targets), set(args.parts.split(","))
    if targets:
        results = asyncio.run(measure(targets, parts, args.kill))
    else:
        with tempfile.TemporaryDirectory() as logs, router_stack(args.programs or Path(), Path(logs)) as found:
            results = asyncio.run(measure(found, parts, args.kill))
    rows = [row(result) for result in results]
    print(json.dumps(rows, indent=1))
    if args.json:
        measured("routers", rows, note).write(args.json)
    if args.page:
        write_page()


def row(result: Result) -> dict[str, Any]:
    """The figures of a row of docs/scale.md."""
    return {name: value for name, value in asdict(result).items() if name not in ("rates", "streams") or value}


MODEL, KILL_AFTER = "cellar-tiny", 3.0
SAMPLED: dict[str, tuple[list[float], list[float]]] = {}

if __name__ == "__main__":
    main()
