"""Computes a batch of texts in one forward of transformers' own model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from engine.embedder.head import EmbeddingHead
from engine.types.request import EmbeddingInput


class Embedder:
    """Runs batches of the embedding model. Shorter texts are padded at the end, and padding is masked.

    pad_token              padding token
    max_length_difference  tokens by which the lengths in a batch may differ
    original_length        longer texts are rotated by other factors (rope.py), so they share no batch with shorter
                           ones; None: no factors depend on the length
    threads                to compute with, independent of the generating model
    """

    def __init__(
        self,
        model: Any,
        head: EmbeddingHead,
        *,
        pad_token: int,
        threads: int,
        max_length_difference: int,
        original_length: int | None = None,
    ) -> None:
        self._model, self._head, self.pad_token, self._threads = model, head, pad_token, threads
        self._parameters = inspect.signature(model.forward).parameters.keys()
        self.max_length_difference, self._original_length = max_length_difference, original_length

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights and activations."""
        dtype: torch.dtype = self._model.dtype
        return dtype

    def can_batch(self, lengths: Sequence[int]) -> bool:
        """Whether texts of the given token lengths may share a batch."""
        similar = max(lengths) - min(lengths) <= self.max_length_difference
        return similar and (self._original_length is None or not min(lengths) <= self._original_length < max(lengths))

    def vectors(self, inputs: Sequence[EmbeddingInput]) -> Tensor:
        """The vectors or scores [inputs, dimensions] in float32."""
        longest = max(len(text.tokens) for text in inputs)
        rows = {
            "input_ids": [_padded(text.tokens, longest, self.pad_token) for text in inputs],
            "attention_mask": [_padded([1] * len(text.tokens), longest, 0) for text in inputs],
        }
        if any(text.token_types for text in inputs):
            rows["token_type_ids"] = [_padded(text.token_types, longest, 0) for text in inputs]
        accepted = {name: row for name, row in rows.items() if name in self._parameters}
        with torch.inference_mode(), _use_threads(self._threads):
            output = self._model(
                **{name: torch.tensor(row, device=self._model.device) for name, row in accepted.items()}
            )
            return self._head(output, inputs).float().cpu()


def _padded(row: Sequence[int], length: int, padding: int) -> list[int]:
    return [*row, *[padding] * (length - len(row))]


@contextmanager
def _use_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
