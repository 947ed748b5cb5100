"""`make test-gpu`: what only a GPU can show, in stages; the first that fails ends the run.

    python -m tests.gpu [--device cuda] [--stages NAME ...]

Prints a line for each stage and writes out/gpu/report.json. Without a GPU it prints why. `--device cpu` tries the
stages that need no GPU, with a tiny model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import throughput
from benchmarks.gpu.profile import profiled
from engine.config import EngineConfig
from engine.kernels.dispatch import device_products
from engine.load.fusion import fuse
from engine.load.load import load
from engine.load.machine.device import describe_gpus, device_memory, no_gpu_reason
from engine.types.request import SamplingParams
from tests.engine.kit.models import core
from tests.engine.kit.play import Job, ask, play, texts
from tests.gpu_products import quantised_products
from tests.gpu_server import serve_mixed

REPORT = Path("out/gpu/report.json")
DEVICE = "cuda"
_COPIED_BYTES, _LAUNCHES = 2**31, 200
_TESTS = ("tests/engine", "tests/kvcache")


def machine() -> dict[str, Any]:
    """The GPU, the bandwidth of a copy in GB/s, and the time of a launch in microseconds, alone and in a graph."""
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=DEVICE)
    target, small = torch.empty_like(source), torch.zeros(1, device=DEVICE)
    copy = _seconds(lambda: target.copy_(source))
    launches = _seconds(lambda: [small.add_(1) for _ in range(_LAUNCHES)])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_LAUNCHES):
            small.add_(1)
    return {
        "torch": torch.__version__,
        "gpus": describe_gpus(),
        "free_bytes": device_memory(DEVICE).free_bytes,
        "copy_gb_per_second": round(2 * _COPIED_BYTES / copy / 1e9),
        "launch_us": round(launches / _LAUNCHES * 1e6, 2),
        "graph_launch_us": round(_seconds(graph.replay) / _LAUNCHES * 1e6, 2),
    }


def marked_tests() -> dict[str, Any]:
    """The tests with the marker gpu."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", *_TESTS]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = outcome.stdout.strip().splitlines()
    if outcome.returncode:
        raise AssertionError("\n".join(lines[-40:]))
    return {"summary": lines[-1]}


def bundled_model() -> dict[str, Any]:
    """The bundled model in float32 gives the text of the CPU, and how many tokens a second with 1 and 64 sequences."""
    on_cpu, on_gpu = (load(_config(device), lambda phase: None) for device in ("cpu", DEVICE))
    prompt = on_cpu.tokenizer.encode("Once upon a time")
    sampling = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=1))
    jobs = [Job(ask(f"{at}", prompt, 60, sampling=own)) for at, own in enumerate(sampling)]
    expected, found = (play(core(loaded, context=512), jobs) for loaded in (on_cpu, on_gpu))
    for job in jobs:
        assert expected[job.request.id].tokens == found[job.request.id].tokens, f"request {job.request.id}"
    speeds = {}
    for streams in (1, 64):
        engine, began = core(on_gpu, slots=streams, context=512), time.perf_counter()
        answers = play(engine, [Job(ask(f"{at}", prompt, 200, ignore_eos=True)) for at in range(streams)])
        tokens = sum(len(answer.tokens) for answer in answers.values())
        speeds[streams] = round(tokens / (time.perf_counter() - began))
    return {"tokens_per_second": speeds}


def compiled_model(device: str) -> dict[str, Any]:
    """The bundled model in float32 gives the same text with --compile; a CPU compiles the modules after the load."""
    is_cpu = device == "cpu"
    config = replace(_config(device), kernels="torch") if is_cpu else _config(device)
    eager = load(config, lambda phase: None)
    fused = load(config if is_cpu else replace(config, compile=True), lambda phase: None)
    if is_cpu:
        names = fuse(fused.model, fused.model.config.get_text_config().vocab_size)
        assert names, "nothing was compiled"
    prompt = eager.tokenizer.encode("Once upon a time")
    jobs = [Job(ask(f"{at}", prompt[: 2 + at], 40, ignore_eos=True), 3 * at) for at in range(3)]
    expected, found = (texts(play(core(loaded, context=512), jobs)) for loaded in (eager, fused))
    assert expected == found, f"{expected} and compiled {found}"
    return {"tokens": sum(map(len, found.values()))}


def server(device: str) -> dict[str, Any]:
    """200 mixed requests over HTTP."""
    return serve_mixed("tiny" if device == "cpu" else "qwen3-0.6b", device, 200)


def benchmark(device: str) -> dict[str, Any]:
    """`make bench-gpu`: eager, with graphs and beside transformers; the rows are in out/gpu/bench.json."""
    rows = REPORT.with_name("bench.json")
    rows.parent.mkdir(parents=True, exist_ok=True)
    small = ["tiny", "--streams", "1", "2", "--prompts", "64"] if device == "cpu" else []
    assert 0 == throughput.main([*small, "--device", device, "--json", str(rows)])
    return {"rows": str(rows)}


def profile(device: str) -> dict[str, Any]:
    """Kernels of a decoding step, with graphs and without."""
    shape = "tiny" if device == "cpu" else "qwen3-0.6b"
    modes = {"graphs": False, "eager": True}
    return {name: profiled(shape, device, 8, enforce_eager=eager) for name, eager in modes.items()}


STAGES: dict[str, Callable[[], dict[str, Any]]] = {
    "machine": machine,
    "tests": marked_tests,
    "bundled model": bundled_model,
    "quantised products": partial(quantised_products, DEVICE, partial(device_products, device=DEVICE)),
}
# Stages that a CPU can try.
DEVICE_STAGES: dict[str, Callable[[str], dict[str, Any]]] = {
    "compiled model": compiled_model,
    "server": server,
    "benchmark": benchmark,
    "profile": profile,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the stages; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tests.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default=DEVICE)
    parser.add_argument("--stages", nargs="+", choices=[*STAGES, *DEVICE_STAGES], metavar="NAME")
    given = parser.parse_args(arguments)
    if given.device == DEVICE and not torch.cuda.is_available():
        print(f"skipped: {no_gpu_reason()}")
        return _write({"skipped": no_gpu_reason()})
    stages = ({} if given.device == "cpu" else STAGES) | {
        name: partial(stage, given.device) for name, stage in DEVICE_STAGES.items()
    }
    report: dict[str, Any] = {}
    for name, stage in stages.items():
        if given.stages and name not in given.stages:
            continue
        began = time.monotonic()
        try:
            report[name] = stage()
        except Exception as error:
            report[name] = {"failed": f"{type(error).__name__}: {error}"}
        seconds = time.monotonic() - began
        print(f"{name}, {seconds:.0f} s: {report[name]}", flush=True)
        if "failed" in report[name]:
            break
    return _write(report)


def _config(device: str) -> EngineConfig:
    return EngineConfig(device=device, dtype="float32", context=512, slots=64, drafter="none")


def _seconds(run: Callable[[], object]) -> float:
    """Of a call on the GPU, after one that warms up."""
    run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _write(report: dict[str, Any]) -> int:
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    return int(any("failed" in part for part in report.values() if isinstance(part, dict)))


if __name__ == "__main__":
    sys.exit(main())
