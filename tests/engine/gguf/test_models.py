"""Models in GGUF files: text and logits equal those of the checkpoint that a file is made of."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM

from engine.errors import ModelUnsupported
from engine.gguf.container import read_model
from tests.engine.convert.checkpoints import CHECKPOINTS
from tests.engine.gguf.files import (
    TYPES,
    add,
    check_type,
    greedy,
    load_file,
    prompt,
    reference_greedy,
    write_checkpoint,
    write_types,
    write_wide,
)

QUICK = ("llama", "gemma3", "deepseek_v3", "lfm2", "gpt_oss")
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CHECKPOINTS]


@pytest.mark.parametrize("name", CASES)
def test_text_equals_the_checkpoint(name: str, tmp_path: Path) -> None:
    """In float64, of a file in float32."""
    file = write_checkpoint(name, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64).eval()
    reference.set_experts_implementation("eager")

    loaded = load_file(file, dtype="float64")

    assert reference_greedy(reference, prompt(), 12) == greedy(loaded, prompt(), 12)


@pytest.mark.parametrize(
    "kind", [kind if kind == Type.Q4_K else pytest.param(kind, marks=pytest.mark.slow) for kind in TYPES]
)
def test_layers_keep_the_weights_of_the_file(kind: Type, tmp_path: Path) -> None:
    """Each weight, and the logits within the rounding of activations."""
    source = read_model(write_wide("llama", tmp_path))

    assert "PASS" == check_type(source, tmp_path / "other.gguf", kind)


def test_the_model_names_the_type_of_its_file(tmp_path: Path) -> None:
    """Unless another dtype is set."""
    file = write_checkpoint("llama", tmp_path, "q8_0")

    assert load_file(file).info.dtype == "float32, Q8_0 weights"
    assert load_file(file, dtype="float32").info.dtype == "float32"
    assert load_file(file, quantize="int8").info.dtype == "float32, int8 weights"


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    """As are tensors that no parameter holds, and an unknown architecture."""
    source = read_model(write_checkpoint("llama", tmp_path))
    tensor = source.tensors["blk.1.ffn_up.weight"]
    tensors, file = dict(source.tensors), tmp_path / "other.gguf"

    assert isinstance(source.tensors, dict)
    del source.tensors[tensor.name]
    write_types(source, file, Type.F32)
    with pytest.raises(ModelUnsupported, match=r"it lacks the tensor of model\.layers\.1\.mlp\.up_proj\.weight"):
        load_file(file)

    source.tensors.update(tensors | {"blk.1.extra.weight": tensor.__class__("blk.1.extra.weight", *_content(tensor))})
    write_types(source, file, Type.F32)
    with pytest.raises(ModelUnsupported, match=r"tensors that its architecture lacks, 1 in all, .*blk\.1\.extra"):
        load_file(file)


def _content(tensor: object) -> tuple[object, ...]:
    return tuple(getattr(tensor, field) for field in ("type", "shape", "data"))


@pytest.mark.parametrize(
    ("architecture", "values", "reason"),
    [
        ("clip", {"general.type": "mmproj"}, "encoder of images or audio"),
        ("llama", {"general.type": "adapter"}, "LoRA weights"),
        ("bert", {}, "the architecture bert is not supported in GGUF files; supported: llama, "),
        ("llama", {}, r"it lacks the tensor token_embd\.weight"),
    ],
)
def test_other_files_are_refused_by_their_kind(
    architecture: str, values: dict[str, str], reason: str, tmp_path: Path
) -> None:
    """An encoder, an adapter, an unknown architecture, a tokenizer alone."""
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "file.gguf", architecture)
    for key, value in values.items():
        add(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with pytest.raises(ModelUnsupported, match=reason):
        load_file(tmp_path / "file.gguf")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("llama.block_count", 2**31, "no size"),
        ("llama.block_count", 10**6, "but it has .* tensors"),
        ("llama.attention.head_count", 0, "no size"),
        ("llama.attention.head_count", 65, "heads for 64 columns"),
        ("llama.attention.head_count_kv", 2**31 - 1, "values, not the"),
        ("llama.embedding_length", 96, "values, not the"),
        ("llama.rope.freq_base", math.inf, "no finite number"),
        ("llama.context_length", "long", "no integer"),
        ("llama.feed_forward_length", [96, 96, 64], "differs between layers"),
    ],
)
def test_metadata_that_does_not_fit_is_named(key: str, value: Any, reason: str, tmp_path: Path) -> None:
    """Without memory for what it claims."""
    source = read_model(write_checkpoint("llama", tmp_path))
    write_types(source, tmp_path / "other.gguf", Type.F32, {key: value})

    with pytest.raises(ModelUnsupported, match=reason):
        load_file(tmp_path / "other.gguf")
