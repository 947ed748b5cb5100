"""Steps of a model in one process and on several ranks: milliseconds a step, and bytes that rank 0 broadcasts.

    python -m benchmarks.cpu.tensor_parallel MODEL [--ranks 2] [--sequences 1 4 8] [--tokens 32]

A ranks' step also has two all-reduces a layer, of `tokens x hidden size` activations, by gloo. Threads are divided.
"""

from __future__ import annotations

import time
from dataclasses import replace

from benchmarks.result import command_parser
from engine.config import EngineConfig
from engine.core import Core
from engine.load.load import LoadedModel
from engine.load.machine.resources import processor_count
from engine.parallel.loading import loaded_model
from engine.parallel.messages import geometry_of
from engine.parallel.runner import TensorParallelRunner
from engine.types.request import Request, SamplingParams

PROMPT = 64


def run(loaded: LoadedModel, config: EngineConfig, sequences: int, tokens: int) -> tuple[list[list[int]], str]:
    """The texts of some sequences, and the figures of their decode steps."""
    sized = replace(loaded, info=replace(loaded.info, slots=sequences))
    runner = loaded.runner if isinstance(loaded.runner, TensorParallelRunner) else None
    if runner is not None:
        runner.workers.send(geometry_of(sized))
    core = Core(sized, replace(config, slots=sequences))
    texts: dict[str, list[int]] = {}
    greedy = SamplingParams(temperature=0.0)
    for number in range(sequences):
        prompt = tuple(range(100 + 7 * number, 100 + 7 * number + PROMPT))
        core.submit(Request(f"{number}", prompt, greedy, max_tokens=tokens, ignore_eos=True))
    seconds, sent = [], []
    while core.busy:
        before, began = 0 if runner is None else runner.workers.sent_bytes, time.perf_counter()
        events = core.step()
        seconds.append(time.perf_counter() - began)
        sent.append(0 if runner is None else runner.workers.sent_bytes - before)
        for name, event in events:
            texts.setdefault(name, []).extend(getattr(event, "tokens", ()))
    # The last steps are decode steps of all sequences.
    decode = sorted(seconds[-tokens // 2 :])[tokens // 4]
    figures = f"{sequences} sequences: {1000 * decode:.1f} ms a decode step"
    if runner is not None:
        figures += f", {sent[-2]} bytes broadcast ({max(sent)} at most in a step with prompts)"
    return list(texts.values()), figures


def main() -> None:
    """Print the figures of one process and of the ranks."""
    parser = command_parser("cpu.tensor_parallel", __doc__)
    parser.add_argument("model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    texts: dict[str, list[list[list[int]]]] = {}
    kinds = {"native": (1, "auto"), "torch": (1, "torch"), f"{options.ranks} ranks": (options.ranks, "auto")}
    for kind, (ranks, kernels) in kinds.items():
        config = EngineConfig(
            model=options.model,
            context=PROMPT + options.tokens + 8,
            slots=max(options.sequences),
            dtype=options.dtype,
            threads=processor_count(),
            kernels=kernels,
            tensor_parallel=ranks,
        )
        with loaded_model(config, lambda _: None, print, reserved_bytes=0) as loaded:
            for sequences in options.sequences:
                own, figures = run(loaded, config, sequences, options.tokens)
                texts.setdefault(kind, []).append(own)
                print(f"{kind}, {figures}", flush=True)
    print("texts:", {kind: own == texts["torch"] for kind, own in texts.items()}, "equal to torch in one process")


if __name__ == "__main__":
    main()
