"""A prompt with one content between two texts, as the unmodified model and the packed batches of a check have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.media.encoder import CapturingEncoder, ContentSample
from engine.step.content import EmbeddedRows
from kvcache.spec import Span


class SamplePrompt:
    """The prompt, with its content encoded.

    middle  a token index inside of the content, or after it if its tokens attend to later ones
    """

    def __init__(self, encoder: CapturingEncoder, sample: ContentSample, before: Sequence[int], after: Sequence[int]):
        self.tokens = [*encoder.text_only(before), *sample.tokens, *encoder.text_only(after)]
        start, stop = len(before), len(before) + len(sample.tokens)
        self._content, self._encoder = replace(sample.content, start=start, stop=stop), encoder
        self._entry = encoder.encode(self._content, sample.tokens)
        self._layout = encoder.layout(self.tokens, (self._content,))
        self.middle = stop if self._layout.bidirectional else (start + stop) // 2

    def reference_inputs(self) -> dict[str, Tensor]:
        """The inputs of the unmodified model."""
        return self._encoder.reference_inputs(self.tokens, self._content)

    def bidirectional(self, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """The bidirectional ranges that begin in a span."""
        return tuple(limits for limits in self._layout.bidirectional if start <= limits[0] < stop)

    def rows(self, span: Span, batch_start: int) -> list[EmbeddedRows]:
        """The tokens of the content in a span that begins at a batch token."""
        first, last = max(self._content.start, span.start), min(self._content.stop, span.stop)
        if first >= last:
            return []
        offset = batch_start - span.start
        return [EmbeddedRows(self._entry, first - self._content.start, first + offset, last + offset)]

    def positions(self, span: Span) -> Tensor | None:
        """[axes, tokens] of a span; None: token indices."""
        positions = self._layout.positions
        return None if positions is None else positions[:, span.start : span.stop]


def batch_contents(
    prompts: Sequence[SamplePrompt | None], spans: Sequence[Span]
) -> tuple[list[EmbeddedRows], Tensor | None]:
    """`StepInput.embeddings` and `StepInput.positions` of spans, each of a prompt with a content or of a text."""
    rows: list[EmbeddedRows] = []
    positions: list[Tensor | None] = []
    batch_start = 0
    for prompt, span in zip(prompts, spans, strict=True):
        rows += [] if prompt is None else prompt.rows(span, batch_start)
        positions.append(None if prompt is None else prompt.positions(span))
        batch_start += span.length
    axes = next((len(of_span) for of_span in positions if of_span is not None), None)
    if axes is None:
        return rows, None
    filled = [
        torch.arange(span.start, span.stop).expand(axes, -1) if of_span is None else of_span
        for of_span, span in zip(positions, spans, strict=True)
    ]
    return rows, torch.cat(filled, 1)
