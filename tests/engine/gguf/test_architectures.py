"""Files have the layout of llama.cpp's converter, stated here row by row."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from torch import Tensor

from engine.convert.convert import convert
from engine.gguf.architectures.table import ARCHITECTURES
from engine.gguf.container import GgufModel, read_model
from tests.engine.convert.checkpoints import CHECKPOINTS, byte_level, conversion, save_checkpoint, save_model
from tests.engine.gguf.files import greedy, load_file, prompt, reference_greedy, write_checkpoint, write_types
from tests.house.source import ROOT

# Of the tiny models: key heads, value heads, and columns of both.
KEYS, VALUES, WIDTH = 2, 4, 16
GROUP = VALUES // KEYS
MULTIPLIERS = ("attention_in", "attention_out", "embedding", "key", "lm_head", "ssm_in", "ssm_out")


def _file(name: str, folder: Path) -> tuple[GgufModel, dict[str, Tensor]]:
    file = write_checkpoint(name, folder)
    return read_model(file), save_checkpoint(name, folder / "again").state_dict()


def _values(model: GgufModel, tensor: str) -> NDArray[np.float32]:
    found = model.tensors[f"blk.0.{tensor}"]
    return found.data.view(np.float32).reshape(found.shape)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_value_heads_are_tiled(name: str, tmp_path: Path) -> None:
    """The first value heads of all key heads come first; the checkpoint groups them by key head."""
    model, weights = _file(name, tmp_path)
    layer = "model.layers.0.linear_attn."
    heads = [key * GROUP + value for value in range(GROUP) for key in range(KEYS)]
    rows = [head * WIDTH + column for head in heads for column in range(WIDTH)]
    before = list(range(2 * KEYS * WIDTH))
    after = [len(before) + row for row in rows]

    def equal(tensor: str, expected: Tensor) -> bool:
        return np.array_equal(_values(model, tensor), expected.numpy())

    assert [0, 2, 1, 3] == heads
    assert equal("attn_qkv.weight", weights[f"{layer}in_proj_qkv.weight"][before + after])
    assert equal("ssm_conv1d.weight", weights[f"{layer}conv1d.weight"][before + after, 0])
    assert equal("attn_gate.weight", weights[f"{layer}in_proj_z.weight"][rows])
    assert equal("ssm_beta.weight", weights[f"{layer}in_proj_b.weight"][heads])
    assert equal("ssm_alpha.weight", weights[f"{layer}in_proj_a.weight"][heads])
    assert equal("ssm_out.weight", weights[f"{layer}out_proj.weight"][:, rows])
    assert equal("ssm_dt.bias", weights[f"{layer}dt_bias"][heads])
    assert equal("ssm_a", -torch.exp(weights[f"{layer}A_log"][heads]))
    assert equal("ssm_norm.weight", weights[f"{layer}norm.weight"])
    assert equal("attn_norm.weight", weights["model.layers.0.input_layernorm.weight"] + 1)


def test_rows_of_a_key_head_are_separated(tmp_path: Path) -> None:
    """The checkpoint has queries, keys, values and gates of one key head after another."""
    model, weights = _file("qwen3_next", tmp_path)
    grouped = weights["model.layers.0.linear_attn.in_proj_qkvz.weight"].view(KEYS, -1, 64)
    queries, keys, values, gates = grouped.split([WIDTH, WIDTH, GROUP * WIDTH, GROUP * WIDTH], 1)

    joined = torch.cat([each.flatten(0, 1) for each in (queries, keys, values)])
    assert np.array_equal(_values(model, "attn_qkv.weight"), joined.numpy())
    assert np.array_equal(_values(model, "attn_gate.weight"), gates.flatten(0, 1).numpy())
    assert {"blk.0.ssm_ba.weight", "blk.0.ssm_a", "blk.0.ssm_dt.bias"} <= set(model.tensors)


def test_multipliers_become_part_of_the_weights(tmp_path: Path) -> None:
    """Files have none; the text is that of the checkpoint."""
    scales = {f"{name}_multiplier": 0.5 + number / 8 for number, name in enumerate(MULTIPLIERS)}
    scales |= {"mlp_multipliers": [0.7, 1.2], "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7]}
    model = save_model("falcon_h1", tmp_path / "model", **scales).double()
    byte_level().save_pretrained(tmp_path / "model")
    convert(conversion(tmp_path / "model", tmp_path / "model.gguf"))

    assert reference_greedy(model, prompt(), 12) == greedy(
        load_file(tmp_path / "model.gguf", dtype="float64"), prompt(), 12
    )


def test_keys_and_values_of_layers_that_share_others_are_ignored(tmp_path: Path) -> None:
    """Published checkpoints have them, and files too."""
    source = read_model(write_checkpoint("gemma4", tmp_path))
    shared = {f"blk.5.attn_{part}.weight": source.tensors[f"blk.3.attn_{part}.weight"] for part in "kv"}
    renamed = {name: replace(tensor, name=name) for name, tensor in shared.items()}

    assert not renamed.keys() & source.tensors.keys()
    write_types(replace(source, tensors={**source.tensors, **renamed}), tmp_path / "shared.gguf", Type.F32)

    files = (tmp_path / "model.gguf", tmp_path / "shared.gguf")
    texts = [greedy(load_file(file, dtype="float64"), prompt(), 12) for file in files]
    assert texts[0] == texts[1]


def test_metadata_of_recurrent_layers(tmp_path: Path) -> None:
    model, _ = _file("qwen3_5", tmp_path)
    keys = ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")

    values = [model.metadata[f"qwen35.ssm.{key}"] for key in keys]
    assert [4, WIDTH, KEYS, VALUES, VALUES * WIDTH] == values
    assert 4 == model.metadata["qwen35.full_attention_interval"]
    assert 4 == model.metadata["qwen35.rope.dimension_count"]


def test_documents_name_every_architecture() -> None:
    read, written = ((ROOT / "docs" / name).read_text() for name in ("gguf.md", "files.md"))
    words = {name: set(re.findall(r"[\w.-]*\w", text)) for name, text in (("read", read), ("written", written))}

    assert set() == {row.name for row in ARCHITECTURES} - words["read"]
    assert set() == {name for row in ARCHITECTURES for name in (row.model, *row.written)} - words["written"]


def test_every_model_type_has_a_checkpoint_that_is_tested() -> None:
    assert set() == {row.model for row in ARCHITECTURES} - {kind for kind, _ in CHECKPOINTS.values()}
