"""The slots of a cache: assigned, shortened, entered into the prefix cache, released."""

from __future__ import annotations

from engine.draft.slots import DraftSlot
from engine.schedule.context import ContextHistory
from engine.schedule.slots import Slots
from kvcache.cache import Cache
from tests.kvcache.digests import FULL, feed, make

CAPACITY = 40


def filled(*lengths: int) -> tuple[Cache, Slots, list[int]]:
    """A cache with slots of the given lengths, its slots, and their numbers."""
    cache = make(FULL)
    slots = Slots(cache)
    numbers = [slots.acquire() for _ in lengths]
    for slot, length in zip(numbers, lengths, strict=True):
        feed(cache, slot, list(range(length)))
    return cache, slots, numbers


def test_a_released_slot_is_empty_and_assigned_again() -> None:
    cache, slots, numbers = filled(5, 7)
    before = slots.free_count

    slots.release(numbers[0])

    assert before + 1 == slots.free_count
    assert (0, 7) == tuple(map(cache.cached_length, numbers))
    assert numbers[0] == slots.acquire()


def test_a_slot_is_not_shortened_inside_a_bidirectional_range() -> None:
    """A context of a sequence aligns the length; a draft slot does not."""
    cache, slots, (first, second) = filled(12, 12)
    context = ContextHistory(range(12), capacity=CAPACITY, keep_tokens=0, bidirectional=((4, 9),))
    draft = DraftSlot(second, b"", 0, list(range(12)))

    assert [10, 4] == [slots.rewind(first, context, length) for length in (10, 7)]
    assert [10, 7, 7] == [slots.rewind(second, draft, length) for length in (10, 7, 9)]


def test_moved_tokens_of_a_draft_slot_are_not_shared() -> None:
    """A draft slot enters its tokens up to the first shift, under its salt."""
    cache, slots, (first, second) = filled(12, 12)
    tokens = list(range(12))
    slots.insert_prefix(first, DraftSlot(first, b"shifted", 0, tokens, reusable=5))
    slots.insert_prefix(second, DraftSlot(second, b"whole", 0, tokens), 9)

    assert [5, 9, 0] == [cache.match_prefix(tokens, salt=salt).length for salt in (b"shifted", b"whole", b"")]
