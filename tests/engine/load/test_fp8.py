"""Checkpoints with fine-grained FP8 weights (DeepSeek-V3, Qwen3 FP8) are dequantised at load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config import EngineConfig
from engine.load.load import LoadedModel, load
from tests.engine.kit.models import CONTEXT, core, save_model
from tests.engine.kit.play import Job, ask, play

BLOCK = 16


def save(folder: Path) -> dict[str, Tensor]:
    """Write a tiny model with projections in FP8 and a scale for each block; the dequantised weights."""
    save_model("llama", folder)
    file, expected = folder / "model.safetensors", dict[str, Tensor]()
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        blocks = tensors[name].unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        scales = blocks.abs().amax((1, 3), keepdim=True) / 448.0
        codes = (blocks / scales).to(torch.float8_e4m3fn)
        expected[name] = (codes.float() * scales).flatten(2).flatten(0, 1)
        tensors[name] = codes.flatten(2).flatten(0, 1)
        tensors[f"{name}_scale_inv"] = scales[:, 0, :, 0]
    save_file(tensors, file, metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    stored = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": stored}))
    return expected


def loaded(folder: Path, dtype: str = "float32", quantize: str = "none") -> LoadedModel:
    """The model of a folder, loaded by the engine's loader."""
    settings = {"model": str(folder), "context": CONTEXT, "slots": 1, "dtype": dtype, "quantize": quantize}
    return load(EngineConfig(**settings), lambda phase: None)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")  # transformers says that it does the same
@pytest.mark.usefixtures("one_thread")
def test_fp8_weights_are_dequantised_and_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Quantisation to int8 works on top."""
    expected = save(tmp_path)

    plain = loaded(tmp_path)
    found = dict(plain.model.named_parameters())
    answer = play(core(plain), [Job(ask("one", (5, 6, 7), 8, ignore_eos=True))])["one"]
    small = play(core(loaded(tmp_path, quantize="int8")), [Job(ask("one", (5, 6, 7), 8, ignore_eos=True))])["one"]

    assert 14 == len(expected)
    assert [] == [name for name, numbers in expected.items() if not torch.equal(numbers, found[name])]
    assert 8 == len(answer.tokens) == len(small.tokens)
    assert "has weights in FP8: they are read as float32" in caplog.text
