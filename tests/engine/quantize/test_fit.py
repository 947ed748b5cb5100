"""Least-squares quantisation to K formats."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine.kernels.formats import LAYOUTS, WeightFormat
from engine.quantize.fit import (
    ColumnStatistics,
    column_importance,
    column_statistics,
    fit,
    pack_fitted,
    without_feedback,
)

FORMATS: tuple[WeightFormat, ...] = ("q4_k", "q5_k", "q6_k")
# Of scales and of minimums.
SEARCH_STEPS = 40


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def gaussian(outputs: int = 48, columns: int = 320, seed: int = 0) -> Tensor:
    """Weights of the usual size."""
    return 0.02 * torch.randn(outputs, columns, generator=torch.Generator().manual_seed(seed))


def correlated(rows: int, columns: int, seed: int = 1) -> Tensor:
    """Inputs with unequal, correlated columns."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(rows, columns // 4, generator=generator) @ torch.randn(
        columns // 4, columns, generator=generator
    )
    own = torch.randn(rows, columns, generator=generator)
    return (mixed / math.sqrt(columns // 4) + own / 2) * torch.rand(columns, generator=generator).exp().square()


def error(weight: Tensor, format: WeightFormat, statistics: ColumnStatistics | None = None) -> float:
    """The relative weighted squared error."""
    statistics = statistics or without_feedback(torch.ones(weight.shape[1]))
    wrong = fit(weight, format, without_feedback(statistics.importance)).unpack(torch.float32) - weight
    weighted = ((each.square() @ statistics.importance).sum() for each in (wrong, weight))
    return float(torch.div(*weighted))


def searched_error(weight: Tensor, importance: Tensor) -> float:
    """The same for 4-bit codes with a float32 scale and minimum for each 32 columns, by brute force over both."""
    total = torch.zeros(())
    for group, weights in zip(weight.split(32, 1), importance.split(32), strict=True):
        low, high = group.amin(1).clamp_max(0), group.amax(1)
        best = torch.full((len(group),), math.inf)
        for bottom in torch.linspace(0.5, 1.1, SEARCH_STEPS):
            for top in torch.linspace(0.5, 1.1, SEARCH_STEPS):
                scale, minimum = ((top * high - bottom * low) / 15)[:, None], (bottom * low)[:, None]
                rounded = ((group - minimum) / scale).round().clamp(0, 15) * scale + minimum
                best = torch.minimum(best, (rounded - group).square() @ weights)
        total += best.sum()
    return float(total / (weight.square() @ importance).sum())


@pytest.mark.parametrize(("is_weighted", "above"), [(False, 1.15), (True, 1.25)])
def test_error_is_near_that_of_a_brute_force_search(is_weighted: bool, above: float) -> None:
    """With rounded scales, beside the best of all unrounded ones; rounding to the range of a group is far worse."""
    weight = gaussian(outputs=12, columns=64)
    generator = torch.Generator().manual_seed(3)
    importance = torch.rand(64, generator=generator).mul(4).exp() if is_weighted else torch.ones(64)
    found, searched = error(weight, "q4_k", without_feedback(importance)), searched_error(weight, importance)

    assert found <= above * searched
    assert found < 0.9 * range_error(weight, importance)


def range_error(weight: Tensor, importance: Tensor) -> float:
    """The relative weighted squared error of codes over the range of each 32 columns."""
    groups = weight.view(-1, 32)
    low = groups.amin(1, keepdim=True)
    scale = (groups.amax(1, keepdim=True) - low) / 15
    rounded = (((groups - low) / scale).round() * scale + low).view_as(weight)
    return float(((rounded - weight).square() @ importance).sum() / (weight.square() @ importance).sum())


@pytest.mark.parametrize("columns", [256, 640, 100, 32, 7])
def test_more_bits_have_less_error(columns: int) -> None:
    """About a quarter of it for each bit, in widths that are no multiple of a superblock or a group, too."""
    weight = gaussian(columns=columns)
    four, five, six = (error(weight, format) for format in FORMATS)

    assert 0.0 < six < 0.8 * five
    assert five < 0.4 * four < 0.4 * 0.01


@pytest.mark.parametrize("format", FORMATS)
def test_constant_and_zero_groups_are_kept(format: WeightFormat) -> None:
    """Positive and negative ones, beside groups with other weights."""
    weight = gaussian(outputs=4, columns=256)
    weight[0] = 0
    weight[1, 32:64], weight[2, 64:96], weight[3, :32] = 0.5, -0.5, 0
    found = fit(weight, format, without_feedback(torch.ones(256))).unpack(torch.float32)

    assert torch.equal(torch.zeros(256), found[0])
    assert torch.equal(torch.zeros(32), found[3, :32])
    torch.testing.assert_close(found[1:3, 32:96][0, :32], weight[1, 32:64], rtol=0.01, atol=0)
    torch.testing.assert_close(found[2, 64:96], weight[2, 64:96], rtol=0.01, atol=0)


@pytest.mark.parametrize("format", FORMATS)
def test_outlier_costs_its_own_group_only(format: WeightFormat) -> None:
    """The other groups of its superblock keep most of their precision: scales have 8 bits."""
    weight = gaussian(outputs=8, columns=256)
    spoilt = weight.clone()
    spoilt[:, 5] = 0.5
    exact, found = (
        fit(each, format, without_feedback(torch.ones(256))).unpack(torch.float32) for each in (weight, spoilt)
    )

    others = slice(32, None)
    wrong, usual = (float((each - weight)[:, others].square().mean()) for each in (found, exact))
    assert wrong < 2 * usual
    torch.testing.assert_close(found[:, 5], spoilt[:, 5], rtol=0.03, atol=0)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [1e-30, 1e-7, 1e6, 1e30])
def test_weights_beyond_float16_are_finite(format: WeightFormat, size: float) -> None:
    """Scales that float16 cannot represent lose precision, and the choice of formats measures it."""
    found = fit(size * gaussian(), format, without_feedback(torch.ones(320))).unpack(torch.float32)

    assert bool(found.isfinite().all())


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("format", FORMATS)
def test_weights_that_are_not_finite_are_refused(format: WeightFormat, wrong: float) -> None:
    weight = gaussian(outputs=3, columns=40)
    weight[1, 39] = wrong

    with pytest.raises(ValueError, match="a weight is infinite or no number"):
        fit(weight, format, without_feedback(torch.ones(40)))


@pytest.mark.parametrize("format", FORMATS)
def test_important_columns_have_less_error(format: WeightFormat) -> None:
    """At the expense of the others."""
    weight, importance = gaussian(), torch.ones(320)
    importance[::5] = 100
    plain, weighted = (
        (fit(weight, format, without_feedback(each)).unpack(torch.float32) - weight).square().mean(0)
        for each in (torch.ones(320), importance)
    )

    assert float(weighted[::5].mean()) < 0.8 * float(plain[::5].mean())
    assert error(weight, format, without_feedback(importance)) < float(
        (plain @ importance) / (weight.square().mean(0) @ importance)
    )


@pytest.mark.parametrize("columns", [320, 100, 1200])
def test_feedback_lowers_the_error_of_products(columns: int) -> None:
    """Also for inputs that were not used for it, and across runs of columns."""
    weight, inputs = gaussian(columns=columns), correlated(4096, columns)
    statistics = column_statistics(inputs[:2048])
    plain, fed = (
        fit(weight, "q4_k", each).unpack(torch.float32)
        for each in (without_feedback(statistics.importance), statistics)
    )

    lost = [float(((each - weight) @ inputs[2048:].T).square().mean()) for each in (plain, fed)]
    assert lost[1] < 0.8 * lost[0]


def test_feedback_of_dead_and_equal_columns_is_finite() -> None:
    """Columns without any input, and columns with equal ones, leave the second moments singular."""
    weight, inputs = gaussian(columns=64), torch.randn(16, 1).expand(16, 64).clone()
    inputs[:, 40:] = 0

    assert bool(fit(weight, "q4_k", column_statistics(inputs)).unpack(torch.float32).isfinite().all())


def test_importance_is_relative() -> None:
    """A mean square, with a lower limit for dead columns."""
    found = column_importance(torch.tensor([[2.0, 0.0, 0.0, 0.0], [2.0, 0.0, 2.0, 0.0]]))

    torch.testing.assert_close(torch.tensor([8 / 3, 1e-4, 4 / 3, 1e-4]), found)


@pytest.mark.parametrize("format", FORMATS)
def test_packed_matrix_equals_the_fit_of_each_part(format: WeightFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is independent of the number of weights at once, and the same every time."""
    weight, statistics = gaussian(outputs=70, columns=96), column_statistics(correlated(256, 96))
    whole = pack_fitted(weight, format, statistics)
    monkeypatch.setattr("engine.quantize.fit._WEIGHTS_AT_ONCE", 96 * 32)
    parts = pack_fitted(weight, format, statistics)

    assert torch.equal(fit(weight, format, statistics).unpack(torch.float32), whole.unpack(torch.float32))
    assert LAYOUTS[format].weight_bits <= 8 * whole.size_bytes / (80 * 96)
    torch.testing.assert_close(parts.unpack(torch.float32), whole.unpack(torch.float32), rtol=0, atol=0.01)
