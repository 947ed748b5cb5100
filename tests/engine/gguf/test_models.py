"""Models in GGUF files: text and logits equal those of the checkpoint that a file is made of."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM

from engine.errors import ModelUnsupported
from engine.gguf.container import GgufError, read_model
from engine.load.load import LoadedModel
from engine.load.read.gguf_model import gguf_config, gguf_model, read_gguf_config, read_gguf_model
from engine.model import hooks
from engine.quantize.experts import QuantizedExperts
from tests.engine.convert.checkpoints import CHECKPOINTS
from tests.engine.gguf.files import (
    TYPES,
    add,
    check_type,
    greedy,
    inexact_layers,
    load_file,
    prompt,
    reference_greedy,
    write_checkpoint,
    write_types,
    write_wide,
)
from tests.libraries import built

QUICK = ("llama", "gemma3", "deepseek_v3", "lfm2", "gpt_oss", "qwen3_5")
ROUTED = ("qwen3_moe", "deepseek_v2")
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


@pytest.mark.parametrize("name", ["mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in ROUTED)])
def test_gates_and_ups_of_experts_keep_two_types(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each weight of all layers, in the native step if the model has one."""
    served, dequantised = _served_experts(name, {"ffn_up_exps": Type.Q6_K}, tmp_path)

    experts = [module for module in served.model.modules() if isinstance(module, QuantizedExperts)]
    assert {("q4_k", "q6_k")} == {(first.format, second.format) for first, second, *_ in (each.up for each in experts)}
    assert [] == inexact_layers(served, dequantised)
    assert served.info.not_native_reason is None
    assert "are stored as int8" not in caplog.text


def test_projections_of_latents_keep_their_format(tmp_path: Path) -> None:
    """The native step multiplies the codes of the file, whose weights are those of the modules."""
    built("step")
    file = tmp_path / "other.gguf"
    write_types(read_model(write_wide("deepseek_v3", tmp_path)), file, Type.Q8_0)
    served = load_file(file)

    assert served.info.not_native_reason is None
    for projection in hooks.latent_projections(served.model):
        assert projection.packed is not None
        for head, (keys, values) in enumerate(zip(projection.packed.keys, projection.packed.values, strict=True)):
            assert torch.equal(keys.unpack(torch.float32).T, projection.keys[head])
            assert torch.equal(values.unpack(torch.float32), projection.values[head])


@pytest.mark.slow
def test_experts_with_a_float_part_stay_floats(tmp_path: Path) -> None:
    served, dequantised = _served_experts("mixtral", {"ffn_up_exps": Type.F16}, tmp_path)

    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert not any(isinstance(module, QuantizedExperts) for module in served.model.modules())
    assert torch.equal(dequantised.get_parameter(name), served.model.get_parameter(name).float())


@pytest.mark.slow
def test_alternating_gates_and_ups_of_two_types_become_int8(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log names their types and the loss."""
    served, _ = _served_experts("gpt_oss", {"ffn_up_exps": Type.Q6_K}, tmp_path)

    experts = [module for module in served.model.modules() if isinstance(module, QuantizedExperts)]
    assert {"int8"} == {matrix.format for each in experts for matrix in each.up}
    assert {"q4_k"} == {matrix.format for each in experts for matrix in each.down}
    assert "million weights in Q4_K and Q6_K are stored as int8, with a relative squared error of" in caplog.text


def _served_experts(name: str, others: dict[str, Type], folder: Path) -> tuple[LoadedModel, Any]:
    """A model in Q4_K with some tensors in other types, and the model with its dequantised weights."""
    file = folder / "other.gguf"
    write_types(read_model(write_wide(name, folder)), file, Type.Q4_K, others=others)
    dequantised, _, _ = read_gguf_model(file, read_gguf_config(file), torch.float32)
    return load_file(file), dequantised


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


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("blk.0.attn_k.weight", {"shape": (64, 32)}, r"attn_k\.weight has the shape \[64, 32\], not \[32, 64\]"),
        ("blk.1.attn_norm.weight", {"type": Type.Q8_0, "data": np.zeros(68, np.uint8)}, "is a vector of the type Q8_0"),
    ],
)
def test_tensors_of_another_form_are_named(name: str, changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """With as many values as the parameter."""
    source = read_model(write_checkpoint("llama", tmp_path))
    tensors = {**source.tensors, name: replace(source.tensors[name], **changes)}

    with pytest.raises(GgufError, match=reason):
        gguf_model(replace(source, tensors=tensors), gguf_config(source), torch.float32)


def _content(tensor: object) -> tuple[object, ...]:
    return tuple(getattr(tensor, field) for field in ("type", "shape", "data"))


@pytest.mark.parametrize(
    ("architecture", "values", "reason"),
    [
        ("clip", {"general.type": "mmproj"}, "encoder of images or audio"),
        ("llama", {"general.type": "adapter"}, "LoRA weights"),
        ("bert", {}, "the architecture bert is not supported in GGUF files; supported: llama, "),
        ("llama4", {}, r"llama4 is not supported in GGUF files \(its chunked attention is not read; "),
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
        ("llama.attention.head_count", 63, "values that do not fit together: .* is not a multiple"),
        ("llama.attention.head_count_kv", 2**31 - 1, "values, not the"),
        ("llama.embedding_length", 96, "values, not the"),
        ("llama.rope.freq_base", math.inf, "no finite number"),
        ("llama.rope.freq_base", 0.0, r"freq_base is 0\.0, not above 0"),
        ("llama.rope.scaling.factor", -4.0, r"factor is -4\.0, not above 0"),
        ("llama.context_length", "long", "no integer"),
        ("llama.feed_forward_length", [96, 96, 64], "differs between layers"),
        ("tokenizer.ggml.eos_token_id", "2", "eos_token_id is no integer"),
    ],
)
def test_metadata_that_does_not_fit_is_named(key: str, value: Any, reason: str, tmp_path: Path) -> None:
    """Without memory for what it claims."""
    source = read_model(write_checkpoint("llama", tmp_path))
    write_types(source, tmp_path / "other.gguf", Type.F32, {key: value})

    with pytest.raises(ModelUnsupported, match=reason):
        load_file(tmp_path / "other.gguf")


def test_a_configuration_without_a_model_is_refused(tmp_path: Path) -> None:
    """The range of YaRN is computed when the model is constructed."""
    values = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, "llama.rope.freq_base": 1.0}
    source = read_model(write_checkpoint("llama", tmp_path))
    write_types(source, tmp_path / "other.gguf", Type.F32, values)

    with pytest.raises(ModelUnsupported, match=r"no model that transformers can construct \(ZeroDivisionError"):
        load_file(tmp_path / "other.gguf")
