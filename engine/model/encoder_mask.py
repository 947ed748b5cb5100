"""What the rows of one sequence see of an encoder entry: all of it, or from some token on the parts that it names."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.encoder_cache import EncoderEntry


@dataclass(frozen=True, slots=True)
class EncoderMask:
    """A pinned entry, and which of its parts each row sees.

    parts  [rows of the prompt, parts], true where a row sees a part; parts are equally long. Rows behind the prompt
           see what its last row sees. On the CPU. None: every row sees everything
    """

    entry: EncoderEntry
    parts: Tensor | None = None

    def attending(self, start: int, stop: int) -> Tensor:
        """Which of the rows [start, stop) see anything: [rows]."""
        seen = self._visible_parts(start, stop)
        return torch.ones(stop - start, dtype=torch.bool) if seen is None else seen.any(-1)

    def mask(self, start: int, stop: int, length: int) -> Tensor | None:
        """What the rows [start, stop) attend to of `length` keys: [rows, length]; None: all of them to all."""
        seen = self._visible_parts(start, stop)
        if seen is None:
            return None
        # A row that sees no part attends to all, as in training (Llama 3.2 Vision); what it makes of them is dropped.
        seen = seen | ~seen.any(-1, keepdim=True)
        return seen.repeat_interleave(length // seen.shape[1], -1)

    def _visible_parts(self, start: int, stop: int) -> Tensor | None:
        if self.parts is None:
            return None
        return self.parts[torch.arange(start, stop).clamp(max=len(self.parts) - 1)]
