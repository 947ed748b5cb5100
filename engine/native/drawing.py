"""Tokens drawn from rows of logits in one native call, that can be described before the logits are computed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from engine.kernels.cpu.native import address
from engine.native.chain import link_table
from engine.native.library import ChoicesFields
from engine.sampling import Draw


class Drawing:
    """One token a row, as `emit` says it of draws of which `chains` holds.

    fields  for the library, which writes `tokens`; they must not outlive this
    """

    def __init__(self, draws: Sequence[Draw], logits: int, outputs: int) -> None:
        """Of rows that lie side by side at the address `logits`, in float32, each of so many tokens."""
        self._links = link_table((draw, 0, 0) for draw in draws)
        self._said = array("q", bytes(8 * len(draws)))
        links, said, threads = address(self._links), address(self._said), torch.get_num_threads()
        self.fields = ChoicesFields(links, len(draws), logits, outputs, said, threads)

    @property
    def tokens(self) -> list[int | None]:
        """What was drawn; None where a row has no finite maximum."""
        return [None if token < 0 else token for token in self._said]
