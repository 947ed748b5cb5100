"""Writes GGUF files: metadata, and tensors one at a time in the chosen weight type."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter, LlamaFileType, quantize
from torch import Tensor

from engine.convert.blocks import encode_blocks
from engine.gguf.architectures.settings import Value
from engine.kernels.formats import WeightFormat
from engine.quantize.fit import ColumnStatistics, fit

WeightType = Literal["f32", "f16", "bf16", "q8_0", "q6_k", "q4_k_m"]
_FILE_TYPES = {
    "f32": LlamaFileType.ALL_F32,
    "f16": LlamaFileType.MOSTLY_F16,
    "bf16": LlamaFileType.MOSTLY_BF16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
    "q6_k": LlamaFileType.MOSTLY_Q6_K,
    "q4_k_m": LlamaFileType.MOSTLY_Q4_K_M,
}
# Small tensors that llama.cpp computes with in float32: routers, short convolutions.
_FLOAT32_TENSORS = (
    "ffn_gate_inp.weight",
    "ffn_gate_inp_shexp.weight",
    "shortconv.conv.weight",
    "ssm_conv1d.weight",
    "_norm.weight",
)
_KIND, _Type = GGUFValueType, GGMLQuantizationType
# Formats of the kernels with the weights of K types, and matrix rows that are quantised at once.
_K_FORMATS: dict[Any, WeightFormat] = {_Type.Q4_K: "q4_k", _Type.Q6_K: "q6_k"}
_ROWS_AT_ONCE = 4096
# The largest scale of 6 bits.
_SCALE_LEVELS = 63
# Values and the second projection of the MLP, with the layer.
_sensitive = re.compile(r"blk\.(\d+)\.(attn_v|attn_qkv|ffn_down|ffn_down_exps)\.weight")

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor of a file: its shape and weight type."""

    name: str
    shape: tuple[int, ...]
    kind: Any

    @property
    def size(self) -> int:
        """Bytes in the file."""
        elements, block_bytes = GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // int(elements) * int(block_bytes)


def plan_tensors(tensors: Iterable[tuple[str, Tensor]], weight_type: WeightType, layers: int) -> list[TensorPlan]:
    """The type of each tensor of a model with `layers` layers: float32 for small ones."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors}
    tied = "output.weight" not in shapes
    return [
        TensorPlan(name, shape, _kind(name, shape, weight_type, layers, tied=tied)) for name, shape in shapes.items()
    ]


def _kind(name: str, shape: tuple[int, ...], weight_type: WeightType, layers: int, *, tied: bool) -> Any:
    if len(shape) < 2 or not name.endswith(".weight") or name.endswith(_FLOAT32_TENSORS):
        return _Type.F32
    kind = _k_type(name, layers, tied=tied) if weight_type == "q4_k_m" else _Type[weight_type.upper()]
    # Rows that are no whole blocks of 256 columns, or of 32.
    return next(
        candidate for candidate in (kind, _Type.Q8_0, _Type.F16) if shape[-1] % GGML_QUANT_SIZES[candidate][0] == 0
    )


def _k_type(name: str, layers: int, *, tied: bool) -> Any:
    """The type in the mix Q4_K_M: more bits for the logits, and for the most sensitive matrices of half the layers."""
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        return _Type.Q6_K
    match = _sensitive.match(name)
    layer, eighth = int(match[1]) if match else 0, layers // 8
    more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    return _Type.Q6_K if match and more else _Type.Q4_K


def write_gguf(
    path: Path,
    metadata: Mapping[str, Value],
    plans: list[TensorPlan],
    tensors: Iterable[tuple[str, Tensor]],
    on_progress: OnProgress,
) -> None:
    """Write a file; calls `on_progress` with the written and all bytes of tensors, after each tensor."""
    writer = GGUFWriter(path, str(metadata["general.architecture"]))
    try:
        for key, value in metadata.items():
            if key != "general.architecture":
                writer.add_key_value(key, value, _value_type(value))
        for plan in plans:
            writer.add_tensor_info(plan.name, plan.shape, np.dtype(np.float32), plan.size, raw_dtype=plan.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        written, total = 0, sum(plan.size for plan in plans)
        for plan, (_, tensor) in zip(plans, tensors, strict=True):
            writer.write_tensor_data(_encoded(tensor, plan.kind))
            written += plan.size
            on_progress(written, total)
    finally:
        writer.close()


def file_type(weight_type: WeightType) -> int:
    """The metadata `general.file_type`."""
    return int(_FILE_TYPES[weight_type])


def _encoded(tensor: Tensor, kind: Any) -> np.ndarray[Any, Any]:
    """The bytes of a tensor. Raises ValueError for infinite weights of K types and NaN."""
    if kind == _Type.BF16:
        return tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    if kind in _K_FORMATS:
        return _k_blocks(tensor.reshape(-1, tensor.shape[-1]), _K_FORMATS[kind])
    encoded: np.ndarray[Any, Any] = quantize(tensor.float().contiguous().numpy(), kind)
    return encoded


def _k_blocks(rows: Tensor, weight_format: WeightFormat) -> np.ndarray[Any, Any]:
    statistics = ColumnStatistics(torch.ones(rows.shape[1]))
    parts = (rows[first : first + _ROWS_AT_ONCE] for first in range(0, len(rows), _ROWS_AT_ONCE))
    fitted = (fit(part, weight_format, statistics, scale_levels=_SCALE_LEVELS) for part in parts)
    return np.concatenate([encode_blocks(part) for part in fitted])


def _value_type(value: Value) -> Any:
    for python, kind in ((bool, _KIND.BOOL), (int, _KIND.UINT32), (float, _KIND.FLOAT32), (str, _KIND.STRING)):
        if isinstance(value, python):
            return kind
    return _KIND.ARRAY
