"""The Hadamard transform against its matrix."""

from __future__ import annotations

import pytest
import torch

from kvcache.kv_buffer import hadamard_transform

BLOCKS = {1: 1, 2: 2, 3: 1, 8: 8, 64: 64, 80: 16, 96: 32, 128: 128, 576: 64}


def matrix(width: int, block: int) -> torch.Tensor:
    """Sylvester's matrix, in blocks: an entry is -1 where row and column share an odd number of set bits."""
    signs = [[(-1.0) ** (row & column).bit_count() for column in range(block)] for row in range(block)]
    own = torch.tensor(signs, dtype=torch.float64) / block**0.5
    return torch.block_diag(*[own] * (width // block))


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random rows with a fixed seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


@pytest.mark.parametrize(("width", "block"), BLOCKS.items())
def test_transform_equals_the_matrix_product(width: int, block: int) -> None:
    some = rows(2, 5, width, dtype=torch.float64)

    torch.testing.assert_close(hadamard_transform(some), some @ matrix(width, block), rtol=0, atol=1e-13)


@pytest.mark.parametrize("width", BLOCKS)
def test_transform_is_its_own_inverse(width: int) -> None:
    some = rows(3, width, dtype=torch.float64)

    torch.testing.assert_close(hadamard_transform(hadamard_transform(some)), some, rtol=0, atol=1e-13)
    torch.testing.assert_close(hadamard_transform(some).norm(dim=-1), some.norm(dim=-1), rtol=1e-13, atol=0)


def test_transform_of_a_row_ignores_its_neighbours() -> None:
    some = rows(4, 37, 128)
    together = hadamard_transform(some)

    assert all(torch.equal(together[:, at], hadamard_transform(some[:, at])) for at in range(37))
    assert torch.equal(together, hadamard_transform(some.transpose(0, 1).contiguous()).transpose(0, 1))


def test_transform_spreads_outliers() -> None:
    some = torch.zeros(128)
    some[5] = 12.0

    torch.testing.assert_close(hadamard_transform(some).abs(), torch.full((128,), 12.0 / 128**0.5))


def test_transform_of_half_precision_is_in_float32() -> None:
    some = rows(2, 128).bfloat16()

    assert torch.equal(hadamard_transform(some.float()), hadamard_transform(some))


def test_transform_takes_no_rows_and_keeps_its_input() -> None:
    for some in (rows(2, 1, 8), rows(1, 1, 8)):
        before = some.clone()
        hadamard_transform(some)

        assert torch.equal(before, some)
    assert (2, 0, 8) == hadamard_transform(rows(2, 0, 8)).shape
