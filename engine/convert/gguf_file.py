"""Writes GGUF files: metadata, and tensors one at a time in the chosen weight type."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter, LlamaFileType, quantize
from torch import Tensor

from engine.convert.architectures import Value

WeightType = Literal["f32", "f16", "bf16", "q8_0"]
_FILE_TYPES = {
    "f32": LlamaFileType.ALL_F32,
    "f16": LlamaFileType.MOSTLY_F16,
    "bf16": LlamaFileType.MOSTLY_BF16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
}
# Small tensors that llama.cpp computes with in float32: routers, short convolutions.
_FLOAT32_TENSORS = ("ffn_gate_inp.weight", "shortconv.conv.weight", "_norm.weight")
_KIND = GGUFValueType

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


def plan_tensors(tensors: Iterable[tuple[str, Tensor]], weight_type: WeightType) -> list[TensorPlan]:
    """The weight type of each tensor: float32 for small ones, float16 where rows are no whole blocks."""
    return [TensorPlan(name, tuple(each.shape), _kind(name, each, weight_type)) for name, each in tensors]


def _kind(name: str, tensor: Tensor, weight_type: WeightType) -> Any:
    if tensor.ndim < 2 or not name.endswith(".weight") or name.endswith(_FLOAT32_TENSORS):
        return GGMLQuantizationType.F32
    kind = GGMLQuantizationType[weight_type.upper()]
    whole_blocks = tensor.shape[-1] % GGML_QUANT_SIZES[kind][0] == 0
    return kind if whole_blocks else GGMLQuantizationType.F16


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
    if kind == GGMLQuantizationType.BF16:
        return tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    encoded: np.ndarray[Any, Any] = quantize(tensor.float().contiguous().numpy(), kind)
    return encoded


def _value_type(value: Value) -> Any:
    for python, kind in ((bool, _KIND.BOOL), (int, _KIND.UINT32), (float, _KIND.FLOAT32), (str, _KIND.STRING)):
        if isinstance(value, python):
            return kind
    return _KIND.ARRAY
