"""The configuration of a model, its dtype and its trained context, before its weights are read."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from engine.config import EngineConfig
from engine.errors import ModelUnsupported
from engine.gguf.container import GgufError
from engine.gguf.projectors.pair import find_tower
from engine.load.machine.device import has_bfloat16
from engine.load.read.checkpoint import (
    READ_ERRORS,
    Checkpoint,
    error_line,
    is_gguf,
    missing_weights_reason,
    read_checkpoint,
    weight_files,
)
from engine.load.read.gguf_model import gguf_config

log = logging.getLogger("cellar.engine")

# Context in tokens of a model without a limit.
_DEFAULT_CONTEXT = 8192
# Names of tokenizer files.
_TOKENIZER_FILES = ("tokenizer*", "*.model", "*.tiktoken", "vocab*")

NO_ENCODER_INPUT = "its decoder needs audio or a text for its encoder, and no request can have media"


def choose_dtype(settings: EngineConfig, config: Any, *, small: bool) -> torch.dtype:
    """The dtype of weights and activations; `small`: see checkpoint.is_small.

    "auto" is bfloat16 for checkpoints in bfloat16 if the device multiplies it (measured 1.3-3 times faster than
    float32 on AVX512-BF16, slower without), and float32 otherwise: also for small models, where exactness is cheap. The
    native step computes in float32 with weights and cells of this dtype.
    """
    if settings.dtype != "auto":
        chosen: torch.dtype = getattr(torch, settings.dtype)
        return chosen
    stored = getattr(config.get_text_config(), "dtype", None)
    if stored != torch.bfloat16 or small:
        return torch.float32
    if has_bfloat16(settings.device):
        return torch.bfloat16
    if settings.device != "cpu":
        log.warning("%s emulates bfloat16: float32 is used; --dtype float16 is faster", settings.device)
    return torch.float32


def read_config(name: str, folder: Path, settings: EngineConfig) -> tuple[Checkpoint, Any]:
    """The checkpoint with its configuration. Models that it, or the file names, rule out are refused before weights
    are read.
    """
    if not is_gguf(folder):
        _check_files(name, folder)
    return read_headers(name, folder, settings)


def _may_transcribe(config: Any, folder: Path) -> bool:
    """Whether a model reads spectrograms, and has timestamps in its generation configuration."""
    file = folder / "generation_config.json"
    return hasattr(config, "num_mel_bins") and file.exists() and b'"no_timestamps_token_id"' in file.read_bytes()


def read_headers(name: str, folder: Path, settings: EngineConfig) -> tuple[Checkpoint, Any]:
    """As `read_config`, of a folder that may lack weights."""
    checkpoint, config = _configuration(name, folder)
    if config.is_encoder_decoder and not (settings.media or _may_transcribe(config, folder)):
        raise ModelUnsupported(name, NO_ENCODER_INPUT)
    longest = max_context(config.get_text_config())
    if settings.context is not None and settings.context > longest:
        raise ModelUnsupported(name, f"its context is at most {longest} tokens; lower --context")
    return checkpoint, config


def _check_files(name: str, folder: Path) -> None:
    """Raise ModelUnsupported for a folder without weights or tokenizer."""
    if not weight_files(folder):
        raise ModelUnsupported(name, missing_weights_reason(folder))
    if not any(next(folder.glob(kind), None) for kind in _TOKENIZER_FILES):
        raise ModelUnsupported(name, "its tokenizer cannot be read: the folder has none, such as tokenizer.json")


def _configuration(name: str, path: Path) -> tuple[Checkpoint, Any]:
    """Raises ModelUnsupported."""
    try:
        checkpoint = read_checkpoint(path)
        if checkpoint.gguf is not None:
            return _with_tower(checkpoint, gguf_config(checkpoint.gguf))
        return checkpoint, AutoConfig.from_pretrained(path, trust_remote_code=False)
    except READ_ERRORS as error:
        raise ModelUnsupported(name, error_line(error)) from error


def _with_tower(checkpoint: Checkpoint, text: Any) -> tuple[Checkpoint, Any]:
    """The checkpoint and the configuration of a GGUF file with the vision tower beside it, if there is one."""
    assert checkpoint.gguf is not None
    try:
        tower = find_tower(checkpoint.path, text)
        if tower is None:
            return checkpoint, text
        config = tower.config(checkpoint.gguf, text)
    except (GgufError, OSError) as error:
        return replace(checkpoint, tower_fault=" ".join(str(error).split())), text
    configuration = checkpoint.configuration + tower.content.metadata.digest.encode()
    return replace(checkpoint, tower=tower, configuration=configuration), config


def text_alone(checkpoint: Checkpoint, config: Any) -> tuple[Checkpoint, Any]:
    """The checkpoint and the configuration without the vision tower beside a GGUF file."""
    if checkpoint.gguf is None or checkpoint.tower is None:
        return checkpoint, config
    return replace(checkpoint, tower=None), gguf_config(checkpoint.gguf)


def read_max_context(name: str, folder: Path) -> int:
    """The trained context of the model in a folder, without loading it. Raises ModelUnsupported."""
    return max_context(_configuration(name, folder)[1].get_text_config())


def max_context(text: Any) -> int:
    """The trained context by the text configuration, in tokens."""
    names = ("max_position_embeddings", "max_target_positions")
    # A number below 1 means no limit.
    return int(next((length for name in names if (length := getattr(text, name, None) or 0) > 0), _DEFAULT_CONTEXT))
