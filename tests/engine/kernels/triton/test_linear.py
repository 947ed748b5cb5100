"""The Triton products with quantised matrices equal products with the unpacked matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.device_products import upload
from engine.kernels.formats import GROUP, LAYOUTS, WeightFormat
from engine.kernels.packing import PackedMatrix
from tests import gpu_products
from tests.engine.kernels.triton.interpreter import DEVICE, HALF, linear
from tests.engine.kernels.weights import random_matrix
from tests.selection import quick

# One format of each number of bits, kind of scales and kind of values.
QUICK: tuple[WeightFormat, ...] = ("int8", "int4", "q5_1", "q4_k", "q6_k", "iq4_xs")


def multiply(rows: Tensor, *matrices: PackedMatrix, one_tile: bool = False) -> list[Tensor]:
    """The products on the CPU."""
    products = linear.TritonProducts(DEVICE, rows.dtype, one_tile=one_tile)
    return [product.cpu() for product in products(upload(matrices, DEVICE))(rows.to(DEVICE))]


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


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_bits_of_a_row_do_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    """With one tile in every dtype, also with columns in splits."""
    matrix, rows = random_matrix("int4", 16, 1100, seed=1), torch.randn(18, 1100).to(dtype)

    (together,), (alone,) = multiply(rows, matrix, one_tile=True), multiply(rows[17:], matrix, one_tile=True)

    assert torch.equal(together[17:], alone)
    assert 1 < 1100 / (GROUP * linear.split_groups(linear.packed_weights(matrix), linear.one_tile(dtype)))


@pytest.mark.parametrize("format", quick(["int8"], ["int8", "q6_k", "mxfp4"]))
def test_rows_of_experts_are_multiplied_by_theirs(format: WeightFormat) -> None:
    """Experts without rows, with more than a tile of rows, and an index beyond all experts, whose product is zero."""
    matrices = upload([random_matrix(format, 40, 100, seed=at) for at in range(4)], DEVICE)
    experts = torch.tensor([0, *[2] * 18, 3, 4], device=DEVICE)
    rows = torch.randn(len(experts), 100, device=DEVICE)
    multiply_by_expert = linear.TritonProducts(DEVICE, torch.float32).experts(matrices)

    assert multiply_by_expert is not None
    product = multiply_by_expert(rows, experts).double()
    weights = [*(one.unpack(torch.float64) for one in matrices), torch.zeros(40, 100, device=DEVICE).double()]
    expected = torch.stack([row @ weights[expert].T for row, expert in zip(rows.double(), experts, strict=True)])
    torch.testing.assert_close(product, expected, rtol=0, atol=3e-6 * float(expected.abs().max()))
    assert not product[-1].any()


@pytest.mark.parametrize("format", quick(["q4_k"], LAYOUTS))
def test_outputs_are_dequantised(format: WeightFormat) -> None:
    matrix = random_matrix(format, 40, 300, seed=1)
    tokens = torch.tensor([39, 0, 39, 7, 20])

    read = linear.TritonProducts(DEVICE, torch.float32).outputs(*upload([matrix], DEVICE))

    torch.testing.assert_close(read(tokens.to(DEVICE)).cpu(), matrix.rows(tokens).unpack(torch.float32))


def test_torch_multiplies_where_a_kernel_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By format, with one log line for each."""
    matrices, rows = [random_matrix("int8", 40, 64, seed=at) for at in range(2)], torch.randn(3, 64)
    right = linear.multiply
    monkeypatch.setattr(linear, "multiply", lambda *given, **more: right(*given, **more) * 1.1)

    products = multiply(rows, *matrices)

    for product, matrix in zip(products, matrices, strict=True):
        torch.testing.assert_close(product, rows @ matrix.unpack(torch.float32).T, rtol=1e-4, atol=1e-5)
    assert ["int8 weights are multiplied by torch, which is slow: its output differs by" in caplog.text] == [True]
    assert 1 == len(caplog.messages)


def test_no_rows_have_no_products() -> None:
    assert (0, 40) == multiply(torch.zeros(0, 64), random_matrix("int8", 40, 64, seed=1))[0].shape


def test_speed_and_error_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage of `make test-gpu`, with a small matrix; wrong products end it."""
    monkeypatch.setattr(gpu_products, "ROWS", (1, 17))
    monkeypatch.setattr(gpu_products, "copy_bandwidth", lambda device: 1e9)
    products, shape = linear.TritonProducts(DEVICE, torch.float32), (32, 64)

    found = gpu_products.measured(products, "q4_k", torch.float32, shape)

    assert [("q4_k", 1), ("q4_k", 17)] == [(one.format, one.rows) for one in found]
    assert all(one.share > 0 and one.error < 1e-6 for one in found)
    monkeypatch.setattr(gpu_products, "multiply_unrounded", lambda rows, matrices: [rows.new_ones(len(rows), 32)])
    with pytest.raises(AssertionError, match="q4_k, 1 rows: an error of"):
        gpu_products.measured(products, "q4_k", torch.float32, shape)
