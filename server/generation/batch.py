"""Runs a list of short requests, such as the inputs of an embeddings request or the questions of a decision."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import Overloaded
from engine.types.events import Delta, Embedded, Finished, TokenLogprob
from engine.types.request import Request
from server.metrics.metrics import Endpoint
from server.service import Service


@dataclass(frozen=True, slots=True)
class PromptResult:
    """Result of one request: its last event, log-probabilities and, if requested, embedding vector (float32 bytes)."""

    finished: Finished
    logprobs: tuple[TokenLogprob, ...] = ()
    vector: bytes = b""


async def run_all(service: Service, requests: Sequence[Request], endpoint: Endpoint) -> list[PromptResult]:
    """Run `requests` with at most one per engine slot at a time; results in order.

    Thus a long list does not fill the queue. The first error cancels the others. If the queue is full, the number of
    concurrent requests is reduced, down to one.
    """
    batch = _PromptBatch(service, requests, endpoint)
    workers = [asyncio.create_task(batch.run_pending()) for _ in range(batch.workers)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [batch.results[index] for index in range(len(requests))]


class _PromptBatch:
    """Pending requests and results."""

    def __init__(self, service: Service, requests: Sequence[Request], endpoint: Endpoint) -> None:
        self._service, self._endpoint = service, endpoint
        self._pending = deque(enumerate(requests))
        self.workers = min(len(requests), service.engine.info.slots)
        self.results: dict[int, PromptResult] = {}

    async def run_pending(self) -> None:
        while self._pending:
            index, request = self._pending.popleft()
            try:
                self.results[index] = await self._run(request)
            except Overloaded:
                if self.workers == 1:
                    raise
                self._pending.appendleft((index, request))
                self.workers -= 1
                return

    async def _run(self, request: Request) -> PromptResult:
        entries: list[TokenLogprob] = []
        vector = b""
        async with self._service.open(request, self._endpoint) as events:
            async for _, event in events:
                match event:
                    case Delta():
                        entries += event.logprobs
                    case Embedded():
                        vector = event.vector
                    case Finished():
                        return PromptResult(event, tuple(entries), vector)
        raise AssertionError("a request ends with Finished, or with an error")
