"""Content of a tiny model: for each token a number that follows from the salt and all tokens up to it.

Keys are rotated to their positions. After a shift a slot has a salt of its own, with the moved content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from kvcache.spec import AttentionRange, LayerSpec, Rotation

ANGLE = 0.1
FULL = LayerSpec(1, 2, 2, rotation=Rotation("half", 0, (ANGLE,)))
WINDOW = LayerSpec(2, 2, 1, AttentionRange("window", 4), Rotation("half", 0, (ANGLE,)))
CHUNK = LayerSpec(1, 2, 3, AttentionRange("chunk", 8), Rotation("half", 0, (ANGLE,)))
LONE = LayerSpec(1, 2, 2, AttentionRange("window", 1), Rotation("half", 0, (ANGLE,)))
STATE = ("state", 3)
STATE_BYTES = 8


@dataclass(slots=True)
class SlotText:
    """The expected content of a slot."""

    tokens: list[int] = field(default_factory=list)
    salt: bytes = b""


@dataclass(frozen=True, slots=True)
class ShiftedText:
    """The content of a slot after a shift: tokens, the stored number of each, and the state behind them."""

    tokens: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    state: int = 0


class Content:
    """The stored numbers of tokens under each salt."""

    def __init__(self) -> None:
        self._pasts: dict[bytes, ShiftedText] = {}
        self.numbers = lru_cache(maxsize=None)(self._numbers)

    def _numbers(self, salt: bytes, tokens: tuple[int, ...]) -> NDArray[np.float64]:
        past = self._pasts.get(salt, ShiftedText())
        pairs = zip(tokens, past.tokens, strict=False)
        same = next((at for at, pair in enumerate(pairs) if pair[0] != pair[1]), None)
        found = list(past.numbers[: min(len(tokens), len(past.tokens)) if same is None else same])
        last = found[-1] if found else crc32(salt) % 2**20
        for token in tokens[len(found) :]:
            last = crc32(token.to_bytes(8, "little"), last) % 2**20
            found.append(last)
        return np.array(found, dtype=np.float64)

    def state(self, salt: bytes, tokens: Sequence[int]) -> float:
        """The recurrent state behind tokens; a carried one still contains the dropped tokens."""
        past = self._pasts.get(salt)
        return float(past.state if past and past.tokens == tuple(tokens) else self.numbers(salt, tuple(tokens))[-1])

    def shifted(self, text: SlotText, keep: int, drop: int) -> SlotText:
        """The expected content of a slot after a shift, under a new salt."""
        numbers = self.numbers(text.salt, tuple(text.tokens)).astype(int).tolist()
        tokens = text.tokens[:keep] + text.tokens[keep + drop :]
        past = ShiftedText(
            tuple(tokens), (*numbers[:keep], *numbers[keep + drop :]), int(self.state(text.salt, text.tokens))
        )
        salt = hashlib.sha256(repr(past).encode()).digest()[:8]
        self._pasts[salt] = past
        return SlotText(tokens, salt)


def rotated(numbers: NDArray[np.float64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Keys of tokens at positions, [tokens, 2]: the stored numbers, rotated."""
    return numbers[:, None] * np.stack((np.cos(ANGLE * positions), np.sin(ANGLE * positions)), -1)
