"""Finds what each attention layer stores, its attention range and its rotation, by calibration runs of the model.

A token that attends only to itself has the same inputs in every layer at every position; only its key is rotated.
Running a few tokens at two positions therefore shows each layer's rotation, or that no known rotation explains it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from engine.kernels.latent import project_latents
from engine.model import hooks
from engine.model.margins import within
from kvcache.rotary import column_pairs, rotate
from kvcache.spec import AttentionRange, LayerSpec, Rotation

# The two positions: their distance distinguishes slow rotations from none, and every model has both.
_OLD_POSITION, _NEW_POSITION = 29, 3
# Tokens of a calibration run. Several, because a padding token has a zero key at every position.
_CALIBRATION_TOKENS = 8
# Largest error of the right rotation, in machine epsilons of the dtype. Measured over all families and Gemma 3 270M:
# 1.4 for the right one, 100 and more for all others.
_ROUNDING_FACTOR = 8
# Error in radians of an angle computed in float32 at _OLD_POSITION, whatever the dtype of the keys.
_ANGLE_ERROR = 2e-6


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """One attention layer that stores cells.

    index           its number in the model
    spec            its layout in the cache
    sharing_layers  layers that store nothing and attend to this one's cells (Gemma 3n, Gemma 4)
    """

    index: int
    spec: LayerSpec
    sharing_layers: tuple[int, ...] = ()

    def with_bidirectional(self, is_bidirectional: bool) -> CachedLayer:
        """The same layer with or without bidirectional ranges (LayerSpec)."""
        return replace(self, spec=replace(self.spec, bidirectional=is_bidirectional))


class CalibrationBackend:
    """An AttentionBackend for a forward in which each token attends only to itself.

    calls        of each layer
    state_bytes  of each recurrent state after one token, by name
    """

    def __init__(self, tokens: int = _CALIBRATION_TOKENS) -> None:
        """`tokens` are those of the forward."""
        self._tokens = tokens
        self.calls: dict[int, hooks.AttentionCall] = {}
        self.state_bytes: dict[Hashable, int] = {}

    def attend(self, call: hooks.AttentionCall) -> Tensor:
        """The value of each token itself, whatever its score; in cross attention, which has no keys here, the query."""
        if call.is_cross:
            return call.query.transpose(0, 1)
        self.calls[call.layer] = call
        if call.latent is not None:
            return project_latents(call.key, call.latent).transpose(0, 1).contiguous()
        heads = call.query.shape[0] // call.value.shape[0]
        return call.value.repeat_interleave(heads, 0).transpose(0, 1).contiguous()

    def recur(self, name: Hashable, operation: hooks.RecurrentOperation) -> list[Tensor]:
        """Start every token from a zero state."""
        outputs, states = zip(*(operation(row, row + 1, None) for row in range(self._tokens)), strict=True)
        self.state_bytes[name] = states[0].nbytes
        return list(outputs)


def find_cached_layers(model: Any, *, vocabulary: int) -> tuple[CachedLayer, ...]:
    """The attention layers that store cells, in order. Raises whatever the model raises if it cannot run packed."""
    before, after = (calibrate(model, vocabulary, position).calls for position in (_OLD_POSITION, _NEW_POSITION))
    frequencies = dict(_frequencies(model))
    plans = []
    for layer, readers in _storing_layers(before):
        rotation = _rotation(before[layer], after[layer], frequencies)
        plans.append(CachedLayer(layer, _layer_spec(model, before[layer], rotation), readers))
    return tuple(plans)


def cached_layers_without_rotation(model: Any, calls: Mapping[int, hooks.AttentionCall]) -> tuple[CachedLayer, ...]:
    """The attention layers that store cells, by the calls of one forward, also of a model without values (meta)."""
    return tuple(
        CachedLayer(layer, _layer_spec(model, calls[layer], None), readers) for layer, readers in _storing_layers(calls)
    )


def _layer_spec(model: Any, call: hooks.AttentionCall, rotation: Rotation | None) -> LayerSpec:
    return LayerSpec(
        heads=call.key.shape[0],
        key_width=call.key.shape[-1],
        value_width=call.value.shape[-1],
        attention_range=_attention_range(model.config.get_text_config(), call.layer, call.window),
        rotation=rotation,
        latent_width=0 if call.latent is None else call.latent.latent_width,
    )


def _storing_layers(calls: Mapping[int, hooks.AttentionCall]) -> list[tuple[int, tuple[int, ...]]]:
    """Layers that compute keys, each with the layers that later attend to the same tensors.

    A layer with another window stores the tensors again: the cells of one table have one attention range.
    """
    members: dict[Hashable, list[int]] = {}
    for layer, call in calls.items():
        members.setdefault((_place(call.key), _place(call.value), call.window), []).append(layer)
    return sorted((layers[0], tuple(layers[1:])) for layers in members.values())


def _place(tensor: Tensor) -> Hashable:
    """Equal for tensors in the same memory; the backend holds all tensors. Meta tensors have a storage too."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape


def calibrate(
    model: Any, vocabulary: int, position: int = _OLD_POSITION, *, tokens: int = _CALIBRATION_TOKENS
) -> CalibrationBackend:
    """The calls of one forward of a few tokens. Raises whatever the model raises if it cannot run packed."""
    device = next(model.parameters()).device
    backend = CalibrationBackend(tokens)
    with torch.inference_mode(), hooks.use_backend(backend):
        rows = torch.arange(tokens, device=device)
        hooks.forward(model, rows * (vocabulary // tokens), torch.full_like(rows, position), rows)
    return backend


def state_bytes(model: Any, vocabulary: int) -> int:
    """Bytes of the recurrent states of one sequence."""
    return sum(calibrate(model, vocabulary).state_bytes.values())


def _attention_range(config: Any, layer: int, window: int | None) -> AttentionRange:
    """The positions that a layer's queries attend to: the window of the call, or else of the configuration."""
    if window is not None:
        return AttentionRange("window", window)
    kinds = getattr(config, "layer_types", None)
    kind = kinds[layer] if kinds is not None and layer < len(kinds) else None
    if kind == "sliding_attention" and config.sliding_window:
        return AttentionRange("window", config.sliding_window)
    if kind == "chunked_attention" and config.attention_chunk_size:
        return AttentionRange("chunk", config.attention_chunk_size)
    return AttentionRange()


def _rotation(old: hooks.AttentionCall, new: hooks.AttentionCall, frequencies: Mapping[str, Tensor]) -> Rotation | None:
    """The rotation with the smallest error; None if none explains the keys, or the values depend on the position."""
    allowed = _tolerance(new.key.dtype)
    if not within("values do not depend on the position", _error(old.value, new.value, Rotation()), allowed):
        return None
    candidates = (Rotation(), *_candidates(old.key.shape[-1], frequencies))
    errors = {candidate: _error(old.key, new.key, candidate) for candidate in candidates}
    (best, error), *others = sorted(errors.items(), key=lambda item: item[1])
    if others:
        within("another rotation explains the keys", others[0][1], allowed)
    return best if within("the rotation explains the keys", error, allowed) else None


def _error(old: Tensor, new: Tensor, rotation: Rotation) -> float:
    """Largest error over pairs of columns after a rotation to the new position, relative to the length of each pair.

    old, new  [heads, tokens, width]

    A rotation by a wrong angle has the same relative error in every pair of any magnitude, so outlier columns hide no
    other column. Columns outside of all pairs are compared one by one.
    """
    before, after = old.double(), new.double()
    error, length = (
        (rotate(before, _NEW_POSITION - _OLD_POSITION, rotation) - after).square().sum(1),
        after.square().sum(1),
    )
    for squares in (error, length):
        first, second = column_pairs(squares, rotation)
        both = first + second
        first.copy_(both)
        second.copy_(both)
    relative = torch.where(error == 0, 0.0, error / length).sqrt()
    return float(relative.max()) if relative.numel() else 0.0


def _candidates(width: int, frequencies: Mapping[str, Tensor]) -> Iterator[Rotation]:
    layouts: tuple[Literal["half", "interleaved"], ...] = ("half", "interleaved")
    for frequency in frequencies.values():
        pairs = len(frequency)
        if 2 * pairs > width:
            continue
        for offset in sorted({0, width - 2 * pairs}):
            for layout in layouts:
                for sign in (1, -1):
                    yield Rotation(layout, offset, tuple((sign * frequency).tolist()))


def _frequencies(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every table of inverse frequencies in the model, by name."""
    for name, buffer in model.named_buffers():
        kind = name.rsplit(".", 1)[-1]
        if kind.endswith("inv_freq") and buffer.dim() == 1:
            yield name, buffer.double()


def _tolerance(dtype: torch.dtype) -> float:
    """Largest relative error that rounding explains: of cosine, sine, products and sums at two positions."""
    return _ROUNDING_FACTOR * max(torch.finfo(dtype).eps, _ANGLE_ERROR)
