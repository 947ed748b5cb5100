"""GET /v1/engine: the engine's snapshot as JSON, for the organisation of an API key."""

from __future__ import annotations

from typing import Any

from engine.types.events import Started
from engine.types.snapshot import (
    CellGroup,
    EngineSnapshot,
    FinishedSequence,
    PrefixNodeSnapshot,
    SequenceCounts,
    SlotSnapshot,
)
from engine.types.status import DraftCounts, Stats
from server.app import create_app
from tests.server.fakes import FakeEngine, ask, settings

PATH = "/v1/engine"
COUNTS = SequenceCounts(
    prompt_tokens=20,
    cached_tokens=15,
    context_tokens=24,
    generated_tokens=8,
    context_shifts=1,
    dropped_tokens=5,
    drafted_tokens=4,
    accepted_tokens=3,
    seconds=0.123456,
)
SEQUENCE = {
    "prompt_tokens": 20,
    "cached_tokens": 15,
    "context_tokens": 24,
    "generated_tokens": 8,
    "context_shifts": 1,
    "dropped_tokens": 5,
    "drafted_tokens": 4,
    "accepted_tokens": 3,
    "seconds": 0.123,
}
STATE = EngineSnapshot(
    stats=Stats(running=1, waiting=2, steps_total=3, drafts=(DraftCounts("model", (4, 3), (2, 1)),)),
    time=10.0,
    context=64,
    groups=(CellGroup("window", 8, 3, 100, 50, 20, 10), CellGroup("full", 0, 1, 200, 60, 0, 5)),
    slots=(SlotSnapshot(0, "decode", COUNTS), SlotSnapshot(1, "other"), SlotSnapshot(2, "free")),
    finished=(FinishedSequence(7, None, 8.5, COUNTS),),
    prefixes=(PrefixNodeSnapshot(2, None, 0, 9, (0, 1)), PrefixNodeSnapshot(3, 2, 9, 4, ())),
)


def app(engine: FakeEngine, **changes: Any) -> Any:
    return create_app(engine, settings(**changes))  # type: ignore[arg-type]


def test_all_counts_are_shown() -> None:
    """Every field of the snapshot; it is not stored by caches."""
    answer = ask(app(FakeEngine(state=STATE)), "GET", PATH)

    assert (200, "no-store") == (answer.status, answer.headers["cache-control"])
    assert {
        "object": "engine",
        "context": 64,
        "counts": {
            "running": 1,
            "waiting": 2,
            "steps": 3,
            "prompt_tokens": 0,
            "cached_tokens": 0,
            "generated_tokens": 0,
            "context_shifts": 0,
            "preemptions": 0,
            "evicted_tokens": 0,
        },
        "drafters": [{"kind": "model", "drafted_tokens": 7, "accepted_tokens": 3}],
        "cells": [
            {"range": "window", "range_size": 8, "layers": 3, "total": 100, "used": 50, "shared": 20, "cached": 10},
            {"range": "full", "range_size": None, "layers": 1, "total": 200, "used": 60, "shared": 0, "cached": 5},
        ],
        "slots": [
            {"slot": 0, "state": "decode", "sequence": SEQUENCE},
            {"slot": 1, "state": "other", "sequence": None},
            {"slot": 2, "state": "free", "sequence": None},
        ],
        "finished": [{"number": 7, "slot": None, "age_seconds": 1.5, "sequence": SEQUENCE}],
        "prefixes": [
            {"id": 2, "parent": None, "start": 0, "length": 9, "slots": [0, 1]},
            {"id": 3, "parent": 2, "start": 9, "length": 4, "slots": []},
        ],
    } == answer.json


def test_the_snapshot_has_the_owner_and_salt_of_the_key() -> None:
    """The same as the key's requests have, so no key sees sequences or prefixes of another one."""
    engine = FakeEngine(script=lambda request: iter([Started(1, 0, 0)]))
    served = app(engine, keys=("wines:a", "wines:b", "c"))
    for key in ("a", "b", "c"):
        headers = {"authorization": f"Bearer {key}"}
        assert 200 == ask(served, "GET", PATH, headers=headers).status
        ask(served, "POST", "/v1/completions", json_body={"prompt": "hi"}, headers=headers)

    assert [(request.owner, request.salt) for request in engine.requests] == engine.inspected
    assert 2 == len({*engine.inspected})


def test_a_key_is_required_where_there_are_keys() -> None:
    engine = FakeEngine()

    assert 401 == ask(app(engine, keys=("a", "b")), "GET", PATH).status
    assert [] == engine.inspected


def test_the_state_of_a_loading_engine_is_503() -> None:
    answer = ask(app(FakeEngine(phase="weights")), "GET", PATH)

    assert (503, "model_loading") == (answer.status, answer.json["error"]["code"])
