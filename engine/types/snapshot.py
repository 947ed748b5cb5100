"""The state of the engine at one moment, for one owner: counts and lengths, never text or tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.types.status import Stats

# free: no sequence; other: a sequence of another owner; waiting: for a prefix that another sequence computes.
SlotState = Literal["free", "other", "waiting", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class CellGroup:
    """The cells of the attention layers with one geometry and one attention range.

    range_size  tokens of a window or chunk; 0: full attention
    used        by slots
    shared      of `used`: by more than one slot
    cached      of the prefix cache alone: evicted for running sequences
    """

    range_kind: Literal["full", "window", "chunk"]
    range_size: int
    layers: int
    total: int
    used: int
    shared: int
    cached: int


@dataclass(frozen=True, slots=True)
class SequenceCounts:
    """Token counts of one sequence.

    prompt_tokens   of the request
    cached_tokens   of the prompt, reused from the prefix cache
    context_tokens  with keys and values in the slot now
    dropped_tokens  by context shifts
    seconds         in a slot
    """

    prompt_tokens: int
    cached_tokens: int
    context_tokens: int
    generated_tokens: int
    context_shifts: int
    dropped_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SlotSnapshot:
    """A slot, with its sequence if that has the owner."""

    slot: int
    state: SlotState
    sequence: SequenceCounts | None = None


@dataclass(frozen=True, slots=True)
class FinishedSequence:
    """A finished sequence of the owner.

    number  counts the finished sequences of all owners
    slot    None: it had none at its end
    time    of its end, in seconds of `EngineSnapshot.time`
    """

    number: int
    slot: int | None
    time: float
    sequence: SequenceCounts


@dataclass(frozen=True, slots=True)
class PrefixNodeSnapshot:
    """A node of the prefix cache: the tokens [start, start + length) of every cached prefix below it.

    parent  the id of the node above, if there is one
    slots   that use its cells
    """

    id: int
    parent: int | None
    start: int
    length: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine between two steps.

    time      in seconds of a monotonic clock
    finished  the last sequences of the owner, newest first
    prefixes  the most recently used nodes under the owner's salt; a node stands before its children
    """

    stats: Stats
    time: float
    context: int
    groups: tuple[CellGroup, ...]
    slots: tuple[SlotSnapshot, ...]
    finished: tuple[FinishedSequence, ...]
    prefixes: tuple[PrefixNodeSnapshot, ...]
