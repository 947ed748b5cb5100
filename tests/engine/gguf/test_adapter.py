"""Adapters in GGUF files equal the PEFT adapters that they were written from."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from engine.adapters.checkpoint import WEIGHTS_FILE, read_adapter
from engine.adapters.modules import AdaptableLayers
from engine.errors import AdapterUnsupported
from engine.gguf.adapter import read_gguf_adapter
from engine.gguf.container import read_model
from engine.types.events import Finished
from tests.engine.gguf.files import write_types, write_wide
from tests.engine.kit.adapters import LINEAR, AdaptedReference, save_adapter
from tests.engine.kit.models import core, load_model
from tests.engine.kit.play import Job, ask, play

Folder = Callable[[str], Path]
_KEY = re.compile(r"base_model\.model\.(.*)\.lora_([AB])\.weight")


def write_adapter(model: Path, adapter: Path, file: Path, *, alpha: float = 16.0, **changes: Any) -> Path:
    """Write a PEFT adapter as llama.cpp's convert_lora_to_gguf.py does.

    changes  architecture, metadata, and `tensors`, a function of the tensors by name
    """
    config = AutoConfig.from_pretrained(model)
    architecture = config.model_type
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_hidden_layers)
    writer = GGUFWriter(file, changes.get("architecture", architecture))
    metadata = {"general.type": "adapter", "adapter.type": "lora", **changes.get("metadata", {})}
    for key, text in metadata.items():
        writer.add_string(key, text)
    writer.add_float32("adapter.lora.alpha", alpha)
    tensors = dict[str, np.ndarray[Any, Any]]()
    for key, matrix in load_file(adapter / WEIGHTS_FILE).items():
        match = _KEY.fullmatch(key)
        assert match is not None
        values = matrix.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        count = heads.get(match[1].rpartition(".")[2])
        if architecture == "llama" and match[2] == "B" and count is not None:
            # LlamaModel.permute of convert_hf_to_gguf.py.
            values = values.reshape(count, 2, len(values) // count // 2, -1).swapaxes(1, 2).reshape(values.shape)
        name = names.get_name(f"{match[1]}.weight", try_suffixes=(".weight",))
        tensors[f"{name}.lora_{match[2].lower()}"] = np.ascontiguousarray(values)
    for name, values in changes.get("tensors", lambda unchanged: unchanged)(tensors).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def shapes_of(model: Path) -> tuple[dict[str, tuple[int, int]], Any]:
    """The linear layers of a model, and its configuration."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    return AdaptableLayers(skeleton).shapes, skeleton.config


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("alpha", [16.0, 0.0])
def test_factors_equal_those_of_peft(family: str, alpha: float, folder: Folder, tmp_path: Path) -> None:
    """With the rows of queries and keys in transformers' order; alpha 0 is a scaling of 1."""
    saved = save_adapter(
        folder(family), tmp_path / "peft", {"r": 8, "target_modules": LINEAR, "lora_alpha": alpha or 8}
    )
    file = write_adapter(folder(family), saved, tmp_path / "adapter.gguf", alpha=alpha)
    shapes, config = shapes_of(folder(family))
    expected = read_adapter("mine", saved, shapes)
    adapter = read_gguf_adapter("mine", file, shapes, config, torch.float32)

    assert adapter.layers.keys() == expected.layers.keys()
    for layer, factors in expected.layers.items():
        assert torch.equal(adapter.layers[layer].down, factors.down), layer
        assert torch.equal(adapter.layers[layer].up, factors.up), layer


def test_texts_equal_those_of_peft(folder: Folder, tmp_path: Path) -> None:
    """From the start, by name."""
    saved = save_adapter(folder("llama"), tmp_path / "peft", {"r": 8, "target_modules": LINEAR})
    file = write_adapter(folder("llama"), saved, tmp_path / "adapter.gguf")
    model = load_model(folder("llama"), "float64", lora=(f"mine={file}",), drafter="none")
    prompt = tuple(range(30, 50))
    answer = play(core(model), [Job(ask("a", prompt, 12, adapter="mine", ignore_eos=True))])["a"]

    assert answer.tokens == AdaptedReference(folder("llama"), saved, torch.float64).greedy(prompt, 12)


def test_a_q4_k_m_model_has_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    """Natively: a GGUF file as the base, adapters in both formats, alone, batched, in chunks, and shifted contexts."""
    source, base = write_wide("llama", tmp_path), tmp_path / "model"
    types = {"ffn_down": GGMLQuantizationType.Q6_K}
    write_types(read_model(source), tmp_path / "base.gguf", GGMLQuantizationType.Q4_K, others=types)
    saved = save_adapter(base, tmp_path / "peft", {"r": 8, "target_modules": LINEAR})
    file = write_adapter(base, saved, tmp_path / "adapter.gguf")
    other = save_adapter(base, tmp_path / "other", {"r": 3, "target_modules": LINEAR}, 1)
    lora = (f"a={file}", f"same={saved}", f"b={other}")
    model = load_model(tmp_path / "base.gguf", "float32", quantize="none", lora=lora, drafter="none")
    names, prompt = ("", "a", "same", "b"), tuple(range(30, 50))
    asked = [
        ask(name, prompt, 60, adapter=name, logprobs=1, ignore_eos=True, overflow="shift", keep=4) for name in names
    ]

    batched = play(core(model, slots=4, context=48), [Job(request) for request in asked])
    chunked = play(core(model, slots=3, context=48, chunk=5), [Job(request) for request in asked])

    assert model.info.not_native_reason is None
    for request in asked:
        alone = play(core(model, slots=1, context=48), [Job(request)])[request.id]
        assert alone.logprobs == batched[request.id].logprobs == chunked[request.id].logprobs, request.id
        assert isinstance(alone.end, Finished)
        assert alone.end.usage.context_shifts > 0
    assert batched["a"].logprobs == batched["same"].logprobs
    assert len({tuple(map(str, answer.logprobs)) for answer in batched.values()}) == 3


def _first(change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {
        name: change(array) if not at else array for at, (name, array) in enumerate(tensors.items())
    }


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architecture": "qwen3"}, "for the architecture qwen3"),
        ({"metadata": {"general.type": "model"}}, "no LoRA adapter, but has the type model"),
        ({"metadata": {"adapter.type": "other"}}, "no LoRA adapter"),
        ({"metadata": {"adapter.alora.invocation_tokens": "x"}}, "adapter.alora.invocation_tokens is not supported"),
        ({"tensors": lambda tensors: {}}, "no matrices"),
        ({"tensors": lambda tensors: dict(list(tensors.items())[1:])}, "only one of the matrices"),
        ({"tensors": lambda tensors: {**tensors, "output.weight.lora_c": np.zeros((1, 1), "f4")}}, "lora_c is no low"),
        ({"tensors": lambda tensors: {**tensors, "blk.9.attn_q.weight.lora_a": np.zeros((1, 1), "f4")}}, "blk.9"),
        ({"tensors": _first(lambda array: array[:, :16].copy())}, "are for the shape|have the shapes"),
        ({"tensors": _first(lambda array: array[:4].copy())}, "are for the shape|have the shapes"),
        ({"tensors": _first(lambda array: array * np.float32(np.nan))}, "not finite"),
    ],
)
def test_other_files_are_refused(changes: dict[str, Any], text: str, folder: Folder, tmp_path: Path) -> None:
    """With the reason."""
    saved = save_adapter(folder("llama"), tmp_path / "peft", {"r": 8, "target_modules": LINEAR})
    file = write_adapter(folder("llama"), saved, tmp_path / "adapter.gguf", **changes)
    shapes, config = shapes_of(folder("llama"))

    with pytest.raises(AdapterUnsupported, match=text):
        read_gguf_adapter("mine", file, shapes, config, torch.float32)


@pytest.mark.parametrize("length", [0, 3, 30, 2000, -1])
def test_truncated_files_are_refused(length: int, folder: Folder, tmp_path: Path) -> None:
    """At any length."""
    saved = save_adapter(folder("llama"), tmp_path / "peft", {"r": 8, "target_modules": LINEAR})
    file = write_adapter(folder("llama"), saved, tmp_path / "adapter.gguf")
    content = file.read_bytes()
    file.write_bytes(content[: length if length >= 0 else len(content) // 2])
    shapes, config = shapes_of(folder("llama"))

    with pytest.raises(AdapterUnsupported):
        read_gguf_adapter("mine", file, shapes, config, torch.float32)
