"""Sends the requests: closed loop (N streams, each sends again when its answer ended) or open loop (Poisson arrivals).

Every request that is started ends as exactly one Sample. Times are taken when bytes are read from the socket, before
they are parsed.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.samples import OK, Run, Sample

Done = Callable[[Sample], None]
Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Server:
    """Whom to ask: `name` is for people, `url` ends in /v1."""

    name: str
    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        # Compressed events would arrive in lumps.
        always = {"Accept-Encoding": "identity"}
        return always | ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What every request asks for besides its prompt. `extra` is laid over the body; null takes a field out of it."""

    max_tokens: int
    timeout_seconds: float
    extra: dict[str, Any] = field(default_factory=dict)

    def path(self, prompt: Prompt) -> str:
        """Return where the request goes, behind /v1: text is a chat, token ids are continued as they are."""
        return "/chat/completions" if isinstance(prompt, str) else "/completions"

    def body(self, model: str, prompt: Prompt) -> dict[str, Any]:
        """Return the JSON body of one streamed request."""
        asked = {"messages": [{"role": "user", "content": prompt}]} if isinstance(prompt, str) else {"prompt": prompt}
        body = {
            "model": model,
            **asked,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return {name: value for name, value in (body | self.extra).items() if value is not None}


@dataclass(slots=True)
class Answer:
    """An answer while it arrives; seconds since it was asked for.

    It is whole after a finish_reason or [DONE]: usage comes behind the first, and some servers never send the second.
    """

    arrivals: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    outcome: str = "cut"

    def take(self, line: bytes, seconds: float) -> None:
        """Read one line of the event stream."""
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self.outcome = OK
            return
        event = json.loads(data)
        choices = event.get("choices") or []
        if event.get("error"):
            self.outcome = "error event"
        elif any(choice.get("finish_reason") for choice in choices):
            self.outcome = OK
        self.usage = event.get("usage") or self.usage
        if any(has_text(choice.get("delta") or choice) for choice in choices):
            self.arrivals.append(seconds)


def has_text(delta: dict[str, Any]) -> bool:
    """Whether a delta, or a choice of a completion, carries what the model wrote; often the first has only a role."""
    return any(delta.get(name) for name in ("content", "text", "reasoning_content", "reasoning", "tool_calls"))


async def closed(
    client: httpx.AsyncClient, server: Server, ask: Ask, *, prompts: Sequence[Prompt], streams: int, done: Done
) -> Run:
    """Send all prompts, `streams` of them at any time."""
    waiting = iter(prompts)
    samples: list[Sample] = []
    start = time.perf_counter()

    async def stream() -> None:
        for prompt in waiting:
            samples.append(await send(client, server, ask, prompt=prompt, start=start))
            done(samples[-1])

    await asyncio.gather(*(stream() for _ in range(streams)))
    return Run(len(prompts), time.perf_counter() - start, tuple(samples))


async def opened(
    client: httpx.AsyncClient, server: Server, ask: Ask, *, prompts: list[str], rate: float, seed: int, done: Done
) -> Run:
    """Send all prompts at random moments, `rate` a second on average, however many are still being answered."""
    source = random.Random(seed)
    samples: list[Sample] = []
    start = time.perf_counter()

    async def one(prompt: str, at: float) -> None:
        await asyncio.sleep(start + at - time.perf_counter())
        samples.append(await send(client, server, ask, prompt=prompt, start=start))
        done(samples[-1])

    at = 0.0
    async with asyncio.TaskGroup() as group:
        for prompt in prompts:
            group.create_task(one(prompt, at))
            at += source.expovariate(rate)
    return Run(len(prompts), time.perf_counter() - start, tuple(samples))


async def send(client: httpx.AsyncClient, server: Server, ask: Ask, *, prompt: Prompt, start: float) -> Sample:
    """Send one request and read its answer to the end; whatever happens is an outcome, not an exception."""
    sent = time.perf_counter()
    answer = Answer()
    body = ask.body(server.model, prompt)
    try:
        async with (
            asyncio.timeout(ask.timeout_seconds),
            client.stream("POST", server.url + ask.path(prompt), json=body, headers=server.headers) as response,
        ):
            if response.status_code != 200:
                answer.outcome = f"http {response.status_code}"
                await response.aread()
            else:
                async for line, moment in lines(response):
                    answer.take(line, moment - sent)
    except TimeoutError:
        answer.outcome = "timeout"
    except httpx.HTTPError:
        answer.outcome = "connection"
    except (ValueError, AttributeError):
        answer.outcome = "unreadable event"
    return sample(answer, sent=sent - start, finished=time.perf_counter() - sent)


async def lines(response: httpx.Response) -> AsyncIterator[tuple[bytes, float]]:
    """Yield every line with the moment when the last of its bytes was read from the socket."""
    rest = b""
    async for block in response.aiter_raw():
        moment = time.perf_counter()
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
            yield line, moment


def sample(answer: Answer, *, sent: float, finished: float) -> Sample:
    """Return what came of an answer."""
    usage = answer.usage
    return Sample(
        outcome=answer.outcome,
        sent=sent,
        arrivals=tuple(answer.arrivals),
        finished=finished,
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens") or len(answer.arrivals),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        counted_by="usage" if usage.get("completion_tokens") else "chunks",
    )
