"""What --tensor-parallel does not support is refused by name before a process is started."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.config import ConfigError, EngineConfig
from engine.errors import ModelUnsupported
from engine.load.plan.model_plan import plan_model
from engine.parallel.loading import check_divisible
from tests.engine.kit.encoders import save_encoder_model

Folder = Callable[[str], Path]


def refusal(folder: Path, ranks: int = 2, **settings: object) -> str:
    """The reason why a model is refused; "" if it is not."""
    config = EngineConfig(model=str(folder), tensor_parallel=ranks, **settings)
    try:
        check_divisible("some", folder, config)
    except ModelUnsupported as error:
        return error.reason
    return ""


def changed(folder: Path, target: Path, **settings: object) -> Path:
    """A copy of a model's folder with another configuration."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | settings))
    return target


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "mixtral"])
def test_models_with_a_plan_are_accepted(folder: Folder, family: str) -> None:
    assert "" == refusal(folder(family))


def test_heads_must_be_divisible(folder: Folder, tmp_path: Path) -> None:
    """The number is named."""
    few = changed(folder("llama"), tmp_path / "few", num_key_value_heads=1)

    assert "it has 2 KV heads, not divisible by 4" in refusal(folder("llama"), 4)
    assert "it has 4 attention heads, not divisible by 3" in refusal(folder("llama"), 3)
    assert "it has 1 KV heads, not divisible by 2" in refusal(few)


def test_models_without_a_plan_are_refused(folder: Folder) -> None:
    assert "it is a gpt2, for which transformers has no plan" in refusal(folder("gpt2"))


def test_gguf_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")

    assert "--tensor-parallel 2 does not support it: it is a GGUF file" in refusal(file)


def test_a_gpu_for_each_rank(folder: Folder) -> None:
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0

    assert f"there are {devices}" in refusal(folder("llama"), 2, device="cuda") or devices > 1


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("quantize", "int8"),
        ("disk_cache", "files"),
        ("host_cache_bytes", 4096),
        ("drafter", "mtp"),
        ("device", "cuda:1"),
    ],
)
def test_settings_are_refused(setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{setting} {value} is not supported with --tensor-parallel 2$"):
        EngineConfig(model="some", tensor_parallel=2, **{setting: value})


def test_ranks_are_at_least_one() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel must be at least 1, not 0"):
        EngineConfig(tensor_parallel=0)


def test_models_with_an_encoder_are_refused(tmp_path: Path) -> None:
    assert "it has an encoder" in refusal(save_encoder_model("bart", tmp_path / "bart"))


def test_a_plan_is_of_one_process(folder: Folder) -> None:
    config = EngineConfig(model=str(folder("llama")), tensor_parallel=2)

    with pytest.raises(ModelUnsupported, match="a plan is of one process; leave out --tensor-parallel"):
        plan_model(config, folder("llama"))
