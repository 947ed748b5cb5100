"""Selections among equal scores, made in one way: the first positions are taken.

torch leaves open which of equals `topk` takes, and takes others of a longer row. Layers that attend to the likeliest
positions meet equals all the time: the same token twice, or heads that score nothing. So chunks would change the text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class StableTopK(TorchFunctionMode):
    """Inside the block, `topk` takes the first of equals; selections without a tie at their end are torch's own."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What torch calls in place of each of its functions."""
        made = func(*args, **(kwargs or {}))
        if func is torch.topk or func is Tensor.topk:
            return _first_of_ties(made, *args, **(kwargs or {}))
        return made


def _first_of_ties(
    made: Any, scores: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, **_: Any
) -> Any:
    """What `topk` made, with the first of those scores that equal the last one taken."""
    values, indices = made
    if not largest or k == 0 or k == scores.shape[dim]:
        return made
    last = values.amin(dim, keepdim=True)
    beyond, equal = scores > last, scores == last
    if last.isnan().any() or not (beyond | equal).sum(dim).gt(k).any():
        return made
    taken = beyond | (equal & (equal.cumsum(dim) <= k - beyond.sum(dim, keepdim=True)))
    # Row after row, each with as many places.
    rows = taken.movedim(dim, -1)
    places = rows.nonzero()[:, -1].view(*rows.shape[:-1], k).movedim(-1, dim)
    chosen = scores.gather(dim, places)
    if sorted:
        chosen, order = chosen.sort(dim=dim, descending=True, stable=True)
        places = places.gather(dim, order)
    return type(made)((chosen, places))
