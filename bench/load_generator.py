"""Sends the requests of a cell: closed loop (N streams, each sends again when its answer ended) or open loop.

Every request that is started ends as exactly one Sample.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.client import Prompt, RequestOptions, SentRequest, Server, send
from bench.prompts import Prompts
from bench.samples import LoadRun


@dataclass(frozen=True, slots=True)
class LoadGenerator:
    """Sends requests to one server in one round. Equal keys give equal prompts."""

    server: Server
    options: RequestOptions
    prompts: Prompts
    key: object = ""

    def for_round(self, key: object) -> LoadGenerator:
        """The same in another round."""
        return replace(self, key=key)

    async def single(self, prompt: Prompt, max_tokens: int) -> LoadRun:
        """Send one request."""
        return await self.closed_loop([prompt], max_tokens, streams=1)

    async def closed_loop(self, prompts: Sequence[Prompt], max_tokens: int, *, streams: int) -> LoadRun:
        """Send all prompts, `streams` of them at any time."""
        waiting = iter(prompts)
        answers: list[SentRequest] = []
        begun = time.perf_counter()

        async def stream() -> None:
            for prompt in waiting:
                answers.append(await self._send(prompt, max_tokens, begun))

        await asyncio.gather(*(stream() for _ in range(streams)))
        return _finished_run(len(prompts), begun, answers)

    async def open_loop(self, prompts: Sequence[Prompt], max_tokens: int, *, rate: float) -> LoadRun:
        """Send all prompts at random moments, `rate` a second on average, regardless of running answers."""
        source = random.Random(f"{self.key} arrivals")
        answers: list[SentRequest] = []
        begun = time.perf_counter()

        async def request(prompt: Prompt, delay: float) -> None:
            await asyncio.sleep(begun + delay - time.perf_counter())
            answers.append(await self._send(prompt, max_tokens, begun))

        delay = 0.0
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(request(prompt, delay))
                delay += source.expovariate(rate)
        return _finished_run(len(prompts), begun, answers)

    async def _send(self, prompt: Prompt, max_tokens: int, begun: float) -> SentRequest:
        return await send(self.server, self.options, prompt=prompt, max_tokens=max_tokens, begun=begun)


def _finished_run(planned: int, begun: float, answers: Sequence[SentRequest]) -> LoadRun:
    """The run, which ends now; answers are parsed only now, which would delay running ones."""
    return LoadRun(planned, time.perf_counter() - begun, tuple(answer.read() for answer in answers))
