"""The products of quantised weights on a device: their error, and their speed as a share of the bandwidth of a copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.throughput import copy_bandwidth, seconds
from engine.kernels.device_products import DeviceProducts, upload
from engine.kernels.formats import LAYOUTS, WeightFormat
from engine.kernels.linear import multiply_unrounded
from tests.engine.kernels.weights import random_matrix

# Rows of a decoded token, of a batch, and of a prompt.
ROWS = (1, 16, 512)
# The first projection of an 8B model's MLP.
OUTPUTS, COLUMNS = 12288, 4096
# Errors relative to the largest product: weights and products are rounded to the dtype of the rows.
LIMITS = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}
# More matrices than the cache of a GPU has room for, so that each product reads its matrix from memory.
_READ_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class Product:
    """Products of some rows with a matrix of a format.

    error  relative to the largest product
    share  of the bandwidth of a copy: bytes of the matrix a second
    """

    format: WeightFormat
    rows: int
    error: float
    share: float


def measured(
    products: DeviceProducts, format: WeightFormat, dtype: torch.dtype, shape: tuple[int, int]
) -> list[Product]:
    """The products of each number of rows. Raises AssertionError for an error beyond the limit."""
    matrix = random_matrix(format, *shape, seed=1)
    copies = max(_READ_BYTES // matrix.size_bytes, 1) if products.device.type == "cuda" else 1
    matrices = [upload([matrix], products.device)[0] for _ in range(copies)]
    multiply = [products([each]) for each in matrices]
    bandwidth, found = copy_bandwidth(str(products.device)), []
    for count in ROWS:
        generator = torch.Generator().manual_seed(count)
        rows = torch.randn(count, matrix.columns, generator=generator).to(products.device, dtype)
        [expected] = multiply_unrounded(rows.float(), matrices[:1])
        error = float((multiply[0](rows)[0] - expected).abs().max() / expected.abs().max())
        assert error <= LIMITS[dtype], f"{format}, {count} rows: an error of {error:.2g}"
        seconds(lambda rows=rows: [each(rows) for each in multiply])
        taken = min(seconds(lambda rows=rows: [each(rows) for each in multiply]) for _ in range(5))
        found.append(Product(format, count, error, copies * matrix.size_bytes / taken / bandwidth))
    return found


def quantised_products(device: str, products: Callable[[torch.dtype], DeviceProducts]) -> dict[str, Any]:
    """By format and number of rows, the share of the bandwidth in bfloat16; all formats are exact in float32."""
    for format in LAYOUTS:
        measured(products(torch.float32), format, torch.float32, (256, 512))
    half, shape = torch.bfloat16, (OUTPUTS, COLUMNS)
    found = [each for format in LAYOUTS for each in measured(products(half), format, half, shape)]
    return {f"{each.format}, {each.rows} rows": round(each.share, 3) for each in found}
