"""Rotary embeddings that depend on the length of the sequence (LongRoPE): short factors within the model's original
length, long factors beyond it.

transformers chooses the factors of a whole forward by its longest position. In a packed batch one long sequence would
rotate all others by its factors, and the chunks of one prompt would get both. Here each token gets the factors that it
has when transformers runs its sequence alone. Outside of `use_long_factors` the model is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.cache_utils import DynamicCache

from kvcache.spec import Span

_ROPE_TYPE = "longrope"

# Cosines and sines [batch, tokens, width], or both as complex numbers [batch, tokens, pairs].
_Angles: TypeAlias = tuple[Tensor, ...] | Tensor


@dataclass(frozen=True, slots=True)
class RopeSwitch:
    """The length at which the rotary factors of a model change.

    original_length  positions from here on are rotated by the long factors
    recomputes       whether `generate` recomputes a sequence by the long factors once it is longer (Phi-3); otherwise
                     earlier keys keep the short factors. A prompt longer than `original_length` has the long factors
                     from its start.
    """

    original_length: int
    recomputes: bool

    def long_factors(self, spans: Sequence[Span]) -> Tensor:
        """[tokens], whether each token of a batch is rotated by the long factors."""
        rows = [
            span.long_factors or position >= self.original_length for span in spans for position in _positions(span)
        ]
        return torch.tensor(rows)


# Which tokens are rotated by the long factors, [tokens] or [1]; None: transformers chooses.
_long_rows: ContextVar[Tensor | None] = ContextVar("engine.model.rope.long_rows", default=None)
_ALL_ROWS = torch.ones(1, dtype=torch.bool)


def original_length(model: Any) -> int | None:
    """The length up to which the short factors hold; None: no factors depend on the length. Raises ValueError."""
    lengths = sorted({length for module in model.modules() for length in _original_lengths(module)})
    if len(lengths) > 1:
        raise ValueError(f"its layers change their rotation at different lengths: {lengths}")
    return lengths[0] if lengths else None


def install(model: Any) -> RopeSwitch | None:
    """Let rotary embeddings follow `use_long_factors`; None: no factors depend on the length. Raises ValueError."""
    original = original_length(model)
    if original is None:
        return None
    for module in model.modules():
        if any(True for _ in _original_lengths(module)):
            module.forward = _rotate_by_row(module.forward, original)
    return RopeSwitch(original, _recomputes(model, original))


@contextmanager
def use_long_factors(rows: Tensor | None = _ALL_ROWS) -> Iterator[None]:
    """Inside the block, the tokens in the mask `rows` [tokens] are rotated by the long factors, the others by the short
    ones.

    By default all are; None leaves the choice to transformers. Positions of tokens with short factors are below the
    original length.
    """
    token = _long_rows.set(rows)
    try:
        yield
    finally:
        _long_rows.reset(token)


def _positions(span: Span) -> range:
    return range(span.start, span.stop)


def _original_lengths(module: nn.Module) -> Iterator[int]:
    """The lengths at which a module changes its factors, one for each layer type."""
    kinds, config = getattr(module, "rope_type", None), getattr(module, "config", None)
    if config is None or not isinstance(kinds, str | dict):
        return
    by_layer = {None: kinds} if isinstance(kinds, str) else kinds
    for layer_type, kind in by_layer.items():
        if kind == _ROPE_TYPE:
            settings = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
            yield int(settings["original_max_position_embeddings"])


def _rotate_by_row(rotate: Callable[..., _Angles], original: int) -> Callable[..., _Angles]:
    """The forward of a rotary embedding, with factors chosen for each token."""

    @wraps(rotate)
    def forward(x: Tensor, position_ids: Tensor, *args: Any, **settings: Any) -> _Angles:
        rows = _long_rows.get()
        if rows is None or not rows.any():
            return rotate(x, position_ids, *args, **settings)
        # One more position beyond the original length gives all tokens the long factors.
        long = rotate(x, pad(position_ids, (0, 1), value=original), *args, **settings)
        if rows.all():
            return _map_angles(lambda angles: angles[..., :-1, :], long)
        rows = rows.to(position_ids.device)[:, None]
        within = rotate(x, position_ids.masked_fill(rows[:, 0], 0), *args, **settings)
        return _map_angles(
            lambda angles, short_angles: torch.where(rows, angles[..., :-1, :], short_angles), long, within
        )

    return forward


def _map_angles(change: Callable[..., Tensor], *angles: _Angles) -> _Angles:
    """Apply a function to angles, or to each part of them."""
    if isinstance(angles[0], Tensor):
        return change(*angles)
    return tuple(change(*parts) for parts in zip(*angles, strict=True))


def _recomputes(model: Any, original: int) -> bool:
    """Whether `generate` passes all tokens again, instead of one, just beyond the original length."""
    memory, tokens = DynamicCache(), torch.zeros(1, original + 1, dtype=torch.long)
    rows = torch.zeros(1, 1, original, 1)
    memory.update(rows, rows, 0)
    inputs = model.prepare_inputs_for_generation(
        tokens,
        past_key_values=memory,
        attention_mask=torch.ones_like(tokens),
        use_cache=True,
        next_sequence_length=1,
    )
    return bool(inputs["input_ids"].shape[1] > 1)
