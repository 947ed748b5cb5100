"""The runner of rank 0 under tensor parallelism: every forward is broadcast to the workers and runs on all ranks."""

from __future__ import annotations

from engine.parallel.messages import MoveKeys, forward_message
from engine.parallel.workers import Workers
from engine.run.runner import ModelRunner
from engine.step.input import StepFeatures, StepInput
from engine.step.output import StepOutput
from kvcache.cell_pool import CellArray


class TensorParallelRunner(ModelRunner):
    """The runner of rank 0's part of a model. Belongs to the engine thread.

    workers  the other ranks

    An exception inside a forward leaves the ranks out of step: it ends the engine.
    """

    def __init__(self, runner: ModelRunner, workers: Workers) -> None:
        self._runner, self.workers = runner, workers
        self.layers, self.long_factor_layers = runner.layers, runner.long_factor_layers
        self.switch, self.sampler = runner.switch, runner.sampler

    def supports(self, features: StepFeatures) -> str | None:
        if (
            features.bidirectional
            or features.encoder
            or features.contents
            or features.position_axes
            or features.far_positions
        ):
            return "media are not supported with --tensor-parallel"
        if features.adapters:
            return "adapters are not supported with --tensor-parallel"
        return self._runner.supports(features)

    def run(self, step: StepInput) -> StepOutput:
        """See ModelRunner. Rank 0 alone samples."""
        with self.workers.in_step():
            self.workers.send(forward_message(step))
            return self._runner.run(step)

    def move_keys(self, group: int, old: CellArray, new: CellArray, distance: int) -> None:
        """Move cached keys on the workers; see Cache, `on_move`."""
        with self.workers.in_step():
            self.workers.send(MoveKeys(group, old, new, distance))
