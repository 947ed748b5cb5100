"""GGUF files of tiny random models, in any type of weights, and the checks of the table in docs/gguf.md.

`python -W ignore -m tests.engine.gguf.files [MODEL ...] [TYPE ...]` prints the table (minutes), or a part of it.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from torch import Tensor

from engine.config import EngineConfig
from engine.convert.convert import convert
from engine.errors import ModelUnsupported
from engine.gguf.container import GgufModel, read_model
from engine.gguf.sources import PLAIN_TYPES
from engine.load.load import LoadedModel, load
from engine.load.read.gguf_model import read_gguf_config, read_gguf_model
from engine.quantize.experts import QuantizedExperts
from engine.quantize.layers import QuantizedLinear
from engine.quantize.stacks import ExpertStack
from engine.step.input import StepInput
from kvcache.cache import Cache
from kvcache.spec import Span
from tests.engine.convert.checkpoints import CHECKPOINTS, SIZE, byte_level, conversion, save_checkpoint, save_model
from tests.engine.kernels.test_blocks import HALVES, random_blocks

# Columns of matrices that have blocks of every type.
WIDTH = 256
WIDE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "moe_intermediate_size": WIDTH,
    "head_dim": 64,
    "linear_value_head_dim": 64,
    "mamba_d_head": 64,
    "mamba_head_dim": 64,
    "mamba_d_ssm": 512,
    "hidden_size_per_layer_input": 64,
    "qk_nope_head_dim": 32,
    "kv_lora_rank": 64,
}
TYPES = (Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1) + (
    Type.Q3_K,
    Type.Q4_K,
    Type.Q5_K,
    Type.Q6_K,
    Type.IQ4_NL,
    Type.IQ4_XS,
    Type.MXFP4,
)
# Largest difference of logits from those of the dequantised weights, relative to their size: activations have 8 bits,
# which changes the logits of random models by up to 0.12. One wrong matrix changes them by more than 1.
ROUNDING = 0.25
# The same with experts: routers choose others for some tokens. int8 of the same weights has 0.32 and 0.34.
ROUTED_ROUNDING = 0.6
# Routers, norms by group and short convolutions are not quantised.
_FLOATS = re.compile(r"gate_inp|_norm|conv\.conv|conv1d")
# A super-scale of random blocks, for weights of about 0.1.
SCALE = 2e-4


def write_checkpoint(name: str, folder: Path, weight_type: Any = "f32") -> Path:
    """Write a tiny checkpoint into folder/model, and its file."""
    save_checkpoint(name, folder / "model")
    convert(conversion(folder / "model", folder / "model.gguf", weight_type))
    return folder / "model.gguf"


def write_types(
    source: GgufModel,
    file: Path,
    kind: Type,
    changes: dict[str, Any] | None = None,
    others: Mapping[str, Type] | None = None,
) -> None:
    """Write a model with its matrices in another type: quantised by the gguf package, or random blocks.

    changes  metadata to replace
    others   types of tensors with a part of their name
    """
    types = dict(others or {})
    writer = GGUFWriter(file, source.metadata.text("general.architecture"))
    for key, value in (dict(source.metadata) | (changes or {})).items():
        if key != "general.architecture":
            add(writer, key, value)
    for number, tensor in enumerate(source.tensors.values()):
        weights = gguf.dequantize(tensor.rows, tensor.type).reshape(tensor.shape)
        own = next((type for part, type in types.items() if part in tensor.name), kind)
        block, _ = gguf.GGML_QUANT_SIZES[own]
        quantised = (
            tensor.name.endswith(".weight")
            and weights.ndim > 1
            and "gate_inp" not in tensor.name
            and "_norm" not in tensor.name
        )
        if quantised and weights.shape[-1] % block == 0 and "conv.conv" not in tensor.name:
            writer.add_tensor(tensor.name, blocks(weights, own, number), raw_dtype=own)
        else:
            writer.add_tensor(tensor.name, np.ascontiguousarray(weights))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    """Add one value of metadata."""
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def blocks(weights: np.ndarray[Any, Any], kind: Type, seed: int) -> np.ndarray[Any, Any]:
    """The blocks of weights; random ones for types that the gguf package does not write."""
    if kind in PLAIN_TYPES or kind.name.endswith(("_0", "_1", "MXFP4")):
        return gguf.quantize(np.ascontiguousarray(weights), kind)
    rows, (columns, size) = weights.size // weights.shape[-1], gguf.GGML_QUANT_SIZES[kind]
    raw = random_blocks(kind, rows, weights.shape[-1] // columns, seed).numpy().reshape(rows, -1, size).copy()
    for at in HALVES[kind]:
        raw[:, :, at : at + 2] = np.frombuffer(np.float16(SCALE).tobytes(), np.uint8)
    return raw.reshape(*weights.shape[:-1], -1)


def load_file(file: Path, **settings: Any) -> LoadedModel:
    """The served model of a file."""
    return load(EngineConfig(model=str(file), context=64, slots=2, **settings), lambda phase: None)


def greedy(loaded: LoadedModel, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of the loaded model after a prompt in two chunks."""
    cache = empty_cache(loaded)
    feed(loaded, cache, prompt[:7])
    tokens = [int(feed(loaded, cache, prompt[7:])[-1].argmax())]
    while len(tokens) < count:
        tokens.append(int(feed(loaded, cache, tokens[-1:])[-1].argmax()))
    return tokens


def empty_cache(loaded: LoadedModel) -> Cache:
    """A cache for one text."""
    return Cache(
        [layer.spec for layer in loaded.layers],
        slots=2,
        capacity=64,
        cells=128,
        dtype=loaded.kv_dtype,
        state_bytes=2**26 if loaded.recurrent else None,
    )


def feed(loaded: LoadedModel, cache: Cache, tokens: list[int]) -> Tensor:
    """The logits after each token."""
    with cache.forward([Span(0, cache.cached_length(0), len(tokens))]) as forward:
        return loaded.runner.run(StepInput(forward, tokens, list(range(len(tokens))))).logits


def reference_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of transformers."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    tokens: list[int] = whole[0, len(prompt) :].tolist()
    return tokens


def prompt(length: int = 20) -> list[int]:
    """A random prompt."""
    tokens: list[int] = torch.randint(5, SIZE - 20, (length,), generator=torch.Generator().manual_seed(3)).tolist()
    return tokens


def inexact_layers(loaded: LoadedModel, dequantised: Any) -> list[str]:
    """The quantised layers and experts with other weights than the dequantised model."""
    expected, wrong = dequantised.state_dict(), []
    for name, module in loaded.model.named_modules():
        if isinstance(module, QuantizedLinear):
            equal = torch.equal(module.packed.unpack(torch.float32), expected[f"{name}.weight"])
        elif isinstance(module, QuantizedExperts):
            stacks = {module.experts.up: module.up, module.experts.down: module.down}
            equal = all(
                torch.equal(matrix.unpack(torch.float32), stacked)
                for stack, matrices in stacks.items()
                for matrix, stacked in zip(matrices, _experts(expected, name, stack), strict=True)
            )
        else:
            continue
        if not equal:
            wrong.append(name)
    return wrong


def widened_layers(loaded: LoadedModel) -> set[str]:
    """The layers whose columns are in another order than in the file, in parts of blocks: they become int8."""
    modules = loaded.model.named_modules()
    return {name for name, own in modules if isinstance(own, QuantizedLinear) and own.packed.format == "int8"}


def _experts(state: dict[str, Tensor], name: str, stack: ExpertStack) -> list[Tensor]:
    stored = state[f"{name}.{stack.parameter}"]
    weights = stored.mT if stack.transposed else stored
    return [part for matrix in weights for part in matrix.chunk(stack.parts)]


def check_type(source: GgufModel, file: Path, kind: Type) -> str:
    """PASS, or the reason: text or weights of the served file, compared with transformers and dequantised weights."""
    write_types(source, file, kind)
    is_plain = kind in PLAIN_TYPES
    try:
        served = load_file(file, dtype="float64" if is_plain else "auto")
    except ModelUnsupported as error:
        return error.reason
    dtype = torch.float64 if is_plain else torch.float32
    dequantised, _, _ = read_gguf_model(file, read_gguf_config(file), dtype)
    if is_plain:
        dequantised.set_experts_implementation("eager")
        expected, actual = reference_greedy(dequantised, prompt(), 12), greedy(served, prompt(), 12)
        return "PASS" if expected == actual else "other text"
    widened = widened_layers(served)
    if wrong := set(inexact_layers(served, dequantised)) - widened:
        return f"{len(wrong)} layers have other weights"
    with torch.inference_mode():
        expected_logits = dequantised(input_ids=torch.tensor([prompt()])).logits[0]
    error = float((_logits(served) - expected_logits).norm() / expected_logits.norm())
    routed = any(isinstance(module, QuantizedExperts) for module in served.model.modules())
    if error >= (ROUTED_ROUNDING if routed else ROUNDING):
        return f"logits differ by {error:.2f}"
    return f"PASS, {len(widened)} matrices as int8" if widened else "PASS"


def _logits(loaded: LoadedModel) -> Tensor:
    return feed(loaded, empty_cache(loaded), prompt())


def rows(names: list[str], kinds: list[Type]) -> Iterator[str]:
    """The lines of the table."""
    yield f"| model | {' | '.join(kind.name for kind in kinds)} |"
    yield f"|{'---|' * (len(kinds) + 1)}"
    for name in names:
        with tempfile.TemporaryDirectory() as own:
            source = read_model(write_wide(name, Path(own)))
            results = [check_type(source, Path(own) / f"{kind.name}.gguf", kind) for kind in kinds]
        yield f"| {name} | {' | '.join(results)} |"


def write_wide(name: str, folder: Path) -> Path:
    """Write a checkpoint with matrices that have blocks of every type, and its file."""
    kind, own = CHECKPOINTS[name]
    wide = WIDE | ({"query_pre_attn_scalar": WIDE["head_dim"]} if kind.startswith("gemma") else {})
    if kind.startswith("deepseek"):
        # The width of the rotated part of a head.
        del wide["head_dim"]
    save_model(kind, folder / "model", **own | wide)
    byte_level().save_pretrained(folder / "model")
    convert(conversion(folder / "model", folder / "model.gguf", "f32"))
    return folder / "model.gguf"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    asked = sys.argv[1:]
    # Names with a space are variants of a model type.
    chosen = [name for name in asked if name in CHECKPOINTS] or [name for name in CHECKPOINTS if " " not in name]
    kinds = [kind for kind in TYPES if kind.name in asked] or list(TYPES)
    for line in rows(chosen, kinds):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
