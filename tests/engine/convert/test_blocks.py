"""Blocks of K-quants decode to the weights that were encoded."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType, dequantize

from engine.convert.blocks import encode_blocks
from engine.kernels.blocks import unpack_blocks
from engine.kernels.formats import WeightFormat
from engine.kernels.row_major import RowMajorWeights


def any_weights(format: WeightFormat, *, columns: int = 768, levels: int = 63) -> RowMajorWeights:
    """Random codes, scales and super-scales."""
    generator = torch.Generator().manual_seed(0)

    def integers(low: int, high: int, count: int) -> torch.Tensor:
        return torch.randint(low, high + 1, (5, count), generator=generator)

    def halves() -> torch.Tensor:
        return torch.randn((5, columns // 256), generator=generator).half()

    if format == "q6_k":
        scales = integers(-128, 127, columns // 16).to(torch.int8)
        return RowMajorWeights(format, integers(0, 63, columns).to(torch.uint8), scales, super_scales=halves())
    scales, minimums = (integers(0, levels, columns // 32).to(torch.uint8) for _ in range(2))
    return RowMajorWeights(format, integers(0, 15, columns).to(torch.uint8), scales, minimums, halves(), halves())


@pytest.mark.parametrize("format", ["q4_k", "q6_k"])
def test_blocks_decode_to_the_same_weights(format: WeightFormat) -> None:
    """By the gguf package in float32, and by the kernels to the same codes and scales."""
    weights = any_weights(format)
    blocks, kind = encode_blocks(weights), GGMLQuantizationType[format.upper()]

    torch.testing.assert_close(torch.tensor(dequantize(blocks, kind)), weights.unpack(torch.float32), rtol=0, atol=0)
    again = unpack_blocks(torch.from_numpy(blocks), kind)
    assert again is not None
    assert again.codes.equal(weights.codes)
    assert again.scales.equal(weights.scales)


def test_unsuitable_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="6 bits"):
        encode_blocks(any_weights("q4_k", levels=64))
    with pytest.raises(ValueError, match="no whole blocks"):
        encode_blocks(
            RowMajorWeights(
                "q6_k",
                torch.zeros(1, 32, dtype=torch.uint8),
                torch.zeros(1, 2, dtype=torch.int8),
                super_scales=torch.zeros(1, 1, dtype=torch.float16),
            )
        )
