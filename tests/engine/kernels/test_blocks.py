"""Blocks of GGUF files: unpacked weights equal those of the gguf package bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from engine.kernels.blocks import EXACT_FORMATS, InfiniteScale, dequantize, pack_blocks, unpack_blocks
from engine.kernels.cpu.products.linear import NativeLinear
from tests.libraries import built, every_variant

Type = GGMLQuantizationType
# Bytes of the float16 numbers in a block.
HALVES = {
    **{kind: (0,) for kind in (Type.Q8_0, Type.Q4_0, Type.Q5_0, Type.IQ4_NL, Type.IQ4_XS)},
    **{kind: (0, 2) for kind in (Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K)},
    Type.Q3_K: (108,),
    Type.Q6_K: (208,),
    Type.MXFP4: (),
}
# Zeros, the smallest subnormal and the largest number, of both signs.
EXTREMES = (0x0000, 0x8000, 0x0001, 0x8001, 0x7BFF, 0xFBFF)


@pytest.fixture(scope="module", params=every_variant("linear"))
def native(request: pytest.FixtureRequest) -> NativeLinear:
    """The kernel of each variant."""
    return NativeLinear(built("linear", request.param))


def random_blocks(kind: GGMLQuantizationType, outputs: int, blocks: int, seed: int) -> Tensor:
    """Random blocks with finite scales, extreme ones in the first outputs."""
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (outputs, blocks, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = raw[:, :, at : at + 2].copy().view(np.uint16)
        halves[halves & 0x7C00 == 0x7C00] &= 0x83FF
        halves[: len(EXTREMES), :, 0] = np.array(EXTREMES)[:outputs, None]
        raw[:, :, at : at + 2] = halves.view(np.uint8)
    if kind == Type.MXFP4:
        raw[:, :, 0] = np.minimum(raw[:, :, 0], 252)
    return torch.from_numpy(raw.reshape(outputs, -1))


def bits_of(weights: Tensor) -> Tensor:
    """The bits of float32 numbers."""
    return weights.contiguous().view(torch.int32)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("kind", EXACT_FORMATS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("outputs", [1, 40])
def test_native_weights_equal_the_package(native: NativeLinear, kind: GGMLQuantizationType, outputs: int) -> None:
    blocks = random_blocks(kind, outputs, 1 + outputs % 5, seed=outputs)
    expected = dequantize(blocks, kind)

    weights = native.dequantize(blocks, kind)

    assert expected is not None
    assert weights is not None
    assert torch.equal(bits_of(expected), bits_of(weights))


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("kind", EXACT_FORMATS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("seed", range(5))
def test_weights_equal_the_package(kind: GGMLQuantizationType, seed: int) -> None:
    """By rows, packed, and packed in parts."""
    blocks = random_blocks(kind, 35 + 23 * seed, 1 + seed, seed)
    expected = torch.from_numpy(gguf.dequantize(blocks.numpy(), kind))

    rows, packed = unpack_blocks(blocks, kind), pack_blocks(blocks, kind)

    assert rows is not None
    assert packed is not None
    assert torch.equal(bits_of(expected), bits_of(rows.unpack(torch.float32)))
    assert torch.equal(bits_of(expected), bits_of(packed.unpack(torch.float32)))
    assert torch.equal(bits_of(expected[16:48]), bits_of(packed.unpack(torch.float32, slice(1, 3))))
    some = torch.tensor([3, 34, 0, 17, 3])
    assert torch.equal(bits_of(expected[some]), bits_of(packed.rows(some).unpack(torch.float32)))


@pytest.mark.parametrize("kind", EXACT_FORMATS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("outputs", [1, 16, 35, 127])
def test_native_packing(native: NativeLinear, kind: GGMLQuantizationType, outputs: int) -> None:
    """Every byte is that of the torch implementation, padding included."""
    blocks = random_blocks(kind, outputs, 1 + outputs % 5, seed=outputs)
    expected = pack_blocks(blocks, kind)

    packed = native.pack_blocks(blocks, kind)

    assert expected is not None
    assert packed is not None
    assert (expected.format, expected.outputs, expected.columns) == (packed.format, packed.outputs, packed.columns)
    assert torch.equal(expected.codes, packed.codes)
    assert torch.equal(expected.scales.view(torch.uint8), packed.scales.view(torch.uint8))


def test_native_packing_of_strided_blocks(native: NativeLinear) -> None:
    blocks = random_blocks(Type.Q6_K, 40, 3, seed=0)
    expected = pack_blocks(blocks[::2], Type.Q6_K)

    packed = native.pack_blocks(blocks[::2], Type.Q6_K)

    assert expected is not None
    assert packed is not None
    assert torch.equal(expected.codes, packed.codes)


def test_matrices_larger_than_one_part() -> None:
    blocks = random_blocks(Type.Q4_K, 300, 16, seed=0)
    expected = torch.from_numpy(gguf.dequantize(blocks.numpy(), Type.Q4_K))

    packed = pack_blocks(blocks, Type.Q4_K)

    assert packed is not None
    assert 16 * packed.blocks_at_once < 300
    assert torch.equal(bits_of(expected), bits_of(packed.unpack(torch.float32)))


@pytest.mark.parametrize("kind", [Type.Q2_K, Type.IQ3_S, Type.IQ2_XXS, Type.TQ1_0, Type.F16])
def test_types_without_an_exact_format(kind: GGMLQuantizationType) -> None:
    blocks = torch.zeros(16, GGML_QUANT_SIZES[kind][1], dtype=torch.uint8)

    assert unpack_blocks(blocks, kind) is None
    assert pack_blocks(blocks, kind) is None
    assert NativeLinear(built("linear")).pack_blocks(blocks, kind) is None


@pytest.mark.parametrize("kind", [kind for kind, places in HALVES.items() if places], ids=lambda kind: kind.name)
@pytest.mark.parametrize("wrong", [0x7C00, 0xFC00, 0x7E00])
def test_infinite_scales_are_refused(native: NativeLinear, kind: GGMLQuantizationType, wrong: int) -> None:
    for at in HALVES[kind]:
        blocks = random_blocks(kind, 20, 1, seed=0)
        blocks[17, at : at + 2] = torch.tensor([wrong & 255, wrong >> 8], dtype=torch.uint8)

        for pack in (pack_blocks, native.pack_blocks):
            with pytest.raises(InfiniteScale, match=f"a scale of {kind.name} blocks is infinite or no number"):
                pack(blocks, kind)


@pytest.mark.parametrize("exponent", [253, 254, 255])
def test_exponents_of_infinite_weights_are_refused(native: NativeLinear, exponent: int) -> None:
    """Of MXFP4; the largest one below is finite with every code."""
    blocks = random_blocks(Type.MXFP4, 20, 3, seed=0)
    blocks[17, 17] = 252
    largest = pack_blocks(blocks, Type.MXFP4)
    assert largest is not None
    assert largest.unpack(torch.float32).isfinite().all()

    blocks[17, 17] = exponent
    for pack in (pack_blocks, native.pack_blocks):
        with pytest.raises(InfiniteScale, match="a scale of MXFP4 blocks is infinite or no number"):
            pack(blocks, Type.MXFP4)
