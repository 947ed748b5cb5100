"""Measures a step of a whole model on the CPU: the native step against transformers' modules over the same cells.

    python -m benchmarks.cpu.step [--layers 4] [--rounds 15] [--quantize int8] [--threads 2]

Models have random weights, published widths, and fewer layers with a vocabulary reduced in proportion. Both runners
alternate call by call, since other work disturbs the machine: figures are medians, and the ratio is of the medians.
"outside" is the share of a step outside the native call: block tables, rotary angles, embeddings.

Rejected, without a gain: dynamic distribution of work among threads, prefetching the next weights while waiting, and
waiting threads that spin longer.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.result import command_parser
from engine.config import Quantize
from engine.kernels.dispatch import best_attention, best_linear
from engine.load.check.selection import select
from engine.load.check.selftest import ModelTraits, find_runner
from engine.load.machine.resources import processor_count
from engine.model import hooks
from engine.native.runner import NativeRunner
from engine.native.step_library import StepFields
from engine.quantize.plan import LayerSurvey
from engine.quantize.quantize import quantize
from engine.quantize.store import WeightStore
from engine.run.packed import PackedRunner
from engine.run.runner import LocalRunner, runners_of
from engine.step.input import StepInput
from kvcache.cache import Cache
from kvcache.spec import Span

DEPTH = 512


@dataclass(frozen=True)
class ModelShape:
    """The shape of a published model."""

    family: str
    hidden_size: int
    intermediate_size: int
    heads: int
    key_heads: int
    width: int
    layers: int
    vocabulary: int

    def settings(self, layers: int) -> dict[str, Any]:
        """The config of a model with fewer layers and a vocabulary reduced in proportion."""
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
    "Qwen3-0.6B": ModelShape("qwen3", 1024, 3072, 16, 8, 128, 28, 151936),
    "SmolLM2-135M": ModelShape("llama", 576, 1536, 9, 3, 64, 30, 49152),
}


@dataclass(frozen=True)
class StepShape:
    """A step: tokens of each sequence after DEPTH cached tokens."""

    sequences: int
    rows: int


STEPS = (StepShape(1, 1), StepShape(8, 1), StepShape(1, 4), StepShape(1, 256))


class LibraryTimer:
    """Wraps a native library and sums the time of its calls."""

    def __init__(self, runner: NativeRunner) -> None:
        self._library, self.seconds = runner._library, 0.0
        runner._library = self  # type: ignore[assignment]

    def run_step(self, step: StepFields) -> None:
        """StepLibrary.run_step."""
        begin = time.perf_counter()
        self._library.run_step(step)
        self.seconds += time.perf_counter() - begin


def load(name: str, layers: int, quantized: Quantize) -> tuple[PackedRunner, LocalRunner]:
    """A model with random weights, its module runner and its native runner."""
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
    assert isinstance(runners_of(native)[0], NativeRunner), "the native step does not support the model"
    return plain, native


def call(runner: LocalRunner, step_shape: StepShape) -> Callable[[], None]:
    """A step with a cache of its own, which is truncated after each call."""
    specs = [plan.spec for plan in runner.layers]
    length = DEPTH + step_shape.rows
    cache = Cache(
        specs,
        slots=step_shape.sequences,
        capacity=length,
        cells=step_shape.sequences * length,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for slot in range(step_shape.sequences):
        with cache.forward([Span(slot, 0, DEPTH)]) as forward:
            runner.run(StepInput(forward, list(range(DEPTH)), [DEPTH - 1]))
    tokens = [7] * step_shape.rows * step_shape.sequences
    logit_tokens = [(slot + 1) * step_shape.rows - 1 for slot in range(step_shape.sequences)]

    def step() -> None:
        with cache.forward([Span(slot, DEPTH, step_shape.rows) for slot in range(step_shape.sequences)]) as forward:
            runner.run(StepInput(forward, tokens, logit_tokens))
            for slot in range(step_shape.sequences):
                forward.keep(slot, DEPTH)

    return step


def seconds(calls: Sequence[Callable[[], None]], rounds: int) -> list[list[float]]:
    """The times of each call; the calls alternate."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for own, step in zip(times, calls, strict=True):
            begin = time.perf_counter()
            step()
            own.append(time.perf_counter() - begin)
    return times


def line(name: str, step_shape: StepShape, runners: tuple[PackedRunner, NativeRunner], rounds: int) -> str:
    """One line of the table."""
    plain, native = (call(runner, step_shape) for runner in runners)
    library, timer = runners[1]._library, LibraryTimer(runners[1])
    before, after = (statistics.median(own) for own in seconds((plain, native), rounds))
    outside = []
    for _ in range(rounds):
        timer.seconds = 0.0
        [[whole]] = seconds((native,), 1)
        outside.append((whole - timer.seconds) / whole)
    runners[1]._library = library
    cells = [
        *(name, f"{step_shape.sequences} x {step_shape.rows}", f"{1e3 * before:.1f}", f"{1e3 * after:.1f}"),
        *(f"{before / after:.2f}", f"{100 * statistics.median(outside):.0f} %"),
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table."""
    parser = command_parser("cpu.step", __doc__)
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
        for step_shape in STEPS:
            print(line(name, step_shape, runners, options.rounds), flush=True)


if __name__ == "__main__":
    main()
