"""Layers that share cell tables, and layers that can be shifted."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from kvcache.spec import AttentionRange, GroupSpec, LayerSpec, Rotation, Span, group_layers

PLAIN = LayerSpec(2, 8, 8)


def test_layers_of_one_geometry_and_range_share_a_group() -> None:
    window = LayerSpec(2, 8, 8, AttentionRange("window", 4))
    other = LayerSpec(2, 8, 8, rotation=Rotation("half", 0, (0.5,)))

    assert [(0, 2, 4), (1, 3)] == [group.layers for group in group_layers([PLAIN, window, PLAIN, window, other])]
    assert (PLAIN.rotation, PLAIN.rotation, other.rotation) == group_layers([PLAIN, PLAIN, other])[0].rotations


@pytest.mark.parametrize(
    "other",
    [
        LayerSpec(1, 8, 8),
        LayerSpec(2, 4, 8),
        LayerSpec(2, 8, 4),
        LayerSpec(2, 8, 8, AttentionRange("window", 8)),
        LayerSpec(2, 8, 8, AttentionRange("chunk", 8)),
    ],
)
def test_different_layers_have_different_groups(other: LayerSpec) -> None:
    assert 2 == len(group_layers([PLAIN, other]))


@pytest.mark.parametrize(
    ("layers", "shiftable"),
    [
        ([PLAIN], True),
        ([LayerSpec(2, 8, 8, AttentionRange("window", 4))], True),
        ([LayerSpec(2, 8, 8, AttentionRange("chunk", 4))], False),
        ([PLAIN, LayerSpec(2, 8, 8, rotation=None)], False),
    ],
)
def test_a_group_is_shiftable_if_every_layer_is(layers: list[LayerSpec], shiftable: bool) -> None:
    assert [shiftable] == [group.shiftable for group in group_layers(layers)]


@pytest.mark.parametrize("size", [1, 2, 4, 7])
@pytest.mark.parametrize("kind", ["full", "window", "chunk"])
def test_oldest_visible_is_the_first_attended_position(kind: Literal["full", "window", "chunk"], size: int) -> None:
    sees = {
        "full": lambda query, key: True,
        "window": lambda query, key: query - key < size,
        "chunk": lambda query, key: query // size == key // size,
    }[kind]
    expected = [min(key for key in range(query + 1) if sees(query, key)) for query in range(20)]
    reach = AttentionRange(kind, size)

    assert expected == [reach.oldest_visible(query) for query in range(20)]
    assert expected == reach.oldest_visible(np.arange(20)).tolist()


@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_a_range_that_covers_all_positions_is_full(kind: Literal["window", "chunk"]) -> None:
    layer = LayerSpec(2, 8, 8, AttentionRange(kind, 8))

    assert [layer, PLAIN, PLAIN] == [layer.limited_to(length) for length in (9, 8, 7)]
    assert PLAIN == PLAIN.limited_to(1)


@pytest.mark.parametrize(
    ("reach", "cells", "expected"),
    [
        (AttentionRange(), 1000, 1000),
        (AttentionRange("window", 8), 1000, 2 * (3 * 7 + 20)),
        (AttentionRange("chunk", 8), 1000, 2 * (3 * 7 + 20)),
        (AttentionRange("window", 1), 1000, 40),
        (AttentionRange("window", 8), 70, 70),
    ],
)
def test_a_window_pool_has_twice_the_visible_cells(reach: AttentionRange, cells: int, expected: int) -> None:
    """Three slots of seven visible cells and twenty batch tokens, twice."""
    assert expected == group_layers([LayerSpec(2, 8, 8, reach)])[0].pool_cells(cells, slots=3, max_batch_tokens=20)


def test_a_cell_is_one_token_in_every_layer() -> None:
    assert 3 * 2 * (8 + 4) * 2 == GroupSpec(2, 8, 4, AttentionRange(), (0, 1, 2), (None,) * 3).cell_bytes(
        torch.bfloat16
    )


def test_a_span_stops_behind_its_last_token() -> None:
    assert 7 == Span(slot=0, start=4, length=3).stop
