"""Which layers share cell numbers, and which can be moved."""

from __future__ import annotations

import pytest

from kvcache.spec import GroupSpec, LayerSpec, Reach, Rotation, Span, group_layers

PLAIN = LayerSpec(2, 8, 8)


def test_layers_of_one_geometry_and_reach_share_a_group() -> None:
    """Alternating layers fall into two groups, in the order of their first layers; rotations may differ inside."""
    window = LayerSpec(2, 8, 8, Reach("window", 4))
    other = LayerSpec(2, 8, 8, rotation=Rotation("half", 0, (0.5,)))

    assert [(0, 2, 4), (1, 3)] == [group.layers for group in group_layers([PLAIN, window, PLAIN, window, other])]
    assert (PLAIN.rotation, PLAIN.rotation, other.rotation) == group_layers([PLAIN, PLAIN, other])[0].rotations


@pytest.mark.parametrize(
    "other",
    [
        LayerSpec(1, 8, 8),
        LayerSpec(2, 4, 8),
        LayerSpec(2, 8, 4),
        LayerSpec(2, 8, 8, Reach("window", 8)),
        LayerSpec(2, 8, 8, Reach("chunk", 8)),
    ],
)
def test_layers_that_differ_have_groups_of_their_own(other: LayerSpec) -> None:
    """Heads, either width, and reach all separate layers."""
    assert 2 == len(group_layers([PLAIN, other]))


@pytest.mark.parametrize(
    ("layers", "shiftable"),
    [
        ([PLAIN], True),
        ([LayerSpec(2, 8, 8, Reach("window", 4))], True),
        ([LayerSpec(2, 8, 8, Reach("chunk", 4))], False),
        ([PLAIN, LayerSpec(2, 8, 8, rotation=None)], False),
    ],
)
def test_a_group_moves_if_every_layer_does(layers: list[LayerSpec], shiftable: bool) -> None:
    """One layer of unknown positions, or a reach bound to them, holds the whole group."""
    assert [shiftable] == [group.shiftable for group in group_layers(layers)]


def test_a_cell_is_one_token_in_every_layer() -> None:
    """Bytes of a cell: layers x heads x both widths x the element's size."""
    assert 3 * 2 * (8 + 4) * 2 == GroupSpec(2, 8, 4, Reach(), (0, 1, 2), (None,) * 3).cell_bytes(2)


def test_a_span_stops_after_its_last_row() -> None:
    """Ranges are half open."""
    assert 7 == Span(slot=0, start=4, length=3).stop
