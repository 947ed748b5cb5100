"""Memory plans, in short-lived processes: they import torch and read the headers of models."""

from __future__ import annotations

import asyncio

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.remote.error_message import to_error
from engine.remote.link import WorkerLink
from engine.remote.messages import Ended, MeasureMemory, MemoryBudget, PlanModel, Planned, Reply
from engine.remote.process import Launch
from engine.types.status import MemoryNeed

# Without a sign of life after which the process is killed.
_STUCK_SECONDS = 120.0


async def measure_budget(config: EngineConfig, launch: Launch) -> int:
    """Bytes for all models, by the settings or by the free memory. Raises EngineError."""
    reply = await _ask(MeasureMemory(config), launch)
    assert isinstance(reply, MemoryBudget), "the answer of MeasureMemory"
    return reply.bytes


async def plan_model(config: EngineConfig, budget_bytes: int, launch: Launch) -> MemoryNeed:
    """The memory of a model within the budget of all models. Raises EngineError."""
    reply = await _ask(PlanModel(config, budget_bytes), launch)
    assert isinstance(reply, Planned), "the answer of PlanModel"
    return reply.need


async def _ask(command: MeasureMemory | PlanModel, launch: Launch) -> Reply:
    answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    def receive(reply: Reply) -> None:
        match reply:
            case Ended(error):
                fail(to_error(error))
            case MemoryBudget() | Planned() if not answer.done():
                answer.set_result(reply)

    def fail(error: EngineError) -> None:
        if not answer.done():
            answer.set_exception(error)

    link = WorkerLink(receive, fail, launch=launch, stuck_seconds=_STUCK_SECONDS)
    link.start(command)
    try:
        return await answer
    finally:
        link.kill()
        await asyncio.to_thread(link.close)
