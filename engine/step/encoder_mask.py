"""Which parts of an encoder entry each token of a sequence attends to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.encoder_cache import EncoderEntry


@dataclass(frozen=True, slots=True)
class EncoderMask:
    """A pinned entry, and the parts of it that each token attends to.

    parts  [prompt tokens, parts] on the CPU, true where a token attends to a part; parts have equal length. Generated
           tokens attend to the parts of the last prompt token. None: every token attends to the whole entry
    """

    entry: EncoderEntry
    parts: Tensor | None = None

    def attending(self, start: int, stop: int) -> Tensor:
        """Which of the tokens [start, stop) attend to any part: [tokens]."""
        visible = self._visible_parts(start, stop)
        return torch.ones(stop - start, dtype=torch.bool) if visible is None else visible.any(-1)

    def mask(self, start: int, stop: int, length: int) -> Tensor | None:
        """The keys that tokens [start, stop) attend to: [tokens, length]; None: all."""
        visible = self._visible_parts(start, stop)
        if visible is None:
            return None
        # A token without visible parts attends to all, as in training (Llama 3.2 Vision); its output is dropped.
        visible = visible | ~visible.any(-1, keepdim=True)
        return visible.repeat_interleave(length // visible.shape[1], -1)

    def _visible_parts(self, start: int, stop: int) -> Tensor | None:
        if self.parts is None:
            return None
        return self.parts[torch.arange(start, stop).clamp(max=len(self.parts) - 1)]
