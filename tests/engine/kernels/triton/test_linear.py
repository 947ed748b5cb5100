"""The Triton products with quantised matrices equal products with the unpacked matrices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.kernels.formats import LAYOUTS, WeightFormat
from engine.kernels.packing import PackedMatrix
from tests.engine.kernels.triton.interpreter import DEVICE, HALF, linear
from tests.engine.kernels.weights import random_matrix
from tests.selection import quick

# One format of each number of bits, kind of scales and kind of values.
QUICK: tuple[WeightFormat, ...] = ("int8", "int4", "q5_1", "q4_k", "q6_k", "iq4_xs")


def multiply(rows: Tensor, *matrices: PackedMatrix) -> list[Tensor]:
    """The products on the CPU."""
    moved = [replace(one, codes=one.codes.to(DEVICE), scales=one.scales.to(DEVICE)) for one in matrices]
    return [product.cpu() for product in linear.prepare(moved)(rows.to(DEVICE))]


@pytest.mark.parametrize("format", quick(QUICK, LAYOUTS))
def test_products_equal_those_of_unpacked_weights(format: WeightFormat) -> None:
    """Outputs, groups, superblocks and columns that are not whole tiles; rows of a view."""
    matrix = random_matrix(format, 40, 300, seed=1)
    rows = torch.randn(3, 400, generator=torch.Generator().manual_seed(2))[:, :300]

    (product,) = multiply(rows, matrix)

    expected = rows.double() @ matrix.unpack(torch.float64).T
    torch.testing.assert_close(product.double(), expected, rtol=0, atol=3e-6 * float(expected.abs().max()))


def test_matrices_of_several_formats_in_one_call() -> None:
    matrices = [random_matrix(format, 20, 64, seed=3) for format in ("int4", "mxfp4")]
    rows = torch.randn(20, 64, generator=torch.Generator().manual_seed(2)).to(HALF)

    products = multiply(rows, *matrices)

    for product, matrix in zip(products, matrices, strict=True):
        expected = rows.double() @ matrix.unpack(torch.float64).T
        assert HALF == product.dtype
        torch.testing.assert_close(product.double(), expected, rtol=0, atol=1e-2 * float(expected.abs().max()))


def test_bits_of_a_row_do_not_depend_on_other_rows() -> None:
    matrix, rows = random_matrix("int4", 40, 64, seed=1), torch.randn(18, 64)

    (together,), (alone,) = multiply(rows, matrix), multiply(rows[17:], matrix)

    assert torch.equal(together[17:], alone)


def test_no_rows_have_no_products() -> None:
    assert (0, 40) == multiply(torch.zeros(0, 64), random_matrix("int8", 40, 64, seed=1))[0].shape
