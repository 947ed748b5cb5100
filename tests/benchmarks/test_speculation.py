"""benchmarks/cpu/speculation.py: comparisons, the scripted drafter and the written files. No time is asserted."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks.cpu.comparison import ModeComparison, RoundTime, trimmed_mean
from benchmarks.cpu.speculation import Scripted, main
from benchmarks.mtp_shape import main as write_mtp_shape
from engine.sample.penalties import PenaltyHistory
from engine.sample.sampler import SamplingContext
from engine.schedule.draft import DraftRequest
from engine.types.request import SamplingParams


def want(name: str, position: int, limit: int) -> DraftRequest:
    """A request of a text of `position` tokens."""
    params = SamplingParams()
    return DraftRequest(
        name, [0] * position, limit, SamplingContext(params, 0, position, PenaltyHistory(params, (), 10))
    )


def test_a_script_has_its_acceptance_rate() -> None:
    """Always, never, or at the same positions in all modes of a round; from the position of the sequence on."""
    tokens = list(range(1000))
    right, wrong, often = (Scripted({"0": tokens}, {"0": 2}, share, 0.0, 5000) for share in (1.0, 0.0, 0.8))

    assert [[10, 11, 12]] == right.propose([want("3 0", 12, 3)]) == right.propose([want("4 0", 12, 3)])
    assert [[11, 12, 13]] == wrong.propose([want("3 0", 12, 3)])
    (guesses,) = often.propose([want("0 0", 2, 1000)])
    assert 750 < sum(guess == token for guess, token in zip(guesses, tokens, strict=True)) < 850
    often.forget("0 0", tokens)
    assert often.propose([want("0 0", 502, 9)]) == [guesses[500:509]]
    assert often.propose([want("1 0", 2, 1000)]) != [guesses], "another round has another script"


def test_ratios_compare_the_same_rounds() -> None:
    """A slow round is slow for all modes; the best mode has a fixed depth."""
    times = {"off": (1.0, 3.0, 1.0), "1": (0.8, 2.4, 0.8), "2": (2.0, 6.0, 2.0), "auto": (0.5, 1.5, 0.5)}
    cell = ModeComparison("0.5", 1, {mode: [RoundTime(10, taken) for taken in each] for mode, each in times.items()})

    assert (10.0, 1.25, 2.0) == (cell.rate("off"), cell.ratio("1"), cell.ratio("auto"))
    assert ("1", 1.6) == (cell.best, pytest.approx(cell.to_best))


def test_the_best_depth_is_chosen_by_the_other_rounds() -> None:
    """A mode that is fast in half of the rounds by chance is not the best one in the same rounds."""
    lucky = (0.1, 1.0) * 4
    times = {"off": (1.0,) * 8, "1": (1.1,) * 8, "2": lucky, "auto": (1.0,) * 8}
    cell = ModeComparison("0.5", 1, {mode: [RoundTime(10, taken) for taken in each] for mode, each in times.items()})

    assert 1.0 == pytest.approx(cell.to_best)


def test_the_interval_grows_with_the_noise_of_rounds() -> None:
    """Its width is 0 for equal rounds."""
    widths = []
    for noise in (0.0, 0.01, 0.1):
        chance = random.Random(1)
        taken = {mode: [RoundTime(10, 1 + chance.gauss(0, noise)) for _ in range(20)] for mode in ("off", "1", "auto")}
        least, most = ModeComparison("0.5", 1, taken).interval
        widths.append(most - least)

    assert 0 == widths[0]
    assert 0.002 < widths[1] < 0.02 < widths[2]


def test_clearly_slower_modes_are_dropped() -> None:
    """10 % slower is dropped, 1 % is not; the best mode and `auto` never are."""
    chance = random.Random(2)
    speeds = {"off": 1.0, "1": 1.1, "2": 1.01, "auto": 1.2, "lookup": 1.1}
    times = {
        mode: [RoundTime(10, speed * chance.uniform(0.98, 1.02)) for _ in range(12)] for mode, speed in speeds.items()
    }
    cell = ModeComparison("0.5", 1, times)

    assert ["1", "lookup"] == cell.clearly_slower()
    cell.times["1"] = cell.times["1"][:6]
    assert ["off", "2"] == cell.candidates
    assert 12 == cell.rounds
    assert 1.1 == pytest.approx(1 / cell.ratio("1"), rel=0.02)


def test_outliers_are_ignored() -> None:
    """A quarter of the rounds on each side does not count."""
    assert 1.0 == trimmed_mean([1.0, 30.0, 1.0, 0.9, 1.1, 1.0, 0.01, 1.0])
    assert 2.0 == trimmed_mean([1.0, 3.0])


@pytest.mark.slow
@pytest.mark.parametrize("null", [False, True])
def test_comparisons_are_written(tmp_path: Path, null: bool) -> None:
    """One comparison for each drafter and batch size, with the tokens of every mode, and a plot."""
    assert 0 == main(["--quick", *(["--null"] if null else []), "--out", str(tmp_path)])
    cells = [json.loads(line) for line in (tmp_path / "speculation.jsonl").read_text().splitlines()]

    assert [("bundled", 1), ("bundled", 2), ("0.6", 1), ("0.6", 2)] == [
        (cell["drafter"], cell["batch"]) for cell in cells
    ]
    for cell in cells:
        more = ["lookup"] if cell["drafter"] == "bundled" and not null else []
        assert ["off", "2", "auto", *more] == list(cell["times"])
        assert {8 * cell["batch"]} == {one["tokens"] for times in cell["times"].values() for one in times}
        assert len(cell["acceptance"]["2"]) == 2
    assert (tmp_path / "speculation.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_an_mtp_layer_is_compared(tmp_path: Path) -> None:
    """The written layer drafts about the wanted share correctly, and its rows name the model."""
    folder, result = tmp_path / "tiny-qwen3.5", tmp_path / "result.json"
    assert write_mtp_shape([str(folder), "--shape", folder.name, "--correct", "0.8"]) == 0
    assert main(["--quick", "--model", str(folder), "--out", str(tmp_path), "--json", str(result)]) == 0
    cells = [json.loads(line) for line in (tmp_path / "speculation.jsonl").read_text().splitlines()]

    assert [(cell["drafter"], cell["batch"]) for cell in cells] == [("mtp", 1), ("mtp", 2)]
    assert all(0.5 < cell["acceptance"]["2"][0] for cell in cells)
    assert all("MTP of tiny-qwen3.5" in row["drafter"] for row in json.loads(result.read_text())[0]["rows"])
