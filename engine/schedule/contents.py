"""The images and sounds of a sequence: which tokens can be computed, and the inputs of the decoder for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.schedule.context import ContextHistory
from engine.step.content import ContentEntry, EmbeddedRows, PromptLayout
from kvcache.spec import Span


class SequenceContents:
    """The contents of a sequence, through its context shifts.

    entry         of the content that is computed next or now, pinned in the encoder cache; None: not encoded yet
    entry_number  its number among the contents; None without an entry
    """

    def __init__(self, layout: PromptLayout, context: ContextHistory) -> None:
        self._layout, self._context = layout, context
        self._positions = layout.positions
        self._shifts = 0
        self.entry: ContentEntry | None = None
        self.entry_number: int | None = None

    def next_number(self, cached_length: int) -> int | None:
        """The number of the first content with uncomputed tokens; None if all tokens of contents are computed."""
        ranges = enumerate(self._context.content_ranges)
        return next((number for number, (_, stop) in ranges if stop > cached_length), None)

    def computable_stop(self, start: int) -> int | None:
        """Where a chunk from `start` ends at the latest; None: anywhere.

        A chunk has either tokens of one content or other tokens: different runners may compute them.
        """
        number = self.next_number(start)
        if number is None:
            return None
        content_start, content_stop = self._context.content_ranges[number]
        if start < content_start:
            return content_start
        return content_stop if number == self.entry_number else start

    def embedded_rows(self, start: int, stop: int, batch_start: int) -> Iterator[EmbeddedRows]:
        """The tokens of contents in [start, stop), of a span that begins at a batch token."""
        if self.entry is None or self.entry_number is None:
            return
        first, last = self._context.content_ranges[self.entry_number]
        first_row, last_row = max(first, start), min(last, stop)
        if first_row < last_row:
            offset = batch_start - start
            yield EmbeddedRows(self.entry, first_row - first, first_row + offset, last_row + offset)

    def positions(self, start: int, stop: int) -> Tensor | None:
        """Positions [axes, tokens] of the tokens [start, stop) of the context; None: their indices."""
        prompt = self._prompt_positions()
        if prompt is None:
            return None
        indices = torch.arange(start, stop)
        length = prompt.shape[1]
        generated = (indices + self._layout.offset).expand(len(prompt), -1)
        positions = torch.where(indices < length, prompt[:, indices.clamp(max=length - 1)], generated)
        return torch.cat((indices[None], positions[1:])) if len(positions) == 4 else positions

    def _prompt_positions(self) -> Tensor | None:
        """Positions of the prompt without dropped tokens. Only text is dropped, where all axes advance together."""
        if self._shifts != self._context.shifts and self._layout.positions is not None:
            positions = self._layout.positions
            for dropped in self._context.drops:
                later = positions[:, dropped.stop :] - dropped.length
                positions = torch.cat((positions[:, : dropped.start], later), 1)
            self._positions, self._shifts = positions, self._context.shifts
        return self._positions


def content_inputs(
    contents: Sequence[SequenceContents | None], spans: Sequence[Span]
) -> tuple[list[EmbeddedRows], Tensor | None]:
    """The rows of contents in a batch, and the positions of its tokens; see StepInput."""
    if not any(contents):
        return [], None
    rows: list[EmbeddedRows] = []
    positions: list[Tensor | None] = []
    batch_start = 0
    for sequence, span in zip(contents, spans, strict=True):
        rows += () if sequence is None else sequence.embedded_rows(span.start, span.stop, batch_start)
        positions.append(None if sequence is None else sequence.positions(span.start, span.stop))
        batch_start += span.length
    axes = next((len(of_span) for of_span in positions if of_span is not None), None)
    return rows, None if axes is None else torch.cat(_with_indices(positions, spans, axes), 1)


def _with_indices(positions: Sequence[Tensor | None], spans: Sequence[Span], axes: int) -> list[Tensor]:
    """The positions of each span; the indices of its tokens on all axes if it has none."""
    return [
        torch.arange(span.start, span.stop).expand(axes, -1) if of_span is None else of_span
        for of_span, span in zip(positions, spans, strict=True)
    ]
