"""Attention of recorded steps: the bits of the same kernel with segments, and the reference in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.kernels import latent, row_attention
from engine.kernels.attention_input import AttentionInput, RowAttentionInput
from kvcache.forward import Segment
from kvcache.kv_buffer import LayerKV
from kvcache.row_forward import RowCells
from kvcache.spec import AttentionRange
from tests.engine.kernels.triton.interpreter import DEVICE, SMALL, TritonKernels, on_device
from tests.engine.kernels.triton.test_attention import CHUNK, DECODING, FULL, TOLERANCE, WINDOW, Case

CAPACITY = 320
CASES = {
    "full, sinks": Case(plan=DECODING, group=3, has_sinks=True),
    "window, softcap, int8": Case(plan=DECODING, attention_range=WINDOW, softcap=5.0, stored=torch.int8),
    "chunk, shared cells": Case(plan=DECODING, attention_range=CHUNK, layout="shared"),
}


def row_cells(segments: tuple[Segment, ...], attention_range: AttentionRange, most: int) -> RowCells:
    """The cells of segments of one row; entries of no position are cell 0."""
    table = torch.zeros(len(segments), CAPACITY, dtype=torch.long)
    latest = torch.tensor([one.start for one in segments])
    for own, segment in zip(table, segments, strict=True):
        assert isinstance(segment.cells, Tensor)
        own[segment.oldest_visible : segment.start + 1] = segment.cells
    oldest = torch.tensor([attention_range.oldest_visible(one.start) for one in segments])
    new = table.gather(1, latest[:, None])[:, 0]
    begins = torch.arange(len(segments)) * CAPACITY
    flat = (table.flatten(), begins, oldest, latest, new)
    return RowCells(*(each.to(DEVICE) for each in flat), most)


@pytest.mark.parametrize("name", CASES)
def test_rows_have_the_bits_of_segments(name: str) -> None:
    """The torch form agrees with the reference."""
    case = CASES[name]
    work = case.batch()
    cells = row_cells(work.segments, case.attention_range, CAPACITY)
    there, kernels = on_device(work), TritonKernels(SMALL)
    keys, values = LayerKV(there.keys, 1), LayerKV(there.values, 1)
    options = {key: own.to(DEVICE) if isinstance(own, Tensor) else own for key, own in case.options.items()}
    inputs = RowAttentionInput(there.query, keys, values, cells, work.query.shape[-1] ** -0.5, **options)

    segments = kernels(there.inputs(case.attention_range, **options))
    rows = kernels.attend_rows(inputs)
    in_torch = row_attention.attend_rows(inputs)

    assert torch.equal(segments, rows)
    expected = work.expected(case.attention_range, **case.options)
    torch.testing.assert_close(in_torch.cpu().double(), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("width", [32, 24])
def test_latent_rows_have_the_bits_of_segments(width: int) -> None:
    """Absorbed, as decoded tokens are."""
    case = Case(plan=DECODING, attention_range=FULL, key_heads=1, group=4, width=width + 8, value_width=width)
    work = on_device(case.batch())
    cells = row_cells(case.batch().segments, FULL, CAPACITY)
    generator = torch.Generator().manual_seed(0)
    projection = latent.LatentProjection(
        *(torch.randn(4, rows, width, generator=generator).to(DEVICE) for rows in (12, 10))
    )
    query = torch.randn(4, len(DECODING), 12 + 8, generator=generator).to(DEVICE)
    layers, kernels = (LayerKV(work.keys, 1), LayerKV(work.values, 1)), TritonKernels(replace(SMALL))
    inputs = RowAttentionInput(query, *layers, cells, 0.2)

    segments = kernels.attend_latent(
        AttentionInput(query, *layers, work.segments, FULL, 0.2), projection, mode="absorb"
    )

    assert torch.equal(segments, kernels.attend_latent_rows(inputs, projection))
    in_torch = row_attention.attend_latent_rows(inputs, projection)
    torch.testing.assert_close(segments, in_torch, rtol=0, atol=1e-4)


def test_tables_are_made_once_for_all_layers_of_a_recording() -> None:
    """A replay by calls has other numbers, in RowCells of its own."""
    work, kernels = on_device(Case(plan=DECODING).batch()), TritonKernels(SMALL)
    keys, values = LayerKV(work.keys, 1), LayerKV(work.values, 1)
    cells = row_cells(Case(plan=DECODING).batch().segments, FULL, CAPACITY)

    inputs = RowAttentionInput(work.query, keys, values, cells, 1.0)

    first, again = (kernels.attend_rows(inputs) for _ in range(2))
    assert 1 == len(kernels._tables)
    cells.latest[2] -= 100
    shorter = kernels.attend_rows(replace(inputs, cells=replace(cells)))

    assert torch.equal(first, again)
    assert torch.equal(first[:2], shorter[:2])
    assert not torch.equal(first[2], shorter[2])
