"""Quantised matrices in the memory layout of the C++ kernels, drawn in engine/kernels/cpu/products/linear.h."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.arena import Arena, aligned_size
from engine.kernels.formats import GROUP, LAYOUTS, SUPERBLOCK, ScaleKind, WeightFormat
from engine.kernels.row_major import RowMajorWeights, split_dim

# Outputs stored side by side.
BLOCK = 16
# Outputs, columns and format of a matrix.
MatrixShape: TypeAlias = tuple[int, int, WeightFormat]

# Weights packed or unpacked at once, so that they stay in the processor's cache; and on other devices.
_WEIGHTS_AT_ONCE, _DEVICE_WEIGHTS_AT_ONCE = 2**18, 2**26
# Bytes of a block's super-scales in a superblock, and of both its super-scales and super-minimums.
_SUPER_BYTES: dict[ScaleKind, int] = {"superblock_half": 2 * BLOCK, "superblock_minimum": 4 * BLOCK}


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A quantised matrix [outputs, columns], outputs padded to whole blocks and columns to whole groups.

    codes   uint8 [blocks, groups, words, BLOCK, 4], aligned to 64 bytes; as many words as a code has bits
    scales  aligned to 64 bytes: bfloat16 or float16 [blocks, groups, BLOCK]; with minimums [blocks, groups, 2, BLOCK];
            with superblocks uint8 [blocks, superblocks, bytes]
    """

    format: WeightFormat
    codes: Tensor
    scales: Tensor
    outputs: int
    columns: int

    @property
    def size_bytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    @property
    def blocks_at_once(self) -> int:
        """Blocks to pack or unpack at once."""
        at_once = _WEIGHTS_AT_ONCE if self.codes.device.type == "cpu" else _DEVICE_WEIGHTS_AT_ONCE
        return max(at_once // (self.codes.shape[1] * GROUP * BLOCK), 1)

    def unpack(self, dtype: torch.dtype, blocks: slice = slice(None)) -> Tensor:
        """The weights [outputs of the blocks, columns]; see RowMajorWeights.unpack."""
        return self.row_major(blocks).unpack(dtype)

    def row_major(self, blocks: slice = slice(None)) -> RowMajorWeights:
        """The rows of some blocks."""
        # Function modes (engine/native/float32_mode.py) would change the dtype of scales.
        with torch._C.DisableTorchFunction():
            return self._row_major(blocks)

    def rows(self, outputs: Tensor) -> RowMajorWeights:
        """The rows of some outputs [rows], in any order."""
        # See row_major.
        with torch._C.DisableTorchFunction():
            layout, blocks, places = LAYOUTS[self.format], outputs // BLOCK, outputs % BLOCK
            codes = _unpack_codes(self.codes[blocks, :, :, places][:, :, :, None], layout.bits)
            scales = {
                name: view[blocks, :, :, places].flatten(1)[:, : self._scale_count(name)]
                for name, view in _scale_views(self.scales, layout.scales).items()
            }
            return RowMajorWeights(self.format, codes.flatten(1)[:, : self.columns], **scales)

    def _row_major(self, blocks: slice) -> RowMajorWeights:
        layout = LAYOUTS[self.format]
        codes = _unpack_codes(self.codes[blocks], layout.bits).transpose(1, 2).flatten(0, 1).flatten(1)
        outputs = min(len(codes), self.outputs - BLOCK * (blocks.start or 0))
        scales = {
            name: view.flatten(1, 2).transpose(1, 2).flatten(0, 1)[:outputs, : self._scale_count(name)]
            for name, view in _scale_views(self.scales[blocks], layout.scales).items()
        }
        return RowMajorWeights(self.format, codes[:outputs, : self.columns], **scales)

    def write(self, first: int, rows: RowMajorWeights) -> None:
        """Store rows from output `first` on, a multiple of BLOCK. Raises ValueError for another format or width."""
        if (rows.format, rows.codes.shape[1]) != (self.format, self.columns) or first % BLOCK:
            raise ValueError(f"{rows.format} weights of {rows.codes.shape[1]} columns at output {first}")
        layout = LAYOUTS[self.format]
        blocks = slice(first // BLOCK, first // BLOCK + -(-len(rows.codes) // BLOCK))
        _pack_codes(_blocks(rows.codes, self.codes.shape[1] * GROUP, layout.zero), layout.bits, self.codes[blocks])
        for name, view in _scale_views(self.scales[blocks], layout.scales).items():
            source = _blocks(getattr(rows, name), view.shape[1] * view.shape[2])
            view.copy_(split_dim(source, 2, view.shape[1:3]).permute(0, 2, 3, 1))

    def _scale_count(self, name: str) -> int:
        """Scales of an output."""
        is_super = name.startswith("super")
        return -(-self.columns // (GROUP * SUPERBLOCK if is_super else LAYOUTS[self.format].scale_columns))


class PackedStorage:
    """Memory for some quantised matrices, in one arena."""

    def __init__(self, shapes: Iterable[MatrixShape]) -> None:
        self._arena = Arena(packed_bytes(shapes))

    def allocate(self, outputs: int, columns: int, format: WeightFormat) -> PackedMatrix:
        """An uninitialised matrix."""
        codes = self._arena.allocate(_codes_shape(outputs, columns, format), torch.uint8)
        scales = self._arena.allocate(_scales_shape(outputs, columns, format), _scales_dtype(format))
        return PackedMatrix(format, codes, scales, outputs, columns)


def packed_bytes(shapes: Iterable[MatrixShape]) -> int:
    """Memory for some quantised matrices."""
    return sum(
        aligned_size(size)
        for shape in shapes
        for size in (_codes_shape(*shape).numel(), _scales_dtype(shape[2]).itemsize * prod(_scales_shape(*shape)))
    )


def pack(rows: RowMajorWeights, storage: PackedStorage | None = None) -> PackedMatrix:
    """The matrix of all rows.

    storage  memory for the result; None: its own
    """
    outputs, columns = rows.codes.shape
    shape = (outputs, columns, rows.format)
    packed = (storage or PackedStorage([shape])).allocate(*shape)
    packed.write(0, rows)
    return packed


def _codes_shape(outputs: int, columns: int, format: WeightFormat) -> torch.Size:
    return torch.Size((-(-outputs // BLOCK), -(-columns // GROUP), LAYOUTS[format].bits, BLOCK, 4))


def _scales_shape(outputs: int, columns: int, format: WeightFormat) -> torch.Size:
    kind, blocks, groups = LAYOUTS[format].scales, -(-outputs // BLOCK), -(-columns // GROUP)
    if kind in _SUPER_BYTES:
        return torch.Size((blocks, -(-groups // SUPERBLOCK), _SUPER_BYTES[kind] + 2 * SUPERBLOCK * BLOCK))
    return torch.Size((blocks, groups, 2, BLOCK) if kind == "float16_minimum" else (blocks, groups, BLOCK))


def _scales_dtype(format: WeightFormat) -> torch.dtype:
    kind = LAYOUTS[format].scales
    return torch.bfloat16 if kind == "bfloat16" else torch.uint8 if kind in _SUPER_BYTES else torch.float16


def _blocks(rows: Tensor, columns: int, padding: int = 0) -> Tensor:
    """[outputs, columns] as [blocks, BLOCK, columns], padded."""
    padded_columns, padded_rows = columns - rows.shape[1], -len(rows) % BLOCK
    if padded_columns or padded_rows:
        rows = functional.pad(rows, (0, padded_columns, 0, padded_rows), value=padding)
    return split_dim(rows, 0, (-1, BLOCK))


def _pack_codes(codes: Tensor, bits: int, packed: Tensor) -> None:
    """Store codes [blocks, BLOCK, columns] in the order of PackedMatrix.codes."""
    # Four codes are moved at once, as an int32.
    words = split_dim(codes.contiguous().view(torch.int32), 2, (-1, GROUP // 4)).permute(0, 2, 3, 1)
    target = packed.flatten(3).view(torch.int32)
    if bits == 8:
        target.copy_(words)
        return
    words = words.contiguous()
    low = words & 0x0F0F0F0F
    torch.bitwise_or(low[:, :, 0::2], low[:, :, 1::2] << 4, out=target[:, :, :4])
    if bits > 4:
        target[:, :, 4:] = _pack_high_bits(words >> 4 & 0x0F0F0F0F, bits - 4)


def _unpack_codes(codes: Tensor, bits: int) -> Tensor:
    """The inverse of _pack_codes."""
    words = codes.flatten(3).view(torch.int32)
    if bits < 8:
        low = words[:, :, :4]
        nibbles = torch.stack((low & 0x0F0F0F0F, low >> 4 & 0x0F0F0F0F), 3).flatten(2, 3)
        words = nibbles if bits == 4 else nibbles | _unpack_high_bits(words[:, :, 4:], bits - 4) << 4
    return words.transpose(2, 3).contiguous().view(torch.uint8)


def _shifts(bits: int, device: torch.device) -> Tensor:
    """Shifts of the high bits of words that share a stored word."""
    return torch.arange(0, 8, bits, dtype=torch.int32, device=device)[:, None]


def _pack_high_bits(high: Tensor, bits: int) -> Tensor:
    """High bits [blocks, groups, words, BLOCK] as stored words [blocks, groups, bits, BLOCK]."""
    return (split_dim(high, 2, (bits, -1)) << _shifts(bits, high.device)).sum(3, dtype=torch.int32)


def _unpack_high_bits(stored: Tensor, bits: int) -> Tensor:
    """The inverse of _pack_high_bits."""
    mask = 0x01010101 if bits == 1 else 0x03030303
    return (stored[:, :, :, None] >> _shifts(bits, stored.device) & mask).flatten(2, 3)


def _scale_views(scales: Tensor, kind: ScaleKind) -> dict[str, Tensor]:
    """Views [blocks, records, count, BLOCK] of packed scales, by the fields of RowMajorWeights."""
    if kind == "float16_minimum":
        return {"scales": scales[:, :, 0, None], "minimums": scales[:, :, 1, None]}
    if kind not in _SUPER_BYTES:
        return {"scales": scales[:, :, None]}
    supers = split_dim(scales[:, :, : _SUPER_BYTES[kind]].view(torch.float16), 2, (-1, BLOCK))
    blocks = split_dim(scales[:, :, _SUPER_BYTES[kind] :], 2, (-1, BLOCK))
    if kind == "superblock_half":
        return {"scales": blocks.view(torch.int8), "super_scales": supers}
    pairs = {"scales": blocks[:, :, 0::2], "minimums": blocks[:, :, 1::2]}
    return pairs | {"super_scales": supers[:, :, :1], "super_minimums": supers[:, :, 1:]}
