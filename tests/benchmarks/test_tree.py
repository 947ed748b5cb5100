"""benchmarks/tree.py: the trees that it grows and the files that it writes. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.tree import EDGE, OPERATIONS, TURNS, conversation, grow, main


def test_conversations_of_a_session_share_a_prefix() -> None:
    """Turns share two edges, sessions of one system prompt one, and all have three."""
    assert 3 * EDGE == len(conversation(0))
    assert (conversation(0)[: 2 * EDGE] == conversation(TURNS - 1)[: 2 * EDGE]).all()
    assert conversation(0)[2 * EDGE] != conversation(1)[2 * EDGE]
    assert conversation(0)[EDGE] != conversation(TURNS)[EDGE]


def test_a_tree_of_a_given_size_contains_its_conversations() -> None:
    tree, count = grow(500)

    assert 500 <= tree.node_count <= 503
    assert [3 * EDGE] * count == [tree.match(conversation(number), b"").length for number in range(count)]


@pytest.mark.slow
def test_times_are_written(tmp_path: Path) -> None:
    """A row for each size, every kind of operation timed, and a plot."""
    assert 0 == main(["--nodes", "40", "80", "--operations", "5", "--rounds", "2", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "tree.json").read_text())["rows"]

    assert [40, 80] == [row.pop("nodes") for row in rows]
    assert [set(OPERATIONS)] * 2 == [set(row) for row in rows]
    assert min(min(row.values()) for row in rows) > 0
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")
