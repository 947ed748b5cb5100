"""A few seeds of the simulation, and planted defects that it has to find."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import first_seed, simulate
from tests.simulation.planted import DEFECTS


@pytest.mark.parametrize("seed", range(4))
def test_no_violation(seed: int) -> None:
    outcome = simulate(seed, 150)

    assert outcome.failure == "", f"python -m tests.simulation --seed {seed} --steps 150"
    assert outcome.counts["tokens compared"] > 0


def test_a_seed_is_one_history() -> None:
    """Run twice, everything but its duration is equal."""
    first, second = (simulate(5, 100) for _ in range(2))

    assert (first.failure, first.counts) == ("", second.counts)


@pytest.mark.parametrize("name", ["salt ignored", "rejected draft token stays", "preempted output sent again"])
def test_planted_defects_are_found(name: str) -> None:
    assert first_seed(name, range(3), 150) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFECTS)
def test_every_planted_defect_is_found(name: str) -> None:
    assert first_seed(name, range(40), 500) is not None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_no_violation_in_long_runs(seed: int) -> None:
    outcome = simulate(seed, 500)

    assert outcome.failure == "", f"python -m tests.simulation --seed {seed} --steps 500"
