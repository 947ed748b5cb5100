"""Recurrent layers in packed batches: the operations that mix along the sequence, made aware of where each begins.

transformers' mixers run unmodified: their projections, norms and gates see the whole packed row at once. Only the
operations that look along the sequence, which every family calls by the same few names in its module, are replaced by
versions that cut the row by sequence, start from each one's state and hand back the state after it. Without a listener
(engine/hooks.py) the originals run. This also gives Mamba-1 what transformers lacks, a scan that starts from a state.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import ACT2FN

from engine import hooks

Operation: TypeAlias = Callable[..., Any]


def install(model: Any) -> bool:
    """Replace the operations in the modules of a model's code, once a process; whether there were any."""
    found = False
    for name in {type(module).__module__ for module in model.modules()}:
        namespace = sys.modules[name]
        for operation, packed in _PACKED.items():
            original = getattr(namespace, operation, None)
            if original is None:
                continue
            found = True
            if not hasattr(original, "unpacked"):
                setattr(namespace, operation, _replace(original, packed, namespace))
    return found


def _replace(original: Operation, packed: Operation, namespace: ModuleType) -> Operation:
    @wraps(original)
    def operation(*args: Any, **settings: Any) -> Any:
        if not hooks.is_listening():
            return original(*args, **settings)
        return packed(original, namespace, *args, **settings)

    operation.unpacked = original  # type: ignore[attr-defined]
    return operation


def _convolve(
    original: Operation,
    namespace: ModuleType,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """A causal depthwise convolution: rows [1, channels, length], weight [channels, kernel]; state the last inputs."""
    kernel = weight.shape[-1]

    def run(start: int, stop: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
        before = rows.new_zeros(rows.shape[1], kernel - 1) if state is None else state
        whole = torch.cat((before, rows[0, :, start:stop]), -1)
        result = functional.conv1d(whole[None].to(weight.dtype), weight.unsqueeze(1), bias, groups=weight.shape[0])
        if activation is not None:
            result = ACT2FN[activation](result)
        # A copy, or the state would keep the whole chunk alive.
        return result.to(rows.dtype), whole[:, whole.shape[-1] - kernel + 1 :].clone()

    return torch.cat(hooks.recur("convolution", run), -1)


def _gated_delta(
    original: Operation, namespace: ModuleType, query: Tensor, key: Tensor, value: Tensor, **settings: Any
) -> tuple[Tensor, Tensor]:
    """Gated delta rule and KDA: everything [1, length, heads, ...]; state [1, heads, key_width, value_width]."""
    gates = {name: settings.pop(name) for name in ("g", "beta") if name in settings}
    settings |= {"output_final_state": True, "cu_seqlens": None}
    # The chunked form pads one row to a chunk of 64; the other form takes rows one by one.
    single = getattr(namespace, _ROW_BY_ROW[original.__name__], original)

    def run(start: int, stop: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
        cut = {name: gate[:, start:stop] for name, gate in gates.items()}
        form = single if stop - start == 1 else original
        parts = (tensor[:, start:stop] for tensor in (query, key, value))
        result, final = form(*parts, **cut, **(settings | {"initial_state": state}))
        return result, final

    return torch.cat(hooks.recur("scan", run), 1), _taken(query)


def _mamba2(
    original: Operation,
    namespace: ModuleType,
    rows: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    chunk_size: int,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """Mamba-2: rows [1, length, heads, width], dt [1, length, heads], b and c [1, length, groups, state]."""
    settings |= {"return_final_states": True}

    def run(start: int, stop: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
        cut = [tensor[:, start:stop] for tensor in (rows, dt, b, c)]
        # Rows are padded to whole chunks; a chunk longer than what there is would be work for nothing.
        size = min(chunk_size, stop - start)
        result, final = original(cut[0], cut[1], a, cut[2], cut[3], size, **(settings | {"initial_states": state}))
        return result, final

    return torch.cat(hooks.recur("scan", run), 1), _taken(rows)


def _mamba1(
    original: Operation,
    namespace: ModuleType,
    rows: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """Mamba-1: rows, dt and gate z [1, channels, length], a [channels, state], b and c [1, state, length].

    The original can only start from zeros. The scan is linear in its state, so what an initial state adds is known:
    exp(a * sum of dt so far) * state, seen through c and the gate.
    """
    gate, bias = settings.pop("z", None), settings.get("delta_bias")
    settings |= {"return_last_state": True}

    def run(start: int, stop: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
        cut = [tensor[..., start:stop] for tensor in (rows, dt, b, c)]
        z = None if gate is None else gate[..., start:stop]
        result, final = original(cut[0], cut[1], a, cut[2], cut[3], z=z, **settings)
        if state is None:
            return result, final
        step = cut[1] if bias is None else cut[1] + bias.to(cut[1].dtype)[..., None]
        elapsed = (functional.softplus(step) if settings.get("delta_softplus") else step).cumsum(-1)
        carried = torch.exp(a[None, :, :, None] * elapsed[:, :, None]) * state[..., None]
        seen = torch.einsum("bdst,bst->bdt", carried, cut[3].to(carried.dtype))
        seen = seen if z is None else seen * functional.silu(z)
        return result + seen.to(result.dtype), final + carried[..., -1].to(final.dtype)

    return torch.cat(hooks.recur("scan", run), -1), _taken(rows)


def _taken(like: Tensor) -> Tensor:
    """In place of the last state, which the listener has: mixers hand it to the cache, and that is the facade."""
    return like.new_empty(0)


_PACKED: dict[str, Operation] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _gated_delta,
    "chunk_kimi_delta_attention": _gated_delta,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba1,
}

_ROW_BY_ROW = {
    "torch_chunk_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention": "recurrent_kimi_delta_attention",
}
