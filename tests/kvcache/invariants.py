"""Invariants of a whole cache, checked token by token: slots, nodes, files and counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from kvcache.attention_group import HOLE, AttentionGroup
from kvcache.cache import Cache
from kvcache.cell_pool import CellArray
from kvcache.node import Node
from kvcache.offload import OffloadConfig
from tests.kvcache import reference
from tests.kvcache.content import STATE, Content, SlotText, rotated
from tests.kvcache.digests import check_references

oldest = lru_cache(maxsize=None)(reference.oldest)


def check_slot(cache: Cache, slot: int, text: SlotText, content: Content) -> None:
    """Check that a slot holds its tokens, and all cells visible from its end."""
    tokens = tuple(text.tokens)
    assert len(tokens) == cache.cached_length(slot)
    if not tokens:
        return
    numbers = content.numbers(text.salt, tokens)
    for group in cache.groups:
        table = group.table(slot)
        assert HOLE not in table[oldest(group.spec.attention_range, len(tokens)) :]
        _check_cells(group, table, numbers, 0)
    if cache.recurrent_states is not None:
        state = cache.recurrent_states.get_tensor(slot, len(tokens), STATE)
        assert state is not None
        assert content.state(text.salt, tokens) == float(state)


def resume_length(cache: Cache, slot: int, length: int) -> int:
    """The largest length, at most the one asked for, at which a slot can resume, by trying all."""
    tables = [(group.spec.attention_range, group.table(slot)) for group in cache.groups]
    states = None if cache.recurrent_states is None else cache.recurrent_states._slots[slot].states
    for at in range(min(length, cache.cached_length(slot)), 0, -1):
        seen = all(HOLE not in table[oldest(reach, at) : at] for reach, table in tables)
        if seen and (states is None or at in states):
            return at
    return 0


def resident_length(cache: Cache, slot: int, tokens: Sequence[int], salt: bytes) -> int:
    """The length that a slot, which holds the first tokens, could reach with resident content alone."""
    path: list[Node] = []
    node, depth = cache._tree._radix.roots.get(salt), 0
    while node is not None and depth < len(tokens):
        node = node.children.get(int(tokens[depth]))
        if node is None or not node.resident:
            break
        path.append(node)
        same = node.tokens.tolist()[: len(tokens) - depth]
        matched = next((at for at, token in enumerate(same) if token != tokens[depth + at]), len(same))
        depth += matched
        if depth < node.stop:
            break
    cached_length = cache.cached_length(slot)
    for at in range(depth, cached_length, -1):
        if _can_resume(cache, path, cached_length, at):
            return at
    return cached_length


def check_tree(cache: Cache, content: Content) -> None:
    """Check that every node holds its edge, every reference has an owner, and leaves are evicted first."""
    check_references(cache)
    order = {node: at for at, node in enumerate(cache._tree._radix.lru)}
    states = 0
    for salt, root in cache._tree._radix.roots.items():
        assert root.children
        for node, before in _walk(root, ()):
            tokens = (*before, *node.tokens.tolist())
            assert node.start == len(before)
            assert node.resident or node.offloaded_tokens == len(node.tokens)
            assert node.resident_children == sum(child.resident for child in node.children.values())
            assert node.resident == (node in order) == bool(node.references)
            assert all(
                node.resident and order[child] < order[node] for child in node.children.values() if child.resident
            )
            for group, held in zip(cache.groups, node.references, strict=False):
                _check_cells(group, held, content.numbers(salt, tokens)[node.start :], node.start)
            if cache.recurrent_states is not None and node.resident:
                for at, state in node.references[-1].states.items():
                    assert 0 < at <= len(node.tokens)
                    assert content.state(salt, tokens[: node.start + at]) == float(state[STATE])
                states += node.references[-1].bytes
    assert cache.recurrent_states is None or states == cache.recurrent_states._held_bytes <= max(
        cache.recurrent_states._budget, 0
    )


def check_offload(cache: Cache, config: OffloadConfig) -> None:
    """Check budgets, byte counts, and that every entry slice belongs to its edge."""
    here = cache._tree.offload
    assert here.memory_bytes == sum(entry.memory_bytes for entry in here._memory) <= here.memory_budget
    assert here.disk_bytes == sum(entry.file_bytes for entry in here._files) <= config.disk_bytes
    found = set()
    for root in cache._tree._radix.roots.values():
        for node, _ in _walk(root, ()):
            at = 0
            for part in node.entry_slices:
                tokens = part.entry.tokens[part.start : part.stop]
                assert node.tokens[at : at + len(tokens)].tolist() == tokens.tolist()
                assert node.start + at == part.entry.start + part.start
                assert node in part.entry.nodes
                assert part.entry in here._files or part.entry in here._memory
                found.add(part.entry)
                at += len(tokens)
    files = list(here._files)
    assert found == {*files, *here._memory}
    assert files == sorted(files, key=lambda entry: (entry.last_used, -entry.start))


def _check_cells(group: AttentionGroup, cells: CellArray, numbers: np.ndarray, start: int) -> None:
    """Check the content of all cells but holes, for positions from `start` on."""
    (there,) = np.nonzero(cells != HOLE)
    expected = numbers[there]
    keys, values = (buffer.rows.cpu().numpy()[0][:, cells[there]] for buffer in (group.pool.keys, group.pool.values))
    assert (values == expected[:, None]).all()
    assert np.abs(keys - rotated(expected, start + there)).max(initial=0) < 1e-6


def _can_resume(cache: Cache, path: Sequence[Node], cached_length: int, at: int) -> bool:
    for own, group in enumerate(cache.groups):
        first = max(oldest(group.spec.attention_range, at), cached_length)
        for node in path:
            if HOLE in node.references[own][max(first - node.start, 0) : max(at - node.start, 0)]:
                return False
    return cache.recurrent_states is None or any(at - node.start in node.references[-1].states for node in path)


def _walk(node: Node, before: tuple[int, ...]) -> Iterator[tuple[Node, tuple[int, ...]]]:
    """Every node below one, with the tokens before its edge."""
    for child in node.children.values():
        yield child, before
        yield from _walk(child, (*before, *child.tokens.tolist()))
