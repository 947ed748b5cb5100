"""`topk` inside the block agrees with a stable sort."""

from __future__ import annotations

import pytest
import torch

from engine.model.ties import StableTopK


@pytest.mark.parametrize("dim", [-1, 1, 0])
@pytest.mark.parametrize("in_order", [True, False])
def test_topk_selects_the_first_of_equal_scores(dim: int, in_order: bool) -> None:
    """As a function and as a method, sorted or not."""
    chance = torch.Generator().manual_seed(0)
    for k in range(1, 8):
        scores = torch.randint(0, 4, (8, 9, 12), generator=chance).float()
        values, positions = (
            part.narrow(dim, 0, k) for part in torch.sort(scores, dim=dim, descending=True, stable=True)
        )
        with StableTopK():
            by_function = torch.topk(scores, k, dim=dim, sorted=in_order)
            by_method = scores.topk(k, dim, sorted=in_order)
        for result in (by_function, by_method):
            assert torch.equal(positions.sort(dim).values, result.indices.sort(dim).values)
            assert torch.equal(scores.gather(dim, result.indices), result.values)
            assert not in_order or torch.equal(values, result.values)


def test_topk_without_ties_is_unchanged() -> None:
    """Also with NaN scores and for the smallest scores."""
    scores = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    broken = torch.where(scores > 1.0, torch.nan, torch.zeros_like(scores))
    expected = [scores.topk(7), broken.topk(7), broken.topk(7, largest=False), torch.zeros(4).topk(0)]
    with StableTopK():
        result = [scores.topk(7), broken.topk(7), broken.topk(7, largest=False), torch.zeros(4).topk(0)]

    for right, own in zip(expected, result, strict=True):
        assert torch.equal(right.indices, own.indices)
