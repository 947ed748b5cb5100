"""Measures Cellar and a peer alternately, both over HTTP, and prints medians, ratios and goals.

    python -m benchmarks.serving.peers llama.cpp $SIDES --program llama-server
    python -m benchmarks.serving.peers openvino $SIDES --program OTHER/bin/python
    python -m benchmarks.serving.peers transformers --model FOLDER --quantize int8 --program OTHER/bin/transformers
    python -m benchmarks.serving.peers --base-url us=http://127.0.0.1:8000/v1 --base-url peer=http://127.0.0.1:8001/v1
    python -m benchmarks.serving.peers --smoke          # the bundled model against itself, one pair: a test

SIDES: --model FOLDER --quantize int8 --peer-model q8_0.gguf

Both servers get the same threads (--threads), slots (the largest number of streams) and context. The expected
duration is printed at the start. The environment of openvino is described in openvino_server.py; `transformers serve`
needs one with `pip install 'transformers[serving]' accelerate`: its bin/transformers is the --program.

The models: `python -m benchmarks.shapes qwen3-0.6b FOLDER --gguf bf16.gguf` writes random weights for both
servers; `llama-quantize bf16.gguf q8_0.gguf Q8_0` and `llama-quantize --pure bf16.gguf q4_0.gguf Q4_0` write the files
of the peer.

llama.cpp's programs come from the source package of its Python binding:

    pip download --no-binary llama-cpp-python --no-deps llama-cpp-python && tar xf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF
    cmake --build build --target llama-server llama-quantize         # build/bin; the tree's gguf-py is the package gguf

peers.json with every pair and every request, and peers.png, go to out/peers/. --json writes the medians as rows for
benchmarks.page.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console

from bench.benchmark import Benchmark, Measured
from bench.cells import Cell, chat, single_stream, streams, users
from bench.client import RequestOptions, Server
from bench.launch import cellar, started
from bench.machine import environment
from bench.plan import read_counts
from bench.plots import MISSING
from bench.report import document, write_json
from bench.samples import OK
from bench.target import BenchError, check_url, find
from benchmarks.result import add_json_option, command_parser, commit, model_name, weight_format
from benchmarks.result import measured as result
from benchmarks.serving.goals import GOALS
from benchmarks.serving.memory_bandwidth import MemoryBandwidth
from benchmarks.serving.paired_figures import document as pairs
from benchmarks.serving.paired_figures import medians, plot, rows, table
from benchmarks.serving.peer_programs import PEERS, Resources
from engine.load.machine.resources import processor_count

NAMES = ("alone", "prefill", "streams", "reuse")
# Context of a slot: lower limit (the requests that detect the server's features fit), and a multiple of page sizes.
MIN_CONTEXT, CONTEXT_STEP = 512, 256


class IncompleteAnswer(Exception):
    """An answer was incomplete, so its times are invalid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Tokens of prompts and outputs.

    depth, decoded    prompt and output of a single stream
    long              prompt with an output of one token
    asked, answered   prompt and output of each concurrent stream
    history, turn     shared prefix, and new tokens of each prompt
    users             requests with one shared prefix
    """

    depth: int = 512
    decoded: int = 64
    long: int = 2048
    asked: int = 256
    answered: int = 128
    history: int = 2048
    turn: int = 32
    users: int = 64

    def cells(self, names: list[str], counts: list[int]) -> dict[str, tuple[Cell, int]]:
        """Return the cells with these names, and the longest sequence of each in tokens."""
        known = {
            "alone": (single_stream(self.depth, answered=self.decoded, repeats=1), self.depth + self.decoded),
            "prefill": (single_stream(self.long, answered=1, repeats=1), self.long + 1),
        }
        for count in counts:
            cell = streams(count, asked=self.asked, answered=self.answered, requests=count)
            known[f"streams {count}"] = (cell, self.asked + self.answered)
        known["reuse, chat"] = (chat(self.history, turn=self.turn), self.history + 4 * self.turn)
        known["reuse, users"] = (users(self.users, system=self.history, turn=self.turn), self.history + 4 * self.turn)
        return {name: cell for name, cell in known.items() if name.replace(",", "").split()[0] in names}


SMOKE = Sizes(depth=24, decoded=8, long=48, asked=16, answered=8, history=64, turn=4, users=4)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write; 0: complete, 1: an answer was incomplete, 2: a server could not be measured."""
    parser = make_parser()
    given = parser.parse_args(arguments)
    try:
        return compete(given)
    except BenchError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    except IncompleteAnswer as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: interrupted\n")


def compete(given: argparse.Namespace) -> int:
    """Return 0 after all results are written; raises BenchError or IncompleteAnswer."""
    rounds = given.pairs if given.pairs is not None else 1 if given.smoke else 5
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(2**32)
    if rounds < 1:
        raise BenchError(f"--pairs must be 1 or more, not {rounds}")
    sizes = SMOKE if given.smoke else Sizes(long=given.long)
    chosen = sizes.cells(given.cells.split(","), read_counts("--streams", given.streams))
    if not chosen:
        raise BenchError(f"--cells names none of {', '.join(NAMES)}")
    cells = [cell for cell, _ in chosen.values()]
    kind = given.prompts or (PEERS[given.peer].kind if given.peer else "ids")
    ask = RequestOptions(timeout_seconds=1200.0, extra={"ignore_eos": True})
    given.out.mkdir(parents=True, exist_ok=True)
    bandwidth = MemoryBandwidth(given.threads)

    def watch(measured: Measured) -> None:
        check(measured)
        bandwidth.measure()

    session = Benchmark(options=ask, kind=kind, seed=seed, rounds=rounds, console=Console(stderr=True), watch=watch)
    with ExitStack() as stack:
        resources = Resources(
            threads=given.threads,
            slots=max(cell.work.streams for cell in cells),
            context=-(-max(MIN_CONTEXT, *(tokens for _, tokens in chosen.values())) // CONTEXT_STEP) * CONTEXT_STEP,
        )
        sides = find_sides(given, resources, stack)
        around = environment() | {"commit": commit()}
        options = {name: str(value) for name, value in vars(given).items()} | {"seed": seed, "cells": list(chosen)}
        try:
            asyncio.run(session.run(sides, cells))
        finally:
            # Partial results of an interrupted run are written, too.
            found = session.measured
            if found and found[0].results and found[1].results:
                content = document(found, servers=sides, environment=around, options=options, left_out=())
                write(given, found, content | {"memory read, bytes a second": bandwidth.rates})
                print(f"memory bandwidth, GB/s: {describe(bandwidth.rates)}")
    return 0


def write(given: argparse.Namespace, measured: list[Measured], content: dict[str, object]) -> None:
    """Print the table, write JSON and plot."""
    goals, names = goals_of(given), (measured[0].server, measured[1].server)
    duel = rows(measured, GOALS[goals])
    write_json(given.out / "peers.json", content | {"figures": pairs(duel)})
    if given.json:
        model = given.model or names[0]
        weights = weight_format(given.quantize, given.dtype, model)
        peer = PEERS[given.peer].title if given.peer else names[1]
        about = {"model": model_name(model), "weights": weights, "peer": peer}
        result("peers", medians(duel, about)).write(given.json)
        print(given.json)
    # A narrow terminal would truncate the figures.
    Console(width=max(Console().width, 150)).print(table(duel, names))
    print(given.out / "peers.json")
    try:
        plot(given.out / "peers.png", duel, names[1], f"{names[0]} beside {names[1]}, goals: {goals}")
        print(given.out / "peers.png")
    except ImportError:
        print(MISSING)


def describe(rates: Sequence[float]) -> str:
    """Return the median and range of rates in GB/s."""
    low, middle, high = (1e-9 * pick(rates) for pick in (min, median, max))
    return f"{middle:.1f} ({low:.1f} to {high:.1f}), the limit of decoding one stream"


def goals_of(given: argparse.Namespace) -> str:
    """Return the name of the goals; none for --smoke without --goals."""
    if given.goals or given.smoke:
        return str(given.goals or "none")
    return str(given.quantize if given.peer in (None, "llama.cpp") else given.peer)


def make_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = command_parser("serving.peers", __doc__)
    add = parser.add_argument
    add("peer", nargs="?", choices=sorted(PEERS), help="server to start beside Cellar")
    add("--model", default=None, metavar="FOLDER", help="model of Cellar, and of transformers")
    add("--peer-model", default=None, metavar="PATH", help="model of the peer (default: --model)")
    add("--program", default=None, metavar="PATH", help="llama-server, a python with openvino-genai, or transformers")
    add("--quantize", default="none", choices=("int8", "int4", "none"), help="of Cellar (default none)")
    add("--dtype", default="auto", help="of Cellar (default auto)")
    add("--threads", type=int, default=processor_count(), metavar="N", help="of both servers (default: all)")
    add("--cellar", default="", metavar="ARGS", help="more arguments of `cellar serve`")
    add("--peer-args", default="", metavar="ARGS", help="more arguments of the peer")
    add("--base-url", action="append", default=[], metavar="NAME=URL", help="two running servers instead, Cellar first")
    add("--prompts", choices=("ids", "text"), default=None, help="default: ids where the peer accepts them")
    add("--smoke", action="store_true", help="one pair of small sizes; without a peer: the bundled model twice")
    add("--pairs", type=int, default=None, metavar="N", help="rounds of both servers (default 5)")
    add("--cells", default=",".join(NAMES), metavar="NAME,...", help="default: all four")
    add("--long", type=int, default=Sizes().long, metavar="N", help="prompt tokens of the prefill cell (default 2048)")
    add("--streams", default="8", metavar="N,...", help="concurrent streams (default 8)")
    add("--goals", choices=sorted(GOALS), default=None, help="default: by --quantize or the peer")
    add("--seed", type=int, default=None, help="of the prompts (default: random, so that no prompt is cached)")
    add("--out", type=Path, default=Path("out/peers"), metavar="FOLDER", help="default: out/peers")
    add_json_option(parser)
    return parser


def find_sides(given: argparse.Namespace, resources: Resources, stack: ExitStack) -> list[Server]:
    """Return Cellar and the peer; started servers end with `stack`."""
    named = [text.partition("=")[::2] for text in given.base_url]
    if not named and given.peer:
        named = [("cellar", start_cellar(given, resources, stack)), (given.peer, start_peer(given, resources, stack))]
    elif not named and given.smoke:
        names = ("cellar", "cellar again")
        alone = ("--drafter", "none")
        named = [(name, stack.enter_context(cellar(alone, given.out / f"{name}.log"))) for name in names]
    if len(named) != 2:
        raise BenchError("name a peer, or give --base-url NAME=URL twice, or --smoke")
    by_path = given.peer_model or given.model if given.peer and PEERS[given.peer].by_path else None
    return [
        find(name, check_url(url, allow_remote=False), model=model, api_key=None, context=None)
        for (name, url), model in zip(named, (None, by_path), strict=True)
    ]


def start_cellar(given: argparse.Namespace, resources: Resources, stack: ExitStack) -> str:
    """Start `cellar serve` without drafts, as the peer has none."""
    if given.model is None:
        raise BenchError("give --model, the folder of the model")
    numbers = ("--dtype", given.dtype, "--quantize", given.quantize, "--drafter", "none")
    size = ("--threads", str(resources.threads), "--slots", str(resources.slots), "--context", str(resources.context))
    arguments = (given.model, *numbers, *size, *shlex.split(given.cellar))
    return stack.enter_context(cellar(arguments, given.out / "cellar.log"))


def start_peer(given: argparse.Namespace, resources: Resources, stack: ExitStack) -> str:
    """Start the peer."""
    peer = PEERS[given.peer]
    command = [*peer.command(given.program, given.peer_model or given.model, resources), *shlex.split(given.peer_args)]
    threads = {"OMP_NUM_THREADS": str(resources.threads)}
    log = given.out / f"{given.peer}.log"
    return stack.enter_context(started(command, ready=peer.ready, log=log, environment=threads))


def check(measured: Measured) -> None:
    """Raise IncompleteAnswer if one of the last answers failed or has fewer tokens than requested."""
    for run in measured.results[-1].runs:
        for sample in run.samples:
            if sample.outcome != OK or sample.completion_tokens != sample.asked_tokens or not sample.arrivals:
                answer = (
                    f"{sample.outcome}, {sample.completion_tokens} tokens of {sample.asked_tokens} {sample.text[:200]}"
                )
                raise IncompleteAnswer(f"{measured.server} answered ({measured.cell.label}): {answer}")


if __name__ == "__main__":
    sys.exit(main())
