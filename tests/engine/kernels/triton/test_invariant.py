"""Row-invariant products and sums in Triton: the bits of a row alone are those among others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from engine.model.invariant import RowInvariant
from tests.engine.kernels.triton.interpreter import DEVICE, HALF

invariant = pytest.importorskip("engine.kernels.triton.invariant")

PRODUCT = invariant.TritonProduct()
# Rounding of a product in the dtype, relative to the largest.
TOLERANCES = {torch.float32: 3e-6, HALF: 1e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers, seeded by the shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def check(found: Tensor, expected: Tensor) -> None:
    """Within rounding."""
    limit = TOLERANCES[found.dtype] * float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=limit)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_linear(dtype: torch.dtype) -> None:
    """Also with columns in splits, and with a transposed weight."""
    rows, weight = random(70, 1100, dtype=dtype), random(1100, 16, dtype=dtype).T

    together = PRODUCT.linear(rows, weight)

    check(together, rows.double() @ weight.double().T)
    assert torch.equal(together[[69]], PRODUCT.linear(rows[69:], weight))
    assert torch.equal(together[3:20], PRODUCT.linear(rows[3:20], weight))


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_batches(dtype: torch.dtype) -> None:
    """Zeros behind the positions of a sequence change no bit."""
    left, right = random(2, 18, 40, dtype=dtype), random(2, 40, 24, dtype=dtype)

    together = PRODUCT.batch(left, right)

    check(together, left.double() @ right.double())
    assert torch.equal(together[1:, 17:], PRODUCT.batch(left[1:, 17:], right[1:]))
    padded = PRODUCT.batch(nn.functional.pad(left, (0, 100)), nn.functional.pad(right, (0, 0, 0, 100)))
    assert torch.equal(together, padded)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_groups_of_experts(dtype: torch.dtype) -> None:
    """A group without rows, and rows behind the last group."""
    rows, weights = random(22, 40, dtype=dtype), random(3, 40, 24, dtype=dtype)
    ends = torch.tensor([19, 19, 21], dtype=torch.int32, device=DEVICE)

    together = PRODUCT.grouped(rows, weights, ends)

    check(together[:19], rows[:19].double() @ weights[0].double())
    check(together[19:21], rows[19:21].double() @ weights[2].double())
    assert not together[21].any()
    alone = PRODUCT.grouped(rows[18:19], weights, torch.ones_like(ends))
    assert torch.equal(together[18:19], alone)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_norms_and_sums(dtype: torch.dtype) -> None:
    """Of rows of a view, along any dimension."""
    rows = random(5, 1300, dtype=dtype)[:, :1200]
    norm = LlamaRMSNorm(1200).to(DEVICE, dtype)
    functions = {
        "norm": norm,
        "sum": lambda own: own.sum(-1, keepdim=True),
        "middle": lambda own: own.view(len(own), 3, 400).sum(dim=1),
        "normalize": lambda own: nn.functional.normalize(own, dim=-1),
    }
    for name, function in functions.items():
        expected = function(rows.contiguous())
        with torch.no_grad(), RowInvariant(PRODUCT):
            together, alone = function(rows), function(rows[4:])

        assert torch.equal(together[4:], alone), name
        torch.testing.assert_close(together, expected, rtol=TOLERANCES[dtype], atol=10 * TOLERANCES[dtype])
