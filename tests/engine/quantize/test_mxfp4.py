"""Checkpoints with experts in MXFP4 keep their codes, or are dequantised at load by the settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig, GptOssConfig, GptOssForCausalLM

from engine.config import EngineConfig
from engine.errors import ModelUnsupported
from engine.load.load import LoadedModel, load
from engine.load.plan.model_plan import plan_model
from engine.quantize.experts import QuantizedExperts
from engine.step.input import StepInput
from kvcache.spec import Span
from tests.engine.kit.models import CONTEXT, END, VOCABULARY, core, save_tokenizer
from tests.engine.kit.play import Job, ask, play, texts
from tests.fake_device import FAKE, fake_device
from tests.selection import quick

# Values of the 4-bit codes (OCP Microscaling Formats, E2M1).
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers says that it dequantises
    pytest.mark.usefixtures("one_thread"),
]


def save(folder: Path) -> dict[str, Tensor]:
    """Write a tiny model with experts in MXFP4; the dequantised weights."""
    torch.manual_seed(0)
    config = GptOssConfig(
        **SIZES,
        vocab_size=VOCABULARY,
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=0,
    )
    GptOssForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    file, expected = folder / "model.safetensors", dict[str, Tensor]()
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, columns, outputs = tensors.pop(name).shape
        codes = torch.randint(0, 16, (experts, outputs, columns // 32, 32))
        exponents = torch.randint(-5, -2, (experts, outputs, columns // 32))
        numbers = VALUES[codes % 8] * torch.where(codes < 8, 1.0, -1.0) * 2.0 ** exponents[..., None]
        expected[name] = numbers.flatten(2).transpose(1, 2)
        tensors[f"{name}_blocks"] = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        tensors[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
    save_file(tensors, file, metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(settings))
    return expected


def loaded(folder: Path, **settings: Any) -> LoadedModel:
    return load(EngineConfig(model=str(folder), context=CONTEXT, slots=2, **settings), lambda phase: None)


def answers(model: LoadedModel) -> dict[str, Any]:
    """The texts of two prompts, one of them in chunks."""
    jobs = [Job(ask("long", range(3, 33), 6, ignore_eos=True)), Job(ask("short", range(40, 47), 9, ignore_eos=True), 1)]
    return texts(play(core(model, slots=2, chunk=12), jobs))


@pytest.mark.parametrize("quantize", quick(["none"], ["none", "auto"]))
def test_experts_keep_their_codes(quantize: str, tmp_path: Path) -> None:
    """Each weight, in the native step, with the planned bytes; the logits within the rounding of activations."""
    expected = save(tmp_path)
    GenerationConfig(eos_token_id=[END, 5]).save_pretrained(tmp_path)
    model = loaded(tmp_path, quantize=quantize)
    plan = plan_model(EngineConfig(model=str(tmp_path), context=CONTEXT, slots=2, drafter="none"), tmp_path)
    plain = loaded(tmp_path, dtype="float32")

    assert {name: own.tolist() for name, own in expected.items()} == unpacked(model)
    assert ("float32, MXFP4 weights", "MXFP4", None) == (model.info.dtype, plan.weights, model.info.not_native_reason)
    assert plan.weights_bytes == model.memory.weights_bytes < 0.8 * plain.memory.weights_bytes
    assert {END, 5} == model.eos == plain.eos
    exact, rounded = (logits(own) for own in (plain, model))
    assert float((rounded - exact).norm() / exact.norm()) < 0.02


def unpacked(model: LoadedModel) -> dict[str, Any]:
    """The weights of all experts by the names of transformers."""
    found = {}
    for name, module in model.model.named_modules():
        if isinstance(module, QuantizedExperts):
            for stack, matrices in ((module.experts.up, module.up), (module.experts.down, module.down)):
                weights = torch.stack([own.unpack(torch.float32) for own in matrices]).transpose(1, 2)
                found[f"{name}.{stack.parameter}"] = weights.tolist()
    return found


def logits(model: LoadedModel) -> Tensor:
    """Of a prompt [tokens, vocabulary]."""
    tokens = list(range(3, 23))
    cache = core(model).cache
    with cache.forward([Span(0, 0, len(tokens))]) as forward:
        return model.runner.run(StepInput(forward, tokens, range(len(tokens)))).logits


def test_text_on_a_device_is_that_of_the_dequantised_weights(tmp_path: Path) -> None:
    """Rows are not quantised there."""
    save(tmp_path)
    expected = answers(loaded(tmp_path, dtype="float32", kernels="torch"))
    with fake_device():
        model = loaded(tmp_path, device=FAKE)
        found = answers(model)

    assert "float32, MXFP4 weights" == model.info.dtype
    assert expected == found


def test_codes_without_exponents_are_refused(tmp_path: Path) -> None:
    save(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, file, metadata={"format": "pt"})

    with pytest.raises(ModelUnsupported, match=r"it lacks the tensor model.layers.1.mlp.experts.down_proj_scales"):
        loaded(tmp_path)


def test_mxfp4_experts_are_dequantised_and_quantised_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = save(tmp_path)

    plain = loaded(tmp_path, dtype="float32")
    small = loaded(tmp_path, dtype="float32", quantize="int8")

    assert 4 == len(expected)
    found = dict(plain.model.named_parameters())
    assert [] == [name for name, numbers in expected.items() if not torch.equal(numbers, found[name])]
    assert 2 == sum(isinstance(one, QuantizedExperts) for one in small.model.modules())
    assert "has weights in MXFP4: they are read as float32, which takes about" in caplog.text
