"""The formats of quantised weights that the kernels multiply.

A weight is scale * value(code) + minimum. A value is code - zero, or an entry of a lookup table. The scales of a row:

    bfloat16            a scale for each group of 32 columns
    float16             the same
    float16_minimum     a scale and a minimum for each group
    superblock_minimum  a float16 super-scale and super-minimum for each superblock of 8 groups; for each group an
                        unsigned 8-bit scale and minimum, multiplied by them
    superblock_half     a float16 super-scale for each superblock; for each half group a signed 8-bit scale

The last superblock of a row may have fewer groups, and its last group fewer columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

WeightFormat = Literal[
    "int8",
    "int4",
    "q8_0",
    "q4_0",
    "q5_0",
    "q4_1",
    "q5_1",
    "q4_k",
    "q5_k",
    "q6_k",
    "iq4_nl",
    "iq4_xs",
    "mxfp4",
]
ScaleKind = Literal["bfloat16", "float16", "float16_minimum", "superblock_minimum", "superblock_half"]

# Columns of a group, and groups of a superblock.
GROUP, SUPERBLOCK = 32, 8

# Values of 4-bit codes: E2M1 floats times two, and the quantiles of IQ4.
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Bits of scales and minimums for a group of 32 weights.
_SCALE_BITS: dict[ScaleKind, float] = {
    "bfloat16": 16,
    "float16": 16,
    "float16_minimum": 32,
    "superblock_minimum": 16 + 32 / SUPERBLOCK,
    "superblock_half": 16 + 16 / SUPERBLOCK,
}


@dataclass(frozen=True, slots=True)
class FormatLayout:
    """The structure of a weight format.

    bits    of a code
    zero    the code of the value 0; of no meaning with lookup values
    lookup  values by code; empty: code - zero
    """

    bits: Literal[4, 5, 6, 8]
    zero: int
    scales: ScaleKind
    lookup: tuple[int, ...] = ()

    @property
    def has_superblocks(self) -> bool:
        """Whether scales are multiplied by super-scales."""
        return self.scales in ("superblock_minimum", "superblock_half")

    @property
    def has_minimums(self) -> bool:
        """Whether weights have minimums."""
        return self.scales in ("float16_minimum", "superblock_minimum")

    @property
    def scale_columns(self) -> int:
        """Columns that share a scale."""
        return GROUP // 2 if self.scales == "superblock_half" else GROUP

    @property
    def weight_bits(self) -> float:
        """Bits of a weight with its share of scales."""
        return self.bits + _SCALE_BITS[self.scales] / GROUP

    def values(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of codes (uint8)."""
        if self.lookup:
            return torch.tensor(self.lookup, dtype=dtype, device=codes.device)[codes.int()]
        return codes.to(dtype).sub_(self.zero)


LAYOUTS: dict[WeightFormat, FormatLayout] = {
    "int8": FormatLayout(8, 128, "bfloat16"),
    "int4": FormatLayout(4, 8, "bfloat16"),
    "q8_0": FormatLayout(8, 128, "float16"),
    "q4_0": FormatLayout(4, 8, "float16"),
    "q5_0": FormatLayout(5, 16, "float16"),
    "q4_1": FormatLayout(4, 0, "float16_minimum"),
    "q5_1": FormatLayout(5, 0, "float16_minimum"),
    "q4_k": FormatLayout(4, 0, "superblock_minimum"),
    "q5_k": FormatLayout(5, 0, "superblock_minimum"),
    "q6_k": FormatLayout(6, 32, "superblock_half"),
    "iq4_nl": FormatLayout(4, 0, "float16", _IQ4_VALUES),
    "iq4_xs": FormatLayout(4, 0, "superblock_half", _IQ4_VALUES),
    "mxfp4": FormatLayout(4, 0, "bfloat16", _MXFP4_VALUES),
}
