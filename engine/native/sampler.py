"""Tokens drawn from rows of logits in one native call, that can be described before the logits are computed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from engine.kernels.cpu.attention import address
from engine.native.draft_loop import write_draw_spec
from engine.native.step_library import DRAW_SPEC, SamplingFields
from engine.sample.sampler import SamplingContext


class SamplingCall:
    """One token a row of logits that lie at one place, as often as they are written anew.

    fields  for the library, which writes `tokens`; they must not outlive this
    """

    def __init__(self, rows: int, logits: int, outputs: int) -> None:
        """Of so many rows at most, side by side at the address `logits`, in float32, each of so many tokens."""
        self._links, self._said = array("q", bytes(DRAW_SPEC.size * rows)), array("q", bytes(8 * rows))
        links, said = address(self._links), address(self._said)
        self.fields = SamplingFields(links, rows, logits, outputs, said, torch.get_num_threads())

    def describe(self, draws: Sequence[SamplingContext]) -> None:
        """Of the rows to come as many are drawn from as there are draws, as `emit` does; `chains` holds of each."""
        self.fields.rows = len(draws)
        for row, draw in enumerate(draws):
            write_draw_spec(self._links, row, draw, 0, 0)

    @property
    def tokens(self) -> list[int | None]:
        """What was drawn; None where a row has no finite maximum."""
        return [None if token < 0 else token for token in self._said[: self.fields.rows]]
