"""The runner of rank 0 under tensor parallelism: every forward is broadcast to the workers and runs on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.model.encoder_mask import EncoderMask
from engine.model.model_runner import ModelRunner
from engine.parallel.messages import MoveKeys, forward_message
from engine.parallel.workers import Workers
from kvcache.cell_pool import CellArray
from kvcache.forward import Forward


class TensorParallelRunner(ModelRunner):
    """The runner of rank 0's part of a model. Belongs to the engine thread.

    workers  the other ranks

    An exception inside a forward leaves the ranks out of step: it ends the engine.
    """

    # Only media have bidirectional ranges, and models with an encoder are refused.
    supports_bidirectional = False

    def __init__(self, runner: ModelRunner, workers: Workers) -> None:
        self._runner, self.workers = runner, workers
        self.layers, self.long_factor_layers = runner.layers, runner.long_factor_layers
        self.switch, self.sampler = runner.switch, runner.sampler
        self.has_hidden_states = runner.has_hidden_states

    def run(
        self,
        forward: Forward,
        tokens: Sequence[int],
        logit_rows: Sequence[int],
        encoder_masks: Sequence[EncoderMask | None] = (),
    ) -> Tensor:
        """See ModelRunner."""
        with self.workers.in_step():
            self.workers.send(forward_message(forward, tokens, logit_rows, None))
            return self._runner.run(forward, tokens, logit_rows)

    def run_with_hidden_states(
        self,
        forward: Forward,
        tokens: Sequence[int],
        logit_rows: Sequence[int],
        hidden_rows: Sequence[int],
        encoder_masks: Sequence[EncoderMask | None] = (),
    ) -> tuple[Tensor, Tensor]:
        """See ModelRunner."""
        with self.workers.in_step():
            self.workers.send(forward_message(forward, tokens, logit_rows, hidden_rows))
            return self._runner.run_with_hidden_states(forward, tokens, logit_rows, hidden_rows)

    def move_keys(self, group: int, old: CellArray, new: CellArray, distance: int) -> None:
        """Move cached keys on the workers; see Cache, `on_move`."""
        with self.workers.in_step():
            self.workers.send(MoveKeys(group, old, new, distance))
