"""The check of the Triton kernels at load: they compile, run, and agree with the reference."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.attention_input import AttentionInput
from engine.kernels.cell_kernels import CellKernels, KernelUnavailable
from engine.kernels.triton.agreement import disagreement
from engine.kernels.triton.batch import Tiling
from engine.kernels.triton.kernels import TritonKernels
from kvcache.forward import Segment
from kvcache.kv_buffer import LayerKV, allocate_kv_buffers
from kvcache.spec import AttentionRange, GroupSpec

# Rows and start of each sequence: decoding after two splits, a prompt, draft tokens.
_BATCH = ((1, 700), (70, 0), (4, 90))
_HEADS, _KEY_HEADS, _WIDTH = 4, 2, 64
# Errors of the output for normal values: sums of float32, and weights rounded to bfloat16.
_EXACT_ERROR, _ROUNDED_ERROR = 1e-4, 5e-2


def checked_kernels(
    dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device, *, one_tile: bool = False
) -> CellKernels:
    """Kernels that agree with the reference on a device. Raises KernelUnavailable.

    one_tile  whether all rows have the tiles of decoded ones
    """
    kernels = TritonKernels(Tiling.for_dtype(torch.float32 if one_tile else dtype))
    limit = _EXACT_ERROR if dtype == torch.float32 else _ROUNDED_ERROR
    reason = disagreement(lambda: _largest_error(kernels, dtype, kv_dtype, device), limit)
    if reason is not None:
        raise KernelUnavailable(reason)
    return kernels


def _largest_error(kernels: CellKernels, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device) -> float:
    """Of the output for a small batch, with keys and values that the kernels stored."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    segments, cells = _segments(device)
    spec = GroupSpec(_KEY_HEADS, _WIDTH, _WIDTH, AttentionRange(), (0,), (None,))
    buffers = allocate_kv_buffers(spec, cells, kv_dtype, device)
    keys, values = (LayerKV(buffer, 0) for buffer in buffers)
    kernels.store(
        keys, values, torch.arange(cells, device=device), *(draw(_KEY_HEADS, cells, _WIDTH) for _ in range(2))
    )
    query, sinks = draw(_HEADS, segments[-1].batch_slice.stop, _WIDTH), draw(_HEADS)
    inputs = AttentionInput(query, keys, values, segments, AttentionRange(), _WIDTH**-0.5, sinks=sinks)
    actual = kernels(inputs)
    expected = reference.attend(replace(inputs, query=query.float(), sinks=sinks.float()))
    return float((actual.float() - expected).abs().max())


def _segments(device: torch.device) -> tuple[tuple[Segment, ...], int]:
    """The segments of the batch, whose cells are every other one of the pool, and the cells of the pool."""
    segments, row, cell = [], 0, 0
    for rows, start in _BATCH:
        cells = torch.arange(cell, cell + 2 * (start + rows), 2, device=device)
        segments.append(Segment(slice(row, row + rows), start, cells))
        row, cell = row + rows, cell + 2 * (start + rows)
    return tuple(segments), cell
