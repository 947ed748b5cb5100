"""The benchmark of GGUF files: names, missing cells, sampled texts, refusals."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM

from benchmarks.gguf.files import (
    MEMORY,
    START_TOKENS,
    TEXTS,
    GgufFile,
    Rows,
    accuracy_rows,
    better,
    main,
    make_parser,
    read_rate,
    sampled,
    sessions,
)
from benchmarks.gguf.token_scores import LIKELY, Loss
from benchmarks.shapes import write_folder, write_gguf
from tests.benchmarks.test_peers import TINY


@pytest.mark.parametrize(
    ("name", "model", "weights"),
    [
        ("qwen3-0.6b-Q4_K_M.gguf", "Qwen3-0.6B", "Q4_K_M"),
        ("gemma-3-270m-q4_k_m.gguf", "Gemma 3 270M", "Q4_K_M"),
        ("my-model.IQ4_XS.gguf", "my-model", "IQ4_XS"),
        ("tiny-bf16.gguf", "tiny", "BF16"),
        ("tiny.gguf", "tiny", "GGUF"),
    ],
)
def test_model_and_quantisation_are_in_the_name(name: str, model: str, weights: str) -> None:
    assert {"model": model, "weights": weights} == GgufFile(Path(name)).about


def given(*arguments: str) -> argparse.Namespace:
    """The parsed command line."""
    return make_parser().parse_args(["tiny-Q4_0.gguf", *arguments])


def labels(kept: Rows, *arguments: str) -> list[tuple[list[str], int]]:
    """The cells and the slots of each session of a file."""
    found = sessions(GgufFile(Path("tiny-Q4_0.gguf")), kept, given(*arguments))
    return [([cell.label for cell in cells], slots) for cells, slots, _ in found]


def test_measured_cells_are_not_measured_again(tmp_path: Path) -> None:
    """Not even by another process."""
    row = {"model": "tiny", "weights": "Q4_0", "figure": "any"}
    alone = ["prompt of 512", "prompt of 2048"]
    assert [(alone, 1), (["8 streams"], 8), (["32 streams"], 32)] == labels(Rows(tmp_path / "rows.json", "llama.cpp"))

    Rows(tmp_path / "rows.json", "llama.cpp").add([row | {"cell": cell} for cell in ("prompt of 512", "8 streams")])
    Rows(tmp_path / "rows.json", "llama.cpp").add([row | {"cell": "32 streams", "weights": "Q8_0"}])

    kept = Rows(tmp_path / "rows.json", "llama.cpp")
    assert [(["prompt of 2048"], 1), (["32 streams"], 32)] == labels(kept)
    assert [([], 1)] == labels(kept, "--cells", "server")
    assert [(["32 streams"], 32)] == labels(kept, "--cells", "streams")
    assert [(alone, 1)] == labels(Rows(tmp_path / "rows.json", "ik_llama.cpp"), "--cells", "alone,prefill")


def test_read_rate_is_the_weights_of_a_token_times_the_decode_rate(tmp_path: Path) -> None:
    """In GB/s, of both servers: half of the experts, and of the embedding table one row."""
    file = tmp_path / "tiny-Q4_0.gguf"
    writer = GGUFWriter(file, "qwen3moe")
    writer.add_expert_count(2)
    writer.add_expert_used_count(1)
    for name, megabytes in (("token_embd", 18), ("output", 1), ("blk.0.ffn_up_exps", 2)):
        writer.add_tensor(f"{name}.weight", np.zeros(megabytes * 250_000, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    row = read_rate(GgufFile(file), {"cell": "prompt of 512", "cellar": 5000.0, "other": 2500.0}, 3e10)

    assert {"cellar": 10.0, "other": 5.0, "limit": 30.0, "cell": "prompt of 512"}.items() <= row.items()


def test_sizes_and_errors_are_better_when_less() -> None:
    row: dict[str, Any] = {"cellar": 2.0, "other": 3.0, "ratio": 0.5}

    assert 1.5 == better(row | {"figure": MEMORY})
    assert 0.5 == better(row | {"figure": "decode, tokens/s"})


def test_accuracy_has_the_units_of_the_page() -> None:
    rows = accuracy_rows(GgufFile(Path("tiny-Q4_0.gguf")), Loss(1.01, 0.002), Loss(1.03, 0.006))

    assert [(1.0, 3.0), (2.0, 6.0)] == [(row["cellar"], row["other"]) for row in rows]
    assert [None, 3.0] == [row.get("ratio") for row in rows]


def test_sampled_tokens_have_the_log_probabilities_of_the_dequantised_model(tmp_path: Path) -> None:
    write_folder(TINY, tmp_path / "model")
    write_gguf(tmp_path / "model", tmp_path / "tiny-BF16.gguf")
    texts, places = sampled(tmp_path / "tiny-BF16.gguf", 4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with torch.inference_mode():
        scores = model(input_ids=torch.tensor(texts)).logits.log_softmax(-1)

    assert TEXTS * 4 == len(places)
    assert {START_TOKENS + 4} == set(map(len, texts))
    for place in places:
        row, token = scores[place.text, place.position - 1], texts[place.text][place.position]
        assert math.isclose(float(row[token]), place.truth, abs_tol=1e-4)
        assert int((row > row[token]).sum()) < LIKELY


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "name GGUF files"),
        (["none.gguf"], "there is no file none.gguf"),
        (["none.gguf", "--cells", "alone,other"], "--cells are of alone, prefill"),
    ],
)
def test_refusal_is_one_line_and_code_2(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--out", str(tmp_path)])

    assert 2 == end.value.code
    assert reason in capsys.readouterr().err
