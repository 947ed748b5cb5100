"""The benchmark of adapters writes a row for each mode."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import shapes
from benchmarks.cpu import adapters


def test_each_mode_has_a_row(tmp_path: Path) -> None:
    """Of a tiny model."""
    assert shapes.main(["tiny", str(tmp_path / "model")]) == 0
    results = tmp_path / "adapters.json"
    options = ["--streams", "2", "--rank", "4", "--threads", "1", "--rounds", "3", "--warm", "1", "--dtype", "bfloat16"]

    assert adapters.main([str(tmp_path / "model"), *options, "--json", str(results)]) == 0
    [document] = json.loads(results.read_text())
    assert [row["mode"] for row in document["rows"]] == list(adapters.MODES)
    assert all(row["step_ms"] > 0 and row["speed"] > 0 for row in document["rows"])
