"""Conversions to GGUF and back: no weight changes, and nothing is overwritten or left behind by a failure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MistralConfig

from engine.convert.convert import convert
from engine.convert.gguf_file import WeightType
from engine.convert.tensors import gguf_tensors
from engine.errors import ModelInconvertible, ModelMissing
from engine.gguf.architectures.table import writable
from tests.engine.convert.checkpoints import (
    CHECKPOINTS,
    ENDS,
    MULTIMODAL,
    TEMPLATE,
    byte_level,
    conversion,
    save_checkpoint,
    save_model,
    save_multimodal,
)
from tests.selection import quick

PROMPT = torch.arange(3, 43).reshape(1, -1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a llama."""
    folder = tmp_path_factory.mktemp("llama")
    save_checkpoint("llama", folder)
    return folder


@pytest.mark.parametrize("name", quick([*CHECKPOINTS][::3], CHECKPOINTS))
def test_checkpoint_is_unchanged_after_gguf(name: str, tmp_path: Path) -> None:
    """Every weight in float32, the logits, the tokens of a text and the template."""
    model = save_checkpoint(name, tmp_path / "model")

    convert(conversion(tmp_path / "model", tmp_path / "model.gguf"))
    convert(conversion(tmp_path / "model.gguf", tmp_path / "again"))

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32).eval()
    expected, actual = model.state_dict(), again.state_dict()
    assert expected.keys() == actual.keys()
    for key, weight in expected.items():
        # Norms are stored with 1 added, decays as -exp.
        shifted = name.startswith(("gemma", "qwen3_5", "qwen3_next")) and "norm" in key
        rounding = 1e-6 if shifted or "A_log" in key else 0
        torch.testing.assert_close(actual[key], weight, rtol=0, atol=rounding)
    with torch.inference_mode():
        torch.testing.assert_close(again(PROMPT).logits, model(PROMPT).logits, rtol=1e-4, atol=1e-4)
    tokenizers = [AutoTokenizer.from_pretrained(tmp_path / folder) for folder in ("model", "again")]
    assert 1 == len({tuple(one.encode("The cellar, <tool> 12 dogs' ü\n")) for one in tokenizers})
    assert [TEMPLATE] * 2 == [one.chat_template for one in tokenizers]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", quick(["gemma3", "mistral3"], MULTIMODAL))
def test_text_of_a_multimodal_checkpoint_is_unchanged_after_gguf(kind: str, tmp_path: Path) -> None:
    """The logits and end tokens of the whole model; an output layer that is the embedding is written once."""
    whole = save_multimodal(kind, tmp_path / "model")

    unread = convert(conversion(tmp_path / "model", tmp_path / "model.gguf"))
    convert(conversion(tmp_path / "model.gguf", tmp_path / "again"))

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = whole(input_ids=PROMPT).logits
        torch.testing.assert_close(again(PROMPT).logits, expected, rtol=1e-4, atol=1e-4)
    inputs = (whole.input_modalities,) if isinstance(whole.input_modalities, str) else whole.input_modalities
    assert unread == tuple(name for name in inputs if name != "text")
    tied = whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
    assert again.config.tie_word_embeddings == tied
    # The tokenizer of some types adds another.
    assert set(ENDS) <= set(again.config.eos_token_id)


def test_halves_of_a_head_are_interleaved() -> None:
    rows = torch.arange(8.0).unsqueeze(1)
    config = LlamaConfig(num_attention_heads=2, head_dim=4)

    ((name, values),) = gguf_tensors({"model.layers.1.self_attn.q_proj.weight": rows}, config)

    assert ("blk.1.attn_q.weight", [0, 2, 1, 3, 4, 6, 5, 7]) == (name, values.flatten().tolist())


def test_window_that_the_architecture_lacks_limits_the_context() -> None:
    """Within its size it has no effect."""
    config = MistralConfig(sliding_window=512, max_position_embeddings=4096)

    assert 512 == writable(config).write(config)["llama.context_length"]


@pytest.mark.parametrize("weight_type", ["f32", "f16", "bf16", "q8_0"])
def test_matrices_have_the_weight_type_and_vectors_float32(
    checkpoint: Path, tmp_path: Path, weight_type: WeightType
) -> None:
    convert(conversion(checkpoint, tmp_path / "model.gguf", weight_type))

    tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    kinds = {1: GGMLQuantizationType.F32, 2: GGMLQuantizationType[weight_type.upper()]}
    assert all(kinds[len(tensor.shape)] == tensor.tensor_type for tensor in tensors.values())
    weights = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()["model.layers.1.mlp.down_proj.weight"]
    written = tensors["blk.1.ffn_down.weight"]
    error = torch.tensor(dequantize(written.data, written.tensor_type)) - weights
    assert float(error.abs().max()) <= {"f32": 0.0, "f16": 1e-3, "bf16": 4e-3, "q8_0": 1e-2}[weight_type]


def test_k_types_have_the_error_of_their_bits(tmp_path: Path) -> None:
    """Q4_K_M has 6 bits for an embedding that is tied to the logits, and for sensitive matrices of some layers."""
    config = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 16}
    config |= {"tie_word_embeddings": True}
    weights = save_model("llama", tmp_path / "model", **config).state_dict()["model.layers.1.mlp.down_proj.weight"]
    byte_level().save_pretrained(tmp_path / "model")
    kinds: dict[str, dict[str, str]] = {}

    for kind, error in (("q6_k", 0.02), ("q4_k_m", 0.1)):
        convert(conversion(tmp_path / "model", tmp_path / f"{kind}.gguf", cast(WeightType, kind)))
        tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / f"{kind}.gguf").tensors}
        kinds[kind] = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
        own = tensors["blk.1.ffn_down.weight"]
        assert float((torch.tensor(dequantize(own.data, own.tensor_type)) - weights).std() / weights.std()) < error

    by_layer = [kinds["q4_k_m"][f"blk.{layer}.ffn_down.weight"] for layer in range(8)]
    assert ["Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K"] == by_layer
    assert ("Q6_K", "Q4_K") == (kinds["q4_k_m"]["token_embd.weight"], kinds["q4_k_m"]["blk.0.attn_q.weight"])
    assert {"F32", "Q6_K"} == set(kinds["q6_k"].values())


def test_matrix_of_incomplete_blocks_has_float16(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "model", intermediate_size=100)
    byte_level().save_pretrained(tmp_path / "model")

    convert(conversion(tmp_path / "model", tmp_path / "model.gguf", "q8_0"))

    kinds = {tensor.name: tensor.tensor_type for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    assert GGMLQuantizationType.F16 == kinds["blk.0.ffn_down.weight"]
    assert GGMLQuantizationType.Q8_0 == kinds["blk.0.ffn_up.weight"]


def test_progress_ends_with_all_bytes(checkpoint: Path, tmp_path: Path) -> None:
    phases: list[str] = []
    progress: list[tuple[int, int]] = []
    own = conversion(checkpoint, tmp_path / "model.gguf", "bf16")

    convert(replace(own, on_phase=phases.append, on_progress=lambda *each: progress.append(each)))

    assert ["resolve", "tokenizer", "weights", "write bf16"] == phases
    assert progress == sorted(progress)
    assert 1 == len({total for _, total in progress})
    assert progress[-1][0] == progress[-1][1]


def test_existing_target_is_replaced_only_if_requested(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    target.write_text("mine")

    with pytest.raises(ModelInconvertible, match="--force"):
        convert(conversion(checkpoint, target))
    assert "mine" == target.read_text()
    convert(conversion(checkpoint, target, overwrite=True))
    assert b"GGUF" == target.read_bytes()[:4]


def test_existing_folder_is_replaced_as_a_whole(checkpoint: Path, tmp_path: Path) -> None:
    convert(conversion(checkpoint, tmp_path / "model.gguf"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old").touch()

    convert(conversion(tmp_path / "model.gguf", tmp_path / "folder", overwrite=True))

    assert "old" not in {file.name for file in (tmp_path / "folder").iterdir()}
    assert {"folder", "model.gguf"} == {file.name for file in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("model", "has the format of the source"),
        ("file.txt", "a file that does not end in .gguf"),
        ("folder.gguf", "folder.gguf is a folder"),
        ("file.txt/model.gguf", "NotADirectoryError|FileExistsError"),
    ],
)
def test_unsuitable_target_is_refused(checkpoint: Path, tmp_path: Path, target: str, reason: str) -> None:
    (tmp_path / "file.txt").touch()
    (tmp_path / "folder.gguf").mkdir()

    with pytest.raises(ModelInconvertible, match=reason):
        convert(conversion(checkpoint, tmp_path / target, overwrite=True))


def test_failure_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    def fail(written: int, total: int) -> None:
        raise OSError("No space left on device")

    with pytest.raises(ModelInconvertible, match="No space left"):
        convert(replace(conversion(checkpoint, tmp_path / "model.gguf"), on_progress=fail))
    assert [] == list(tmp_path.iterdir())


def test_missing_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match="there is no such file"):
        convert(conversion(tmp_path / "none.gguf", tmp_path / "model"))


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("gpt_neox", {}, "models of type gpt_neox are not written; deepseek_v2, "),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "type dynamic"),
        ("gemma2", {"query_pre_attn_scalar": 7}, "query_pre_attn_scalar=7"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not written"),
        ("smollm3", {"no_rope_layers": [0, 1, 1]}, "no_rope_layers"),
        ("lfm2", {"conv_bias": True}, "conv_bias must be False in GGUF, not True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob must be True"),
    ],
)
def test_inexpressible_setting_is_refused_by_name(
    name: str, settings: dict[str, object], reason: str, tmp_path: Path
) -> None:
    save_model(name, tmp_path / "model", **settings)

    with pytest.raises(ModelInconvertible, match=reason):
        convert(conversion(tmp_path / "model", tmp_path / "model.gguf"))
    assert ["model"] == [file.name for file in tmp_path.iterdir()]
