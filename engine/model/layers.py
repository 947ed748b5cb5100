"""What each attention layer stores, sees, and how its keys move: found by watching the model run, not by its name.

A token that attends only to itself gets the same from every layer wherever it stands; only its key turns. Running some
tokens that way at two positions therefore shows each layer's rotation, or that there is none that explains it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from engine.model import hooks
from engine.model.margins import within
from kvcache.rotary import column_pairs, rotate
from kvcache.spec import AttentionRange, LayerSpec, Rotation

# Far enough apart to tell slow rotations from none, and inside every model's positions.
_OLD_POSITION, _NEW_POSITION = 29, 3
# Several tokens, for one of them may be a padding token, whose key is zero wherever it stands.
_CALIBRATION_TOKENS = 8
# Of the type's precision, the error of a right rotation at most. Measured over all families and Gemma 3 270M: 1.4 for
# the right one, 100 and more for all others.
_ROUNDING_FACTOR = 8
# The error in radians of an angle that is computed in float32 at the first position, whatever type keys have.
_ANGLE_ERROR = 2e-6


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """One attention layer that stores cells: `layer` is its own number, `spec` what the cache must know.

    readers  the layers that store nothing and attend to this one's cells (Gemma 3n, Gemma 4)
    """

    layer: int
    spec: LayerSpec
    readers: tuple[int, ...] = ()


class CalibrationBackend:
    """A listener (hooks.Listener) for a forward whose rows do not see each other: keeps each layer's call."""

    def __init__(self) -> None:
        self.calls: dict[int, hooks.AttentionCall] = {}

    def attend(self, call: hooks.AttentionCall) -> Tensor:
        """A row that attends to itself alone gets its own value, whatever its score; there is nothing to cross to."""
        if call.is_cross:
            return call.query.transpose(0, 1)
        self.calls[call.layer] = call
        if call.latent is not None:
            own = call.key[..., : call.latent.latent_width] @ call.latent.values.mT
            return own.transpose(0, 1).contiguous()
        heads = call.query.shape[0] // call.value.shape[0]
        return call.value.repeat_interleave(heads, 0).transpose(0, 1).contiguous()

    def recur(self, name: Hashable, operation: hooks.RecurrentOperation) -> list[Tensor]:
        """Every row begins anew, from zeros."""
        return [operation(row, row + 1, None)[0] for row in range(_CALIBRATION_TOKENS)]


def find_cached_layers(model: Any, *, vocabulary: int) -> tuple[CachedLayer, ...]:
    """The attention layers that store, in order. Raises whatever the model raises when it cannot run packed."""
    before, after = (
        _attention_calls(model, vocabulary, _OLD_POSITION),
        _attention_calls(model, vocabulary, _NEW_POSITION),
    )
    frequencies = dict(_frequencies(model))
    plans = []
    for layer, readers in _storing_layers(before):
        old, new = before[layer], after[layer]
        spec = LayerSpec(
            heads=old.key.shape[0],
            key_width=old.key.shape[-1],
            value_width=old.value.shape[-1],
            attention_range=_reach(model.config.get_text_config(), layer, old.window),
            rotation=_rotation(old, new, frequencies),
            latent_width=0 if old.latent is None else old.latent.latent_width,
        )
        plans.append(CachedLayer(layer, spec, readers))
    return tuple(plans)


def _storing_layers(calls: Mapping[int, hooks.AttentionCall]) -> list[tuple[int, tuple[int, ...]]]:
    """The layers that make keys of their own, each with those that came with the very same tensors later.

    A layer that sees another window of them stores them again: cells of one table are seen in one way.
    """
    members: dict[Hashable, list[int]] = {}
    for layer, call in calls.items():
        # The watcher holds all tensors, so no two live at one address.
        tensors = (call.key.data_ptr(), call.value.data_ptr(), call.key.shape, call.value.shape)
        members.setdefault((*tensors, call.window), []).append(layer)
    return sorted((layers[0], tuple(layers[1:])) for layers in members.values())


def _attention_calls(model: Any, vocabulary: int, position: int) -> dict[int, hooks.AttentionCall]:
    device = next(model.parameters()).device
    watcher = CalibrationBackend()
    with torch.inference_mode(), hooks.use_backend(watcher):
        rows = torch.arange(_CALIBRATION_TOKENS, device=device)
        hooks.forward(model, rows * (vocabulary // _CALIBRATION_TOKENS), torch.full_like(rows, position), rows)
    return watcher.calls


def _reach(config: Any, layer: int, window: int | None) -> AttentionRange:
    """What the layer's queries see: the window of the call wins; some models only write it in their configuration."""
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
    """The rotation with the smallest error; None where none explains the keys, or the values depend on the position."""
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
    """The largest error over the pairs of columns after a rotation to the new position, relative to each pair's length.

    old, new  [heads, tokens, width]

    A rotation by a wrong angle has the same relative error in every pair, however large its columns are, so outlier
    columns hide no other. Columns outside of all pairs are compared by themselves.
    """
    before, after = old.double(), new.double()
    wrong, length = (
        (rotate(before, _NEW_POSITION - _OLD_POSITION, rotation) - after).square().sum(1),
        after.square().sum(1),
    )
    for squares in (wrong, length):
        first, second = column_pairs(squares, rotation)
        both = first + second
        first.copy_(both)
        second.copy_(both)
    relative = torch.where(wrong == 0, 0.0, wrong / length).sqrt()
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
    """Every table of inverse frequencies in the model that is short enough for a head, by name."""
    for name, buffer in model.named_buffers():
        kind = name.rsplit(".", 1)[-1]
        if kind.endswith("inv_freq") and buffer.dim() == 1:
            yield name, buffer.double()


def _tolerance(dtype: torch.dtype) -> float:
    """The largest relative error that rounding explains: of cosine, sine, products and sums at two positions."""
    return _ROUNDING_FACTOR * max(torch.finfo(dtype).eps, _ANGLE_ERROR)
