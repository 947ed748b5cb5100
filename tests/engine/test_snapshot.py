"""Snapshots of the engine: slots, shared prefixes, shifts and drafts of one owner, as they happen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.core import Core
from engine.engine import Engine
from engine.errors import Loading
from engine.types.request import Request
from engine.types.snapshot import EngineSnapshot, SequenceCounts
from tests.engine.kit.models import Models, core
from tests.engine.kit.play import ask
from tests.engine.test_engine import run_with_engine

PROMPT = tuple(range(1, 21))


def request(name: str, prompt: tuple[int, ...] = PROMPT, count: int = 8, **fields: object) -> Request:
    """A greedy request that ends at its length."""
    return ask(name, prompt, count, ignore_eos=True, **fields)


def running(snapshot: EngineSnapshot) -> list[SequenceCounts]:
    """The sequences in slots."""
    return [slot.sequence for slot in snapshot.slots if slot.sequence is not None]


def steps(engine: Core, count: int) -> None:
    """Compute some steps."""
    for _ in range(count):
        engine.step()


def finish(engine: Core) -> None:
    """Compute until nothing is left."""
    while engine.busy:
        engine.step()


def test_a_slot_passes_from_free_to_prefill_to_decode(loaded: Models) -> None:
    """With the tokens that it caches; afterwards the sequence is a finished one."""
    engine = core(loaded("llama"), slots=2, chunk=8)
    states = [engine.snapshot("", b"").slots[0].state]
    engine.submit(request("one"))
    steps(engine, 1)
    states.append(engine.snapshot("", b"").slots[0].state)
    assert [8] == [sequence.context_tokens for sequence in running(engine.snapshot("", b""))]
    steps(engine, 3)
    states.append(engine.snapshot("", b"").slots[0].state)
    finish(engine)
    snapshot = engine.snapshot("", b"")

    assert ["free", "prefill", "decode"] == states
    assert [] == running(snapshot)
    (finished,) = snapshot.finished
    assert (20, 0, 8) == (
        finished.sequence.prompt_tokens,
        finished.sequence.cached_tokens,
        finished.sequence.generated_tokens,
    )
    assert finished.slot is not None
    assert finished.time <= snapshot.time


def test_a_shared_prefix_is_seen_while_both_run(loaded: Models) -> None:
    """The second request reuses cells of the first: cached tokens, shared cells, and one node with two slots."""
    engine = core(loaded("llama"), slots=2)
    engine.submit(request("one", count=20))
    steps(engine, 3)
    engine.submit(request("two", (*PROMPT[:15], 60, 61), count=20))
    steps(engine, 2)

    snapshot = engine.snapshot("", b"")

    assert [0, 15] == sorted(sequence.cached_tokens for sequence in running(snapshot))
    assert 15 == snapshot.groups[0].shared
    (node,) = [node for node in snapshot.prefixes if node.start == 0]
    assert (15, 2) == (node.length, len(node.slots))


def test_a_context_shift_is_seen_while_it_runs(loaded: Models) -> None:
    engine = core(loaded("llama"), slots=1, context=24)
    engine.submit(request("one", count=30, overflow="shift"))
    shifts = []
    while engine.busy:
        engine.step()
        shifts += [(one.context_shifts, one.dropped_tokens > 0) for one in running(engine.snapshot("", b""))]

    assert [(0, False), (1, True)] == list(dict.fromkeys(shifts))[:2]
    assert engine.snapshot("", b"").finished[0].sequence.context_shifts == shifts[-1][0]


def test_other_owners_show_no_more_than_a_busy_slot(loaded: Models) -> None:
    """Neither counts of a sequence, nor cached prefixes, nor finished sequences."""
    engine = core(loaded("llama"), slots=2)
    engine.submit(request("one", owner="wines", salt=b"wines"))
    steps(engine, 2)
    own, other = (engine.snapshot(owner, owner.encode()) for owner in ("wines", "cheese"))
    finish(engine)
    later = engine.snapshot("cheese", b"cheese")

    assert {"decode", "free"} == {slot.state for slot in own.slots}
    assert 1 == len(running(own))
    assert 20 == sum(node.length for node in own.prefixes)
    assert {"other", "free"} == {slot.state for slot in other.slots}
    assert ([], (), ()) == (running(other), other.prefixes, other.finished)
    assert ((), ()) == (later.prefixes, later.finished)
    assert 1 == len(engine.snapshot("wines", b"wines").finished)


def test_a_cancelled_request_counts_as_finished(loaded: Models) -> None:
    """In a slot or in the queue, where it has no slot."""
    engine = core(loaded("llama"), slots=1)
    for name in ("one", "two"):
        engine.submit(request(name))
    steps(engine, 2)
    for name in ("one", "two"):
        engine.cancel(name)

    assert [None, 0] == [finished.slot for finished in engine.snapshot("", b"").finished]


def test_windows_are_groups_of_their_own(loaded: Models) -> None:
    groups = core(loaded("gemma3")).snapshot("", b"").groups

    assert {"full", "window"} == {group.range_kind for group in groups}
    assert all((group.range_size > 0) == (group.range_kind == "window") for group in groups)


def test_concurrent_snapshots_of_an_owner_are_one(folder: Callable[[str], Path]) -> None:
    """The engine thread is asked once."""

    async def story(engine: Engine) -> None:
        several = await asyncio.gather(*(engine.snapshot("", b"") for _ in range(5)), engine.snapshot("other", b"x"))

        assert 2 == len({id(snapshot) for snapshot in several})
        assert all(snapshot.slots for snapshot in several)
        assert 0 == len(engine._snapshots)

    run_with_engine(folder("llama"), story)


def test_there_is_no_snapshot_of_a_loading_engine(folder: Callable[[str], Path]) -> None:
    async def story() -> None:
        engine = Engine(EngineConfig(model=str(folder("llama"))))
        with pytest.raises(Loading):
            await engine.snapshot("", b"")

    asyncio.run(story())
