"""Quantised weights of GGUF files, repacked exactly: the raw blocks of a tensor as RowMajorWeights.

Unpacked in float32, weights equal gguf.dequantize's bit for bit. The blocks of a row follow one another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import gguf
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from engine.kernels.formats import WeightFormat
from engine.kernels.packing import BLOCK, PackedMatrix, PackedStorage
from engine.kernels.row_major import RowMajorWeights, split_dim

_Type = GGMLQuantizationType
# The formats that hold the weights of a type without loss. Q3_K has the scales of Q6_K and smaller codes.
EXACT_FORMATS: dict[GGMLQuantizationType, WeightFormat] = {
    _Type.Q8_0: "q8_0",
    _Type.Q4_0: "q4_0",
    _Type.Q4_1: "q4_1",
    _Type.Q5_0: "q5_0",
    _Type.Q5_1: "q5_1",
    _Type.Q3_K: "q6_k",
    _Type.Q4_K: "q4_k",
    _Type.Q5_K: "q5_k",
    _Type.Q6_K: "q6_k",
    _Type.IQ4_NL: "iq4_nl",
    _Type.IQ4_XS: "iq4_xs",
    _Type.MXFP4: "mxfp4",
}
# Blocks [outputs, blocks, bytes] to weights.
_Unpack = Callable[[Tensor], RowMajorWeights]


def unpack_blocks(blocks: Tensor, type: GGMLQuantizationType) -> RowMajorWeights | None:
    """The weights of raw blocks (uint8 [outputs, bytes of a row]); None for a type without an exact format."""
    if type not in EXACT_FORMATS:
        return None
    return _UNPACK[type](split_dim(blocks, 1, (-1, GGML_QUANT_SIZES[type][1])))


class BlockReader(Protocol):
    """Reads the raw blocks of matrices (uint8 [outputs, bytes of a row])."""

    def pack_blocks(
        self, blocks: Tensor, type: GGMLQuantizationType, storage: PackedStorage | None = None
    ) -> PackedMatrix | None:
        """The matrix; None for a type without an exact format. Raises InfiniteScale.

        storage  memory for the result; None: its own
        """
        ...

    def dequantize(self, blocks: Tensor, type: GGMLQuantizationType) -> Tensor | None:
        """The weights, float32 [outputs, columns]; None for a type that it cannot read."""
        ...


# The largest code is 12: 12 * 2 ** (253 - 128) exceeds float32.
_MAX_MXFP4_EXPONENT = 252


class InfiniteScale(ValueError):
    """Blocks of a type have a scale that is infinite or NaN."""

    def __init__(self, type: GGMLQuantizationType) -> None:
        super().__init__(f"a scale of {type.name} blocks is infinite or no number")


def check_exponents(blocks: Tensor, type: GGMLQuantizationType) -> None:
    """Raise InfiniteScale for blocks of MXFP4 with an exponent that makes the largest code infinite."""
    if type == _Type.MXFP4 and blocks.numel():
        exponents = blocks[:, :: GGML_QUANT_SIZES[type][1]]
        if int(exponents.max()) > _MAX_MXFP4_EXPONENT:
            raise InfiniteScale(type)


def pack_blocks(
    blocks: Tensor, type: GGMLQuantizationType, storage: PackedStorage | None = None
) -> PackedMatrix | None:
    """See BlockReader."""
    packed = allocate_packed(blocks, type, storage)
    if packed is None:
        return None
    check_exponents(blocks, type)
    outputs_at_once = BLOCK * packed.blocks_at_once
    for first in range(0, len(blocks), outputs_at_once):
        rows = unpack_blocks(blocks[first : first + outputs_at_once], type)
        assert rows is not None
        if not _is_finite(rows):
            raise InfiniteScale(type)
        packed.write(first, rows)
    return packed


def dequantize(blocks: Tensor, type: GGMLQuantizationType) -> Tensor | None:
    """See BlockReader."""
    try:
        return torch.from_numpy(gguf.dequantize(blocks.numpy(), type))
    except NotImplementedError:
        return None


class TorchBlocks:
    """The functions of this module; implements BlockReader."""

    pack_blocks = staticmethod(pack_blocks)
    dequantize = staticmethod(dequantize)


def allocate_packed(
    blocks: Tensor, type: GGMLQuantizationType, storage: PackedStorage | None = None
) -> PackedMatrix | None:
    """An uninitialised matrix for raw blocks; None for a type without an exact format."""
    if type not in EXACT_FORMATS:
        return None
    columns, size = GGML_QUANT_SIZES[type]
    shape = (len(blocks), blocks.shape[1] // size * columns, EXACT_FORMATS[type])
    return (storage or PackedStorage([shape])).allocate(*shape)


def _is_finite(rows: RowMajorWeights) -> bool:
    scales = (rows.scales, rows.minimums, rows.super_scales, rows.super_minimums)
    return all(bool(scale.isfinite().all()) for scale in scales if scale is not None and scale.is_floating_point())


def _halves(blocks: Tensor, first: int) -> Tensor:
    """The float16 number at a byte of each block, [outputs, blocks]."""
    return blocks[..., first : first + 2].contiguous().view(torch.float16).flatten(1)


def _nibbles(codes: Tensor) -> Tensor:
    """Bytes [..., bytes] as codes [..., 2, bytes]: low halves, then high halves."""
    return torch.stack((codes & 15, codes >> 4), -2)


def _bits(masks: Tensor) -> Tensor:
    """The bits of bytes [..., bytes] as [..., 8 * bytes], lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (masks[..., None] >> shifts & 1).flatten(-2)


def _q8_0(blocks: Tensor) -> RowMajorWeights:
    return RowMajorWeights("q8_0", (blocks[..., 2:] ^ 128).flatten(1), _halves(blocks, 0))


def _small(format: WeightFormat, *, has_minimum: bool = False, has_high_bits: bool = False) -> _Unpack:
    """Blocks of 32 columns: scale, minimum, fifth bits, codes of 4 bits."""

    def unpack(blocks: Tensor) -> RowMajorWeights:
        start = 4 if has_minimum else 2
        codes = _nibbles(blocks[..., -16:]).flatten(2)
        if has_high_bits:
            codes |= _bits(blocks[..., start : start + 4]) << 4
        return RowMajorWeights(
            format, codes.flatten(1), _halves(blocks, 0), _halves(blocks, 2) if has_minimum else None
        )

    return unpack


def _mxfp4(blocks: Tensor) -> RowMajorWeights:
    exponents = blocks[..., 0].to(torch.int16)
    # 2 ** (exponent - 128), which bfloat16 holds; the smallest two are subnormal.
    scales = torch.where(exponents < 2, 0x20 << exponents, exponents - 1 << 7).to(torch.int16)
    return RowMajorWeights("mxfp4", _nibbles(blocks[..., 1:]).flatten(1), scales.view(torch.bfloat16))


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and minimums of 8 groups, 6 bits each, in 12 bytes."""
    low, middle, high = split_dim(packed, -1, (3, 4)).unbind(-2)
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), -1)
    minimums = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), -1)
    return scales.flatten(1), minimums.flatten(1)


def _q4_or_q5_k(format: WeightFormat) -> _Unpack:
    """A super-scale, a super-minimum, scales and minimums, fifth bits, codes of 4 bits."""

    def unpack(blocks: Tensor) -> RowMajorWeights:
        codes = _nibbles(split_dim(blocks[..., -128:], 2, (4, 32)))
        if format == "q5_k":
            fifth = blocks[..., 16:48, None] >> torch.arange(8, dtype=torch.uint8) & 1
            codes |= split_dim(fifth.transpose(2, 3), 2, (4, 2)) << 4
        scales, minimums = _k_scales(blocks[..., 4:16])
        return RowMajorWeights(format, codes.flatten(1), scales, minimums, _halves(blocks, 0), -_halves(blocks, 2))

    return unpack


def _q6_k(blocks: Tensor) -> RowMajorWeights:
    # Halves of 128 columns: nibbles of columns [0, 64) and [64, 128), pairs of high bits of 32 columns each.
    low = _nibbles(split_dim(blocks[..., :128], 2, (2, 64))).flatten(3)
    pairs = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (split_dim(blocks[..., 128:192], 2, (2, 1, 32)) >> pairs & 3).flatten(3)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).flatten(1)
    return RowMajorWeights("q6_k", (low | high << 4).flatten(1), scales, super_scales=_halves(blocks, 208))


def _q3_k(blocks: Tensor) -> RowMajorWeights:
    pairs = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    low = (split_dim(blocks[..., 32:96], 2, (2, 1, 32)) >> pairs & 3).flatten(2)
    high = (blocks[..., None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1).flatten(2)
    packed = blocks[..., 96:108]
    high_scales = (packed[..., None, 8:] >> pairs & 3).flatten(2)
    scales = (_nibbles(packed[..., :8]).flatten(2) | high_scales << 4).to(torch.int8) - 32
    # Values are -4 to 3; zero has the code 32.
    codes = low + 4 * high + 28
    return RowMajorWeights("q6_k", codes.flatten(1), scales.flatten(1), super_scales=_halves(blocks, 108))


def _iq4_xs(blocks: Tensor) -> RowMajorWeights:
    low = _nibbles(blocks[..., 4:8, None]).flatten(2)
    high = (blocks[..., 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3).flatten(2)
    scales = ((low | high << 4).to(torch.int8) - 32).repeat_interleave(2, 2)
    codes = _nibbles(split_dim(blocks[..., 8:], 2, (8, 16)))
    return RowMajorWeights("iq4_xs", codes.flatten(1), scales.flatten(1), super_scales=_halves(blocks, 0))


_UNPACK: dict[GGMLQuantizationType, _Unpack] = {
    _Type.Q8_0: _q8_0,
    _Type.Q4_0: _small("q4_0"),
    _Type.Q4_1: _small("q4_1", has_minimum=True),
    _Type.Q5_0: _small("q5_0", has_high_bits=True),
    _Type.Q5_1: _small("q5_1", has_minimum=True, has_high_bits=True),
    _Type.Q3_K: _q3_k,
    _Type.Q4_K: _q4_or_q5_k("q4_k"),
    _Type.Q5_K: _q4_or_q5_k("q5_k"),
    _Type.Q6_K: _q6_k,
    _Type.IQ4_NL: _small("iq4_nl"),
    _Type.IQ4_XS: _iq4_xs,
    _Type.MXFP4: _mxfp4,
}
