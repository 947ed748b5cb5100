"""The activation of an MLP is found beside outliers, for which several are within tolerance."""

from __future__ import annotations

import pytest
import torch

from engine.native.decoder import Linear
from engine.native.gated_mlp import ACTIVATIONS, _find_activation
from engine.native.trace import TracedLinear


@pytest.mark.parametrize("outlier", [1.0, 1e3, 1e5])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_has_the_smallest_error(name: str, outlier: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, gates, ups = (torch.randn(6, 64, generator=generator) for _ in range(3))
    # Both kinds of gelu are equal here.
    gates[:, 3] = 6.0
    ups[:, 3] *= outlier
    inner = [TracedLinear(Linear(torch.empty(0), None), rows, output) for output in (gates, ups)]
    activated = ACTIVATIONS[name](gates) * ups  # type: ignore[index]

    assert (name, 0, 1) == (lambda gate, up, found: (found, gate.matrix, up.matrix))(
        *_find_activation(inner, activated)
    )
