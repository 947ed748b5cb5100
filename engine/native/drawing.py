"""Tokens drawn from rows of logits in one native call, that can be described before the logits are computed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from engine.kernels.cpu.native import address
from engine.native.chain import put_link
from engine.native.library import LINK, ChoicesFields
from engine.sample.sampler import Draw


class Drawing:
    """One token a row of logits that lie at one place, as often as they are written anew.

    fields  for the library, which writes `tokens`; they must not outlive this
    """

    def __init__(self, rows: int, logits: int, outputs: int) -> None:
        """Of so many rows at most, side by side at the address `logits`, in float32, each of so many tokens."""
        self._links, self._said = array("q", bytes(LINK.size * rows)), array("q", bytes(8 * rows))
        links, said = address(self._links), address(self._said)
        self.fields = ChoicesFields(links, rows, logits, outputs, said, torch.get_num_threads())

    def describe(self, draws: Sequence[Draw]) -> None:
        """Of the rows to come as many are drawn from as there are draws, as `emit` does; `chains` holds of each."""
        self.fields.rows = len(draws)
        for row, draw in enumerate(draws):
            put_link(self._links, row, draw, 0, 0)

    @property
    def tokens(self) -> list[int | None]:
        """What was drawn; None where a row has no finite maximum."""
        return [None if token < 0 else token for token in self._said[: self.fields.rows]]
