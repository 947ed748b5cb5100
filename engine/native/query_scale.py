"""The scale of queries that grows with their position (Llama 4, Ministral 3)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from engine.native.decoder import QueryScale


def query_scales(config: Any) -> Iterator[QueryScale | None]:
    """Scales that layers of a text configuration may have: None, and those of its settings."""
    yield None
    rope = getattr(config, "rope_parameters", None) or {}
    beta, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    if beta and length:
        yield QueryScale(beta, length)
    beta, length = getattr(config, "attn_scale", None), getattr(config, "floor_scale", None)
    if beta and length:
        yield QueryScale(beta, length, offset=1)


def query_factors(scale: QueryScale, positions: Tensor) -> Tensor:
    """The factors [rows] of queries at positions [rows], computed in float32 as in transformers."""
    return 1 + scale.beta * torch.log(1 + torch.floor((positions + scale.offset) / scale.length))


def without_scale(queries: Tensor, scale: QueryScale | None, positions: Tensor) -> Tensor:
    """Queries [heads, rows, width] divided by their factors."""
    return queries if scale is None else queries / query_factors(scale, positions)[:, None]
