"""Chooses the weight format of each matrix for int4: `q4_k`, and more bits where errors change the predictions most.

The effect of a format is measured on some outputs of a matrix, with the statistics of the calibration text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.formats import LAYOUTS, WeightFormat
from engine.kernels.rounding import pack_floats
from engine.quantize.calibration import LayerStatistics
from engine.quantize.fit import column_importance, fit, without_feedback

# Formats by rising bits.
LADDER: tuple[WeightFormat, ...] = ("q4_k", "q5_k", "q6_k", "int8")
BASE = LADDER[0]
# The format of matrices without statistics, such as down projections of experts.
UNMEASURED: WeightFormat = "q5_k"
# The most bits of a weight on average.
MAX_AVERAGE_BITS = 5.2
# The expected divergence in nats below which no more bits are spent: int8 has about as much by rounding activations.
_SUFFICIENT_DIVERGENCE = 0.002
# The smallest useful gain of more bits for one matrix, in nats.
_LEAST_GAIN = 1e-6
# Outputs of a matrix on which formats are compared.
_SAMPLED_OUTPUTS = 256


@dataclass(frozen=True, slots=True)
class MatrixEffect:
    """The expected divergence in nats of the predictions by format, and the number of weights."""

    divergence: Mapping[WeightFormat, float]
    weights: int


def measure(weight: Tensor, statistics: LayerStatistics) -> MatrixEffect | None:
    """The effect of each format on a matrix [outputs, columns]; None without a measured sensitivity."""
    if statistics.sensitivity is None:
        return None
    importance = column_importance(statistics.inputs)
    sensitivity = statistics.sensitivity.clamp_min(torch.finfo(torch.float32).tiny)
    # Outputs are sampled by sensitivity: few tokens have most of the probability.
    count, generator = min(_SAMPLED_OUTPUTS, len(weight)), torch.Generator().manual_seed(0)
    sample = torch.multinomial(sensitivity.double(), count, replacement=True, generator=generator)
    rows, total = weight[sample].detach().float(), float(sensitivity.sum())
    effects = {}
    for format in LADDER:
        error = _quantised(rows, format, importance).sub_(rows).square_() @ importance
        effects[format] = total * float(error.mean())
    return MatrixEffect(effects, weight.numel())


def _quantised(rows: Tensor, format: WeightFormat, importance: Tensor) -> Tensor:
    if format == "int8":
        return pack_floats(rows, 8).unpack(torch.float32)
    return fit(rows, format, without_feedback(importance)).unpack(torch.float32)


def choose(
    effects: Mapping[str, MatrixEffect], others: Mapping[str, tuple[int, WeightFormat]]
) -> dict[str, WeightFormat]:
    """The format of each matrix by name: the smallest expected divergence with MAX_AVERAGE_BITS.

    others  number of weights and format of matrices that are not measured
    """
    chosen = dict.fromkeys(effects, BASE) | {name: format for name, (_, format) in others.items()}
    sizes = {name: effect.weights for name, effect in effects.items()} | {
        name: size for name, (size, _) in others.items()
    }
    free = sum(size * (MAX_AVERAGE_BITS - LAYOUTS[chosen[name]].weight_bits) for name, size in sizes.items())
    divergence = sum(effect.divergence[BASE] for effect in effects.values())
    while divergence > _SUFFICIENT_DIVERGENCE:
        raises = [
            candidate
            for name, effect in effects.items()
            for candidate in _raises(name, effect, chosen[name])
            if candidate.cost <= free
        ]
        best = max(raises, key=lambda candidate: candidate.gain / candidate.cost, default=None)
        if best is None:
            break
        chosen[best.name], free, divergence = best.format, free - best.cost, divergence - best.gain
    return chosen


@dataclass(frozen=True, slots=True)
class _Raise:
    """A format with more bits for a matrix: its cost in bits and its gain in nats."""

    name: str
    format: WeightFormat
    cost: float
    gain: float


def _raises(name: str, effect: MatrixEffect, current: WeightFormat) -> list[_Raise]:
    """The useful formats with more bits than the current one."""
    raises = []
    for format in LADDER[LADDER.index(current) + 1 :]:
        cost = effect.weights * (LAYOUTS[format].weight_bits - LAYOUTS[current].weight_bits)
        gain = effect.divergence[current] - effect.divergence[format]
        if gain > _LEAST_GAIN:
            raises.append(_Raise(name, format, cost, gain))
    return raises
