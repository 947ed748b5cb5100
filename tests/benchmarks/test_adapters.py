"""The benchmarks of adapters write a row for each mode."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import shapes
from benchmarks.cpu import adapter_loads, adapters


def test_each_mode_has_a_row(tmp_path: Path) -> None:
    """Of a tiny model."""
    assert shapes.main(["tiny", str(tmp_path / "model")]) == 0
    results = tmp_path / "adapters.json"
    options = ["--streams", "2", "--rank", "4", "--threads", "1", "--rounds", "3", "--warm", "1", "--dtype", "bfloat16"]

    assert adapters.main([str(tmp_path / "model"), *options, "--json", str(results)]) == 0
    [document] = json.loads(results.read_text())
    assert [row["mode"] for row in document["rows"]] == list(adapters.MODES)
    assert all(row["step_ms"] > 0 and row["speed"] > 0 for row in document["rows"])


def test_loads_beside_streams_have_rows(tmp_path: Path) -> None:
    """Of a tiny model."""
    assert shapes.main(["tiny", str(tmp_path / "model")]) == 0
    results = tmp_path / "adapter_loads.json"
    options = ["--streams", "2", "--rank", "4", "--loads", "2", "--steps", "5", "--json", str(results)]

    assert adapter_loads.main([str(tmp_path / "model"), *options]) == 0
    [document] = json.loads(results.read_text())
    assert [row["mode"] for row in document["rows"]] == list(adapter_loads.MODES)
    assert all(0 < row["gap_ms"] <= row["longest_gap_ms"] for row in document["rows"])
    assert document["rows"][1]["longest_load_ms"] > 0
