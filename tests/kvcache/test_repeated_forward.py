"""A forward, and a shift, repeated over the buffers of another cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvcache.cache import Cache
from kvcache.cell_pool import CellArray
from kvcache.forward import Forward, ForwardCells, RepeatedForward
from kvcache.spec import AttentionRange, LayerSpec, Rotation, Span

ROTATION = Rotation("half", 0, (1.0, 0.25))
LAYERS = [
    LayerSpec(2, 4, 4, rotation=ROTATION),
    LayerSpec(2, 4, 4, AttentionRange("window", 6), rotation=ROTATION),
    LayerSpec(2, 4, 4, rotation=ROTATION),
]


def make_cache(on_move: Callable[[int, CellArray, CellArray, int], None] | None = None) -> Cache:
    return Cache(LAYERS, slots=3, capacity=32, cells=64, on_move=on_move)


def write(forward: Forward, seed: int) -> None:
    """Random keys and values in every layer."""
    generator = torch.Generator().manual_seed(seed)
    for layer in range(len(LAYERS)):
        forward.store_kv(layer, *torch.randn(2, 2, forward.batch_tokens, 4, generator=generator))


class Mirror:
    """A cache, and one that repeats its forwards and shifts."""

    def __init__(self) -> None:
        self.copy = make_cache()
        self.cache = make_cache(lambda group, *move: self.copy.groups[group].move_cells(*move))
        self._seed = 0

    def feed(self, *parts: tuple[int, int]) -> None:
        """One forward of (slot, tokens) parts in both."""
        spans = [Span(slot, self.cache.cached_length(slot), tokens) for slot, tokens in parts]
        self._seed += 1
        with self.cache.forward(spans) as forward:
            write(forward, self._seed)
            cells = [forward.group_cells(group) for group in forward.groups]
            repeated = RepeatedForward(self.copy, spans, cells)
            write(repeated, self._seed)
            assert all(attended(forward, layer) == attended(repeated, layer) for layer in range(len(LAYERS)))

    def is_equal(self) -> bool:
        """Whether all buffers have the same content."""
        pairs = zip(self.cache.groups, self.copy.groups, strict=True)
        return all(
            torch.equal(one.pool.keys.tensors["rows"], other.pool.keys.tensors["rows"])
            and torch.equal(one.pool.values.tensors["rows"], other.pool.values.tensors["rows"])
            for one, other in pairs
        )


def attended(forward: Forward, layer: int) -> list[tuple[object, ...]]:
    """The segments of a layer, comparable."""
    return [
        (each.batch_slice, each.start, each.oldest_visible, torch.arange(64)[each.cells].tolist())
        for each in forward.segments(layer)
    ]


def test_forwards_are_repeated() -> None:
    """Scattered tables, shared prefixes and windows included."""
    mirror = Mirror()
    for _ in range(4):
        mirror.feed((0, 3), (1, 2))
    mirror.cache.copy_prefix(0, 2, 7)
    mirror.feed((2, 2), (0, 1), (1, 5))
    mirror.cache.rewind(1, 9)
    mirror.feed((1, 3))

    assert mirror.is_equal()


def test_shifts_are_repeated() -> None:
    """Rotated in place, or in private copies where cells are shared."""
    mirror = Mirror()
    mirror.feed((0, 12), (1, 4))
    mirror.cache.copy_prefix(0, 2, 12)

    assert 9 == mirror.cache.shift(0, 2, 3)
    assert mirror.is_equal()

    mirror.feed((0, 2), (2, 1))
    assert 8 == mirror.cache.shift(0, 1, 3)
    mirror.feed((0, 1))

    assert mirror.is_equal()


def test_the_cells_of_a_forward_are_its_own() -> None:
    """By span, those of all positions in the attention range."""
    cache = make_cache()
    with cache.forward([Span(0, 0, 5)]):
        pass
    with cache.forward([Span(0, 5, 4)]) as forward:
        full, window = (forward.group_cells(group) for group in forward.groups)

    assert ForwardCells(slice(5, 9), (slice(0, 9),)) == full
    assert ForwardCells(slice(5, 9), (slice(0, 9),)) == window
