"""Resuming at any position equals computing anew: for each kind of memory, at every position of 300 tokens.

However a slot came to its cached length, the length is as large as promised, and the logits after it equal those of one
forward over the whole text, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from kvcache.offload import OffloadConfig
from kvcache.prefix import MIN_LOAD_TOKENS
from tests.engine.resumed import BEYOND, KINDS, LENGTH, MARKS, Talk, build, ends, text

# The last positions of chunks and messages, their neighbours and some others; and all positions.
SOME = sorted({*range(1, LENGTH, 61), *(position + by for position in MARKS[:2] for by in (-1, 0, 1)), LENGTH - 1})
ALL = range(1, LENGTH)

Talks = Callable[[str], Talk]

every_kind = pytest.mark.parametrize("kind", KINDS)
positions = pytest.mark.parametrize(
    "positions",
    [pytest.param(SOME, id="some"), pytest.param(ALL, id="all", marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Talks:
    """The conversation with a tiny model."""
    root = tmp_path_factory.mktemp("resumed")
    return cache(lambda kind: build(kind, root / kind))


@positions
@every_kind
def test_resume_at_any_length(talks: Talks, kind: str, positions: list[int]) -> None:
    """With enough cells, at every token; a recurrent model where a forward ended."""
    talk = talks(kind)
    memory = talk.cache()
    talk.play(memory)
    for position in positions:
        memory.clear(1)

        assert talk.computed(position) == memory.reuse_prefix(1, talk.tokens[:position])
        assert talk.goes_on(memory, 1, position), position


@positions
@every_kind
def test_rewind_and_continue(talks: Talks, kind: str, positions: list[int]) -> None:
    """From the end to every position, with a few tokens computed in between, as far as windows permit."""
    talk = talks(kind)
    memory = talk.cache()
    talk.play(memory, remember=False)
    start = ends()[-2]
    for position in reversed(positions):
        expected = talk.computed(position, start)

        assert expected == memory.rewind(0, position)
        assert talk.goes_on(memory, 0, position), position
        start = expected


@positions
@every_kind
def test_copy_a_running_slot_at_any_length(talks: Talks, kind: str, positions: list[int]) -> None:
    """After each forward of the source, which continues unchanged."""
    talk = talks(kind)
    memory = talk.cache()
    start = 0
    for stop in ends():
        assert talk.goes_on(memory, 0, stop - BEYOND)
        for position in [position for position in positions if start < position <= stop]:
            assert talk.computed(position, start) == memory.copy_prefix(0, 1, position)
            assert talk.goes_on(memory, 1, position), position
        start = stop


@positions
@every_kind
def test_resume_after_eviction(talks: Talks, kind: str, positions: list[int]) -> None:
    """Other conversations take most cells; the ends of messages stay resumable longest."""
    talk = talks(kind)
    memory = talk.cache(cells=740, rows=160, states=10)
    talk.play(memory)
    for seed in (2, 3):
        memory.clear(0)
        talk.play(memory, tokens=text(talk.vocabulary, seed), upto=198 if seed == 3 else LENGTH)
    memory.clear(0)

    assert list(MARKS) == [talk.remembered(memory, position) for position in MARKS]
    assert any(talk.remembered(memory, position) < talk.computed(position) for position in positions)
    for position in positions:
        memory.clear(1)
        expected = talk.remembered(memory, position)

        assert expected == memory.reuse_prefix(1, talk.tokens[:position])
        assert talk.goes_on(memory, 1, position), position


@positions
@every_kind
def test_resume_from_host_memory(talks: Talks, kind: str, positions: list[int]) -> None:
    """Trimmed entries are offloaded and loaded on demand."""
    talk = talks(kind)
    memory = talk.cache(shelf=OffloadConfig(memory_bytes=2**30))
    talk.play(memory)
    for position in positions:
        memory.clear(1)
        memory.reset_prefix_cache()
        deepest = talk.trimmed(position, (*MARKS, LENGTH))
        expected = deepest if deepest >= MIN_LOAD_TOKENS else 0

        assert expected == memory.reuse_prefix(1, talk.tokens[:position])
        assert talk.goes_on(memory, 1, position), position


@pytest.mark.parametrize("given_up", [False, True], ids=["", "after it was given up"])
@positions
@every_kind
def test_resume_in_another_process(
    talks: Talks, kind: str, positions: list[int], given_up: bool, tmp_path: Path
) -> None:
    """A new cache over the same files has all tokens that were written."""
    talk = talks(kind)
    shelf = OffloadConfig(memory_bytes=2**30, folder=tmp_path, disk_bytes=2**30, identity=kind)
    memory = talk.cache(shelf=shelf)
    talk.play(memory)
    if given_up:
        memory.reset_prefix_cache()
    while memory.flush_to_disk(2**30):
        pass
    for position in positions:
        again = talk.cache(shelf=shelf)
        expected = talk.trimmed(position, (*MARKS, LENGTH)) if given_up else talk.computed(position)

        assert (expected if position >= MIN_LOAD_TOKENS else 0) == again.reuse_prefix(1, talk.tokens[:position])
        assert talk.goes_on(again, 1, position), position
