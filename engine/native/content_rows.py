"""The input of the first layer for steps with rows of contents (images, sounds), which the native step reads as is."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.model.injection import feature_arguments
from engine.native.comparison import least_squares_ratio
from engine.native.decoder import DecoderSpec
from engine.native.trace import embedding_rows
from engine.step.content import EmbeddedRows

# Tokens of the embedding whose scale is compared, and the relative error of scales in bfloat16.
_COMPARED_TOKENS, _SCALE_ERROR = 8, 0.01
# Arguments of decoders that add features of contents to the states after the first layers (deepstack of Qwen3-VL).
_FEATURES = "deepstack_visual_embeds"
FEATURE_ARGUMENTS = frozenset({_FEATURES, "visual_pos_masks"})


@dataclass(frozen=True, slots=True)
class AddedFeatures:
    """Features of contents that are added to the states after the first layers.

    features  [layers, features, width] float32
    rows      of the features by batch token; -1: none
    """

    features: Tensor
    rows: array[int]

    @classmethod
    def of(cls, tokens: int, embedded: Sequence[EmbeddedRows]) -> AddedFeatures | None:
        """Those of a step; None: its contents have none."""
        layers = feature_arguments(embedded).get(_FEATURES)
        if not layers:
            return None
        has_features = torch.zeros(tokens, dtype=torch.bool)
        for part in embedded:
            if _FEATURES in part.entry.feature_arguments:
                has_features[part.batch_start : part.batch_stop] = part.entry.features[part.entry_rows]
        rows = torch.where(has_features, has_features.cumsum(0) - 1, -1)
        return cls(torch.stack(layers).float(), array("q", rows.tolist()))


class ContentRows:
    """Inputs of tokens and contents for the first layer of a model."""

    def __init__(self, model: Any, decoder: DecoderSpec) -> None:
        self._embedding, self._scale = model.get_input_embeddings(), decoder.scale
        self._content_scale = _content_scale(self._embedding, decoder)

    @property
    def reason(self) -> str | None:
        """Why there are no such inputs; None: there are."""
        return "the native step embeds tokens only" if self._content_scale is None else None

    def inputs(self, tokens: Sequence[int], embedded: Sequence[EmbeddedRows]) -> tuple[array[int], Tensor]:
        """Tokens, with 0 for placeholders, and their inputs [tokens, width] in float32: of texts bit for bit those that
        the native step computes.
        """
        assert self._content_scale is not None, "steps with contents are checked before"
        with torch.inference_mode():
            numbers = torch.tensor(tokens)
            for part in embedded:
                numbers[part.batch_start : part.batch_stop] = 0
            states = self._scale * embedding_rows(self._embedding, numbers)
            for part in embedded:
                rows = part.entry.rows[part.entry_rows].float()
                states[part.batch_start : part.batch_stop] = self._content_scale * rows
        return array("q", numbers.tolist()), states


def _content_scale(embedding: Any, decoder: DecoderSpec) -> float | None:
    """The factor of rows of contents: that of the decoder, without one inside the embedding. None: it is not known."""
    if decoder.pair_input is not None or decoder.per_layer_inputs is not None:
        return None
    tokens = torch.arange(_COMPARED_TOKENS)
    with torch.inference_mode():
        scale = least_squares_ratio(embedding_rows(embedding, tokens), embedding(tokens).float())
    for inside, outside in ((1.0, decoder.scale), (decoder.scale, 1.0)):
        if math.isclose(scale, inside, rel_tol=_SCALE_ERROR):
            return outside
    return None
