"""Positions of tokens in an encoded text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TokenOffsets(Sequence[int]):
    """Positions in the text where tokens start (edge 0) or end (1), computed on access.

    A list of all of 400,000 tokens would hold the GIL for 0.25 s (measured), and a few are needed.
    """

    def __init__(self, encoding: Any, edge: int) -> None:
        self._encoding, self._edge = encoding, edge

    def __len__(self) -> int:
        return len(self._encoding)

    def __getitem__(self, token: Any) -> Any:
        return self._encoding.token_to_chars(token)[self._edge]
