"""The choice of weight formats by their effect on the predictions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.formats import LAYOUTS, WeightFormat
from engine.quantize.calibration import LayerStatistics
from engine.quantize.formats import BASE, LADDER, MAX_AVERAGE_BITS, UNMEASURED, MatrixEffect, choose, measure


def effect(divergence: float, weights: int = 1000) -> MatrixEffect:
    """The effect of a matrix: a quarter with each further bit."""
    bits = {format: LAYOUTS[format].bits for format in LADDER}
    return MatrixEffect({format: divergence / 4 ** (bits[format] - 4) for format in LADDER}, weights)


def average_bits(chosen: dict[str, WeightFormat], weights: dict[str, int]) -> float:
    """Of a weight."""
    return sum(LAYOUTS[chosen[name]].weight_bits * count for name, count in weights.items()) / sum(weights.values())


def test_sensitive_matrices_get_more_bits() -> None:
    """Within the average, and small matrices first if the effect is the same."""
    effects = {"big": effect(0.02, 10_000), "small": effect(0.02, 100), "harmless": effect(1e-7)}
    chosen = choose(effects, {})

    assert {"big": "q4_k", "small": "int8", "harmless": "q4_k"} == chosen
    assert average_bits(chosen, {name: one.weights for name, one in effects.items()}) <= MAX_AVERAGE_BITS


def test_no_bits_are_spent_without_need() -> None:
    chosen = choose({name: effect(1e-5) for name in "abcd"}, {})

    assert {BASE} == set(chosen.values())


@pytest.mark.parametrize("seed", range(5))
def test_average_is_kept(seed: int) -> None:
    """For matrices of any size and effect, and most of it is used if all effects are large."""
    generator = torch.Generator().manual_seed(seed)
    weights = {str(number): int(torch.randint(10, 10_000, (), generator=generator)) for number in range(40)}
    effects = {name: effect(float(torch.rand((), generator=generator).exp()), count) for name, count in weights.items()}
    average = average_bits(choose(effects, {}), weights)

    assert MAX_AVERAGE_BITS - 0.1 < average <= MAX_AVERAGE_BITS


def test_matrices_without_statistics_keep_their_format() -> None:
    """They count in the average."""
    chosen = choose({"a": effect(1.0)}, {"b": (100, UNMEASURED), "c": (1000, BASE)})

    assert {"a": "q5_k", "b": UNMEASURED, "c": BASE} == chosen


def statistics(outputs: int, columns: int, sensitivity: Tensor | None) -> LayerStatistics:
    """Random inputs of unit mean square."""
    inputs = torch.randn(64, columns, generator=torch.Generator().manual_seed(1))
    return LayerStatistics(inputs / inputs.square().mean(1, keepdim=True).sqrt(), sensitivity)


def test_measured_effect_is_proportional_to_the_sensitivity() -> None:
    """And falls with the bits of a format."""
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    once, twice = (measure(weight, statistics(40, 96, size * torch.ones(40))) for size in (1.0, 2.0))

    assert once is not None
    assert twice is not None
    assert {format: pytest.approx(2 * value) for format, value in once.divergence.items()} == dict(twice.divergence)
    assert sorted(once.divergence.values(), reverse=True) == list(once.divergence.values())
    assert 40 * 96 == once.weights


def test_effect_is_measured_on_sensitive_outputs() -> None:
    """One output of many thousands has all of the effect."""
    weight, sensitivity = torch.zeros(5000, 32), torch.full((5000,), 1e-9)
    weight[4321] = torch.randn(32, generator=torch.Generator().manual_seed(0))
    sensitivity[4321] = 1.0
    found = measure(weight, statistics(5000, 32, sensitivity))

    assert found is not None
    assert found.divergence[BASE] > 1e-4


def test_no_effect_is_measured_without_gradients() -> None:
    assert measure(torch.ones(4, 32), statistics(4, 32, None)) is None
