"""Counter-based noise: a random number for each (seed, position, token), without generator state.

Sampled text is therefore independent of the batch, chunk sizes, prefix reuse and speculation. Philox4x32-10 after
Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11), in 64-bit integer arithmetic on tensors.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Words of 64 bits. For few of them numpy is several times faster than torch.
Words = TypeVar("Words", Tensor, NDArray[np.int64])

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_ROUNDS = 10

# Range of `gumbel` for uniforms of 32 bits: -ln(-ln((n + 0.5) / 2^32)).
MAX_NOISE, MIN_NOISE = 22.87, -3.14


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Four random words for each counter; all int64 of one shape with values in [0, 2^32)."""
    a, b, c, d = counter
    k0, k1 = key
    # Products wrap like those of uint64, and bits above the word are dropped only where they are multiplied: here every
    # operation is a pass over memory, or a call of numpy for a few numbers.
    for _ in range(_ROUNDS):
        product_a, product_c = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b = ((product_c >> 32) ^ b ^ k0) & _WORD, product_c
        c, d = ((product_a >> 32) ^ d ^ k1) & _WORD, product_a
        k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
    return a, b & _WORD, c, d & _WORD


def gumbel(seeds: Tensor, positions: Tensor, tokens: Tensor, lane: int = 0) -> Tensor:
    """Standard Gumbel noise in float64 for each (seed, position, token); all int64 of one shape, seeds of 64 bits.

    The arg max of log-probabilities plus this noise is a sample of them (Gumbel-max; Maddison et al., 2014).
    """
    return -torch.log(-torch.log(uniform(seeds, positions, tokens, lane)))


def uniform(seeds: Tensor, positions: Tensor, tokens: Tensor, lane: int = 0) -> Tensor:
    """Uniform numbers in (0, 1) in float64, with the arguments of `gumbel`; lanes are independent of each other."""
    if tokens.device.type == "cpu":
        # Flat, because numpy scalars warn where arrays wrap around.
        flat_seeds, flat_positions, flat = (part.reshape(-1).numpy() for part in (seeds, positions, tokens))
        lanes = np.full_like(flat, lane)
        word = torch.from_numpy(_random_word(flat_seeds, flat_positions, flat, lanes)).view(tokens.shape)
    else:
        word = _random_word(seeds, positions, tokens, torch.full_like(tokens, lane))
    return (word.double() + 0.5) / 2.0**32


def _random_word(seeds: Words, positions: Words, tokens: Words, lanes: Words) -> Words:
    """The first of the four words."""
    counter = (positions & _WORD, (positions >> 32) & _WORD, tokens, lanes)
    return philox(counter, (seeds & _WORD, (seeds >> 32) & _WORD))[0]
