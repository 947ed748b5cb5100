"""GET /v1/engine: slots, cells, cached prefixes and drafts at this moment, as far as an API key may see them."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import FastAPI
from starlette.responses import Response

from engine.types.snapshot import CellGroup, EngineSnapshot, FinishedSequence, SequenceCounts, SlotSnapshot
from engine.types.status import DraftCounts, Stats
from server.http.encoding import JsonResponse
from server.models.registry import ModelRegistry
from server.routes.openapi import ERROR_RESPONSES
from server.schemas.engine import (
    EngineCells,
    EngineCounts,
    EngineDrafter,
    EngineFinished,
    EnginePrefix,
    EngineSequence,
    EngineSlot,
    EngineState,
)


def add(app: FastAPI, models: ModelRegistry) -> None:
    """Add the route."""

    @app.get("/v1/engine", responses={**ERROR_RESPONSES, 200: {"model": EngineState}})
    async def engine_state() -> Response:
        """The state of the engine: counts and lengths, no text.

        Sequences and cached prefixes are those of the API key's organisation, without `cache_salt`.
        """
        service = models.use()
        service.check_ready()
        return JsonResponse(_state(await service.snapshot()), headers={"Cache-Control": "no-store"})


def _state(snapshot: EngineSnapshot) -> EngineState:
    return EngineState(
        object="engine",
        context=snapshot.context,
        counts=_counts(snapshot.stats),
        drafters=[_drafter(counts) for counts in snapshot.stats.drafts],
        cells=[_cells(group) for group in snapshot.groups],
        slots=[_slot(slot) for slot in snapshot.slots],
        finished=[_finished(sequence, snapshot.time) for sequence in snapshot.finished],
        prefixes=[
            EnginePrefix(id=node.id, parent=node.parent, start=node.start, length=node.length, slots=list(node.slots))
            for node in snapshot.prefixes
        ],
    )


def _counts(stats: Stats) -> EngineCounts:
    return EngineCounts(
        running=stats.running,
        waiting=stats.waiting,
        steps=stats.steps_total,
        prompt_tokens=stats.prompt_tokens_total,
        cached_tokens=stats.cached_tokens_total,
        generated_tokens=stats.generated_tokens_total,
        context_shifts=stats.context_shifts_total,
        preemptions=stats.preemptions_total,
        evicted_tokens=stats.evicted_tokens_total,
    )


def _drafter(counts: DraftCounts) -> EngineDrafter:
    return EngineDrafter(kind=counts.kind, drafted_tokens=sum(counts.drafted), accepted_tokens=sum(counts.accepted))


def _cells(group: CellGroup) -> EngineCells:
    return EngineCells(
        range=group.range_kind,
        range_size=group.range_size or None,
        layers=group.layers,
        total=group.total,
        used=group.used,
        shared=group.shared,
        cached=group.cached,
    )


def _slot(slot: SlotSnapshot) -> EngineSlot:
    sequence = None if slot.sequence is None else _sequence(slot.sequence)
    return EngineSlot(slot=slot.slot, state=slot.state, sequence=sequence)


def _finished(finished: FinishedSequence, now: float) -> EngineFinished:
    return EngineFinished(
        number=finished.number,
        slot=finished.slot,
        age_seconds=round(now - finished.time, 3),
        sequence=_sequence(finished.sequence),
    )


def _sequence(counts: SequenceCounts) -> EngineSequence:
    return EngineSequence(**{**asdict(counts), "seconds": round(counts.seconds, 3)})  # type: ignore[typeddict-item]
