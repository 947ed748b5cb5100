"""Requests that must not be cached: choices share a prefix while they run, and nothing is left after their end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.core import Core
from tests.engine.kit.models import Models, core
from tests.engine.kit.play import Job, ask, play, texts
from tests.selection import quick

PROMPT = tuple((11 * at + 3) % 250 for at in range(60))


def choices(count: int, tokens: int, **fields: object) -> list[Job]:
    """The choices of one request; the second is cancelled."""
    jobs = [
        Job(ask(f"choice {number}", PROMPT, tokens, ignore_eos=True, salt=b"own", cacheable=False, **fields))
        for number in range(count)
    ]
    return [replace(job, leaves=9) if number == 1 else job for number, job in enumerate(jobs)]


def is_empty(engine: Core, folder: Path) -> bool:
    """Whether no cell is used, and nothing is cached in the prefix tree, in host memory or in files."""
    while engine.flush_when_idle():
        pass
    if any(path.is_file() for path in folder.rglob("*")) or any(engine.cache.offloaded_bytes):
        return False
    used = sum(group.pool.cells - group.pool.free_cells for group in engine.cache.groups)
    states = engine.cache.recurrent_states
    held = 0 if states is None else states._held_bytes
    return (engine.cache._tree.node_count, used, held) == (0, 0, 0)


@pytest.mark.parametrize("family", quick(("gemma3", "lfm2"), ("llama", "gemma3", "lfm2")))
def test_nothing_outlives_an_uncacheable_request(loaded: Models, family: str, tmp_path: Path) -> None:
    """Through preemption, context shifts and a cancelled choice; the prompt is computed once."""
    model = loaded(family)
    engine = core(model, slots=4, chunk=16, disk_cache=str(tmp_path))
    play(engine, choices(3, 4))
    assert len(PROMPT) + 2 + 3 * 3 == engine.stats().batch_tokens_total
    assert is_empty(engine, tmp_path)

    scarce = core(model, slots=4, cells=200, chunk=16, overflow="shift", disk_cache=str(tmp_path))
    answers = play(scarce, choices(4, 90))
    assert 0 < scarce.stats().preemptions_total
    assert 0 < scarce.stats().context_shifts_total
    assert is_empty(scarce, tmp_path)

    same = [Job(replace(job.request, cacheable=True), leaves=job.leaves) for job in choices(4, 90)]
    cached = core(model, slots=4, chunk=16, overflow="shift", disk_cache=str(tmp_path))
    expected = texts(play(cached, same))
    for name in ("choice 0", "choice 2", "choice 3"):
        assert texts(answers)[name] == expected[name]
    assert not is_empty(cached, tmp_path)


def test_nothing_outlives_a_change_of_rotary_factors(loaded: Models, tmp_path: Path) -> None:
    """The restart with long factors changes the salt."""
    engine = core(loaded("phi3_long"), slots=3, chunk=16, disk_cache=str(tmp_path))
    play(engine, [Job(replace(job.request, prompt=PROMPT[:30])) for job in choices(3, 20)])

    assert is_empty(engine, tmp_path)


def test_an_uncacheable_request_evicts_no_other(loaded: Models) -> None:
    """A cached prompt is found after a longer uncacheable one has filled the free cells."""
    engine = core(loaded("llama"), slots=2, cells=150, chunk=16)
    other = tuple(reversed(PROMPT))
    for name in ("first", "second"):
        again = play(engine, [Job(ask(name, other, 2, ignore_eos=True))])[name]
        for number in range(3):
            play(engine, [Job(ask(str(number), PROMPT, 20, ignore_eos=True, salt=bytes([number]), cacheable=False))])

    assert len(other) - 1 == again.started[0].cached_tokens
