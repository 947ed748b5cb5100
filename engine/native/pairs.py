"""Runs a drafting layer (MTP), whose tokens are paired with hidden states, in one native call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from engine.native.runner import NativeRunner
from engine.run.runner import DraftLoopInput
from engine.step.input import FINAL_NORM, HiddenRows, StepInput
from kvcache.forward import Forward


class PairOutput(NamedTuple):
    """Logits [logit rows, vocabulary], and the hidden states [logit rows, width] that later tokens are paired with."""

    logits: Tensor
    states: Tensor


class NativePairRunner(NativeRunner):
    """A NativeRunner of a decoder with `pair_input`. Belongs to the engine thread."""

    def run_pairs(
        self, forward: Forward, tokens: Sequence[int], states: Tensor, logit_rows: Sequence[int]
    ) -> PairOutput:
        """Outputs for the tokens of all spans, with the hidden states [tokens, width] of the tokens before them."""
        self._bind_pair_states(states)
        output = self.run(StepInput(forward, tokens, logit_rows, HiddenRows(logit_rows)))
        return PairOutput(output.logits, output.hidden_states[FINAL_NORM])

    def run_pair_loop(
        self, forward: Forward, inputs: Sequence[DraftLoopInput], states: Tensor, vocabulary: int
    ) -> list[list[int]]:
        """See DraftLoopRunner; `states` [tokens, width] are those of the tokens before the first step's."""
        self._bind_pair_states(states)
        return self.run_draft_loop(forward, inputs, vocabulary)

    def _bind_pair_states(self, states: Tensor) -> None:
        # The tensor must live until the step is over, which reads it by address.
        self._pair_states = states.float().contiguous()
        self._step.initial_states = self._pair_states.data_ptr()
