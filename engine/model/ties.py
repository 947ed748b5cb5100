"""Selections with ties resolved in favour of the first positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class StableTopK(TorchFunctionMode):
    """Inside the block, `topk` selects the first of equal scores; selections without a tie at their end are torch's
    own.

    torch leaves the choice among equals open, and chooses others in a longer row. Sparse attention meets ties all the
    time (repeated tokens, heads with zero scores), so chunks of a prompt would change the text.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls `func`, and corrects the result of `topk`."""
        result = func(*args, **(kwargs or {}))
        if func is torch.topk or func is Tensor.topk:
            return _first_of_ties(result, *args, **(kwargs or {}))
        return result


def _first_of_ties(
    result: Any, scores: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, **_: Any
) -> Any:
    """The result of `topk`, with ties at its end resolved in favour of the first positions."""
    values, indices = result
    if not largest or k == 0 or k == scores.shape[dim]:
        return result
    last = values.amin(dim, keepdim=True)
    above, equal = scores > last, scores == last
    if last.isnan().any() or not (above | equal).sum(dim).gt(k).any():
        return result
    selected = above | (equal & (equal.cumsum(dim) <= k - above.sum(dim, keepdim=True)))
    # By row, with equally many indices in each.
    rows = selected.movedim(dim, -1)
    positions = rows.nonzero()[:, -1].view(*rows.shape[:-1], k).movedim(-1, dim)
    chosen = scores.gather(dim, positions)
    if sorted:
        chosen, order = chosen.sort(dim=dim, descending=True, stable=True)
        positions = positions.gather(dim, order)
    return type(result)((chosen, positions))
