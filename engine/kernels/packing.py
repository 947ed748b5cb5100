"""Storage of quantised matrices: codes of 8 or 4 bits, and a bfloat16 scale for every 32 columns of an output.

A weight is (code - zero) * scale: 8.5 or 4.5 bits. bfloat16 scales have the range of float32 and convert by a shift.
The order of the codes is that of the C++ kernel (drawn in engine/kernels/cpu/linear.h); `unpack` returns weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.arena import Arena, aligned_size

Bits = Literal[8, 4]

# Columns that share a scale; outputs stored side by side.
GROUP, BLOCK = 32, 16
# Weights packed or unpacked at once, so that they stay in the processor's cache.
_WEIGHTS_AT_ONCE = 2**18
# Codes that the largest weight of a 4-bit group may get; the one with the smallest squared error is used.
_LARGEST_CODES = (-8.0, -7.5, -7.0, -6.5, 6.5, 7.0)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A quantised matrix [outputs, columns], outputs padded to whole blocks and columns to whole groups.

    codes   uint8 [blocks, groups, words, BLOCK, 4], aligned to 64 bytes; 8 words with 8 bits, 4 with 4
    scales  bfloat16 [blocks, groups, BLOCK], aligned to 64 bytes
    """

    codes: Tensor
    scales: Tensor
    outputs: int
    columns: int

    @property
    def bits(self) -> Bits:
        """Bits of a code."""
        return 8 if self.codes.shape[2] == GROUP // 4 else 4

    @property
    def size_bytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    @property
    def blocks_at_once(self) -> int:
        """Blocks to unpack at once."""
        return max(_WEIGHTS_AT_ONCE // (self.codes.shape[1] * GROUP * BLOCK), 1)

    def unpack(self, dtype: torch.dtype, blocks: slice = slice(None)) -> Tensor:
        """The weights [outputs of the blocks, columns]."""
        codes, scales = self.codes[blocks], self.scales[blocks].to(dtype)
        values = _unpack_codes(codes, self.bits).to(dtype).sub_(_ZERO[self.bits]).mul_(scales[:, :, :, None])
        rows = values.transpose(1, 2).flatten(0, 1).flatten(1)
        return rows[: self.outputs - BLOCK * (blocks.start or 0), : self.columns]


_ZERO: dict[Bits, int] = {8: 128, 4: 8}


class PackedStorage:
    """Memory for some quantised matrices, in one arena."""

    def __init__(self, shapes: Iterable[tuple[int, int]], bits: Bits) -> None:
        """`shapes` are (outputs, columns) of the matrices."""
        self.bits = bits
        sizes = [
            size for shape in shapes for size in (_codes_shape(*shape, bits).numel(), 2 * _scales_shape(*shape).numel())
        ]
        self._arena = Arena(sum(map(aligned_size, sizes)))

    def allocate(self, outputs: int, columns: int) -> PackedMatrix:
        """An uninitialised matrix."""
        codes = self._arena.allocate(_codes_shape(outputs, columns, self.bits), torch.uint8)
        scales = self._arena.allocate(_scales_shape(outputs, columns), torch.bfloat16)
        return PackedMatrix(codes, scales, outputs, columns)


def _codes_shape(outputs: int, columns: int, bits: Bits) -> torch.Size:
    return torch.Size((-(-outputs // BLOCK), -(-columns // GROUP), bits, BLOCK, 4))


def _scales_shape(outputs: int, columns: int) -> torch.Size:
    return torch.Size((-(-outputs // BLOCK), -(-columns // GROUP), BLOCK))


def pack(weight: Tensor, bits: Bits, storage: PackedStorage | None = None) -> PackedMatrix:
    """Quantise a matrix [outputs, columns] of any floating dtype. Raises ValueError for infinite weights and NaN.

    storage  memory for the result; None: its own
    """
    outputs, columns = weight.shape
    packed = (storage or PackedStorage([(outputs, columns)], bits)).allocate(outputs, columns)
    for start in range(0, packed.codes.shape[0], packed.blocks_at_once):
        blocks = slice(start, start + packed.blocks_at_once)
        grouped = _grouped(weight[blocks.start * BLOCK : blocks.stop * BLOCK].float())
        if not grouped.isfinite().all():
            raise ValueError("a weight is infinite or no number")
        scales = _scales8(grouped) if bits == 8 else _scales4(grouped)
        packed.scales[blocks] = scales
        packed.codes[blocks] = _pack_codes(_codes(grouped, scales.float(), bits) + _ZERO[bits], bits)
    return packed


def _grouped(rows: Tensor) -> Tensor:
    """Rows [count, columns] as [blocks, groups, BLOCK, GROUP], padded with zeros."""
    count, columns = rows.shape
    padded = functional.pad(rows, (0, -columns % GROUP, 0, -count % BLOCK))
    return padded.view(-1, BLOCK, padded.shape[1] // GROUP, GROUP).transpose(1, 2)


def _codes(grouped: Tensor, scales: Tensor, bits: Bits) -> Tensor:
    """The nearest codes, relative to the zero; float32 scales."""
    # Groups with a zero or denormal scale are zero: its inverse could be infinite.
    inverse = torch.where(scales.abs() >= torch.finfo(torch.float32).tiny, 1 / scales, 0)
    smallest, largest = (-127, 127) if bits == 8 else (-8, 7)
    return (grouped * inverse[:, :, :, None]).round_().clamp_(smallest, largest)


def _scales8(grouped: Tensor) -> Tensor:
    """Scales for which the largest weight of a group has a code of at most 127."""
    exact = grouped.abs().amax(-1) / 127
    # Rounded up to bfloat16, the upper half of float32: add a bit less than its unit and drop the lower half.
    return ((exact.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32).bfloat16()


def _scales4(grouped: Tensor) -> Tensor:
    """Of the scales for _LARGEST_CODES those with the smallest squared error; negative for a negative code."""
    largest = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))[..., 0]
    best = torch.zeros_like(largest)
    smallest_error = grouped.square().sum(-1)
    for code in _LARGEST_CODES:
        scales = (largest / code).bfloat16().float()
        error = (_codes(grouped, scales, 4) * scales[..., None] - grouped).square_().sum(-1)
        better = error < smallest_error
        best, smallest_error = torch.where(better, scales, best), torch.where(better, error, smallest_error)
    return best.bfloat16()


def _pack_codes(codes: Tensor, bits: Bits) -> Tensor:
    """Unsigned codes [blocks, groups, BLOCK, GROUP] in the order of PackedMatrix.codes."""
    # Four codes are moved at once, as an int32.
    words = codes.to(torch.uint8).contiguous().view(torch.int32).transpose(2, 3).contiguous()
    if bits == 4:
        words = words[:, :, 0::2] | words[:, :, 1::2] << 4
    return words.view(torch.uint8).view(*words.shape[:3], BLOCK, 4)


def _unpack_codes(codes: Tensor, bits: Bits) -> Tensor:
    """The inverse of _pack_codes."""
    words = codes.flatten(3).view(torch.int32)
    if bits == 4:
        words = torch.stack((words & 0x0F0F0F0F, words >> 4 & 0x0F0F0F0F), 3).flatten(2, 3)
    return words.transpose(2, 3).contiguous().view(torch.uint8)
