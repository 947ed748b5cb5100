"""Attention of batches with one token a sequence, over cells that are numbers on a device: no shape depends on them.

The reference of kernels for recorded steps (kvcache/row_forward.py), and their replacement where a device has none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.attention_input import RowAttentionInput
from engine.kernels.latent import LatentProjection, absorb_keys, project_values
from kvcache.kv_buffer import LayerKV
from kvcache.row_forward import RowCells


def attend_rows(inputs: RowAttentionInput) -> Tensor:
    """The attention output, [rows, heads, value_width]."""
    index, visible = _visible_cells(inputs.cells)
    keys, values = (_read(stored, index, inputs.query.dtype) for stored in (inputs.keys, inputs.values))
    return _mix(inputs, inputs.keys.transform(inputs.query), keys, values, visible)


def attend_latent_rows(inputs: RowAttentionInput, projection: LatentProjection) -> Tensor:
    """The output [rows, heads, value_width] of latent attention; see latent.attend, mode "absorb"."""
    index, visible = _visible_cells(inputs.cells)
    latents, query = inputs.keys, inputs.query
    cached = _read(latents, index, query.dtype)
    reduced = latents.transform(absorb_keys(query, projection))
    mixed = _mix(inputs, reduced, cached, cached[..., : projection.latent_width], visible)
    return project_values(latents.transform(mixed).transpose(0, 1), projection)


def _visible_cells(cells: RowCells) -> tuple[Tensor, Tensor]:
    """The cells [rows, most] of the last positions of each row, and whether it attends to them."""
    positions = cells.latest[:, None] - torch.arange(cells.max_attended, device=cells.latest.device)
    index = cells.table[cells.begins[:, None] + positions.clamp_min(0)]
    # So rows of padding attend to cells that they have written.
    index[:, 0] = cells.new
    return index, positions >= cells.oldest[:, None]


def _read(stored: LayerKV, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Stored rows [heads, rows, positions, width] of cells [rows, positions]."""
    flat = stored.read(index.flatten(), dtype)
    return flat.view(flat.shape[0], *index.shape, flat.shape[-1])


def _mix(inputs: RowAttentionInput, query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Queries [heads, rows, width] over keys and values [key_heads, rows, positions, width]."""
    q = query.reshape(keys.shape[0], -1, *query.shape[1:])
    # Matrix products, which can be made row-invariant (engine/model/invariant.py).
    scores = (q.transpose(1, 2) @ keys.mT).transpose(1, 2) * inputs.scale
    precision = torch.promote_types(scores.dtype, torch.float32)
    if inputs.softcap is not None:
        scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if inputs.sinks is not None:
        sink = inputs.sinks.to(scores.dtype).view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, sink), -1).softmax(-1, dtype=precision)[..., :-1]
    else:
        weights = scores.softmax(-1, dtype=precision)
    # Cells of other sequences may have numbers that are not finite.
    seen = values.masked_fill(~visible[..., None], 0.0)
    return (weights.to(values.dtype).transpose(1, 2) @ seen).transpose(1, 2).flatten(0, 1).transpose(0, 1)
