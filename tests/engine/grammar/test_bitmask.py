"""Bitmasks equal boolean masks, bit for bit, for any size of the vocabulary."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar.bitmask import contains, count, mask_logits, pack, unpack

SIZES = (1, 7, 8, 9, 64, 1000, 5003)


@given(size=st.sampled_from(SIZES), seed=st.integers(0, 2**32), longer=st.integers(0, 9))
@settings(max_examples=200, deadline=None, database=None, derandomize=True)
def test_a_bitmask_holds_its_tokens(size: int, seed: int, longer: int) -> None:
    """Bits beyond the vocabulary, which llguidance may set, are ignored."""
    mask = torch.rand(size, generator=torch.Generator().manual_seed(seed)) < (seed % 10) / 9
    tokens = mask.nonzero()[:, 0].tolist()
    bits = pack((*tokens, *range(size, size + longer)), size + longer)

    assert mask.tolist() == unpack(bits, size).tolist()
    assert len(tokens) == count(bits, size)
    assert mask.tolist() == [contains(bits, token) for token in range(size)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_mask_logits_equals_a_boolean_mask(size: int, dtype: torch.dtype) -> None:
    """With infinities, zeros of both signs and subnormal numbers; the input is unchanged."""
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(size, generator=generator, dtype=dtype)
    for at, value in enumerate((torch.inf, -torch.inf, 0.0, -0.0, 1e-40, torch.nan)):
        logits[at % size :: 11] = value
    mask = torch.rand(size, generator=generator) < 0.5
    mask &= ~logits.isnan()
    before = logits.clone()

    result = mask_logits(logits, pack(mask.nonzero()[:, 0].tolist(), size))

    expected = logits.masked_fill(~mask, -torch.inf)
    integers = torch.int32 if dtype == torch.float32 else torch.int64
    assert torch.equal(expected.view(integers), result.view(integers))
    assert torch.equal(before.view(integers), logits.view(integers))


def test_mask_logits_keeps_nan() -> None:
    result = mask_logits(torch.tensor([torch.nan, 1.0]), pack((0,), 2))

    assert not result[0].isfinite()
