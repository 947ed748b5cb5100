"""Latent attention by the Triton kernels equals engine/kernels/latent.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.kernels import latent
from engine.kernels.attention_input import AttentionInput
from engine.types.request import MlaMode
from kvcache.forward import Segment
from kvcache.kv_buffer import LayerKV, allocate_kv_buffers
from kvcache.spec import AttentionRange, GroupSpec
from tests.engine.kernels.triton.interpreter import DEVICE, SMALL, TritonKernels, buffer_on_device
from tests.selection import quick

HEADS, KEY, ROTARY, VALUE = 18, 12, 8, 10
# Decoded tokens before and behind a prompt, which is expanded.
SEGMENTS = (
    Segment(slice(0, 1), 70, slice(0, 71)),
    Segment(slice(1, 5), 0, slice(80, 84)),
    Segment(slice(5, 7), 20, torch.arange(121, 99, -1)),
    Segment(slice(7, 8), 5, slice(140, 146)),
)


@pytest.mark.parametrize("mode", quick(("auto",), ("auto", "absorb")))
@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.float32, 32), (torch.int8, 32), (torch.float32, 24), (torch.int8, 24)]
)
def test_latent_attention_equals_torch(dtype: torch.dtype, width: int, mode: MlaMode) -> None:
    """Int8 latents of a width that is no power of two are computed by torch."""
    generator = torch.Generator().manual_seed(0)
    spec = GroupSpec(1, width + ROTARY, 0, AttentionRange(), (0, 1), (None, None), width)
    buffer, no_values = allocate_kv_buffers(spec, 150, dtype, torch.device("cpu"))
    buffer.write(1, slice(0, 150), torch.randn(1, 150, width + ROTARY, generator=generator))
    keys, values = (torch.randn(HEADS, rows, width, generator=generator) for rows in (KEY, VALUE))
    query = torch.randn(HEADS, 8, KEY + ROTARY, generator=generator)
    rule = latent.AbsorptionRule.of(latent.LatentProjection(keys, values), mode)
    assert (mode == "absorb") == all(rule.applies(one) for one in SEGMENTS)

    inputs = AttentionInput(query, LayerKV(buffer, 1), LayerKV(no_values, 1), SEGMENTS, AttentionRange(), 0.2)
    moved = replace(
        inputs,
        query=query.to(DEVICE),
        keys=LayerKV(buffer_on_device(buffer), 1),
        segments=[
            replace(one, cells=one.cells.to(DEVICE)) if isinstance(one.cells, torch.Tensor) else one for one in SEGMENTS
        ],
    )
    actual = TritonKernels(SMALL).attend_latent(
        moved, latent.LatentProjection(keys.to(DEVICE), values.to(DEVICE)), mode=mode
    )

    expected = latent.attend(
        replace(inputs, query=query.double()), latent.LatentProjection(keys.double(), values.double()), mode=mode
    )
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=0, atol=1e-4)
