"""Keys and values from which token, position and time of writing can be read back.

Keys are rotated by numpy's complex numbers, independently of `kvcache.rotary`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.cache import Cache
from kvcache.forward import Forward
from kvcache.spec import AttentionRange, LayerSpec, Rotation, Span
from tests.kvcache.reference import oldest

TOKENS = 11

HALF = LayerSpec(2, 5, 2, AttentionRange(), Rotation("half", 1, (0.21, 0.047)))
INTERLEAVED = LayerSpec(2, 5, 2, AttentionRange(), Rotation("interleaved", 0, (0.13, 0.31)))
NEGATIVE_WINDOW = LayerSpec(1, 3, 2, AttentionRange("window", 4), Rotation("interleaved", 0, (-0.21,)))
NO_POSITION = LayerSpec(1, 3, 4, AttentionRange(), Rotation())
LEARNED = LayerSpec(1, 3, 4, AttentionRange(), None)
LEARNED_SIBLING = LayerSpec(2, 5, 2, AttentionRange(), None)
PAIR = LayerSpec(1, 3, 2, AttentionRange("window", 2), Rotation("half", 0, (0.13,)))
LONE = LayerSpec(1, 3, 2, AttentionRange("window", 1), Rotation("half", 0, (0.13,)))
CHUNKED = LayerSpec(1, 3, 2, AttentionRange("chunk", 4), Rotation("half", 0, (0.21,)))

SHIFTABLE = (HALF, NEGATIVE_WINDOW, INTERLEAVED, NO_POSITION)
WINDOWED = (NEGATIVE_WINDOW, PAIR, LONE)
UNSHIFTABLE = ((HALF, NEGATIVE_WINDOW, LEARNED), (HALF, CHUNKED), (HALF, LEARNED_SIBLING, NEGATIVE_WINDOW))


def key_rows(layer: LayerSpec, tokens: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """Keys of tokens at positions: [heads, tokens, key_width]."""
    token = np.asarray(tokens, dtype=np.float64)
    heads = np.arange(layer.heads, dtype=np.float64)[:, None, None]
    rows = 1.0 + token[None, :, None] + 100.0 * heads + 0.25 * np.arange(layer.key_width)
    rotation = layer.rotation
    if rotation is None:
        return rows
    for pair, frequency in enumerate(rotation.inverse_frequency):
        first, second = columns(rotation, pair)
        rotated = (rows[..., first] + 1j * rows[..., second]) * np.exp(1j * frequency * np.asarray(positions))
        rows[..., first], rows[..., second] = rotated.real, rotated.imag
    return rows


def columns(rotation: Rotation, pair: int) -> tuple[int, int]:
    """The two columns of a rotated pair."""
    if rotation.layout == "half":
        return rotation.offset + pair, rotation.offset + pair + len(rotation.inverse_frequency)
    return rotation.offset + 2 * pair, rotation.offset + 2 * pair + 1


def value_rows(layer: LayerSpec, tokens: Sequence[int], serials: Sequence[int]) -> NDArray[np.float64]:
    """Values of tokens with their time of writing: [heads, tokens, value_width]."""
    rows = np.zeros((layer.heads, len(tokens), layer.value_width))
    rows[..., 0] = tokens
    rows[..., 1] = serials
    return rows


def write(forward: Forward, layers: Sequence[LayerSpec], tokens: Sequence[int], serials: Sequence[int]) -> None:
    """Store one row for each token in every layer, in the order of the spans."""
    positions = [position for span in forward.spans for position in range(span.start, span.stop)]
    for index, layer in enumerate(layers):
        device = forward.cache.layer_group(index)[0].pool.device
        rows = (key_rows(layer, tokens, positions), value_rows(layer, tokens, serials))
        forward.store_kv(index, *(torch.from_numpy(own).to(device) for own in rows))


def feed(cache: Cache, layers: Sequence[LayerSpec], slot: int, tokens: Sequence[int]) -> None:
    """Append tokens to a slot, with serial number 0."""
    with cache.forward([Span(slot, cache.cached_length(slot), len(tokens))]) as forward:
        write(forward, layers, tokens, [0] * len(tokens))


def read(cache: Cache, layers: Sequence[LayerSpec], slot: int) -> list[int]:
    """The tokens of a slot, after a check that all layers agree, visible cells are present and keys are in place.

    -1 for a token without a cell in any layer.
    """
    length = cache.cached_length(slot)
    tokens = np.full(length, -1)
    for index, layer in enumerate(layers):
        group, own = cache.layer_group(index)
        table = group.table(slot)
        (there,) = np.nonzero(table >= 0)
        cells = torch.from_numpy(table[there])
        here = group.pool.values.rows[own][0, cells, 0].to(torch.int64).numpy()
        assert set(range(oldest(layer.attention_range, length), length)) <= set(there.tolist())
        known = tokens[there] >= 0
        assert tokens[there][known].tolist() == here[known].tolist()
        tokens[there] = here
        keys = group.pool.keys.rows[own][:, cells].double().numpy()
        np.testing.assert_allclose(keys, key_rows(layer, here.tolist(), there.tolist()), rtol=0, atol=1e-9)
    return tokens.tolist()
