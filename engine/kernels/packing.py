"""How a quantised matrix is stored: codes of 8 or 4 bits, and a scale for every 32 columns of a row.

A weight is (code - zero) * scale, 8.5 or 4.5 bits in all. Scales are bfloat16: they reach as far as float32, and a
shift reads them. The order of the codes is what the C++ kernel reads (engine/kernels/cpu/linear.h has the drawing);
whoever wants to see weights calls `unpack`.
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

# Columns that share a scale, and rows (outputs) that lie side by side.
GROUP, BLOCK = 32, 16
# Weights that are packed or unpacked at a time: they stay in the processor's cache.
_AT_ONCE = 2**18
# With 4 bits the greatest weight of a group may be given these codes; the best of all is taken.
_GREATEST_CODES = (-8.0, -7.5, -7.0, -6.5, 6.5, 7.0)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix [outputs, columns], rows padded to whole blocks and columns to whole groups.

    codes   uint8 [blocks, groups, words, BLOCK, 4], aligned to 64 bytes; 8 words with 8 bits, 4 with 4
    scales  bfloat16 [blocks, groups, BLOCK], aligned to 64 bytes
    """

    codes: Tensor
    scales: Tensor
    outputs: int
    columns: int

    @property
    def bits(self) -> Bits:
        """Of a code."""
        return 8 if self.codes.shape[2] == GROUP // 4 else 4

    @property
    def size_bytes(self) -> int:
        """What it takes."""
        return self.codes.nbytes + self.scales.nbytes

    @property
    def blocks_at_once(self) -> int:
        """Blocks that are best unpacked at a time."""
        return max(_AT_ONCE // (self.codes.shape[1] * GROUP * BLOCK), 1)

    def unpack(self, dtype: torch.dtype, blocks: slice = slice(None)) -> Tensor:
        """The weights [outputs of the blocks, columns]."""
        codes, scales = self.codes[blocks], self.scales[blocks].to(dtype)
        values = _numbers(codes, self.bits).to(dtype).sub_(_ZERO[self.bits]).mul_(scales[:, :, :, None])
        rows = values.transpose(1, 2).flatten(0, 1).flatten(1)
        return rows[: self.outputs - BLOCK * (blocks.start or 0), : self.columns]


_ZERO: dict[Bits, int] = {8: 128, 4: 8}


class PackedStorage:
    """Memory for the matrices of a model (engine/kernels/arena.py)."""

    def __init__(self, shapes: Iterable[tuple[int, int]], bits: Bits) -> None:
        """For matrices of these outputs and columns."""
        self.bits = bits
        sizes = [
            size for shape in shapes for size in (_codes_shape(*shape, bits).numel(), 2 * _scales_shape(*shape).numel())
        ]
        self._pages = Arena(sum(map(aligned_size, sizes)))

    def allocate(self, outputs: int, columns: int) -> PackedMatrix:
        """The next one; its codes and scales are anything yet."""
        codes = self._pages.allocate(_codes_shape(outputs, columns, self.bits), torch.uint8)
        return PackedMatrix(
            codes, self._pages.allocate(_scales_shape(outputs, columns), torch.bfloat16), outputs, columns
        )


def _codes_shape(outputs: int, columns: int, bits: Bits) -> torch.Size:
    return torch.Size((-(-outputs // BLOCK), -(-columns // GROUP), bits, BLOCK, 4))


def _scales_shape(outputs: int, columns: int) -> torch.Size:
    return torch.Size((-(-outputs // BLOCK), -(-columns // GROUP), BLOCK))


def pack(weight: Tensor, bits: Bits, storage: PackedStorage | None = None) -> PackedMatrix:
    """Quantise a matrix [outputs, columns] of any floating type. Raises ValueError where a weight is no number.

    room  where it is to lie; None: by itself
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
        packed.codes[blocks] = _stored(_codes(grouped, scales.float(), bits) + _ZERO[bits], bits)
    return packed


def _grouped(rows: Tensor) -> Tensor:
    """Rows [count, columns] as [blocks, groups, BLOCK, GROUP], zeros where there are none."""
    count, columns = rows.shape
    padded = functional.pad(rows, (0, -columns % GROUP, 0, -count % BLOCK))
    return padded.view(-1, BLOCK, padded.shape[1] // GROUP, GROUP).transpose(1, 2)


def _codes(grouped: Tensor, scales: Tensor, bits: Bits) -> Tensor:
    """The nearest codes around zero; scales in float32."""
    # A scale of zero, or one so small that its inverse is none, is that of a group of zeros.
    inverse = torch.where(scales.abs() >= torch.finfo(torch.float32).tiny, 1 / scales, 0)
    least, greatest = (-127, 127) if bits == 8 else (-8, 7)
    return (grouped * inverse[:, :, :, None]).round_().clamp_(least, greatest)


def _scales8(grouped: Tensor) -> Tensor:
    """So that the greatest weight of a group has the code 127, or a little less: never more than there is."""
    exact = grouped.abs().amax(-1) / 127
    # bfloat16 is the upper half of float32: rounding up is to drop the lower half of what lies just below the next.
    return ((exact.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32).bfloat16()


def _scales4(grouped: Tensor) -> Tensor:
    """Of some scales the one with the least squared error; negative where the greatest weight gets the code -8."""
    greatest = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))[..., 0]
    best = torch.zeros_like(greatest)
    least = grouped.square().sum(-1)
    for code in _GREATEST_CODES:
        scales = (greatest / code).bfloat16().float()
        error = (_codes(grouped, scales, 4) * scales[..., None] - grouped).square_().sum(-1)
        better = error < least
        best, least = torch.where(better, scales, best), torch.where(better, error, least)
    return best.bfloat16()


def _stored(codes: Tensor, bits: Bits) -> Tensor:
    """Codes from zero up [blocks, groups, BLOCK, GROUP] in the order in which they are stored."""
    # Four codes are moved at a time, as one whole number.
    words = codes.to(torch.uint8).contiguous().view(torch.int32).transpose(2, 3).contiguous()
    if bits == 4:
        words = words[:, :, 0::2] | words[:, :, 1::2] << 4
    return words.view(torch.uint8).view(*words.shape[:3], BLOCK, 4)


def _numbers(codes: Tensor, bits: Bits) -> Tensor:
    """What `_stored` was given."""
    words = codes.flatten(3).view(torch.int32)
    if bits == 4:
        words = torch.stack((words & 0x0F0F0F0F, words >> 4 & 0x0F0F0F0F), 3).flatten(2, 3)
    return words.transpose(2, 3).contiguous().view(torch.uint8)
