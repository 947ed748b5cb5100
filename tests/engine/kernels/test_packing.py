"""Quantised matrices: rounding error, storage and padding."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.packing import BLOCK, GROUP, Bits, PackedStorage, pack

SHAPES = ((16, 32), (1, 1), (5, 7), (17, 33), (48, 64), (100, 130), (1500, 200))


def weights(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random weights of different sizes by row."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-6, 3, (shape[0], 1), generator=generator)
    return torch.randn(*shape, generator=generator) * sizes


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_error_is_bounded_by_the_largest_of_a_group(bits: Bits, shape: tuple[int, int]) -> None:
    """Half a step of 127 with 8 bits, and the rounding of the scale; with 4 bits a step of 8."""
    weight = weights(*shape)
    unpacked = pack(weight, bits).unpack(torch.float32)

    groups = [slice(start, start + GROUP) for start in range(0, shape[1], GROUP)]
    greatest = torch.cat([weight[:, own].abs().amax(1, keepdim=True).expand_as(weight[:, own]) for own in groups], 1)
    assert shape == unpacked.shape
    assert bool(((unpacked - weight).abs() <= greatest * (1.01 / 254 if bits == 8 else 1.02 / 8)).all())


def test_four_bit_scales_reduce_the_squared_error() -> None:
    """Compared with the largest weight at code -8 or 7."""
    weight = weights(64, 512)
    error = (pack(weight, 4).unpack(torch.float32) - weight).square().sum()
    for code in (-8.0, 7.0):
        grouped = weight.view(64, -1, GROUP)
        scale = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True)) / code
        plain = ((grouped / scale).round().clamp(-8, 7) * scale - grouped).square().sum()

        assert error < 0.97 * plain


@pytest.mark.parametrize("bits", [8, 4])
def test_blocks_unpack_independently(bits: Bits) -> None:
    packed = pack(weights(70, 40), bits)
    whole = packed.unpack(torch.float64)

    assert torch.equal(whole[2 * BLOCK : 4 * BLOCK], packed.unpack(torch.float64, slice(2, 4)))
    assert torch.equal(whole[4 * BLOCK :], packed.unpack(torch.float64, slice(4, 9)))


def test_codes_have_the_layout_of_the_kernel() -> None:
    """As drawn in linear.h."""
    weight = torch.zeros(32, 96)
    weight[19, 32 + 13] = 127.0

    eight, four = pack(weight, 8), pack(weight / 127, 4)

    assert 255 == eight.codes[1, 1, 3, 3, 1]
    assert [[1, 1, 3, 3, 1]] == (eight.codes != 128).nonzero().tolist()
    # Column 13 is byte 1 of the upper half of word 1; the code is -8 + 8, with a scale of -1/8.
    assert [[1, 1, 1, 3, 1]] == (four.codes != 0x88).nonzero().tolist()
    assert 0x08 == four.codes[1, 1, 1, 3, 1]
    assert -0.125 == float(four.scales[1, 1, 3])


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_and_denormals_are_zero(bits: Bits) -> None:
    weight = torch.full((3, 64), 1e-42)
    weight[1] = 0

    assert torch.equal(torch.zeros(3, 64), pack(weight, bits).unpack(torch.float32).round(decimals=30))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_nan_and_infinity_are_refused(bits: Bits, wrong: float) -> None:
    weight = weights(20, 40)
    weight[17, 3] = wrong

    with pytest.raises(ValueError, match="no number"):
        pack(weight, bits)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_and_layouts(bits: Bits, dtype: torch.dtype) -> None:
    weight = (torch.randn(40, 24, generator=torch.Generator().manual_seed(1)) / 8).to(dtype)
    expected = pack(weight.T.float().contiguous(), bits)

    assert torch.equal(expected.codes, pack(weight.T, bits).codes)
    assert torch.equal(expected.scales, pack(weight.T, bits).scales)


@pytest.mark.parametrize("bits", [8, 4])
def test_size_in_bytes(bits: Bits) -> None:
    """Half a bit more than its code, without padding."""
    assert (bits + 0.5) / 8 * 256 * 512 == pack(torch.zeros(256, 512), bits).size_bytes


@pytest.mark.parametrize("bits", [8, 4])
def test_matrices_share_a_storage(bits: Bits) -> None:
    """Aligned to 64 bytes, each with its own content."""
    some = [weights(*shape) for shape in SHAPES]
    room = PackedStorage([(one.shape[0], one.shape[1]) for one in some], bits)

    packed = [pack(one, bits, room) for one in some]

    assert {0} == {tensor.data_ptr() % 64 for one in packed for tensor in (one.codes, one.scales)}
    for own, weight in zip(packed, some, strict=True):
        assert torch.equal(pack(weight, bits).unpack(torch.float32), own.unpack(torch.float32))
