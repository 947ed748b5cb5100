"""Recurrent states: they exist at some positions, are never written in place, and follow their slots."""

from __future__ import annotations

import pytest
import torch

from kvcache.cache import Cache
from kvcache.errors import BadSpan
from kvcache.recurrent import Checkpoints, RecurrentState, RecurrentStates
from kvcache.spec import AttentionRange, LayerSpec, Span

LAYERS = (LayerSpec(1, 2, 2),)
BYTES = 8


def make(*, state_bytes: int = 10**6, layers: tuple[LayerSpec, ...] = LAYERS) -> Cache:
    """A hybrid cache: one attention layer, and a state that counts the tokens."""
    return Cache(layers, slots=3, capacity=40, cells=120, state_bytes=state_bytes)


def feed(cache: Cache, slot: int, length: int, *, keep: int | None = None) -> None:
    """Compute tokens; the state counts them."""
    span = Span(slot, cache.cached_length(slot), length)
    with cache.forward([span]) as forward:
        for layer in range(len(LAYERS) if cache.groups else 0):
            forward.store_kv(layer, torch.zeros(1, length, 2), torch.zeros(1, length, 2))
        before = forward.recurrent_state(span.slot, span.start, "count")
        forward.store_recurrent_state(
            span.slot, span.stop, "count", torch.tensor(length) if before is None else before + length
        )
        if keep is not None:
            forward.keep(slot, keep)


def count(cache: Cache, slot: int) -> int:
    """The token count in a slot's state."""
    assert cache.recurrent_states is not None
    state = cache.recurrent_states.get_tensor(slot, cache.cached_length(slot), "count")
    return 0 if state is None else int(state)


def test_a_state_contains_the_tokens_of_its_slot() -> None:
    cache = make()
    for length in (5, 1, 1, 7):
        feed(cache, 0, length)

    assert (14, 14) == (cache.cached_length(0), count(cache, 0))


def test_a_rewind_ends_at_a_checkpoint() -> None:
    cache = make()
    for length in (5, 6, 1, 1):
        feed(cache, 0, length)

    assert 11 == cache.rewind(0, 12)
    assert 11 == count(cache, 0)
    assert 5 == cache.rewind(0, 10)
    assert 5 == count(cache, 0)


def test_a_partly_kept_span_goes_back_to_its_start() -> None:
    cache = make()
    feed(cache, 0, 5)
    feed(cache, 0, 4, keep=7)

    assert (5, 5) == (cache.cached_length(0), count(cache, 0))


def test_checkpoints_of_a_slot_keep_their_spacing() -> None:
    cache = Cache(LAYERS, slots=3, capacity=40, cells=120, state_bytes=10**6, state_spacing=8)
    for length in (3, 4, 2, 8, 5, 1):
        feed(cache, 0, length)

    reached = [cache.rewind(0, position) for position in (22, 21, 16, 8)]

    assert [22, 17, 9, 0] == reached
    assert 0 == count(cache, 0)


def test_states_of_the_prefix_tree_keep_their_spacing() -> None:
    """The last state of a prompt stays until a later one replaces it; the budget counts the kept ones."""
    cache = Cache(LAYERS, slots=3, capacity=40, cells=120, state_bytes=3 * BYTES, state_spacing=8)
    tokens = list(range(30))
    for length in (3, 4, 2, 8, 5, 2):
        feed(cache, 0, length)
        cache.insert_prefix(0, tokens[: cache.cached_length(0)])

    reached = []
    for position in (24, 23, 16, 8):
        cache.clear(1)
        reached.append(cache.reuse_prefix(1, tokens[:position]))

    assert [24, 17, 9, 0] == reached
    assert cache.recurrent_states is not None
    assert 0 == cache.recurrent_states.over_budget()


def test_a_state_that_ends_a_message_stays() -> None:
    cache = Cache(LAYERS, slots=3, capacity=40, cells=120, state_bytes=10**6, state_spacing=8)
    tokens = list(range(30))
    feed(cache, 0, 3)
    cache.insert_prefix(0, tokens[:3], checkpoint=True)
    feed(cache, 0, 20)
    cache.insert_prefix(0, tokens[:23])

    assert 3 == cache.reuse_prefix(1, tokens[:5])


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_reused_state_stays_as_a_checkpoint(checkpoint: bool) -> None:
    """It is 4 tokens after the one before: too close to stay when another slot inserts tokens behind it."""
    cache = Cache(LAYERS, slots=3, capacity=40, cells=120, state_bytes=10**6, state_spacing=8)
    tokens = list(range(30))
    for length in (10, 4):
        feed(cache, 0, length)
        cache.insert_prefix(0, tokens[: cache.cached_length(0)])
    reused = cache.reuse_prefix(1, tokens)
    feed(cache, 1, 1)
    if checkpoint:
        cache.insert_prefix(1, tokens[:reused], checkpoint=True)
    cache.insert_prefix(1, tokens[: reused + 1])

    assert 14 == reused
    assert (14 if checkpoint else 10) == cache.reuse_prefix(2, [*tokens[:14], 99])


@pytest.mark.parametrize("kept", range(1, 5))
def test_draft_tokens_stay_as_far_as_accepted(kept: int) -> None:
    cache = make()
    feed(cache, 0, 5)
    span = Span(0, 5, 4, draft_tokens=3)
    with cache.forward([span]) as forward:
        forward.store_kv(0, torch.zeros(1, 4, 2), torch.zeros(1, 4, 2))
        for stop in range(6, 10):
            forward.store_recurrent_state(0, stop, "count", torch.tensor(stop))
        forward.keep(0, 5 + kept)

    assert (5 + kept, 5 + kept) == (cache.cached_length(0), count(cache, 0))


@pytest.mark.parametrize("draft_tokens", [-1, 4, 5])
def test_a_span_of_draft_tokens_alone_is_refused(draft_tokens: int) -> None:
    cache = make()
    feed(cache, 0, 5)
    with pytest.raises(BadSpan):
        cache.forward([Span(0, 5, 4, draft_tokens=draft_tokens)]).__enter__()

    assert (5, 5) == (cache.cached_length(0), count(cache, 0))


def test_a_slot_shifted_empty_starts_from_zeros() -> None:
    cache = make()
    feed(cache, 0, 5)

    assert 0 == cache.shift(0, 0, 5, states="carry")
    assert cache.recurrent_states is not None
    assert cache.recurrent_states.get_tensor(0, 0, "count") is None
    feed(cache, 0, 3)
    assert 3 == count(cache, 0)


def test_a_failed_forward_restores_the_state() -> None:
    cache = make()
    feed(cache, 0, 5)
    span = Span(0, 5, 3)
    try:
        with cache.forward([span]) as forward:
            forward.store_recurrent_state(span.slot, span.stop, "count", torch.tensor(99))
            raise RuntimeError("broken")
    except RuntimeError:
        pass

    assert (5, 5) == (cache.cached_length(0), count(cache, 0))


def test_a_copy_shares_the_state_of_its_length() -> None:
    cache = make()
    for length in (5, 6, 1):
        feed(cache, 0, length)
    cached_length = cache.copy_prefix(0, 1, 8)
    feed(cache, 1, 2)

    assert 5 == cached_length
    assert (7, 12) == (count(cache, 1), count(cache, 0))


@pytest.mark.parametrize("layers", [LAYERS, ()], ids=["hybrid", "recurrent"])
def test_a_copy_has_no_state_behind_its_length(layers: tuple[LayerSpec, ...]) -> None:
    cache = make(layers=layers)
    for length in (5, 6, 4):
        feed(cache, 0, length)
    other = [0, 1, 2, 3, 4, *range(20, 30)]
    feed(cache, 2, len(other))
    cache.insert_prefix(2, other)

    assert 5 == cache.copy_prefix(0, 1, 5)
    assert 5 == cache.rewind(1, 11)
    assert 15 == cache.reuse_prefix(1, other)
    assert 5 == cache.rewind(1, 12)


def test_a_rewind_into_a_reused_prefix_finds_its_checkpoint() -> None:
    cache = make()
    tokens = list(range(20))
    for length in (5, 6, 9):
        feed(cache, 0, length)
        cache.insert_prefix(0, tokens[: cache.cached_length(0)])
    assert 20 == cache.reuse_prefix(1, tokens)
    feed(cache, 1, 3)

    assert 11 == cache.rewind(1, 15)
    assert 11 == count(cache, 1)


def test_reuse_ends_where_cells_and_states_meet() -> None:
    cache = make()
    tokens = list(range(20))
    for length in (5, 6, 9):
        feed(cache, 0, length)
        cache.insert_prefix(0, tokens[: cache.cached_length(0)])
    cache.clear(0)

    assert 11 == cache.reuse_prefix(1, [*tokens[:15], 99])
    assert 11 == count(cache, 1)
    assert 20 == cache.reuse_prefix(2, [*tokens, 99])


def test_components_shorten_each_other_until_lengths_agree() -> None:
    """The window can resume at 26; the last state before is at 20, where the window has holes; so 10."""
    cache = make(layers=(LayerSpec(1, 2, 2), LayerSpec(2, 2, 2, AttentionRange("window", 4))))
    tokens = list(range(30))
    for length in (10, 10, 10):
        feed(cache, 0, length)
        cache.insert_prefix(0, tokens[: min(cache.cached_length(0), 26)], checkpoint=cache.cached_length(0) == 10)
    cache.clear(0)
    cache._tree.evict([0, cache.groups[1].pool.cells - cache.groups[1].pool.free_cells - 2 * 3, 0])

    assert [10, 10] == [cache.reuse_prefix(slot, tokens[:stop]) for slot, stop in ((1, 26), (2, 25))]
    assert 10 == count(cache, 1)


def test_a_state_at_a_split_belongs_to_the_upper_part() -> None:
    cache = make()
    tokens = list(range(20))
    for length in (5, 6, 9):
        feed(cache, 0, length)
        cache.insert_prefix(0, tokens[: cache.cached_length(0)])
    cache.insert_prefix(0, tokens[:11], checkpoint=True)
    assert cache.recurrent_states is not None
    upper, lower = cache._tree._radix.lru

    assert [{5, 11}, {9}] == sorted((set(node.references[-1].states) for node in (upper, lower)), key=len, reverse=True)
    assert 3 * BYTES == cache.recurrent_states._held_bytes
    cache.reset_prefix_cache()
    assert 0 == cache.recurrent_states._held_bytes


def test_a_shift_rebuilds_states() -> None:
    cache = make()
    feed(cache, 0, 4)
    feed(cache, 0, 16)

    assert 4 == cache.shift(0, 6, 8)


def test_a_shift_carries_states_on_request() -> None:
    cache = make()
    for length in (4, 6, 5):
        feed(cache, 0, length)

    assert 11 == cache.shift(0, 2, 4, states="carry")
    assert (11, 15) == (cache.cached_length(0), count(cache, 0))
    feed(cache, 0, 3)
    assert (14, 18) == (cache.cached_length(0), count(cache, 0))
    assert 0 == cache.rewind(0, 10)


def test_checkpoints_before_the_drop_survive_a_carried_shift() -> None:
    cache = make()
    for length in (4, 6, 5):
        feed(cache, 0, length)

    assert 12 == cache.shift(0, 10, 3, states="carry")
    cache.insert_prefix(0, list(range(12)))
    assert 10 == cache.reuse_prefix(1, list(range(11)))
    assert (10, 10) == (cache.rewind(0, 11), count(cache, 0))
    assert (4, 4) == (cache.rewind(0, 9), count(cache, 0))


def test_a_carried_state_is_no_checkpoint_of_the_old_text() -> None:
    cache = make()
    for length in (4, 6, 5):
        feed(cache, 0, length)

    assert 10 == cache.shift(0, 10, 5, states="carry")
    assert 15 == count(cache, 0)
    feed(cache, 0, 2)
    assert 4 == cache.rewind(0, 10)


def test_cached_states_keep_to_their_budget() -> None:
    cache = make(state_bytes=2 * BYTES)
    for first in range(5):
        feed(cache, 0, 4)
        cache.insert_prefix(0, [first, 1, 2, 3])
        cache.clear(0)

    assert [0, 0, 0, 4, 4] == [cache.reuse_prefix(0, [first, 1, 2, 3]) + 0 * cache.rewind(0, 0) for first in range(5)]
    assert 120 - 8 == cache.free_cells


def test_a_model_without_attention_needs_no_cells() -> None:
    cache = make(layers=())
    feed(cache, 0, 30)
    cache.insert_prefix(0, list(range(30)))

    assert 120 == cache.free_cells
    assert 30 == cache.reuse_prefix(1, list(range(35)))


def test_trimming_keeps_the_state_at_the_end() -> None:
    cache = make(state_bytes=2 * BYTES)
    for length in (4, 4, 4):
        feed(cache, 0, length)
        cache.insert_prefix(0, list(range(cache.cached_length(0))))
    cache.clear(0)

    assert cache.recurrent_states is not None
    assert 0 == cache.recurrent_states.over_budget()
    assert 12 == cache.reuse_prefix(1, list(range(12)))
    assert 0 == cache.reuse_prefix(2, list(range(11)))


def test_states_are_saved_with_their_names() -> None:
    states = RecurrentStates(1, 10**6)
    tensors: RecurrentState = {
        ("scan", 3): torch.randn(2, 3, dtype=torch.float64),
        "conv": torch.arange(6).view(2, 3).T,
        (1, ("a:b", 2)): torch.ones(2, dtype=torch.bfloat16),
        7: torch.tensor(4),
    }
    held = Checkpoints(8, {3: tensors, 5: {}, 8: tensors})
    loaded = states.load(states.save(held), 2, 8)

    assert (6, {1, 6}) == (loaded.length, set(loaded.states))
    for state in loaded.states.values():
        assert list(tensors) == list(state)
        assert all(torch.equal(tensors[name], state[name]) for name in tensors)
        assert all(tensors[name].dtype == state[name].dtype for name in tensors)
    assert {5} == set(states.load(states.save(held), 3, 8).states)


def test_saved_states_are_copies() -> None:
    batch = torch.ones(100, 4)
    saved = RecurrentStates(1, 10**6).save(Checkpoints(8, {3: {"conv": batch[7]}, 8: {"conv": batch[7]}}))

    assert [16, 16] == [tensor.untyped_storage().nbytes() for tensor in saved.values()]
    assert 2 == len({tensor.data_ptr() for tensor in saved.values()})
