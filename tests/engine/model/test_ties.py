"""Selections among equals: what `topk` gives inside the block is what a stable sort gives."""

from __future__ import annotations

import pytest
import torch

from engine.model.ties import StableTopK


@pytest.mark.parametrize("dim", [-1, 1, 0])
@pytest.mark.parametrize("in_order", [True, False])
def test_the_first_of_equals_are_taken(dim: int, in_order: bool) -> None:
    """Of few values in many rows, by the function and by the method, sorted or as a set."""
    chance = torch.Generator().manual_seed(0)
    for k in range(1, 8):
        scores = torch.randint(0, 4, (8, 9, 12), generator=chance).float()
        values, places = (part.narrow(dim, 0, k) for part in torch.sort(scores, dim=dim, descending=True, stable=True))
        with StableTopK():
            by_function = torch.topk(scores, k, dim=dim, sorted=in_order)
            by_method = scores.topk(k, dim, sorted=in_order)
        for made in (by_function, by_method):
            assert torch.equal(places.sort(dim).values, made.indices.sort(dim).values)
            assert torch.equal(scores.gather(dim, made.indices), made.values)
            assert not in_order or torch.equal(values, made.values)


def test_what_has_no_tie_is_torchs_own() -> None:
    """The same tensors in the same order, also where a score is no number or the smallest are asked for."""
    scores = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    broken = torch.where(scores > 1.0, torch.nan, torch.zeros_like(scores))
    expected = [scores.topk(7), broken.topk(7), broken.topk(7, largest=False), torch.zeros(4).topk(0)]
    with StableTopK():
        made = [scores.topk(7), broken.topk(7), broken.topk(7, largest=False), torch.zeros(4).topk(0)]

    for right, own in zip(expected, made, strict=True):
        assert torch.equal(right.indices, own.indices)
