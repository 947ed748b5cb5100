"""A model of hashes: each layer hashes all numbers that a token attends to, with their positions.

The logits are a checksum of the cells that a sequence can see: a foreign, stale or misplaced cell changes its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcache.spec import AttentionRange, LayerSpec, Rotation

Numbers: TypeAlias = NDArray[np.uint64]
Positions: TypeAlias = NDArray[np.int64]

# Radians a position: a key that is off by one position is off by 0.05 of a number that is 1 or more.
ANGLE = 0.05
_LIMIT = np.uint64(2**20)
_FACTOR, _TOKEN, _POSITION, _SUM = (
    np.uint64(factor) for factor in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5)
)
_SHIFT, _HALF, _ONE = np.uint64(29), np.uint64(32), np.uint64(1)


def mix(numbers: Numbers) -> Numbers:
    """A hash of each number."""
    mixed = (numbers ^ (numbers >> _SHIFT)) * _FACTOR
    return mixed ^ (mixed >> _HALF)


@cache
def rotations(capacity: int) -> NDArray[np.float64]:
    """Cosine and sine at each position [positions, 2]."""
    angles = ANGLE * np.arange(capacity + 1)
    return np.stack((np.cos(angles), np.sin(angles)), -1)


@cache
def _embeddings(vocabulary: int, seed: int) -> Numbers:
    """The number of each token of a vocabulary."""
    return mix(np.arange(vocabulary, dtype=np.uint64) * _TOKEN + np.uint64(seed)) % _LIMIT + _ONE


@cache
def _offsets(vocabulary: int, seed: int) -> Numbers:
    """What each token of a vocabulary adds to the number whose hash is its logit."""
    return np.arange(vocabulary, dtype=np.uint64) * _POSITION + np.uint64(seed)


@dataclass(frozen=True, slots=True)
class HashModel:
    """A model of attention layers, with a recurrent layer after them or without.

    ranges      of each attention layer
    can_rotate  whether cached keys can be moved
    """

    seed: int
    vocabulary: int
    ranges: tuple[AttentionRange, ...]
    can_rotate: bool = True
    recurrent: bool = False

    @property
    def specs(self) -> list[LayerSpec]:
        """The layers in the cache: values are the number of a token and the salt under which it was computed."""
        rotation = Rotation("half", 0, (ANGLE,)) if self.can_rotate else None
        return [LayerSpec(1, 2, 2, attention_range, rotation) for attention_range in self.ranges]

    def embed(self, tokens: Sequence[int] | Positions) -> Numbers:
        """The number of each token."""
        return _embeddings(self.vocabulary, self.seed)[np.asarray(tokens, np.int64)]

    def weigh(self, layer: int, numbers: Numbers, positions: Positions) -> Numbers:
        """What each cell adds to the sum of a layer."""
        return mix(numbers * _TOKEN + positions.view(np.uint64) * _POSITION + np.uint64(layer))

    def combine(self, sums: Numbers, numbers: Numbers) -> Numbers:
        """The output of a layer for tokens with some numbers, from the sums over the cells that they attend to."""
        return mix(sums * _SUM + numbers) % _LIMIT + _ONE

    def next_state(self, state: int, number: int) -> int:
        """The recurrent state after one more token."""
        return (state * 1_000_003 + number * 8191 + 12345) % 2**40

    def with_states(self, numbers: Numbers, states: Sequence[int]) -> Numbers:
        """Numbers after the recurrent layer."""
        return mix(numbers * _SUM + np.asarray(states, np.uint64))

    def logits(self, numbers: Numbers) -> NDArray[np.float64]:
        """Logits [rows, vocabulary] between -4 and 4."""
        hashed = mix((numbers * _TOKEN)[:, None] + _offsets(self.vocabulary, self.seed)) >> np.uint64(40)
        logits: NDArray[np.float64] = hashed / 2.0**21 - 4
        return logits
