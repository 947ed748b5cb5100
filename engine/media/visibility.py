"""Bidirectional attention of a model, by the masks that it builds for a prompt with one content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.media.capture import ContentsUnsupported


@dataclass(frozen=True, slots=True)
class Bidirectional:
    """The layers of a model whose tokens attend to later ones.

    layer_types   of such layers, as in the configuration; None: all layers
    whole_prompt  of the whole prompt (prefix LM), rather than of the placeholders of a content
    """

    layer_types: frozenset[str] | None = frozenset()
    whole_prompt: bool = False

    def holds(self, config: Any, layer: int) -> bool:
        """Whether it holds for a layer of the text with this configuration."""
        if self.layer_types is None:
            return True
        types = getattr(config, "layer_types", None) or ()
        return layer < len(types) and types[layer] in self.layer_types

    def __bool__(self) -> bool:
        return self.layer_types is None or bool(self.layer_types)

    def ranges(self, tokens: int, placeholders: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """The bidirectional ranges [start, stop) of a prompt with runs of placeholders."""
        if self.whole_prompt:
            return ((0, tokens),)
        return tuple(placeholders) if self else ()


def read_bidirectional(masks: Any, placeholders: Sequence[tuple[int, int]]) -> Bidirectional:
    """The bidirectional layers by the decoder's `attention_mask` for a prompt with runs of placeholders.

    Raises ContentsUnsupported for a mask that is neither causal, nor that of a prefix LM or of these runs.
    """
    if not isinstance(masks, Mapping):
        mask = _seen_later(masks)
        return Bidirectional() if mask is None else _checked(None, mask, placeholders)
    later = {name: seen for name, mask in masks.items() if (seen := _seen_later(mask)) is not None}
    if not later:
        return Bidirectional()
    results = [_checked(frozenset(later), mask, placeholders) for mask in later.values()]
    if len(set(results)) > 1:
        raise ContentsUnsupported("its layers differ in the tokens that attend to later ones")
    return results[0]


def runs(flags: Sequence[bool], start: int = 0) -> tuple[tuple[int, int], ...]:
    """The ranges [start, stop) of consecutive true flags, the first of which has the index `start`."""
    edges = [index for index in range(len(flags) + 1) if any(flags[index - 1 : index]) != any(flags[index : index + 1])]
    return tuple((start + first, start + stop) for first, stop in zip(edges[::2], edges[1::2], strict=True))


def _seen_later(mask: Any) -> Tensor | None:
    """[tokens, tokens] bool: the later tokens that each token attends to; None: there are none."""
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return None
    values = mask[0, 0, :, : mask.shape[2]]
    later = (values if values.dtype == torch.bool else values > -1).triu(1)
    return later if bool(later.any()) else None


def _checked(
    layer_types: frozenset[str] | None, later: Tensor, placeholders: Sequence[tuple[int, int]]
) -> Bidirectional:
    tokens = later.shape[0]
    for whole_prompt in (True, False):
        result = Bidirectional(layer_types, whole_prompt)
        expected = torch.zeros_like(later)
        for start, stop in result.ranges(tokens, placeholders):
            expected[start:stop, start:stop] = True
        if torch.equal(expected.triu(1), later):
            return result
    raise ContentsUnsupported("its tokens attend to later ones outside of the placeholders of an image")
