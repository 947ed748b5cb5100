"""benchmarks/peers.py against a server whose answers are known. No time is asserted, only order, counts and shapes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.duel import Duel, document, table
from benchmarks.peers import main
from benchmarks.shapes import SHAPES, gguf_tensors, pair_columns, write_folder
from tests.benchmarks.conftest import Peer

TINY = SHAPES["qwen3-0.6b"] | {
    "vocab_size": 600,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def compete(peer: Peer, out: Path, *arguments: str) -> dict[str, Any]:
    """Let `peer` compete with itself in small sizes and return the written JSON."""
    urls = ("--base-url", f"us={peer.url}", "--base-url", f"peer={peer.url}")
    assert 0 == main([*urls, "--smoke", "--seed", "3", "--out", str(out), *arguments])
    content: dict[str, Any] = json.loads((out / "peers.json").read_text())
    return content


def test_a_ratio_above_one_is_ours() -> None:
    """More of a rate is better, less of a time is, and the ratio is the middle of the pairs' own."""
    duel = Duel(("us", "peer"))
    for ours, peers in ((40.0, 10.0), (20.0, 10.0), (10.0, 20.0)):
        duel.add(
            {"decode, tokens/s": ours, "first token, ms": ours}, {"decode, tokens/s": peers, "first token, ms": peers}
        )
    figures = document(duel, environment={}, options={})["figures"]

    assert (2.0, [4.0, 2.0, 0.5]) == (figures["decode, tokens/s"]["ratio"], figures["decode, tokens/s"]["ratios"])
    assert (0.5, (20.0, 10.0)) == (figures["first token, ms"]["ratio"], figures["first token, ms"]["medians"])


def test_the_table_has_a_row_a_figure() -> None:
    """Medians, ratio, its range and the number of pairs stand in one line."""
    duel = Duel(("us", "peer"))
    duel.add({"decode, tokens/s": 1234.5}, {"decode, tokens/s": 50.0})
    console = Console(width=130, record=True, file=io.StringIO())
    console.print(table(duel))
    row = next(line for line in console.export_text().splitlines() if "decode" in line)

    assert ["1,234", "50.0", "24.7", "24.7", "24.7", "1"] == [part.strip() for part in row.split("│")[2:-1]]


def test_all_cells_are_measured_in_pairs(peer: Peer, tmp_path: Path) -> None:
    """Every figure has as many pairs as asked for, and all times and rates are above zero."""
    content = compete(peer, tmp_path, "--pairs", "2", "--streams", "2,4")

    assert ["us", "peer"] == content["servers"]
    assert ["alone", "prefill", "2 streams", "4 streams", "reuse"] == content["options"]["cells"]
    assert 3 + 2 * 5 + 4 == len(content["figures"])
    for figure in content["figures"].values():
        assert 2 == len(figure["pairs"])
        assert all(value > 0 for pair in figure["pairs"] for value in pair)
    assert 4 == peer.most_running
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_both_sides_are_asked_the_same(peer: Peer, tmp_path: Path) -> None:
    """In one turn both get the same prompts in the same words, in the next turn others."""
    compete(peer, tmp_path, "--pairs", "2", "--cells", "alone")
    measured = [body for body in peer.completions if len(body["prompt"]) == 24]

    assert measured[0] == measured[1]
    assert measured[2] == measured[3]
    assert measured[0]["prompt"] != measured[2]["prompt"]
    assert (8, 0, True) == tuple(measured[0][name] for name in ("max_tokens", "temperature", "ignore_eos"))


def test_a_second_turn_begins_with_the_first(peer: Peer, tmp_path: Path) -> None:
    """What is reused is shared token by token, and what is cold is shared with nobody."""
    compete(peer, tmp_path, "--cells", "reuse")
    chat, again, user, other = (body["prompt"] for body in peer.completions[4:8])

    assert chat == again[: len(chat)]
    assert user[:64] == other[:64]
    assert user[64:] != other[64:]
    assert chat[:4] != user[:4]


def test_a_short_answer_is_no_result(peer: Peer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server that says fewer tokens than asked for is not fast: the run ends with status 1 and says why."""
    peer.model = "short"
    with pytest.raises(SystemExit, match="1"):
        compete(peer, tmp_path)

    assert "answered: ok, 7 tokens of 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "give --cellar and --peer"),
        (["--cellar", ""], "give --cellar and --peer"),
        (["--smoke", "--cells", "nothing"], "--cells names none of"),
        (["--smoke", "--pairs", "0"], "--pairs must be 1 or more"),
        (["--smoke", "--streams", "0"], "--streams must be 1 or more"),
        (["--smoke", "--streams", "many"], "whole numbers"),
        (["--base-url", "us=127.0.0.1:9", "--base-url", "peer=127.0.0.1:9"], "must look like"),
    ],
)
def test_nonsense_is_refused(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be measured ends with status 2 and a sentence that says why."""
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--out", str(tmp_path)])

    assert reason in capsys.readouterr().err


def test_a_made_model_is_a_checkpoint(tmp_path: Path) -> None:
    """transformers reads the folder, and every id that prompts are made of is a word of its own."""
    write_folder(TINY, tmp_path)
    words = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)

    assert (600, 599) == (len(words), words.eos_token_id)
    assert 600 - 257 == len({words.decode([number]) for number in range(256, 599)})
    assert (600, 32) == tuple(model.get_input_embeddings().weight.shape)


def test_every_weight_goes_to_the_peer(tmp_path: Path) -> None:
    """No weight is left out, none twice, and only a shape that pairs neighbours has its projections reordered."""
    write_folder(TINY, tmp_path)
    weights = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="bfloat16").state_dict()
    written = dict(gguf_tensors(TINY, tmp_path))

    assert len(weights) - 1 == len(written)  # the head is the embedding
    assert weights["model.layers.1.self_attn.q_proj.weight"].equal(written["blk.1.attn_q.weight"])


def test_rotated_halves_become_neighbours() -> None:
    """Row i of a head's first half is followed by row i of its second."""
    rows = torch.arange(8.0).unsqueeze(1)

    assert [0, 2, 1, 3, 4, 6, 5, 7] == pair_columns(rows, 4).flatten().tolist()


@pytest.mark.slow
def test_the_bundled_model_meets_itself(tmp_path: Path) -> None:
    """Two real servers are started, measured once in small sizes, and ended."""
    assert 0 == main(["--smoke", "--out", str(tmp_path)])

    assert "second turn of 64, first token, ms" in json.loads((tmp_path / "peers.json").read_text())["figures"]
