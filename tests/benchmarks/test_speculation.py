"""benchmarks/speculation.py: what it compares, what its script says, and what it writes. No time is asserted."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks.speculation import Scripted, main
from benchmarks.turns import Cell, Turn, middle
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


def test_a_script_is_right_as_often_as_it_should_be() -> None:
    """Always, never, or at places that are the same whoever asks in a round; from where the text stands."""
    said = list(range(1000))
    right, wrong, often = (Scripted({"0": said}, {"0": 2}, share, 0.0, 5000) for share in (1.0, 0.0, 0.8))

    assert [[10, 11, 12]] == right.propose([want("3 0", 12, 3)]) == right.propose([want("4 0", 12, 3)])
    assert [[11, 12, 13]] == wrong.propose([want("3 0", 12, 3)])
    (guesses,) = often.propose([want("0 0", 2, 1000)])
    assert 750 < sum(guess == token for guess, token in zip(guesses, said, strict=True)) < 850
    often.forget("0 0", said)
    assert often.propose([want("0 0", 502, 9)]) == [guesses[500:509]]
    assert often.propose([want("1 0", 2, 1000)]) != [guesses], "another round has another script"


def test_ratios_are_of_rounds_side_by_side() -> None:
    """A machine that is slow for a round is slow for all modes; the best is one that chooses nothing."""
    turns = {"off": (1.0, 3.0, 1.0), "1": (0.8, 2.4, 0.8), "2": (2.0, 6.0, 2.0), "auto": (0.5, 1.5, 0.5)}
    cell = Cell("0.5", 1, {mode: [Turn(10, taken) for taken in each] for mode, each in turns.items()})

    assert (10.0, 1.25, 2.0) == (cell.rate("off"), cell.ratio("1"), cell.ratio("auto"))
    assert ("1", 1.6) == (cell.best, pytest.approx(cell.to_best))


def test_the_best_is_chosen_by_other_rounds() -> None:
    """What is fast in half of the rounds, by luck, is not what `auto` has to keep up with in them."""
    lucky = (0.1, 1.0) * 4
    turns = {"off": (1.0,) * 8, "1": (1.1,) * 8, "2": lucky, "auto": (1.0,) * 8}
    cell = Cell("0.5", 1, {mode: [Turn(10, taken) for taken in each] for mode, each in turns.items()})

    assert 1.0 == pytest.approx(cell.to_best)


def test_an_interval_shows_how_much_rounds_differ() -> None:
    """None where all are alike; the more they differ, the wider."""
    widths = []
    for noise in (0.0, 0.01, 0.1):
        chance = random.Random(1)
        taken = {mode: [Turn(10, 1 + chance.gauss(0, noise)) for _ in range(20)] for mode in ("off", "1", "auto")}
        least, most = Cell("0.5", 1, taken).interval
        widths.append(most - least)

    assert 0 == widths[0]
    assert 0.002 < widths[1] < 0.02 < widths[2]


def test_what_is_clearly_slower_is_given_up() -> None:
    """A tenth slower is hopeless after some rounds, a hundredth is not; nobody gives up the best or `auto`."""
    chance = random.Random(2)
    speeds = {"off": 1.0, "1": 1.1, "2": 1.01, "auto": 1.2, "lookup": 1.1}
    turns = {mode: [Turn(10, speed * chance.uniform(0.98, 1.02)) for _ in range(12)] for mode, speed in speeds.items()}
    cell = Cell("0.5", 1, turns)

    assert ["1", "lookup"] == cell.hopeless()
    cell.turns["1"] = cell.turns["1"][:6]
    assert ["off", "2"] == cell.rivals
    assert 12 == cell.rounds
    assert 1.1 == pytest.approx(1 / cell.ratio("1"), rel=0.02)


def test_a_hiccup_does_not_count() -> None:
    """The machine may do what it likes in a quarter of the rounds."""
    assert 1.0 == middle([1.0, 30.0, 1.0, 0.9, 1.1, 1.0, 0.01, 1.0])
    assert 2.0 == middle([1.0, 3.0])


@pytest.mark.parametrize("null", [False, True])
def test_figures_are_written(tmp_path: Path, null: bool) -> None:
    """A cell for each pair and batch, with the tokens of every mode, and a picture."""
    assert 0 == main(["--quick", *(["--null"] if null else []), "--out", str(tmp_path)])
    cells = [json.loads(line) for line in (tmp_path / "speculation.jsonl").read_text().splitlines()]

    assert [("bundled", 1), ("bundled", 2), ("0.6", 1), ("0.6", 2)] == [(cell["pair"], cell["batch"]) for cell in cells]
    for cell in cells:
        more = ["lookup"] if cell["pair"] == "bundled" and not null else []
        assert ["off", "2", "auto", *more] == list(cell["turns"])
        assert {8 * cell["batch"]} == {turn["tokens"] for turns in cell["turns"].values() for turn in turns}
        assert len(cell["accepted"]["2"]) == 2
    assert (tmp_path / "speculation.png").read_bytes().startswith(b"\x89PNG")
