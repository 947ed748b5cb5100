"""Measures a step of a whole model on the CPU: the native step against transformers' modules over the same cells.

    python -m benchmarks.step [--layers 4] [--rounds 15] [--quantize int8] [--threads 2]

Models have random weights, the widths of a published one, and fewer layers and tokens in its proportion. Both sides
take turns, call by call, because a machine is rarely quiet: figures are medians, and the ratio is theirs. "outside" is
the share of a native step that is not the one call: tables, angles, embeddings.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.config import Quantize
from engine.kernels.dispatch import best_attention, best_linear
from engine.load.resources import processor_count
from engine.load.selection import select
from engine.load.selftest import ModelTraits, find_runner
from engine.model import hooks
from engine.model.runner import PackedRunner
from engine.native.runner import NativeRunner
from engine.native.step_library import StepFields
from engine.quantize.plan import LayerSurvey
from engine.quantize.quantize import quantize
from engine.quantize.store import WeightStore
from kvcache.cache import Cache
from kvcache.spec import Span

DEPTH = 512


@dataclass(frozen=True)
class Shape:
    """A published model: its family, sizes, layers and tokens."""

    family: str
    hidden_size: int
    intermediate_size: int
    heads: int
    key_heads: int
    width: int
    layers: int
    vocabulary: int

    def settings(self, layers: int) -> dict[str, Any]:
        """Those of a part of it: so many of its layers, and as large a part of its tokens."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
            "head_dim": self.width,
            "num_hidden_layers": layers,
            "vocab_size": self.vocabulary * layers // self.layers,
            "max_position_embeddings": 4096,
        }


SHAPES = {
    "Qwen3-0.6B": Shape("qwen3", 1024, 3072, 16, 8, 128, 28, 151936),
    "SmolLM2-135M": Shape("llama", 576, 1536, 9, 3, 64, 30, 49152),
}


@dataclass(frozen=True)
class Work:
    """What each of some sequences does behind DEPTH tokens: so many rows."""

    sequences: int
    rows: int


WORKS = (Work(1, 1), Work(8, 1), Work(1, 4), Work(1, 256))


class Clock:
    """Stands in for a native library and takes the time of its calls."""

    def __init__(self, runner: NativeRunner) -> None:
        self._library, self.seconds = runner._library, 0.0
        runner._library = self  # type: ignore[assignment]

    def run_step(self, step: StepFields) -> None:
        """Library.run_step."""
        begin = time.perf_counter()
        self._library.run_step(step)
        self.seconds += time.perf_counter() - begin


def load(name: str, layers: int, quantized: Quantize) -> tuple[PackedRunner, NativeRunner]:
    """A model of random weights, and both ways to run it."""
    shape = SHAPES[name]
    config = AutoConfig.for_model(shape.family, **shape.settings(layers), tie_word_embeddings=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    hooks.install_latent(model)
    facts = ModelTraits(vocabulary=config.vocab_size, recurrent=False, dtype=torch.float32, attend=best_attention())
    survey = LayerSurvey(model)
    plain = find_runner(name, model, facts)
    choice = survey.close()
    if quantized in ("int8", "int4"):
        with tempfile.TemporaryDirectory() as folder:
            quantize(model, choice, WeightStore(name, 8 if quantized == "int8" else 4, Path(folder)), best_linear())
    native = select(model, plain, facts, context=4096).runner
    assert isinstance(plain, PackedRunner)
    assert isinstance(native, NativeRunner), "the native step does not know the model"
    return plain, native


def call(runner: PackedRunner, work: Work) -> Callable[[], None]:
    """One step, undone behind itself, over a cache of its own."""
    specs = [plan.spec for plan in runner.layers]
    length = DEPTH + work.rows
    cache = Cache(
        specs,
        slots=work.sequences,
        capacity=length,
        cells=work.sequences * length,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for slot in range(work.sequences):
        with cache.forward([Span(slot, 0, DEPTH)]) as forward:
            runner.run(forward, list(range(DEPTH)), [DEPTH - 1])
    tokens = [7] * work.rows * work.sequences
    wanted = [(slot + 1) * work.rows - 1 for slot in range(work.sequences)]

    def step() -> None:
        with cache.forward([Span(slot, DEPTH, work.rows) for slot in range(work.sequences)]) as forward:
            runner.run(forward, tokens, wanted)
            for slot in range(work.sequences):
                forward.keep(slot, DEPTH)

    return step


def seconds(calls: Sequence[Callable[[], None]], rounds: int) -> list[list[float]]:
    """Of each call, all times; they take turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for own, step in zip(times, calls, strict=True):
            begin = time.perf_counter()
            step()
            own.append(time.perf_counter() - begin)
    return times


def line(name: str, work: Work, runners: tuple[PackedRunner, NativeRunner], rounds: int) -> str:
    """One line of the table."""
    plain, native = (call(runner, work) for runner in runners)
    library, clock = runners[1]._library, Clock(runners[1])
    before, after = (statistics.median(own) for own in seconds((plain, native), rounds))
    outside = []
    for _ in range(rounds):
        clock.seconds = 0.0
        [[whole]] = seconds((native,), 1)
        outside.append((whole - clock.seconds) / whole)
    runners[1]._library = library
    cells = [
        *(name, f"{work.sequences} x {work.rows}", f"{1e3 * before:.1f}", f"{1e3 * after:.1f}"),
        *(f"{before / after:.2f}", f"{100 * statistics.median(outside):.0f} %"),
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=processor_count())
    parser.add_argument("--quantize", default="none", choices=("none", "int8", "int4"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.layers} layers, {options.threads} threads, weights {options.quantize}, depth {DEPTH}\n")
    print("| shape | sequences x rows | modules ms | native ms | times | outside |")
    print("|" + "---|" * 6)
    for name in SHAPES:
        runners = load(name, options.layers, options.quantize)
        for work in WORKS:
            print(line(name, work, runners, options.rounds), flush=True)


if __name__ == "__main__":
    main()
