"""Content that names its tokens: stored values are digests of the salt and of all tokens up to their own.

A slot with the digests of its own tokens has no foreign, torn or moved content.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy as np
import torch

from kvcache.attention_group import HOLE, AttentionGroup
from kvcache.cache import Cache
from kvcache.cell_pool import CellArray
from kvcache.offload import OffloadConfig
from kvcache.spec import AttentionRange, LayerSpec, Span

FULL = LayerSpec(1, 2, 2)
WINDOW = LayerSpec(2, 2, 2, AttentionRange("window", 4))
CHUNK = LayerSpec(1, 2, 4, AttentionRange("chunk", 8))
STATE = ("state", 3)


def digests(tokens: Sequence[int], salt: bytes = b"") -> list[float]:
    """One number for each token, exact in float32."""
    found, last = [], crc32(salt)
    for token in tokens:
        last = crc32(int(token).to_bytes(8, "little", signed=True), last)
        found.append(float(last % 2**20))
    return found


def make(
    *layers: LayerSpec,
    slots: int = 3,
    capacity: int = 64,
    cells: int = 192,
    state_bytes: int | None = None,
    offload: OffloadConfig | None = None,
) -> Cache:
    """A cache of some layers."""
    return Cache(
        layers or (FULL,), slots=slots, capacity=capacity, cells=cells, state_bytes=state_bytes, offload=offload
    )


def feed(cache: Cache, slot: int, tokens: Sequence[int], *, upto: int | None = None, salt: bytes = b"") -> None:
    """Compute the missing tokens of a slot, which holds the first of `tokens`, up to `upto`."""
    start, stop = cache.cached_length(slot), len(tokens) if upto is None else upto
    if start == stop:
        return
    span = Span(slot, start, stop - start)
    numbers = torch.tensor(digests(tokens[:stop], salt)[start:])
    assert 0 == cache.evict_for([span])
    with cache.forward([span]) as forward:
        for group in cache.groups:
            for layer in group.spec.layers:
                rows = numbers[None, :, None].expand(group.spec.heads, len(numbers), 1)
                forward.store_kv(
                    layer, rows.repeat(1, 1, group.spec.key_width), rows.repeat(1, 1, group.spec.value_width)
                )
        if cache.recurrent_states is not None:
            assert (
                start == 0 or forward.recurrent_state(span.slot, span.start, STATE) == digests(tokens[:start], salt)[-1]
            )
            forward.store_recurrent_state(span.slot, span.stop, STATE, numbers[-1].clone())


def check_content(group: AttentionGroup, cells: CellArray, expected: Sequence[float]) -> None:
    """Check the content of all cells but holes."""
    there = torch.from_numpy(cells[cells != HOLE])
    goal = [number for number, cell in zip(expected, cells, strict=True) if cell != HOLE]
    for buffer in (group.pool.keys, group.pool.values):
        read = buffer.read(0, there, torch.float32)
        assert (read == torch.tensor(goal)[None, :, None]).all()


def check(cache: Cache, slot: int, tokens: Sequence[int], *, salt: bytes = b"") -> None:
    """Check that a slot holds `tokens`, and all cells visible from its end."""
    assert len(tokens) == cache.cached_length(slot)
    numbers = digests(tokens, salt)
    for group in cache.groups:
        table = group.table(slot)
        assert HOLE not in table[group.spec.attention_range.oldest_visible(len(tokens)) :]
        check_content(group, table, numbers)
    if cache.recurrent_states is not None and len(tokens):
        state = cache.recurrent_states.get_tensor(slot, len(tokens), STATE)
        assert state is not None
        assert numbers[-1] == float(state)


def compute_and_insert(cache: Cache, tokens: Sequence[int], *, checkpoint: bool = False, salt: bytes = b"") -> None:
    """Compute tokens in the first slot, reusing its prefix, insert them, and clear the slot."""
    cache.reuse_prefix(0, tokens, salt=salt)
    feed(cache, 0, tokens, salt=salt)
    cache.insert_prefix(0, tokens, salt=salt, checkpoint=checkpoint)
    cache.clear(0)


def reused_length(cache: Cache, tokens: Sequence[int], *, salt: bytes = b"") -> int:
    """How many of the tokens the second slot gets from the prefix tree, after a check of their content."""
    cache.clear(1)
    length = cache.reuse_prefix(1, tokens, salt=salt)
    check(cache, 1, tokens[:length], salt=salt)
    cache.clear(1)
    return length


def check_references(cache: Cache) -> None:
    """Check that every reference belongs to a slot or to a node of the tree."""
    nodes = [child for root in cache._tree._radix.roots.values() for child in root.children.values()]
    for node in nodes:
        nodes.extend(node.children.values())
    assert len(nodes) == cache._tree.node_count
    for index, group in enumerate(cache.groups):
        owners = np.zeros(group.pool.cells, dtype=np.int32)
        tables = [group.table(slot) for slot in range(cache.slots)]
        for cells in tables + [node.references[index] for node in nodes if node.resident]:
            np.add.at(owners, cells[cells != HOLE], 1)
        assert owners.tolist() == group.pool.reference_counts.tolist()
        assert group.pool.free_cells == int((owners == 0).sum())


def flush_all(cache: Cache, size: int = 10**6) -> None:
    """Write all content, `size` bytes at a time; fails if that does not end."""
    for _ in range(500):
        if not cache.flush_to_disk(size):
            return
    raise AssertionError("the flush does not end")
