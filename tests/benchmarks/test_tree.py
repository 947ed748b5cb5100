"""benchmarks/tree.py: what it counts, and what it writes. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.tree import EDGE, TURNS, main, plant, text


def test_texts_of_a_session_begin_alike() -> None:
    """Turns share two edges, sessions of one system prompt one, and all have three."""
    assert 3 * EDGE == len(text(0))
    assert (text(0)[: 2 * EDGE] == text(TURNS - 1)[: 2 * EDGE]).all()
    assert text(0)[2 * EDGE] != text(1)[2 * EDGE]
    assert text(0)[EDGE] != text(TURNS)[EDGE]


def test_a_planted_tree_has_its_nodes() -> None:
    """It is as large as was asked for, and knows all its texts."""
    tree, count = plant(500)

    assert 500 <= tree.node_count <= 503
    assert [3 * EDGE] * count == [tree.match(text(number), b"").length for number in range(count)]


def test_figures_are_written(tmp_path: Path) -> None:
    """A row for each size, every kind of operation timed, and a picture."""
    assert 0 == main(["--nodes", "40", "80", "--operations", "5", "--rounds", "2", "--out", str(tmp_path)])
    figures = json.loads((tmp_path / "tree.json").read_text())["figures"]

    assert [40, 80] == [row.pop("nodes") for row in figures]
    assert [{"recall", "remember", "thin", "evict"}] * 2 == [set(row) for row in figures]
    assert min(min(row.values()) for row in figures) > 0
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")
