"""benchmarks/serving/peers.py against a server with known answers: order, counts and shapes. No time is asserted."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.benchmark import Measured
from bench.cells import DECODE, FASTER, FIRST, PREFILL, RATE, CellResult
from benchmarks.serving.goals import GOALS
from benchmarks.serving.paired_figures import PairedFigure, document, rows, table
from benchmarks.serving.peer_programs import PEERS, Resources
from benchmarks.serving.peers import Sizes, main
from benchmarks.shapes import SHAPES, write_folder, write_gguf
from tests.server.peer import Peer

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
    ours, peers = [40.0, 20.0, 10.0], [10.0, 10.0, 20.0]
    rate, time = document([PairedFigure("a", DECODE, ours, peers, 2.0), PairedFigure("a", FIRST, ours, peers, 1.2)])

    assert (2.0, [4.0, 2.0, 0.5], "PASS") == (rate["ratio"], rate["ratios"], rate["verdict"])
    assert (0.5, (20.0, 10.0), "behind") == (time["ratio"], time["medians"], time["verdict"])


def test_reuse_has_a_goal_without_a_peer() -> None:
    """A cached prefix must be twenty times as fast, whatever the peer's figure is."""
    verdicts = [PairedFigure("a", FASTER, [ours], [100.0], 20.0).verdict for ours in (19.0, 21.0)]

    assert ["behind", "PASS"] == verdicts


def test_no_ratio_is_made_of_nothing() -> None:
    """Tokens that arrive together have no time in between: such a figure is left out, the others are not."""
    cell = next(cell for cell, _ in Sizes().cells(["streams"], [8]).values())
    gap, sides = "between p50, ms", ((0.0, 5.0), (3.0, 5.0))
    results = [[CellResult({RATE: 10.0, gap: ms}, ()) for ms in side] for side in sides]
    measured = [Measured(name, cell, own) for name, own in zip(("us", "peer"), results, strict=True)]

    assert [RATE] == [row.figure for row in rows(measured, GOALS["none"])]


def test_each_peer_has_its_goals() -> None:
    """By bits and by peer; other figures have none."""
    cells = {name: cell for name, (cell, _) in Sizes().cells(["alone", "streams"], [8, 32]).items()}
    alone, eight, many = cells.values()

    assert (2.0, 3.0, None) == tuple(GOALS["int8"].of(alone, name) for name in (DECODE, PREFILL, FIRST))
    assert (1.2, 2.5, 2.5) == tuple(GOALS["int4"].of(many, name) for name in (DECODE, PREFILL, RATE))
    assert (8.0, None, 20.0) == tuple(
        GOALS["transformers"].of(cell, name) for cell, name in ((eight, RATE), (many, RATE), (eight, FASTER))
    )
    assert (1.2, 1.2) == (GOALS["openvino"].of(many, RATE), GOALS["openvino"].of(alone, FIRST))


def test_both_sides_get_the_same(tmp_path: Path) -> None:
    """Threads, sequences and tokens of each stand in the peer's command line."""
    program = tmp_path / "server"
    program.write_text("")
    program.chmod(0o755)
    resources = Resources(threads=3, slots=8, context=512)
    command = " ".join(PEERS["llama.cpp"].command(str(program), "q8_0.gguf", resources))

    assert f"{program} -m q8_0.gguf --port {{port}} -t 3 -tb 3 -np 8 -c 4096 -fa on" == command


def test_the_table_has_a_row_a_figure() -> None:
    """Medians, ratio, its range, the goal and whether it is reached stand in one line."""
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(table([PairedFigure("8 streams", RATE, [1234.5], [50.0], 3.0)], ("us", "peer")))
    row = next(line for line in console.export_text().splitlines() if "8 streams" in line)

    assert ["1,234", "50.0", "24.7", "24.7", "24.7", "3", "PASS"] == [part.strip() for part in row.split("│")[2:-1]]


@pytest.mark.slow
def test_all_cells_are_measured_in_pairs(peer: Peer, tmp_path: Path) -> None:
    """Every figure has as many pairs as asked for, and all times and rates are above zero."""
    content = compete(peer, tmp_path, "--pairs", "2", "--streams", "2,4")
    cells = ["alone", "prefill", "streams 2", "streams 4", "reuse, chat", "reuse, users"]

    assert ["us", "peer"] == [server["name"] for server in content["servers"]]
    assert cells == content["options"]["cells"]
    assert 4 + 2 + 2 * 5 + 2 * 4 == len(content["figures"])
    for figure in content["figures"]:
        assert 2 == len(figure["ours"]) == len(figure["peers"])
        assert all(value > 0 for value in (*figure["ours"], *figure["peers"]))
    assert 4 == peer.most_running
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_both_servers_get_the_same_requests(peer: Peer, tmp_path: Path) -> None:
    """In one round both get the same bodies, in the next round other prompts."""
    compete(peer, tmp_path, "--pairs", "2", "--cells", "alone")
    measured = [body for body in peer.completions if len(body["prompt"]) == 24]

    assert measured[0] == measured[1]
    assert measured[2] == measured[3]
    assert measured[0]["prompt"] != measured[2]["prompt"]
    assert (8, 0, True) == tuple(measured[0][name] for name in ("max_tokens", "temperature", "ignore_eos"))


def test_a_second_turn_begins_with_the_first(peer: Peer, tmp_path: Path) -> None:
    """A reused prefix is equal token by token; a cold one differs from the first tokens on."""
    compete(peer, tmp_path, "--cells", "reuse")
    measured = [body["prompt"] for body in peer.completions if len(body["prompt"]) in (64, 68)]
    chat, again = measured[:2]
    users = [prompt for prompt in measured[4:] if len(prompt) == 68][:4]

    assert chat == again[:64]
    assert {4} == {len({tuple(prompt[64:]) for prompt in users})}
    assert 1 == len({tuple(prompt[:64]) for prompt in users})
    assert chat[:4] != users[0][:4]


def test_a_short_answer_is_no_result(peer: Peer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server that says fewer tokens than asked for is not fast: the run ends with status 1 and says why."""
    peer.model = "short"
    with pytest.raises(SystemExit, match="1"):
        compete(peer, tmp_path)

    assert "ok, 7 tokens of 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "name a peer"),
        (["llama.cpp", "--peer-model", "a.gguf"], "give --model"),
        (["--smoke", "--cells", "nothing"], "--cells names none of"),
        (["--smoke", "--pairs", "0"], "--pairs must be 1 or more"),
        (["--smoke", "--streams", "0"], "above 0"),
        (["--smoke", "--streams", "many"], "numbers separated by commas"),
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
    """No weight is left out, and matrices have 16 bits."""
    write_folder(TINY, tmp_path)
    weights = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="bfloat16").state_dict()
    write_gguf(tmp_path, tmp_path / "model.gguf")
    written = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "model.gguf").tensors}

    assert len(weights) - 1 == len(written)  # the head is the embedding
    assert {"F32", "BF16"} == {tensor.tensor_type.name for tensor in written.values()}


@pytest.mark.slow
def test_the_bundled_model_meets_itself(tmp_path: Path) -> None:
    """Two real servers are started, measured once in small sizes, and ended."""
    assert 0 == main(["--smoke", "--out", str(tmp_path)])

    figures = json.loads((tmp_path / "peers.json").read_text())["figures"]
    assert "second turn of 64" in {figure["cell"] for figure in figures}
