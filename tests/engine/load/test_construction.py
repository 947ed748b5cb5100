"""Models constructed without torch's kernels in Python equal those of transformers alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from engine.load.construction import construct
from tests.engine.load.test_imports import run
from tests.engine.tiny import settings

# A scaled embedding and two rotations; a state space; a convolution; biases of attention; learned positions.
FAMILIES = ("gemma3_text", "mamba2", "lfm2", "bloom", "gpt2")

LOAD = """
import sys
from engine.load.imports import import_transformers
import_transformers()
from engine.config import EngineConfig
from engine.load.load import load
load(EngineConfig(model={folder!r}, slots=1), lambda phase: None)
print("sympy" in sys.modules)
"""


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_buffers_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings(family))).save_pretrained(tmp_path)
    read = partial(AutoModelForCausalLM.from_pretrained, tmp_path, attn_implementation="eager")

    expected, actual = tensors(read()), tensors(construct(read))

    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        assert tensor.device == actual[name].device, name
        assert torch.equal(tensor, actual[name]), name


def test_a_constructor_may_combine_numbers_with_weights_on_the_meta_device() -> None:
    """They are made on the meta device in a second attempt."""
    devices: list[str] = []

    def read() -> Tensor:
        with torch.device("meta"):
            numbers = torch.arange(3)
            devices.append(numbers.device.type)
            return torch.empty(3) + numbers

    assert "meta" == construct(read).device.type
    assert ["cpu", "meta"] == devices


def test_error_of_a_reader_is_raised() -> None:
    def read() -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        construct(read)


@pytest.mark.slow
def test_a_load_imports_no_sympy(folder: Any) -> None:
    assert ["False"] == run(LOAD.format(folder=str(folder("llama"))))


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by name."""
    return dict(model.named_parameters()) | dict(model.named_buffers())
