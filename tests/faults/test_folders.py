"""Damaged files of models are refused with a message, or have no effect."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.load.load import load

BUNDLED = Path(__file__).parents[2] / "models" / "target"


def lacks_a_field(content: dict[str, Any]) -> None:
    del content["added_tokens"][0]["special"]


def has_a_number(content: dict[str, Any]) -> None:
    content["padding"] = 0


@pytest.mark.parametrize("change", [lacks_a_field, has_a_number])
def test_an_invalid_tokenizer_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED, folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))

    with pytest.raises(ModelError, match="its tokenizer cannot be read: ") as refused:
        load(EngineConfig(model=str(folder), device="cpu"), lambda _: None)
    assert str(folder) in str(refused.value)


def test_an_index_without_weights_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED, folder)
    weights = folder / "model.safetensors"
    weights.rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}, "weight_map": {}}')

    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json names no weights") as refused:
        load(EngineConfig(model=str(folder), device="cpu"), lambda _: None)
    assert str(folder) in str(refused.value)


@pytest.mark.parametrize("ends", [{"x": 1}, [None]])
def test_end_tokens_that_are_no_numbers_are_refused(tmp_path: Path, ends: Any) -> None:
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))

    with pytest.raises(ModelError, match="its eos_token_id is neither a token nor a list of tokens: ") as refused:
        load(EngineConfig(model=str(folder), device="cpu"), lambda _: None)
    assert str(folder) in str(refused.value)


@pytest.mark.slow
def test_damaged_files_are_refused_or_have_no_effect() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.folders", "--count", "20"], capture_output=True, text=True, check=False
    )

    assert (0, "") == (done.returncode, done.stderr)
