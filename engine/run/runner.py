"""The interface of the runners, and the list of runners of a model.

Local ones are PackedRunner, SequentialRunner, and NativeRunner (engine/native/runner.py); TensorParallelRunner
(engine/parallel/runner.py) runs a local one on every rank.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from engine.kernels.products import RowInvariantProduct
from engine.model.layers import CachedLayer
from engine.model.rope import RopeSwitch
from engine.sample.sampler import Sampler, SamplingContext
from engine.step.input import StepFeatures, StepInput
from engine.step.output import StepOutput
from kvcache.forward import Forward


class ModelRunner(Protocol):
    """Runs a model over the spans of open forwards of the cache.

    layers              with KV cells, in the order of the cache
    long_factor_layers  the same with the rotation of sequences beyond the original length; equal without a switch
    switch              when the rotary factors change; None: never
    sampler             of its logits
    """

    layers: tuple[CachedLayer, ...]
    long_factor_layers: tuple[CachedLayer, ...]
    switch: RopeSwitch | None
    sampler: Sampler

    @abstractmethod
    def supports(self, features: StepFeatures) -> str | None:
        """The reason why the runner cannot compute a step with the features; None if it can."""
        ...

    @abstractmethod
    def run(self, step: StepInput) -> StepOutput:
        """Compute a step with supported features."""
        ...


class LocalRunner(ModelRunner, Protocol):
    """A runner that computes in this process alone."""

    @abstractmethod
    def make_invariant(self, product: RowInvariantProduct) -> None:
        """Give each row the same bits in any batch and for any chunks, from now on; see engine/model/invariant.py."""
        ...


class FirstSupporting(LocalRunner):
    """The runners of one model, fastest first: the first that supports a step computes it.

    Their logits differ by rounding.
    """

    def __init__(self, runners: Sequence[LocalRunner]) -> None:
        self.runners = tuple(runners)
        first, last = self.runners[0], self.runners[-1]
        self.layers, self.long_factor_layers, self.switch = last.layers, last.long_factor_layers, last.switch
        self.sampler = first.sampler

    def supports(self, features: StepFeatures) -> str | None:
        """See ModelRunner."""
        return None if self._first(features) is not None else self.runners[-1].supports(features)

    def run(self, step: StepInput) -> StepOutput:
        """See ModelRunner."""
        runner = self._first(step.features)
        assert runner is not None, "requests are checked before"
        return runner.run(step)

    def make_invariant(self, product: RowInvariantProduct) -> None:
        """See LocalRunner."""
        for runner in self.runners:
            runner.make_invariant(product)

    def supports_draft_loop(self, forward: Forward, first_tokens: int = 1) -> bool:
        """See DraftLoopRunner."""
        first = self.runners[0]
        return isinstance(first, DraftLoopRunner) and first.supports_draft_loop(forward, first_tokens)

    def run_draft_loop(self, forward: Forward, inputs: Sequence[DraftLoopInput], vocabulary: int) -> list[list[int]]:
        """See DraftLoopRunner."""
        first = self.runners[0]
        assert isinstance(first, DraftLoopRunner), "not checked by the caller"
        return first.run_draft_loop(forward, inputs, vocabulary)

    def _first(self, features: StepFeatures) -> LocalRunner | None:
        return next((runner for runner in self.runners if runner.supports(features) is None), None)


def runners_of(runner: ModelRunner) -> tuple[ModelRunner, ...]:
    """The runners of a FirstSupporting, fastest first, or the runner itself."""
    return runner.runners if isinstance(runner, FirstSupporting) else (runner,)


@dataclass(frozen=True, slots=True)
class DraftLoopInput:
    """One sequence of a draft loop.

    tokens   to compute in the first step
    count    tokens to sample; 0: none
    context  of the first sampled token, of unmodified logits (`is_native` of engine/native/sampler.py)
    """

    tokens: Sequence[int]
    count: int
    context: SamplingContext

    @property
    def batch_tokens(self) -> int:
        """The length of its span: the tokens, and all sampled tokens but the last."""
        return len(self.tokens) + max(self.count - 1, 0)


@runtime_checkable
class DraftLoopRunner(Protocol):
    """A runner of several steps at once, each of which samples the token that the next one computes."""

    def supports_draft_loop(self, forward: Forward, first_tokens: int = 1) -> bool:
        """Whether `run_draft_loop` computes a forward, with `first_tokens` in its first step."""
        ...

    def run_draft_loop(self, forward: Forward, inputs: Sequence[DraftLoopInput], vocabulary: int) -> list[list[int]]:
        """The sampled tokens of each input; fewer than its count from logits on that are not finite.

        forward     open, with a span of `batch_tokens` for each input; `supports_draft_loop` holds
        vocabulary  only the first `vocabulary` tokens are sampled
        """
        ...
