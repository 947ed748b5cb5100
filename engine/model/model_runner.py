"""The interfaces of the runners.

Local ones are PackedRunner, SequentialRunner, and NativeRunner (engine/native/runner.py); TensorParallelRunner
(engine/parallel/runner.py) runs a local one on every rank.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from engine.kernels.products import RowInvariantProduct
from engine.model.encoder_mask import EncoderMask
from engine.model.layers import CachedLayer
from engine.model.rope import RopeSwitch
from engine.sample.logprobs import LogprobQuery
from engine.sample.sampler import LogitReport, Sampler, SamplingContext
from kvcache.forward import Forward


class ModelRunner(Protocol):
    """Runs a model over the spans of open forwards of the cache.

    layers                  with KV cells, in the order of the cache
    long_factor_layers      the same with the rotation of sequences beyond the original length; equal without a switch
    switch                  when the rotary factors change; None: never
    sampler                 for the logits of `run`
    has_hidden_states       whether the self-test found that `run_with_hidden_states` can be called
    supports_bidirectional  whether spans may have bidirectional ranges
    """

    layers: tuple[CachedLayer, ...]
    long_factor_layers: tuple[CachedLayer, ...]
    switch: RopeSwitch | None
    sampler: Sampler
    has_hidden_states: bool
    supports_bidirectional: bool

    @abstractmethod
    def run(
        self,
        forward: Forward,
        tokens: Sequence[int],
        logit_rows: Sequence[int],
        encoder_masks: Sequence[EncoderMask | None] = (),
    ) -> Tensor:
        """Logits [logit_rows, vocabulary] of an open forward.

        tokens         of all spans, concatenated
        logit_rows     batch rows, ascending
        encoder_masks  the encoder output that each span attends to; None: none. Empty: none for all spans
        """
        ...

    @abstractmethod
    def run_with_hidden_states(
        self,
        forward: Forward,
        tokens: Sequence[int],
        logit_rows: Sequence[int],
        hidden_rows: Sequence[int],
        encoder_masks: Sequence[EncoderMask | None] = (),
    ) -> tuple[Tensor, Tensor]:
        """As `run`, and the hidden states [hidden_rows, width] before the output layer; all rows ascending."""
        ...

    def run_and_sample(
        self,
        forward: Forward,
        tokens: Sequence[int],
        logit_rows: Sequence[int],
        encoder_masks: Sequence[EncoderMask | None],
        contexts: Sequence[SamplingContext],
    ) -> list[int | None]:
        """The token that `sampler` samples from the logits of each row; None where these are not finite."""
        return self.sampler.sample(self.run(forward, tokens, logit_rows, encoder_masks), contexts)

    def run_and_report(
        self,
        forward: Forward,
        tokens: Sequence[int],
        logit_rows: Sequence[int],
        encoder_masks: Sequence[EncoderMask | None],
        sampled_rows: Sequence[int],
        queries: Sequence[LogprobQuery],
    ) -> LogitReport:
        """The report of the logits that `run` returns; see Sampler. They may be computed by its `sample`."""
        return self.sampler.report(self.run(forward, tokens, logit_rows, encoder_masks), sampled_rows, queries)


class LocalRunner(ModelRunner, Protocol):
    """A runner that computes in this process alone."""

    @abstractmethod
    def make_invariant(self, product: RowInvariantProduct) -> None:
        """Give each row the same bits in any batch and for any chunks, from now on; see engine/model/invariant.py."""
        ...


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
