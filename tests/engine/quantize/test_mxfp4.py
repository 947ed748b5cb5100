"""Checkpoints with experts in MXFP4 are dequantised at load, and the log reports their size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

from engine.config import EngineConfig
from engine.load.load import load
from engine.quantize.experts import QuantizedExperts
from tests.engine.models import CONTEXT, VOCABULARY, save_tokenizer

# Values of the 4-bit codes (OCP Microscaling Formats, E2M1).
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


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


@pytest.mark.filterwarnings("ignore")  # transformers says that it does the same
@pytest.mark.usefixtures("one_thread")
def test_mxfp4_experts_are_dequantised_and_quantised_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = save(tmp_path)
    settings = {"model": str(tmp_path), "context": CONTEXT, "slots": 1, "dtype": "float32"}

    plain = load(EngineConfig(**settings), lambda phase: None)  # type: ignore[arg-type]
    small = load(EngineConfig(**settings, quantize="int8"), lambda phase: None)  # type: ignore[arg-type]

    assert 4 == len(expected)
    found = dict(plain.model.named_parameters())
    assert [] == [name for name, numbers in expected.items() if not torch.equal(numbers, found[name])]
    assert 2 == sum(isinstance(one, QuantizedExperts) for one in small.model.modules())
    assert "has weights in MXFP4: they are read as float32, which takes about" in caplog.text
