"""Attention of batches with one token a sequence, over cells that are numbers on a device: no shape depends on them.

The reference of kernels for recorded steps (kvcache/row_forward.py), and their replacement where a device has none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.latent import LatentProjection, absorb_keys, project_values
from kvcache.kv_buffer import LayerKV
from kvcache.row_forward import RowCells


def attend_rows(
    query: Tensor,
    keys: LayerKV,
    values: LayerKV,
    cells: RowCells,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The output [rows, heads, value_width] of queries [heads, rows, key_width]; see reference.attend."""
    index, visible = _visible_cells(cells)
    k, v = (_read(stored, index, query.dtype) for stored in (keys, values))
    return _mix(keys.transform(query), k, v, visible, scale, softcap, sinks)


def attend_latent_rows(
    query: Tensor, latents: LayerKV, cells: RowCells, projection: LatentProjection, *, scale: float
) -> Tensor:
    """The output [rows, heads, value_width] of latent attention; see latent.attend, mode "absorb"."""
    index, visible = _visible_cells(cells)
    cached = _read(latents, index, query.dtype)
    reduced = latents.transform(absorb_keys(query, projection))
    mixed = _mix(reduced, cached, cached[..., : projection.latent_width], visible, scale, None, None)
    return project_values(latents.transform(mixed).transpose(0, 1), projection)


def _visible_cells(cells: RowCells) -> tuple[Tensor, Tensor]:
    """The cells [rows, most] of the last positions of each row, and whether it attends to them."""
    positions = cells.latest[:, None] - torch.arange(cells.most, device=cells.latest.device)
    index = cells.table[cells.begins[:, None] + positions.clamp_min(0)]
    # So rows of padding attend to what they have written.
    index[:, 0] = cells.new
    return index, positions >= cells.oldest[:, None]


def _read(stored: LayerKV, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Stored rows [heads, rows, positions, width] of cells [rows, positions]."""
    flat = stored.read(index.flatten(), dtype)
    return flat.view(flat.shape[0], *index.shape, flat.shape[-1])


def _mix(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Queries [heads, rows, width] over keys and values [key_heads, rows, positions, width]."""
    q = query.reshape(keys.shape[0], -1, *query.shape[1:])
    # Matrix products, which can be made row-invariant (engine/model/invariant.py).
    scores = (q.transpose(1, 2) @ keys.mT).transpose(1, 2) * scale
    precision = torch.promote_types(scores.dtype, torch.float32)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, sink), -1).softmax(-1, dtype=precision)[..., :-1]
    else:
        weights = scores.softmax(-1, dtype=precision)
    # Cells of other sequences may have numbers that are not finite.
    seen = values.masked_fill(~visible[..., None], 0.0)
    return (weights.to(values.dtype).transpose(1, 2) @ seen).transpose(1, 2).flatten(0, 1).transpose(0, 1)
