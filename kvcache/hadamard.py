"""The Walsh-Hadamard transform, which spreads what stands out in one column over all of them.

A key with a few large columns quantises badly, for they set the scale of all. Turned by an orthonormal matrix its
columns are much alike, and queries that are turned too give the same scores (QuaRot, arXiv 2404.00456, section 4.2).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def hadamard_transform(rows: Tensor) -> Tensor:
    """Rows times the orthonormal Hadamard matrix, which is its own inverse; in float32 or better.

    rows  [..., width]; a width that is no power of two is cut into equal blocks, each the largest power that divides it

    Sums and differences of pairs only, so that a row's bits do not depend on the rows beside it. A product with the
    matrix would be faster for single rows (8 heads of 128 columns: 6 us against 72), but not that.
    """
    # Columns first: every stage then runs over long stretches of memory, from one buffer to another, back and forth.
    exact = rows.to(torch.promote_types(rows.dtype, torch.float32))
    columns = exact.movedim(-1, 0).clone(memory_format=torch.contiguous_format)
    other, width = torch.empty_like(columns), columns.shape[0]
    block, half = width & -width, 1  # the lowest bit that is set
    while half < block:
        pairs = (width // (2 * half), 2, half, *columns.shape[1:])
        (first, second), (total, difference) = columns.view(pairs).unbind(1), other.view(pairs).unbind(1)
        torch.add(first, second, out=total)
        torch.sub(first, second, out=difference)
        columns, other, half = other, columns, 2 * half
    return columns.div(math.sqrt(block)).movedim(0, -1)
