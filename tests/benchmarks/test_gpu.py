"""benchmarks/gpu/throughput.py on a CPU with a tiny shape: every cell has its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import throughput
from benchmarks.result import add_rows, documents, measured
from benchmarks.shapes import write_folder

TINY = (
    {"model_type": "llama", "vocab_size": 2000, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    | {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    | {"max_position_embeddings": 512}
)


def test_each_cell_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without graphs, with quantised weights, and by transformers."""
    monkeypatch.setattr(throughput, "BEHIND", 16)
    monkeypatch.setattr(throughput, "STEPS", 4)
    write_folder(TINY, tmp_path)

    rows = list(
        throughput.shape_rows("tiny", tmp_path, throughput.Options("cpu", (1, 3), (40,), ("graphs", "eager", "int8")))
    )

    cells = ["1 streams", "3 streams", "prompt of 40"]
    expected = {"graphs": cells, "eager": cells[:2], "int8": cells, "transformers": cells[:2]}
    assert [(mode, cell) for mode, own in expected.items() for cell in own] == [
        (row["mode"], row["cell"]) for row in rows
    ]
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert all(row["step_ms"] > row.get("host_ms", 0) >= 0 for row in rows if "streams" in row["cell"])
    for _ in range(2):
        for row in rows:
            add_rows(tmp_path / "bench.json", measured("gpu", [row]))
    assert len(rows) == sum(len(result.rows) for result in documents(tmp_path / "bench.json"))


def test_without_a_gpu_the_reason_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    if throughput.torch.cuda.is_available():
        pytest.skip("there is a GPU")

    assert 1 == throughput.main([])
    assert "torch can use no GPU here" in capsys.readouterr().err
