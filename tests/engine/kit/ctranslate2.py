"""Reads a Whisper checkpoint in the format of CTranslate2, as packages bundle it, into a folder of transformers."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

ENGLISH_VOCABULARY = 51_864
HEAD_WIDTH = 64
DTYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)
Matrices = Mapping[str, NDArray[Any]]


class _Cursor:
    """Reads values from the start of a file on."""

    def __init__(self, content: bytes) -> None:
        self._content, self._position = content, 0

    def number(self, form: str) -> int:
        (value,) = struct.unpack_from(f"<{form}", self._content, self._position)
        self._position += struct.calcsize(f"<{form}")
        return int(value)

    def text(self) -> str:
        """A text with its length and a zero byte."""
        return self.block(self.number("H")).rstrip(b"\0").decode()

    def block(self, size: int) -> bytes:
        self._position += size
        return self._content[self._position - size : self._position]


def read_matrices(file: Path) -> dict[str, NDArray[Any]]:
    """The matrices of a model.bin by name."""
    cursor = _Cursor(file.read_bytes())
    version, name = cursor.number("I"), cursor.text()
    cursor.number("I")
    assert version >= 4
    assert "Whisper" in name
    matrices = {}
    for _ in range(cursor.number("I")):
        key = cursor.text()
        shape = [cursor.number("I") for _ in range(cursor.number("B"))]
        dtype = np.dtype(DTYPES[cursor.number("B")])
        matrices[key] = np.frombuffer(cursor.block(cursor.number("I")), dtype).reshape(shape)
    return matrices


def state_dict(matrices: Matrices) -> dict[str, torch.Tensor]:
    """The weights by their names in transformers."""
    state: dict[str, NDArray[Any]] = {"model.decoder.embed_tokens.weight": _dequantized(matrices, "decoder/embeddings")}
    for side in ("encoder", "decoder"):
        state[f"model.{side}.embed_positions.weight"] = matrices[f"{side}/position_encodings/encodings"]
        state |= _norm(matrices, f"model.{side}.layer_norm", f"{side}/layer_norm")
        for layer in range(_layers(matrices, side)):
            state |= _layer(matrices, f"model.{side}.layers.{layer}", f"{side}/layer_{layer}")
    for conv in ("conv1", "conv2"):
        state[f"model.encoder.{conv}.weight"] = matrices[f"encoder/{conv}/weight"]
        state[f"model.encoder.{conv}.bias"] = matrices[f"encoder/{conv}/bias"]
    return {name: torch.from_numpy(np.array(values, np.float32)) for name, values in state.items()}


def save_checkpoint(source: Path, target: Path) -> Path:
    """Write the folder of a checkpoint of CTranslate2 as one of transformers."""
    matrices = read_matrices(source / "model.bin")
    vocabulary, width = matrices["decoder/embeddings/weight"].shape
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"), eos_token="<|endoftext|>")
    end, start, disabled, previous = tokenizer.convert_tokens_to_ids(
        ["<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>", "<|startofprev|>"]
    )
    config = WhisperConfig(
        vocab_size=vocabulary,
        d_model=width,
        encoder_layers=_layers(matrices, "encoder"),
        decoder_layers=_layers(matrices, "decoder"),
        encoder_attention_heads=width // HEAD_WIDTH,
        decoder_attention_heads=width // HEAD_WIDTH,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        num_mel_bins=matrices["encoder/conv1/weight"].shape[1],
        eos_token_id=end,
        bos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=start,
    )
    assert vocabulary == ENGLISH_VOCABULARY
    model = WhisperForConditionalGeneration(config)
    missing, unexpected = model.load_state_dict(state_dict(matrices), strict=False)
    assert set(missing) <= {"proj_out.weight"}
    assert not unexpected
    model.tie_weights()
    settings = json.loads((source / "config.json").read_text())
    model.generation_config = GenerationConfig(
        eos_token_id=end,
        bos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=start,
        no_timestamps_token_id=disabled,
        prev_sot_token_id=previous,
        max_initial_timestamp_index=50,
        suppress_tokens=[token for token in settings["suppress_ids"] if token >= 0],
        begin_suppress_tokens=settings["suppress_ids_begin"],
        is_multilingual=False,
        return_timestamps=False,
        max_length=config.max_target_positions,
    )
    model.eval().save_pretrained(target)
    tokenizer.save_pretrained(target)
    WhisperFeatureExtractor(feature_size=config.num_mel_bins).save_pretrained(target)
    return target


def _layers(matrices: Matrices, side: str) -> int:
    names = {name.split("/")[1] for name in matrices if name.startswith(f"{side}/layer_")}
    return len(names - {"layer_norm"})


def _layer(matrices: Matrices, target: str, source: str) -> dict[str, NDArray[Any]]:
    state = {
        **_attention(matrices, f"{target}.self_attn", f"{source}/self_attention", ("qkv", "")),
        **_linear(matrices, f"{target}.fc1", f"{source}/ffn/linear_0"),
        **_linear(matrices, f"{target}.fc2", f"{source}/ffn/linear_1"),
        **_norm(matrices, f"{target}.final_layer_norm", f"{source}/ffn/layer_norm"),
    }
    if f"{source}/attention/linear_0/weight" in matrices:
        state |= _attention(matrices, f"{target}.encoder_attn", f"{source}/attention", ("q", "kv", ""))
    return state


def _attention(matrices: Matrices, target: str, source: str, parts: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """Projections whose rows are concatenated; the last one is that of the output."""
    state = _norm(matrices, f"{target}_layer_norm", f"{source}/layer_norm")
    for index, kinds in enumerate(parts):
        name = f"{source}/linear_{index}"
        for kind, weight, bias in zip(
            kinds,
            np.split(_dequantized(matrices, name), max(len(kinds), 1)),
            np.split(matrices[f"{name}/bias"], max(len(kinds), 1)),
            strict=False,
        ):
            state[f"{target}.{kind}_proj.weight"] = weight
            if kind != "k":
                state[f"{target}.{kind}_proj.bias"] = bias
    return state | _linear(matrices, f"{target}.out_proj", f"{source}/linear_{len(parts) - 1}")


def _linear(matrices: Matrices, target: str, source: str) -> dict[str, NDArray[Any]]:
    return {f"{target}.weight": _dequantized(matrices, source), f"{target}.bias": matrices[f"{source}/bias"]}


def _norm(matrices: Matrices, target: str, source: str) -> dict[str, NDArray[Any]]:
    return {f"{target}.weight": matrices[f"{source}/gamma"], f"{target}.bias": matrices[f"{source}/beta"]}


def _dequantized(matrices: Matrices, name: str) -> NDArray[Any]:
    weight, scale = matrices[f"{name}/weight"].astype(np.float32), matrices.get(f"{name}/weight_scale")
    return weight if scale is None else weight / scale.reshape(-1, 1)
