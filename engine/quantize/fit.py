"""Quantisation of floating-point weights to K formats by least squares, weighted by the importance of each column.

Scales and minimums: alternately the nearest codes for the scales, and the scales with the smallest squared error for
the codes. Codes: column by column, the rounding error is compensated by the next columns (Frantar et al. 2022, GPTQ,
arXiv 2210.17323), as far as the inputs of the calibration text are correlated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.formats import GROUP, LAYOUTS, SUPERBLOCK, WeightFormat
from engine.kernels.packing import BLOCK, PackedMatrix, PackedStorage
from engine.kernels.row_major import RowMajorWeights

# Rounds of codes and scales; the error falls by less than 1 % after them.
_ROUNDS = 3
# Columns within which errors are compensated, and the added share of a column's own second moment: few inputs give a
# noisy estimate of correlations.
_FEEDBACK_COLUMNS, _DAMPING = 1024, 0.5
# Weights quantised at once: long vectors, little memory. Weights of which scales are fitted at once, in a cache.
_WEIGHTS_AT_ONCE, _CACHED_WEIGHTS = 2**21, 2**17
# The smallest importance of a column, relative to the mean.
_LEAST_IMPORTANCE = 1e-4
# The largest scale and minimum of a group; signed ones of a half group.
SCALE_LEVELS, _SIGNED_LEVELS = 255, 127
_TINY = torch.finfo(torch.float32).tiny
_LARGEST_FLOAT16 = torch.finfo(torch.float16).max


@dataclass(frozen=True, slots=True)
class ColumnStatistics:
    """Statistics of the inputs of a matrix.

    importance  relative mean square of each column, float32 [columns], positive
    feedback    for each run of _FEEDBACK_COLUMNS columns the upper Cholesky factor of the inverse of their damped
                second moments; empty: errors are not compensated
    """

    importance: Tensor
    feedback: tuple[Tensor, ...] = ()


def without_feedback(importance: Tensor) -> ColumnStatistics:
    """Statistics with an importance [columns] only."""
    return ColumnStatistics(importance)


def column_importance(inputs: Tensor) -> Tensor:
    """The mean square of each column of inputs [rows, columns], relative to the mean of all."""
    moments = inputs.float().square().mean(0)
    return (moments / moments.mean().clamp_min(_TINY)).clamp_min(_LEAST_IMPORTANCE)


def column_statistics(inputs: Tensor) -> ColumnStatistics:
    """The statistics of inputs [rows, columns]."""
    importance = column_importance(inputs)
    # Columns of unit variance have a well conditioned matrix of second moments.
    deviations = importance.sqrt()
    rows = inputs.float() / deviations
    parts = zip(torch.split(rows, _FEEDBACK_COLUMNS, 1), torch.split(deviations, _FEEDBACK_COLUMNS), strict=True)
    return ColumnStatistics(importance, tuple(_feedback(*part) for part in parts))


def _feedback(rows: Tensor, deviations: Tensor) -> Tensor:
    """The Cholesky factor of the inverse second moments of columns that were divided by their deviations."""
    moments = rows.T @ rows / len(rows)
    moments.diagonal().mul_(1 + _DAMPING).clamp_min_(_DAMPING)
    factor: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(moments)), upper=True)
    return factor / deviations


def pack_fitted(
    weight: Tensor, format: WeightFormat, statistics: ColumnStatistics, storage: PackedStorage | None = None
) -> PackedMatrix:
    """Quantise a matrix [outputs, columns]; see `fit`.

    storage  memory for the result; None: its own
    """
    shape = (*weight.shape, format)
    packed = (storage or PackedStorage([shape])).allocate(*shape)
    outputs_at_once = BLOCK * max(_WEIGHTS_AT_ONCE // (BLOCK * weight.shape[1]), 1)
    for first in range(0, packed.outputs, outputs_at_once):
        packed.write(first, fit(weight[first : first + outputs_at_once], format, statistics))
    return packed


def fit(
    weight: Tensor, format: WeightFormat, statistics: ColumnStatistics, *, scale_levels: int = SCALE_LEVELS
) -> RowMajorWeights:
    """Quantise rows [outputs, columns] of any floating dtype to `q4_k`, `q5_k` or `q6_k`.

    scale_levels  the largest scale and minimum of a group with a minimum; 63 in GGUF files

    Raises ValueError for infinite weights and NaN.
    """
    columns, layout = weight.shape[1], LAYOUTS[format]
    padding = -columns % layout.scale_columns
    # Columns by rows: sums over a group, and updates of columns, are then sums and updates of whole vectors.
    padded = functional.pad(weight.detach().float(), (0, padding)).T.contiguous()
    if not torch.stack(padded.aminmax()).isfinite().all():
        raise ValueError("a weight is infinite or no number")
    importance = functional.pad(statistics.importance, (0, padding), value=_LEAST_IMPORTANCE)
    if layout.has_minimums:
        return _fit_with_minimums(padded, format, importance, statistics.feedback, (columns, scale_levels))
    return _fit_half_groups(padded, format, importance, columns)


def _fit_with_minimums(
    weights: Tensor,
    format: WeightFormat,
    importance: Tensor,
    feedback: tuple[Tensor, ...],
    limits: tuple[int, int],
) -> RowMajorWeights:
    """Weights [columns, outputs] as code * scale + minimum, with a minimum of at most 0.

    limits  the columns without padding, and the largest scale and minimum
    """
    columns, scale_levels = limits
    largest = 2 ** LAYOUTS[format].bits - 1
    grouped = weights.view(-1, GROUP, weights.shape[1])
    at_once = max(_CACHED_WEIGHTS // grouped[0].numel(), 1)
    parts = zip(torch.split(grouped, at_once), torch.split(importance.view(-1, 1, GROUP), at_once), strict=True)
    fitted = zip(*(_affine_scales(*part, largest) for part in parts), strict=True)
    scales, minimums = (_super_scaled(torch.cat(candidates), SUPERBLOCK, scale_levels) for candidates in fitted)
    if feedback:
        codes = _compensated_codes(weights, scales.values, minimums.values, largest, feedback)
    else:
        codes = _codes(grouped, scales.values, minimums.values, largest).flatten(0, 1)
    return RowMajorWeights(
        format,
        _rows(codes[:columns], torch.uint8),
        _rows(scales.integers, torch.uint8),
        _rows(minimums.integers, torch.uint8),
        _rows(scales.super_scales, torch.float16),
        _rows(minimums.super_scales, torch.float16),
    )


def _affine_scales(grouped: Tensor, importance: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Scales and minimums [groups, outputs] of weights [groups, GROUP, outputs].

    importance  [groups, 1, GROUP]
    """
    minimums = grouped.amin(1).clamp_max_(0)
    scales = (grouped.amax(1) - minimums).div_(largest)
    total = importance.sum(2)
    weighted_sum = (importance @ grouped)[:, 0]
    for _ in range(_ROUNDS):
        codes = _codes(grouped, scales, minimums, largest)
        product = (importance @ (codes * grouped))[:, 0]
        first = (importance @ codes)[:, 0]
        second = (importance @ codes.square_())[:, 0]
        # Normal equations of weights = scale * codes + minimum; without a minimum if it would be positive.
        determinant = total * second - first.square()
        minimums = ((second * weighted_sum - first * product) / determinant).clamp_max_(0)
        scales = torch.where(minimums < 0, (product - minimums * first) / second, product / second)
        # With equal codes the equations are singular: the minimum alone, or without one if it would be positive.
        singular = determinant <= 1e-6 * total * second
        minimums = torch.where(singular, (weighted_sum / total).clamp_max_(0), minimums)
        single = torch.where(minimums < 0, 0, product / second.clamp_min_(_TINY))
        scales = torch.where(singular, single, scales).clamp_min_(0)
    return scales, minimums


def _codes(grouped: Tensor, scales: Tensor, minimums: Tensor, largest: int) -> Tensor:
    """The nearest codes of weights [groups, columns, outputs]."""
    inverse = _inverse(scales)
    return (grouped * inverse[:, None]).sub_((minimums * inverse)[:, None]).round_().clamp_(0, largest)


def _inverse(scales: Tensor) -> Tensor:
    """1 / scale; 0 for zero and denormal scales, with inverses that could be infinite."""
    return torch.where(scales.abs() >= _TINY, 1 / scales, 0)


@dataclass(frozen=True, slots=True)
class _SuperScaled:
    """Scales or minimums [scales, outputs] as integers times float16 super-scales [superblocks, outputs]."""

    integers: Tensor
    super_scales: Tensor
    values: Tensor


def _super_scaled(scales: Tensor, count: int, levels: int) -> _SuperScaled:
    """Scales rounded to integers of at most `levels`, times a super-scale for each `count` of them.

    The first of the largest scales of a superblock has a positive integer.
    """
    padded = functional.pad(scales, (0, 0, 0, -len(scales) % count)).view(-1, count, scales.shape[1])
    largest = padded.gather(1, padded.abs().argmax(1, keepdim=True))[:, 0]
    super_scales = (largest / levels).clamp_(-_LARGEST_FLOAT16, _LARGEST_FLOAT16).half()
    factors = super_scales.float()[:, None]
    integers = (padded * _inverse(factors)).round_().clamp_(-levels, levels)
    values = (integers * factors).flatten(0, 1)[: len(scales)]
    return _SuperScaled(integers.flatten(0, 1)[: len(scales)], super_scales, values)


def _compensated_codes(
    weights: Tensor, scales: Tensor, minimums: Tensor, largest: int, feedback: tuple[Tensor, ...]
) -> Tensor:
    """The codes [columns, outputs] with each column's error compensated by the columns after it.

    weights  [columns, outputs], overwritten
    """
    codes = torch.empty_like(weights)
    for number, factor in enumerate(feedback):
        first = number * _FEEDBACK_COLUMNS
        columns = weights[first : first + len(factor)]
        for start in range(0, len(factor), GROUP):
            stop = min(start + GROUP, len(factor))
            group = (first + start) // GROUP
            part = slice(first + start, first + stop)
            errors = _compensate_group(
                columns[start:stop],
                codes[part],
                (scales[group], minimums[group]),
                largest,
                factor[start:stop, start:stop],
            )
            columns[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    # Columns of padding have no factor.
    covered = sum(map(len, feedback))
    codes[covered:] = 0
    return codes


def _compensate_group(
    weights: Tensor, codes: Tensor, scale: tuple[Tensor, Tensor], largest: int, factor: Tensor
) -> Tensor:
    """Write the codes of one group's columns; their errors, relative to the diagonal of the factor."""
    scales, minimums = scale
    inverse, diagonal = _inverse(scales), factor.diagonal()[:, None]
    # In units of the scale, which all columns of the group share, an error is what rounding changes.
    scaled = (weights * inverse).sub_(minimums * inverse)
    errors = torch.empty_like(weights)
    for column, (values, code, error, feedback) in enumerate(
        zip(scaled, codes, errors, factor / diagonal, strict=True)
    ):
        torch.round(values, out=code).clamp_(0, largest)
        torch.sub(values, code, out=error)
        scaled[column + 1 :].addr_(feedback[column + 1 :], error, alpha=-1)
    # All weights with a scale of 0 are the minimum.
    return torch.where(inverse == 0, weights - minimums, errors.mul_(scales)).div_(diagonal)


def _fit_half_groups(weights: Tensor, format: WeightFormat, importance: Tensor, columns: int) -> RowMajorWeights:
    """Weights [columns, outputs] as code * scale with signed codes; scales of 16 columns."""
    layout = LAYOUTS[format]
    grouped, weighting = (
        numbers.view(-1, layout.scale_columns, numbers.shape[-1]) for numbers in (weights, importance[:, None])
    )
    # The largest weight gets the code with the largest magnitude, which is negative.
    scales = grouped.gather(1, grouped.abs().argmax(1, keepdim=True))[:, 0] / -layout.zero
    for _ in range(_ROUNDS - 1):
        codes = _signed_codes(grouped, scales, layout.zero)
        weighted = codes * weighting
        squares = (weighted * codes).sum(1)
        scales = torch.where(squares > 0, (weighted * grouped).sum(1) / squares, 0)
    rounded = _super_scaled(scales, GROUP * SUPERBLOCK // layout.scale_columns, _SIGNED_LEVELS)
    codes = _signed_codes(grouped, rounded.values, layout.zero).add_(layout.zero).flatten(0, 1)
    return RowMajorWeights(
        format,
        _rows(codes[:columns], torch.uint8),
        _rows(rounded.integers, torch.int8),
        super_scales=_rows(rounded.super_scales, torch.float16),
    )


def _signed_codes(grouped: Tensor, scales: Tensor, zero: int) -> Tensor:
    return (grouped * _inverse(scales)[:, None]).round_().clamp_(-zero, zero - 1)


def _rows(columns: Tensor, dtype: torch.dtype) -> Tensor:
    """[columns, outputs] as contiguous [outputs, columns]."""
    return columns.to(dtype).T.contiguous()
