"""Cancelled requests: their slots and cells are free within one step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.core import Core
from engine.types.events import Finished
from tests.engine.kit.models import Models, Reference, core
from tests.engine.kit.play import Job, ask, play

LONG = tuple(at % 200 for at in range(90))


def available(engine: Core) -> int:
    """Cells outside of slots: free ones, and evictable ones of the prefix cache."""
    return engine.cache.free_cells + engine.cache.evictable_cells()


def test_cancel_a_queued_request(loaded: Models) -> None:
    """A waiting request leaves the queue and never starts."""
    engine = core(loaded("llama"), slots=1)
    engine.submit(ask("first", (1, 2, 3), 20))
    engine.submit(ask("second", LONG, 20))
    engine.step()
    engine.cancel("second")

    assert (1, 0) == (engine.stats().running, engine.stats().waiting)
    assert "second" not in {name for _ in range(40) for name, _ in engine.step()}


def test_a_cancelled_request_keeps_its_counts(loaded: Models) -> None:
    """Its prompt counts as computed or cached, unless it never got a slot."""
    engine = core(loaded("llama"), slots=1)
    for name in ("first", "second", "waits"):
        engine.submit(ask(name, LONG, 20))
    for name in ("first", "second"):
        for _ in range(3):
            engine.step()
        engine.cancel(name)
    engine.cancel("waits")
    stats = engine.stats()

    assert (2 * len(LONG), len(LONG) - 1, 1) == (
        stats.prompt_tokens_total,
        stats.cached_tokens_total,
        stats.prefix_hits_total,
    )


@pytest.mark.parametrize("steps", [1, 3], ids=["in prefill", "in decode"])
def test_cancel_a_running_request(loaded: Models, steps: int) -> None:
    """It loses its slot and its cells before the next step."""
    engine = core(loaded("llama"), slots=2, chunk=64)
    engine.submit(ask("leaves", LONG, 30))
    for _ in range(steps):
        engine.step()
    assert available(engine) < engine.cache.cells

    engine.cancel("leaves")

    assert available(engine) == engine.cache.cells
    assert (0, 0) == (engine.stats().running, engine.stats().waiting)
    assert not engine.busy


def test_cancel_before_the_first_step(loaded: Models) -> None:
    engine = core(loaded("llama"))
    engine.submit(ask("leaves", LONG))
    engine.cancel("leaves")

    assert not engine.busy
    assert [] == engine.step()
    assert engine.cache.cells == engine.cache.free_cells


def test_cancel_is_idempotent(loaded: Models) -> None:
    """Unknown and finished ids may be cancelled too."""
    engine = core(loaded("llama"))
    answers = play(engine, [Job(ask("done", (1, 2), 2))])
    engine.cancel("done")
    engine.cancel("never was")
    engine.submit(ask("leaves", (1, 2)))
    engine.cancel("leaves")
    engine.cancel("leaves")

    assert isinstance(answers["done"].end, Finished)
    assert not engine.busy


def test_an_id_is_free_after_its_request(loaded: Models) -> None:
    engine = core(loaded("llama"))
    engine.submit(ask("name", LONG))
    engine.step()
    engine.cancel("name")
    answer = play(engine, [Job(ask("name", (1, 2, 3), 5))])["name"]

    assert 5 == len(answer.tokens)


@pytest.mark.parametrize("leaves", range(12))
def test_cancel_does_not_change_other_requests(
    loaded: Models, reference: Callable[..., Reference], leaves: int
) -> None:
    """One of four is cancelled at any step; two of the others share its prompt."""
    engine = core(loaded("llama"), slots=3, chunk=8)
    prompts = {"leaves": LONG[:30], "same": LONG[:30], "longer": LONG[:40], "other": (9, 8, 7)}
    jobs = [
        Job(ask(name, prompt, 10, ignore_eos=True), leaves=leaves if name == "leaves" else None)
        for name, prompt in prompts.items()
    ]
    answers = play(engine, jobs)

    for name in ("same", "longer", "other"):
        assert list(reference("llama").greedy(prompts[name], 10)) == answers[name].tokens
    assert available(engine) == engine.cache.cells
