"""Resuming at any position equals computing anew: for each kind of memory, at every position of 300 tokens.

However a slot came to its cached length, the length is as large as promised, and the logits after it equal one
forward over the whole text, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from kvcache.offload import OffloadConfig
from kvcache.prefix import MIN_LOAD_TOKENS
from tests.engine.kit.resumed import COMPARED_AFTER, KINDS, LENGTH, MESSAGE_ENDS, Conversation, build, ends, text
from tests.selection import quick

# The last positions of chunks and messages, their neighbours and some others; and all positions.
SOME = sorted(
    {*range(1, LENGTH, 61), *(position + by for position in MESSAGE_ENDS[:2] for by in (-1, 0, 1)), LENGTH - 1}
)
ALL = range(1, LENGTH)

Conversations = Callable[[str], Conversation]

# One kind of each mechanism; the others differ in its number.
COMMON = ("full", "window and full", "chunk and full", "latent", "hybrid", "shared cells of two widths", "encoder")
every_kind = pytest.mark.parametrize("kind", quick(COMMON, KINDS))
# What has a cache of its own in memory, with and without windows and states.
by_kind = pytest.mark.parametrize("kind", quick(("window and full", "latent", "hybrid"), KINDS))
positions = pytest.mark.parametrize(
    "positions",
    [pytest.param(SOME, id="some"), pytest.param(ALL, id="all", marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Conversations:
    """The conversation with a tiny model."""
    root = tmp_path_factory.mktemp("resumed")
    return cache(lambda kind: build(kind, root / kind))


@positions
@every_kind
def test_resume_at_any_length(conversations: Conversations, kind: str, positions: list[int]) -> None:
    """With enough cells, at every token; a recurrent model where a forward ended."""
    conversation = conversations(kind)
    memory = conversation.cache()
    conversation.play(memory)
    for position in positions:
        memory.clear(1)

        assert conversation.computed(position) == memory.reuse_prefix(1, conversation.tokens[:position])
        assert conversation.matches(memory, 1, position), position


@positions
@by_kind
def test_rewind_and_continue(conversations: Conversations, kind: str, positions: list[int]) -> None:
    """From the end to every position, with a few tokens computed in between, as far as windows permit."""
    conversation = conversations(kind)
    memory = conversation.cache()
    conversation.play(memory, insert=False)
    start = ends()[-2]
    for position in reversed(positions):
        expected = conversation.computed(position, start)

        assert expected == memory.rewind(0, position)
        assert conversation.matches(memory, 0, position), position
        start = expected


@positions
@by_kind
def test_copy_a_running_slot_at_any_length(conversations: Conversations, kind: str, positions: list[int]) -> None:
    """After each forward of the source, which continues unchanged."""
    conversation = conversations(kind)
    memory = conversation.cache()
    start = 0
    for stop in ends():
        assert conversation.matches(memory, 0, stop - COMPARED_AFTER)
        for position in [position for position in positions if start < position <= stop]:
            assert conversation.computed(position, start) == memory.copy_prefix(0, 1, position)
            assert conversation.matches(memory, 1, position), position
        start = stop


@positions
@by_kind
def test_resume_after_eviction(conversations: Conversations, kind: str, positions: list[int]) -> None:
    """Other conversations take most cells; the ends of messages stay resumable longest."""
    conversation = conversations(kind)
    memory = conversation.cache(cells=740, rows=160, states=10)
    conversation.play(memory)
    for seed in (2, 3):
        memory.clear(0)
        conversation.play(memory, tokens=text(conversation.vocabulary, seed), upto=198 if seed == 3 else LENGTH)
    memory.clear(0)

    assert list(MESSAGE_ENDS) == [conversation.resident_length(memory, position) for position in MESSAGE_ENDS]
    assert any(
        conversation.resident_length(memory, position) < conversation.computed(position) for position in positions
    )
    for position in positions:
        memory.clear(1)
        expected = conversation.resident_length(memory, position)

        assert expected == memory.reuse_prefix(1, conversation.tokens[:position])
        assert conversation.matches(memory, 1, position), position


@positions
@by_kind
def test_resume_from_host_memory(conversations: Conversations, kind: str, positions: list[int]) -> None:
    """Trimmed entries are offloaded and loaded on demand."""
    conversation = conversations(kind)
    memory = conversation.cache(offload=OffloadConfig(memory_bytes=2**30))
    conversation.play(memory)
    for position in positions:
        memory.clear(1)
        memory.reset_prefix_cache()
        deepest = conversation.trimmed(position, (*MESSAGE_ENDS, LENGTH))
        expected = deepest if deepest >= MIN_LOAD_TOKENS else 0

        assert expected == memory.reuse_prefix(1, conversation.tokens[:position])
        assert conversation.matches(memory, 1, position), position


# A reset is the same for all kinds.
QUICK = {*((kind, False) for kind in COMMON), ("window and full", True)}


@pytest.mark.parametrize(("kind", "reset"), quick(QUICK, [(kind, reset) for kind in KINDS for reset in (False, True)]))
@positions
def test_resume_in_another_process(
    conversations: Conversations, kind: str, positions: list[int], reset: bool, tmp_path: Path
) -> None:
    """A new cache over the same files has all tokens that were written."""
    conversation = conversations(kind)
    offload = OffloadConfig(memory_bytes=2**30, folder=tmp_path, disk_bytes=2**30, identity=kind)
    memory = conversation.cache(offload=offload)
    conversation.play(memory)
    if reset:
        memory.reset_prefix_cache()
    while memory.flush_to_disk(2**30):
        pass
    for position in positions:
        again = conversation.cache(offload=offload)
        expected = conversation.trimmed(position, (*MESSAGE_ENDS, LENGTH)) if reset else conversation.computed(position)

        assert (expected if position >= MIN_LOAD_TOKENS else 0) == again.reuse_prefix(1, conversation.tokens[:position])
        assert conversation.matches(again, 1, position), position
