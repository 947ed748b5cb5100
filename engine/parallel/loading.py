"""Loads a model on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.config import BUNDLED_NAME, EngineConfig
from engine.errors import ModelUnsupported
from engine.load.load import LoadedModel, load
from engine.load.read.checkpoint import is_gguf, resolve
from engine.load.read.configuration import read_headers
from engine.model.encoder import has_encoder
from engine.parallel.messages import geometry_of
from engine.parallel.runner import TensorParallelRunner
from engine.parallel.workers import started


@contextmanager
def loaded_model(
    config: EngineConfig, on_phase: Callable[[str], None], on_lost: Callable[[str], None], *, reserved_bytes: int
) -> Iterator[LoadedModel]:
    """As `load`; under tensor parallelism with the other ranks' processes, which end with the block.

    on_lost  called in another thread, with the reason, when a rank has ended and the model cannot run any more

    Raises ModelError; EngineDead when a rank ends during the load.
    """
    if config.tensor_parallel == 1:
        yield load(config, on_phase, reserved_bytes=reserved_bytes)
        return
    on_phase("resolve")
    name, folder = config.model or BUNDLED_NAME, resolve(config.model)
    check_divisible(name, folder, config)
    with started(worker_config(config, folder), on_lost) as workers:
        loaded = load(config, on_phase, reserved_bytes=reserved_bytes)
        if loaded.recurrent:
            raise _unsupported(name, "has recurrent layers", config)
        workers.send(geometry_of(loaded))
        runner = TensorParallelRunner(loaded.runner, workers)
        yield replace(loaded, runner=runner, on_move=runner.move_keys)


def worker_config(config: EngineConfig, folder: Path) -> EngineConfig:
    """The settings of a worker: only rank 0 drafts, and has an embedding model."""
    return replace(
        config, model=str(folder), drafter="none", draft_model=None, draft_quantize=None, embedding_model=None
    )


def check_divisible(name: str, folder: Path, config: EngineConfig) -> None:
    """Raise ModelUnsupported for a model, or a machine, that --tensor-parallel does not support."""
    ranks = config.tensor_parallel
    if not torch.distributed.is_available():
        raise _unsupported(name, "needs torch.distributed, which this build of torch lacks", config)
    if is_gguf(folder):
        raise _unsupported(name, "is a GGUF file", config)
    model_config = read_headers(name, folder, config)[1]
    text = model_config.get_text_config()
    if has_encoder(model_config):
        raise _unsupported(name, "has an encoder", config)
    if not getattr(text, "base_model_tp_plan", None):
        raise _unsupported(name, f"is a {text.model_type}, for which transformers has no plan of the division", config)
    for kind, heads in _heads(text).items():
        if heads % ranks:
            raise _unsupported(name, f"has {heads} {kind}, not divisible by {ranks}", config)
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if config.device == "cpu" and devices:
        # transformers divides over the accelerator of the machine, if there is one.
        raise _unsupported(name, "would be divided over the GPUs: hide them (CUDA_VISIBLE_DEVICES=)", config)
    if config.device != "cpu" and devices < ranks:
        raise _unsupported(name, f"needs a GPU for each rank, and there are {devices}", config)


def _heads(text: Any) -> dict[str, int]:
    """The numbers of heads in a configuration, by kind."""
    heads = getattr(text, "num_attention_heads", None)
    kinds = {"attention heads": heads, "KV heads": getattr(text, "num_key_value_heads", None) or heads}
    return {kind: number for kind, number in kinds.items() if isinstance(number, int)}


def _unsupported(name: str, reason: str, config: EngineConfig) -> ModelUnsupported:
    return ModelUnsupported(name, f"--tensor-parallel {config.tensor_parallel} does not support it: it {reason}")
