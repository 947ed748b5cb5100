"""The input of one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from engine.sample.logprobs import LogprobQuery
from engine.sample.sampler import SamplingContext
from engine.step.content import EmbeddedRows
from engine.step.encoder_mask import EncoderMask
from kvcache.forward import Forward
from kvcache.spec import Span


@dataclass(frozen=True, slots=True)
class Sampling:
    """Which rows of the logits of a step are sampled, and how.

    contexts  of the sampled rows, in order
    rows      of the logits; None: all
    queries   of the log-probabilities that are read afterwards, with SAMPLED for a sampled token, at most one for each
              row of logits; None: there are none, and the logits may stay inside the runner
    """

    contexts: Sequence[SamplingContext]
    rows: Sequence[int] | None = None
    queries: Sequence[LogprobQuery] | None = None


# Rotary positions have up to three axes (time, height, width); they are the last of `StepInput.positions`.
ROTARY_AXES = 3

# The place after the last layer and its norm: the input of the output layer.
FINAL_NORM = -1


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """Batch tokens whose hidden states are returned, and the layers after which they are read.

    rows    batch tokens, ascending
    layers  indices of decoder layers: the hidden states that the next layer gets, `hidden_states[layer + 1]` of
            transformers. After the last layer transformers returns them with the final norm alone: that is FINAL_NORM,
            its `hidden_states[-1]`; the index of the last layer gives them without it
    """

    rows: Sequence[int]
    layers: Sequence[int] = (FINAL_NORM,)


def decoder_layers_of(layers: Sequence[int]) -> tuple[int, ...]:
    """The layers without FINAL_NORM."""
    return tuple(layer for layer in layers if layer != FINAL_NORM)


@dataclass(frozen=True, slots=True)
class StepFeatures:
    """What a step requires of its runner besides causal spans and logits.

    hidden_layers      layers after which hidden states are returned (HiddenRows)
    bidirectional      tokens of a range attend to each other
    encoder            tokens attend to the output of an encoder
    adapters           tokens have a LoRA adapter
    contents           the inputs of tokens are rows of contents in place of embeddings
    content_arguments  names of further arguments of the decoder that contents have (deepstack)
    position_axes      positions that differ by axis
    far_positions      positions that exceed the capacity of a slot
    """

    hidden_layers: Sequence[int] = ()
    bidirectional: bool = False
    encoder: bool = False
    adapters: bool = False
    contents: bool = False
    content_arguments: frozenset[str] = frozenset()
    position_axes: bool = False
    far_positions: bool = False

    @classmethod
    def of_contents(
        cls, rows: Sequence[EmbeddedRows], positions: Tensor | None, spans: Sequence[Span], capacity: int
    ) -> StepFeatures:
        """What the contents of a step require; `rows` and `positions` as in StepInput."""
        return cls(
            bidirectional=any([span.bidirectional for span in spans]),
            contents=bool(rows),
            content_arguments=frozenset(
                name
                for of_entry in rows
                for name in (*of_entry.entry.token_arguments, *of_entry.entry.feature_arguments)
            ),
            position_axes=positions is not None and differ_by_axis(positions),
            far_positions=positions is not None and int(positions[-ROTARY_AXES:].max()) >= capacity,
        )


@dataclass(frozen=True, slots=True)
class StepInput:
    """All that one forward computes and returns; a runner reads nothing else.

    forward        open: spans, cells, states
    tokens         of all spans, concatenated
    logit_rows     batch tokens with logits, ascending
    hidden         hidden states that are returned; None: there are none
    encoder_masks  the encoder output that each span attends to, None: none; empty: none for all spans
    adapters       the slot of each span's adapter, 0: none (engine/adapters/store.py); empty: none for all spans
    sampling       None: the logits are returned
    embeddings     batch tokens whose inputs are rows of contents, ascending
    positions      [axes, tokens] int64 on the CPU, as the model takes them; of four axes the first is the index of the
                   token in its sequence. None: these indices
    """

    forward: Forward
    tokens: Sequence[int]
    logit_rows: Sequence[int]
    hidden: HiddenRows | None = None
    encoder_masks: Sequence[EncoderMask | None] = ()
    sampling: Sampling | None = None
    adapters: Sequence[int] = ()
    embeddings: Sequence[EmbeddedRows] = ()
    positions: Tensor | None = None

    @property
    def features(self) -> StepFeatures:
        """What the step requires of its runner."""
        return replace(
            StepFeatures.of_contents(self.embeddings, self.positions, self.forward.spans, self.forward.capacity),
            hidden_layers=() if self.hidden is None else self.hidden.layers,
            encoder=any(self.encoder_masks),
            adapters=any(self.adapters),
        )


def differ_by_axis(positions: Tensor) -> bool:
    """Whether a token has several positions [axes, tokens]."""
    rotary = positions[-ROTARY_AXES:]
    return not bool((rotary == rotary[-1]).all())
