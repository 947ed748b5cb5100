"""Measures one GPU: `make bench-gpu`. Needs no download: models have published shapes and random weights.

    python -m benchmarks.gpu.throughput [SHAPE ...] [--device cuda] [--modes graphs compiled eager ...]
                             [--streams 1 8 64] [--prompts 512 2048 8192] [--json FILE]

For each shape and mode: decoding behind 512 tokens, prompts, and the decoding of many streams. The modes are those with
and without CUDA graphs, with --compile, with --batch-invariant, and with quantised weights: int8, or int4, which is
calibrated on the CPU first. The same decoding by transformers' continuous batching is beside them. A share compares the
bytes of the weights that each step reads with the bandwidth of a copy on the same device. `--device cpu tiny` tries the
script.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.result import add_json_option, add_rows, command_parser, measured
from benchmarks.shapes import SHAPES, write_folder
from engine.config import EngineConfig
from engine.core import Core
from engine.load.load import LoadedModel, load
from engine.load.recording import record_steps
from engine.quantize.quantize import bytes_of, weights_of
from engine.step.input import StepInput
from engine.step.output import StepOutput
from engine.types.events import Delta
from engine.types.request import Request, SamplingParams

SHAPE_NAMES = ("qwen3-0.6b", "qwen3-8b")
BEHIND, STEPS, WARM_STEPS, FIRST_TOKEN = 512, 64, 8, 300
# Settings by mode.
MODES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "compiled": {"compile": True},
    "batch invariant": {"batch_invariant": True},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
}
DEFAULT_MODES = ("graphs", "compiled", "eager", "batch invariant", "int8")
COPIED_BYTES = {"cuda": 2**31, "cpu": 2**27}


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    device: str
    streams: Sequence[int]
    prompts: Sequence[int]
    modes: Sequence[str] = DEFAULT_MODES


def main(arguments: list[str] | None = None) -> int:
    """Measure the shapes, print a line for each figure, and add the rows to a file."""
    parser = command_parser("gpu.throughput", __doc__)
    parser.add_argument("shapes", nargs="*", choices=[[], *sorted(SHAPES)], metavar="SHAPE")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--streams", type=int, nargs="+", default=(1, 8, 64))
    parser.add_argument("--prompts", type=int, nargs="+", default=(512, 2048, 8192))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=DEFAULT_MODES)
    add_json_option(parser)
    given = parser.parse_args(arguments)
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        print("benchmarks.gpu.throughput: torch can use no GPU here", file=sys.stderr)
        return 1
    options = Options(given.device, given.streams, given.prompts, given.modes)
    for shape in given.shapes or SHAPE_NAMES:
        with tempfile.TemporaryDirectory() as folder:
            write_folder(SHAPES[shape], Path(folder))
            for row in shape_rows(shape, Path(folder), options):
                print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
                if given.json:
                    add_rows(given.json, measured("gpu", [row]))
    return 0


def shape_rows(shape: str, folder: Path, options: Options) -> Iterator[dict[str, Any]]:
    """The figures of a shape, the most important first."""
    bandwidth = copy_bandwidth(options.device)
    # --compile is for GPUs.
    for mode in (mode for mode in options.modes if (options.device, mode) != ("cpu", "compiled")):
        config = EngineConfig(
            model=str(folder),
            device=options.device,
            context=max(*options.prompts, BEHIND) + STEPS + WARM_STEPS + max(options.streams) + 8,
            slots=max(options.streams),
            drafter="none",
            **MODES[mode],
        )
        loaded = load(config, lambda phase: None)
        core = Core(loaded, config)
        record_steps(config, loaded, core.cache, lambda phase: None)
        about = {"device": device_name(options.device), "shape": shape, "mode": mode}
        for streams in options.streams:
            whole, outside = decode_seconds(core, loaded, streams)
            yield about | {
                "cell": f"{streams} streams",
                "tokens_per_second": round(streams / whole, 1),
                "step_ms": round(1000 * whole, 3),
                "host_ms": round(1000 * outside, 3),
                "share_of_bandwidth": round(read_bytes(loaded) / whole / bandwidth, 3),
            }
        for length in () if mode == "eager" else options.prompts:
            whole = prompt_seconds(core, length)
            yield about | {
                "cell": f"prompt of {length}",
                "tokens_per_second": round(length / whole, 1),
                "teraflops": round(2 * read_weights(loaded) * length / whole / 1e12, 2),
            }
        del core, loaded
    about = {"device": device_name(options.device), "shape": shape, "mode": "transformers"}
    for streams, whole in transformers_step_seconds(folder, options):
        yield about | {
            "cell": f"{streams} streams",
            "tokens_per_second": round(streams / whole, 1),
            "step_ms": round(1000 * whole, 3),
        }


def transformers_step_seconds(folder: Path, options: Options) -> Iterator[tuple[int, float]]:
    """Numbers of streams, and the median seconds of a decoding step of transformers' continuous batching."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(options.device).eval()
    for streams in options.streams:
        prompts = [[*stream_prompt(number)] for number in range(streams)]
        tokens = STEPS + WARM_STEPS + streams
        # An end token would end a stream before the others.
        settings = GenerationConfig(do_sample=False, max_new_tokens=tokens, eos_token_id=-1)
        # Its choice of sizes on a CPU is all memory.
        sizes = (
            ContinuousBatchingConfig(num_blocks=4 * streams, max_batch_tokens=BEHIND)
            if options.device == "cpu"
            else None
        )
        outputs = model.generate_batch(
            prompts, generation_config=settings, continuous_batching_config=sizes, record_timestamps=True
        )
        stamps = [output.timestamps for output in outputs.values()]
        assert {tokens} == {len(own) for own in stamps}, "a stream ended early"
        # All streams decode behind the first token of the last one.
        begin = max(own[0] for own in stamps)
        steps = [after - before for own in stamps for before, after in pairwise(own) if before >= begin]
        yield streams, median(steps)


def stream_prompt(number: int) -> range:
    """The prompt of a stream."""
    return range(FIRST_TOKEN + 7 * number, FIRST_TOKEN + 7 * number + BEHIND)


def start_streams(core: Core, streams: int) -> None:
    """Compute the prompts of streams, and the first tokens of all of them."""
    waiting = {f"{streams}-{number}" for number in range(streams)}
    for number, name in enumerate(sorted(waiting)):
        core.submit(greedy(name, stream_prompt(number), STEPS + WARM_STEPS + streams))
    while waiting:
        waiting -= {name for name, event in core.step() if isinstance(event, Delta)}
    for _ in range(WARM_STEPS):
        core.step()


def decode_seconds(core: Core, loaded: LoadedModel, streams: int) -> tuple[float, float]:
    """The median seconds of a decoding step of all streams, and of its part outside the model and its sampler."""
    start_streams(core, streams)
    inside: list[float] = []
    run = loaded.runner.run

    def timed(step: StepInput) -> StepOutput:
        began = time.perf_counter()
        output = run(step)
        inside.append(time.perf_counter() - began)
        return output

    with patch.object(loaded.runner, "run", timed):
        whole = [seconds(core.step) for _ in range(STEPS)]
    for number in range(streams):
        core.cancel(f"{streams}-{number}")
    return median(whole), median(own - model for own, model in zip(whole, inside, strict=True))


def prompt_seconds(core: Core, length: int) -> float:
    """The median seconds to the first token of three prompts without a common prefix."""
    found = []
    for number in range(3):
        first = FIRST_TOKEN + 1000 * (number + 1)
        core.submit(greedy(f"prompt {length}-{number}", range(first, first + length), 1))
        found.append(seconds(lambda: finish(core)))
    return median(found)


def finish(core: Core) -> None:
    """Compute all requests to their ends."""
    while core.busy:
        core.step()


def greedy(name: str, prompt: Iterable[int], tokens: int) -> Request:
    """A request of a fixed number of tokens."""
    sampling = SamplingParams(temperature=0.0)
    return Request(name, tuple(prompt), sampling=sampling, max_tokens=tokens, ignore_eos=True)


def seconds(run: Callable[[], object]) -> float:
    """The seconds of a call, to the end of the device's work."""
    began = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def read_bytes(loaded: LoadedModel) -> int:
    """Bytes of the weights that a decoding step reads: all but a separate input embedding."""
    return bytes_of(loaded.model) - sum(weight.nbytes for weight in separate_embedding(loaded))


def read_weights(loaded: LoadedModel) -> int:
    """Their number."""
    return weights_of(loaded.model) - sum(weight.numel() for weight in separate_embedding(loaded))


def separate_embedding(loaded: LoadedModel) -> list[torch.Tensor]:
    """The weight of an input embedding that is not the output layer too."""
    model: Any = loaded.model
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return [] if embedding is output else [embedding]


def copy_bandwidth(device: str) -> float:
    """Bytes a second that a copy on the device reads and writes."""
    source = torch.empty(COPIED_BYTES[torch.device(device).type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes / min(seconds(lambda: target.copy_(source)) for _ in range(5))


def device_name(device: str) -> str:
    """The name of the GPU."""
    return torch.cuda.get_device_name(device) if torch.cuda.is_available() else device


if __name__ == "__main__":
    sys.exit(main())
