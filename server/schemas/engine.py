"""The response of /v1/engine: counts and lengths, never text or tokens."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict


class EngineCounts(TypedDict):
    """Requests of all API keys, and totals since the start."""

    running: int
    waiting: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    context_shifts: int
    preemptions: int
    evicted_tokens: int


class EngineDrafter(TypedDict):
    """Drafted and accepted tokens of one kind of drafter since the start."""

    kind: str
    drafted_tokens: int
    accepted_tokens: int


class EngineCells(TypedDict):
    """The cells of the layers with one attention range; `range_size` is null for full attention."""

    range: Literal["full", "window", "chunk"]
    range_size: int | None
    layers: int
    total: int
    used: int
    shared: int
    cached: int


class EngineSequence(TypedDict):
    """Token counts of a sequence of this API key's organisation."""

    prompt_tokens: int
    cached_tokens: int
    context_tokens: int
    generated_tokens: int
    context_shifts: int
    dropped_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    seconds: float


class EngineSlot(TypedDict):
    """A slot; `sequence` is null if it is free or belongs to another organisation."""

    slot: int
    state: Literal["free", "other", "waiting", "prefill", "decode"]
    sequence: EngineSequence | None


class EngineFinished(TypedDict):
    """A finished sequence of this API key's organisation, and the seconds since its end."""

    number: int
    slot: int | None
    age_seconds: float
    sequence: EngineSequence


class EnginePrefix(TypedDict):
    """A node of the prefix cache, below the node `parent`; `slots` use its cells now."""

    id: int
    parent: int | None
    start: int
    length: int
    slots: list[int]


class EngineState(TypedDict):
    """The engine between two steps."""

    object: Literal["engine"]
    context: int
    counts: EngineCounts
    drafters: list[EngineDrafter]
    cells: list[EngineCells]
    slots: list[EngineSlot]
    finished: list[EngineFinished]
    prefixes: list[EnginePrefix]
