"""Quantised matrices: rounding error, storage and padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.kernels.formats import GROUP, LAYOUTS, WeightFormat
from engine.kernels.packing import BLOCK, PackedStorage, pack
from engine.kernels.rounding import FORMATS, Bits, pack_floats
from tests.engine.kernels.weights import random_matrix, random_rows

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
    unpacked = pack_floats(weight, bits).unpack(torch.float32)

    groups = [slice(start, start + GROUP) for start in range(0, shape[1], GROUP)]
    greatest = torch.cat([weight[:, own].abs().amax(1, keepdim=True).expand_as(weight[:, own]) for own in groups], 1)
    assert shape == unpacked.shape
    assert bool(((unpacked - weight).abs() <= greatest * (1.01 / 254 if bits == 8 else 1.02 / 8)).all())


def test_four_bit_scales_reduce_the_squared_error() -> None:
    """Compared with the largest weight at code -8 or 7."""
    weight = weights(64, 512)
    error = (pack_floats(weight, 4).unpack(torch.float32) - weight).square().sum()
    for code in (-8.0, 7.0):
        grouped = weight.view(64, -1, GROUP)
        scale = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True)) / code
        plain = ((grouped / scale).round().clamp(-8, 7) * scale - grouped).square().sum()

        assert error < 0.97 * plain


@pytest.mark.parametrize("bits", [8, 4])
def test_blocks_unpack_independently(bits: Bits) -> None:
    packed = pack_floats(weights(70, 40), bits)
    whole = packed.unpack(torch.float64)

    assert torch.equal(whole[2 * BLOCK : 4 * BLOCK], packed.unpack(torch.float64, slice(2, 4)))
    assert torch.equal(whole[4 * BLOCK :], packed.unpack(torch.float64, slice(4, 9)))


def test_codes_have_the_layout_of_the_kernel() -> None:
    """As drawn in linear.h."""
    weight = torch.zeros(32, 96)
    weight[19, 32 + 13] = 127.0

    eight, four = pack_floats(weight, 8), pack_floats(weight / 127, 4)

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

    assert torch.equal(torch.zeros(3, 64), pack_floats(weight, bits).unpack(torch.float32).round(decimals=30))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_nan_and_infinity_are_refused(bits: Bits, wrong: float) -> None:
    weight = weights(20, 40)
    weight[17, 3] = wrong

    with pytest.raises(ValueError, match="no number"):
        pack_floats(weight, bits)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_and_layouts(bits: Bits, dtype: torch.dtype) -> None:
    weight = (torch.randn(40, 24, generator=torch.Generator().manual_seed(1)) / 8).to(dtype)
    expected = pack_floats(weight.T.float().contiguous(), bits)

    assert torch.equal(expected.codes, pack_floats(weight.T, bits).codes)
    assert torch.equal(expected.scales, pack_floats(weight.T, bits).scales)


@pytest.mark.parametrize("bits", [8, 4])
def test_size_in_bytes(bits: Bits) -> None:
    """Half a bit more than its code, without padding."""
    assert (bits + 0.5) / 8 * 256 * 512 == pack_floats(torch.zeros(256, 512), bits).size_bytes


@pytest.mark.parametrize("bits", [8, 4])
def test_matrices_share_a_storage(bits: Bits) -> None:
    """Aligned to 64 bytes, each with its own content."""
    some = [weights(*shape) for shape in SHAPES]
    room = PackedStorage([(one.shape[0], one.shape[1], FORMATS[bits]) for one in some])

    packed = [pack_floats(one, bits, room) for one in some]

    assert {0} == {tensor.data_ptr() % 64 for one in packed for tensor in (one.codes, one.scales)}
    for own, weight in zip(packed, some, strict=True):
        assert torch.equal(pack_floats(weight, bits).unpack(torch.float32), own.unpack(torch.float32))


@pytest.mark.parametrize("format", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packing_keeps_all_formats(format: WeightFormat, shape: tuple[int, int]) -> None:
    """Codes and scales by rows, for widths that are no multiples of groups and superblocks too."""
    rows = random_rows(format, *shape)
    packed = pack(rows)
    again = packed.row_major()

    assert torch.equal(rows.codes, again.codes)
    for name in ("scales", "minimums", "super_scales", "super_minimums"):
        own, kept = getattr(rows, name), getattr(again, name)
        assert own is kept is None or torch.equal(own, kept)
    assert torch.equal(rows.unpack(torch.float32), packed.unpack(torch.float32))


@pytest.mark.parametrize("format", LAYOUTS)
def test_weights_are_scaled_values(format: WeightFormat) -> None:
    """Recomputed for each weight; in float32 only adding a minimum rounds."""
    rows, layout = random_rows(format, 3, 300), LAYOUTS[format]
    weights, exact = rows.unpack(torch.float32), rows.unpack(torch.float64)
    for output in range(3):
        for column in range(300):
            code, group, superblock = int(rows.codes[output, column]), column // layout.scale_columns, column // 256
            scale = float(rows.scales[output, group])
            minimum = 0.0 if rows.minimums is None else float(rows.minimums[output, group])
            if rows.super_scales is not None:
                scale *= float(rows.super_scales[output, superblock])
            if rows.super_minimums is not None:
                minimum *= float(rows.super_minimums[output, superblock])
            value = layout.lookup[code] if layout.lookup else code - layout.zero

            assert scale * value + minimum == float(exact[output, column])
    assert torch.equal(exact.float(), weights)


def test_sizes_of_formats() -> None:
    """Bits of a weight with its scales."""
    for format, layout in LAYOUTS.items():
        assert layout.weight_bits / 8 * 64 * 512 == random_matrix(format, 64, 512).size_bytes
    assert [4.625, 5.625, 6.5625, 4.5] == [LAYOUTS[own].weight_bits for own in ("q4_k", "q5_k", "q6_k", "mxfp4")]


def test_mixed_formats_share_a_storage() -> None:
    some = [random_rows(format, 40, 70, seed) for seed, format in enumerate(LAYOUTS)]
    storage = PackedStorage([(40, 70, own.format) for own in some])

    packed = [pack(own, storage) for own in some]

    assert {0} == {tensor.data_ptr() % 64 for one in packed for tensor in (one.codes, one.scales)}
    for own, rows in zip(packed, some, strict=True):
        assert torch.equal(rows.unpack(torch.float32), own.unpack(torch.float32))


def test_rows_of_another_shape_are_refused() -> None:
    rows = random_rows("q4_k", 20, 300)
    with pytest.raises(ValueError, match="q4_k weights with minimums None"):
        replace(rows, minimums=None)
    with pytest.raises(ValueError, match="q4_k weights with scales"):
        replace(rows, scales=rows.scales[:, 1:])
    with pytest.raises(ValueError, match="q5_k weights of 300 columns at output 0"):
        pack(rows).write(0, random_rows("q5_k", 20, 300))
    with pytest.raises(ValueError, match="q4_k weights of 300 columns at output 8"):
        pack(rows).write(8, rows)
