"""Many small requests as one piece of work, such as the inputs of an embedding or the questions of a decision."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import Overloaded
from engine.types.events import Delta, Embedded, Finished, TokenLogprob
from engine.types.request import Request
from server.metrics import Endpoint
from server.service import Service


@dataclass(frozen=True, slots=True)
class PromptResult:
    """What one request told: its end, log-probabilities of what it said, and its vector if it asked for one."""

    finished: Finished
    logprobs: tuple[TokenLogprob, ...] = ()
    vector: bytes = b""


async def run_all(service: Service, requests: Sequence[Request], endpoint: Endpoint) -> list[PromptResult]:
    """Run the requests, as many at a time as the engine has slots; what they told, in order.

    So a long list takes no more places in the queue than that. The first error ends all of them; where the queue is
    full, the rest goes on in fewer places, down to one.
    """
    work = _PromptBatch(service, requests, endpoint)
    workers = [asyncio.create_task(work.work()) for _ in range(work.workers)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [work.outcomes[at] for at in range(len(requests))]


class _PromptBatch:
    """The work that is left, and what came of what is done."""

    def __init__(self, service: Service, requests: Sequence[Request], endpoint: Endpoint) -> None:
        self._service, self._endpoint = service, endpoint
        self._pending = deque(enumerate(requests))
        self.workers = min(len(requests), service.engine.info.slots)
        self.outcomes: dict[int, PromptResult] = {}

    async def work(self) -> None:
        """Run one after the other until nothing is left."""
        while self._pending:
            at, request = self._pending.popleft()
            try:
                self.outcomes[at] = await self._run(request)
            except Overloaded:
                if self.workers == 1:
                    raise
                self._pending.appendleft((at, request))
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
