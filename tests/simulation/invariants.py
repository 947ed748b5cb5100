"""Invariants of a core between two operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from engine.core import Core
from engine.schedule.fairness import MAX_DEBT, QUANTUM, DeficitRoundRobin
from kvcache.attention_group import HOLE
from kvcache.cache import Cache
from kvcache.node import Node
from tests.simulation.hash_model import HashModel
from tests.simulation.runner import read_cells


def check_core(core: Core, model: HashModel, salts: Mapping[bytes, int]) -> None:
    """Check sequences, slots, shares and cells.

    salts  the number in the cells for each salt of the prefix tree
    """
    _check_sequences(core)
    resident = check_cache(core.cache)
    _check_tokens(core, resident, model, salts)


def check_cache(cache: Cache) -> list[Node]:
    """Check that every reference of a cell belongs to a slot or a node, and that every other cell is free.

    Returns the resident nodes of the prefix tree.
    """
    tree = nodes(cache)
    resident = [node for node in tree if node.resident]
    lengths = [cache.cached_length(slot) for slot in range(cache.slots)]
    for index, group in enumerate(cache.groups):
        tables = [group.table(slot) for slot in range(cache.slots)]
        held = np.concatenate([*tables, *[node.references[index] for node in resident]])
        # Holes are -1, and any cell beyond the pool makes the counts longer.
        owners = np.bincount(held + 1, minlength=group.pool.cells + 1)[1:]
        assert np.array_equal(owners, group.pool.reference_counts), "references without an owner, or too few"
        assert group.pool.free_cells == group.pool.cells - np.count_nonzero(owners), "the count of free cells"
        assert [len(table) for table in tables] == lengths, "groups of different lengths"
    assert len(tree) == cache._tree.node_count, "the count of nodes"
    assert len(cache._tree._radix.lru) == len(resident), "resident nodes out of the order of use"
    states = cache.recurrent_states
    if states is not None:
        assert states._held_bytes == sum(node.references[-1].bytes for node in resident), "bytes of states"
    return resident


def nodes(cache: Cache) -> list[Node]:
    """All nodes of the prefix tree but the roots."""
    found = [child for root in cache._tree._radix.roots.values() for child in root.children.values()]
    for node in found:
        found.extend(node.children.values())
    return found


def check_empty(cache: Cache) -> None:
    """Check that no cell and no state is held once the prefix tree is cleared."""
    cache.reset_prefix_cache()
    check_cache(cache)
    for group in cache.groups:
        assert group.pool.free_cells == group.pool.cells, "cells that nobody can free"
    assert cache.recurrent_states is None or cache.recurrent_states._held_bytes == 0
    assert all(cache.cached_length(slot) == 0 for slot in range(cache.slots)), "a slot that was not cleared"


def _check_sequences(core: Core) -> None:
    scheduler = core._scheduler
    running, waiting = scheduler.running, list(scheduler.waiting)
    everybody = [*running, *waiting]
    assert {id(sequence) for sequence in everybody} == {id(sequence) for sequence in core._sequences.values()}
    assert len(everybody) == len(core._sequences), "a sequence in two queues"
    assert all(sequence.slot is None for sequence in waiting), "a waiting sequence with a slot"
    assigned = [sequence.slot for sequence in running]
    assert sorted([*assigned, *scheduler._slots._free]) == list(range(core.cache.slots)), "slots free and assigned"
    assert all(core.cache.cached_length(slot) == 0 for slot in scheduler._slots._free), "a free slot with tokens"
    assert set(scheduler._leaders) <= set(running)
    assert set(scheduler._admitted_at) == set(running) == set(scheduler.fairness._steps)
    assert [sequence.rank for sequence in waiting] == sorted(sequence.rank for sequence in waiting), "order of tiers"
    _check_shares(scheduler.fairness._owners, Counter(sequence.owner for sequence in everybody))
    _check_shares(scheduler.fairness._requests, Counter(sequence.group for sequence in everybody))


def _check_shares(shares: DeficitRoundRobin, members: Mapping[object, int]) -> None:
    assert shares._members == members, "members of a flow"
    assert set(shares._credit) == set(members)
    assert all(-MAX_DEBT <= credit <= QUANTUM + MAX_DEBT for credit in shares._credit.values()), "unbounded credit"


def _check_tokens(core: Core, resident: Sequence[Node], model: HashModel, salts: Mapping[bytes, int]) -> None:
    """Check that cells of slots and of nodes hold their tokens, computed under their salt."""
    group, layer = core.cache.layer_group(0)
    index = core.cache.groups.index(group)
    # By slot and node.
    tokens, cells, numbers = list[np.ndarray](), list[np.ndarray](), list[int]()
    for sequence in core._scheduler.running:
        assert sequence.slot is not None
        table = group.table(sequence.slot)
        assert len(table) <= len(sequence.tokens), "more cells than tokens"
        tokens.append(np.asarray(sequence.tokens[: len(table)], np.int64))
        cells.append(table)
        numbers.append(salts[sequence.context.salt])
    for node in resident:
        assert len(node.references[index]) == len(node.tokens), "a node with more or fewer cells than tokens"
        tokens.append(node.tokens)
        cells.append(node.references[index])
        numbers.append(salts[node.salt])
    if not tokens:
        return
    held = np.concatenate(cells)
    kept = held != HOLE
    _, values = read_cells(group, layer, held[kept])
    token_salts = np.repeat(np.asarray(numbers, np.float64), [len(part) for part in cells])
    assert (values[:, 0] == model.embed(np.concatenate(tokens)[kept])).all(), "cells of other tokens"
    assert (values[:, 1] == token_salts[kept]).all(), "cells of another salt"
