"""Measures what LoRA adapters cost: steps of streams that each have an adapter, beside the same steps without.

    python -m benchmarks.cpu.adapters MODEL [--streams 8] [--rank 16] [--dtype float32] [--rounds 100] [--threads 2]

In one process, without HTTP. Adapters have random factors and files of --dtype. Modes alternate step by step, since
other work disturbs the machine; a ratio is the median of the ratios of steps in the same round. With one thread, times
are processor times. Modes:

    without    a model that was loaded without adapters
    base       a model with loaded adapters, none of them in the batch
    attention  each stream has an adapter of its own, of q, k, v and o
    all        the same, of all linear layers of attention and MLP
    shared     as `all`, with one adapter for all streams
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.result import add_json_option, add_rows, command_parser, measured, model_name
from engine.adapters.checkpoint import WEIGHTS_FILE
from engine.adapters.config import CONFIG_FILE
from engine.config import EngineConfig
from engine.core import Core
from engine.load.load import LoadedModel, load
from engine.load.machine.resources import processor_count
from engine.types.events import Delta
from engine.types.request import Request, SamplingParams

PROMPT_TOKENS = 64
MODES = ("without", "base", "attention", "all", "shared")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_TARGETS = {"attention": _ATTENTION, "all": (*_ATTENTION, "gate_proj", "up_proj", "down_proj")}


def write_adapter(
    folder: Path, shapes: Mapping[str, tuple[int, int]], targets: Sequence[str], rank: int, dtype: torch.dtype
) -> Path:
    """Write an adapter with random factors for the layers with these last names.

    shapes  [outputs, columns] of the layers, by name
    """
    folder.mkdir(parents=True)
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank}
    (folder / CONFIG_FILE).write_text(json.dumps({**settings, "target_modules": list(targets)}))
    tensors = {}
    for name, (outputs, columns) in shapes.items():
        if name.rpartition(".")[2] in targets:
            key = f"base_model.model.{name}.lora_"
            tensors[f"{key}A.weight"] = (torch.randn(rank, columns) / columns).to(dtype)
            tensors[f"{key}B.weight"] = torch.randn(outputs, rank).to(dtype)
    save_file(tensors, folder / WEIGHTS_FILE)
    return folder


def engine_config(options: Any) -> EngineConfig:
    """The settings of the engine, without a limit of the context."""
    return EngineConfig(
        model=options.model,
        quantize=options.quantize,
        slots=options.streams,
        threads=options.threads,
        drafter="none",
        itl_target_ms=0.0,
    )


def load_models(options: Any, folder: Path) -> tuple[LoadedModel, LoadedModel]:
    """The model without adapters, and the same with adapters for each stream in the modes `attention` and `all`."""
    config = replace(engine_config(options), context=PROMPT_TOKENS + options.rounds + options.warm + 2)
    plain = load(config, lambda phase: None)
    adapted = load(replace(config, lora_dir=str(folder)), lambda phase: None)
    reader = adapted.adapter_reader
    assert reader is not None, "--lora-dir permits adapters"
    for mode, targets in _TARGETS.items():
        for stream in range(options.streams):
            name = f"{mode}{stream}"
            path = write_adapter(folder / name, reader.shapes, targets, options.rank, getattr(torch, options.dtype))
            adapted.adapters.load(reader.read(name, path))
    return plain, adapted


def decoding(model: LoadedModel, mode: str, options: Any) -> Core:
    """An engine core in which every stream of a mode decodes."""
    core = Core(model, replace(engine_config(options), context=model.info.context))
    for stream in range(options.streams):
        adapter = {"attention": f"attention{stream}", "all": f"all{stream}", "shared": "all0"}.get(mode, "")
        prompt = tuple((stream * PROMPT_TOKENS + at) % 1000 + 300 for at in range(PROMPT_TOKENS))
        sampling = SamplingParams(temperature=0.0)
        core.submit(Request(f"{stream}", prompt, sampling=sampling, max_tokens=None, ignore_eos=True, adapter=adapter))
    started: set[str] = set()
    while len(started) < options.streams:
        started.update(name for name, event in core.step() if isinstance(event, Delta))
    return core


def measure(cores: Mapping[str, Core], options: Any) -> dict[str, list[float]]:
    """The seconds of a step of each mode in each round."""
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {mode: [] for mode in cores}
    for round_ in range(options.warm + options.rounds):
        for mode, core in cores.items():
            began = clock()
            core.step()
            if round_ >= options.warm:
                seconds[mode].append(clock() - began)
    return seconds


def rows(seconds: Mapping[str, Sequence[float]], options: Any) -> list[dict[str, Any]]:
    """A row for each mode, compared with `base`; `base` itself with `without`."""
    return [
        {
            "model": model_name(options.model),
            "streams": options.streams,
            "rank": options.rank,
            "dtype": options.dtype,
            "mode": mode,
            "step_ms": round(1e3 * statistics.median(times), 2),
            "speed": round(_speed(times, seconds["without" if mode == "base" else "base"]), 3),
        }
        for mode, times in seconds.items()
    ]


def _speed(times: Sequence[float], others: Sequence[float]) -> float:
    """Speed relative to other steps of the same rounds."""
    return statistics.median(other / time_ for time_, other in zip(times, others, strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = command_parser("cpu.adapters", __doc__)
    parser.add_argument("model", help="a folder or a GGUF file")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the adapters' files")
    parser.add_argument("--quantize", choices=("none", "int8", "int4"), default="none")
    parser.add_argument("--threads", type=int, default=processor_count())
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--warm", type=int, default=5, help="rounds before")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        plain, adapted = load_models(options, Path(folder))
        cores = {mode: decoding(plain if mode == "without" else adapted, mode, options) for mode in MODES}
    gc.collect()
    gc.freeze()
    result = rows(measure(cores, options), options)
    for row in result:
        print(f"{row['mode']:10} {row['step_ms']:8.2f} ms {row['speed']:6.3f}")
    if options.json:
        add_rows(options.json, measured("adapters", result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
