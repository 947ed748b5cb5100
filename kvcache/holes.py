"""Cells with holes: where a layer no longer looks, cells are released, and -1 stands in their place.

A sequence can go on at a position if it has every cell that a query there sees.
"""

from __future__ import annotations

import numpy as np

from kvcache.cell_pool import CellArray
from kvcache.spec import AttentionRange

HOLE = -1


def resume_position(cells: CellArray, start: int, reach: AttentionRange) -> int:
    """The deepest position up to the end of `cells` at which a sequence can go on; at least `start`.

    cells  those of the positions from `start` on; at `start` itself the sequence can go on
    """
    stop = start + len(cells)
    if reach.kind == "full":
        return stop
    # Most often nothing is missing where it is needed, and only that is looked at.
    if not np.any(cells[max(reach.oldest_visible(stop) - start, 0) :] == HOLE):
        return stop
    positions = np.arange(start, stop + 1, dtype=np.int64)
    last_hole = np.full(len(positions), -1, dtype=np.int64)
    np.maximum.accumulate(np.where(cells == HOLE, positions[:-1], -1), out=last_hole[1:])
    return int(positions[last_hole < reach.oldest_visible(positions)].max(initial=start))
