"""The inner state of a cache: tables, pools and tree, for tests that check every cell."""

from __future__ import annotations

from itertools import chain
from typing import TypeAlias

import numpy as np
import torch

from kvcache.cache import Cache
from kvcache.spec import AttentionRange
from tests.kvcache.reference import Entry, ReferenceCache

# The reference entry in each cell, by attention range.
EntriesByCell: TypeAlias = dict[AttentionRange, dict[int, Entry]]


def as_index(cells: slice | torch.Tensor) -> slice | np.ndarray:
    """Cells of a segment as a numpy index."""
    return cells if isinstance(cells, slice) else cells.cpu().numpy()


def tree_cells(cache: Cache) -> dict[tuple[int, ...], list[int]]:
    """The prefix tree as a dictionary: for all tokens up to a position, the cell of each group."""
    found: dict[tuple[int, ...], list[int]] = {}
    open_nodes = [((), root) for root in cache._tree._radix.roots.values()]
    while open_nodes:
        before, node = open_nodes.pop()
        for at in range(len(node.tokens)):
            found[(*before, *node.tokens[: at + 1].tolist())] = [int(held[at]) for held in node.references]
        open_nodes += [((*before, *node.tokens.tolist()), child) for child in node.children.values()]
    return found


def group_index(cache: Cache, reach: AttentionRange) -> int:
    """The index of the first group with an attention range."""
    return next(at for at, group in enumerate(cache.groups) if group.spec.attention_range == reach)


def entries_by_cell(cache: Cache, reference: ReferenceCache) -> EntriesByCell:
    """The reference entry in each cell of a slot or of the tree."""
    tree = tree_cells(cache)
    cell_entries: EntriesByCell = {}
    for reach, store in reference.stores.items():
        at = group_index(cache, reach)
        tables = [cache.groups[at].table(slot).tolist() for slot in range(cache.slots)]
        cells = [*chain.from_iterable(tables), *(tree[path][at] for path in store.tree)]
        entries = [*chain.from_iterable(store.slots), *store.tree.values()]
        cell_entries[reach] = {cell: entry for cell, entry in zip(cells, entries, strict=True) if entry}
    return cell_entries


def cached_paths(cache: Cache) -> set[tuple[int, ...]]:
    """All token sequences in the prefix tree."""
    return set(tree_cells(cache))


def fingerprint(cache: Cache) -> list[object]:
    """All state that a refused operation must not change."""
    return [
        (
            [(group.length(slot), group.table(slot).tobytes()) for slot in range(cache.slots)],
            group.pool.reference_counts.tobytes(),
            group.pool.free_cells,
            group.pool.keys.rows.cpu().numpy().tobytes(),
            group.pool.values.rows.cpu().numpy().tobytes(),
        )
        for group in cache.groups
    ] + [tree_cells(cache)]
