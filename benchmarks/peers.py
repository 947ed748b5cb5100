"""Measures us and a peer alternately in one run, both over HTTP, and prints the medians, their ratio and the goals.

    python -m benchmarks.peers llama.cpp --model FOLDER --quantize int8 --peer-model q8_0.gguf --program llama-server
    python -m benchmarks.peers openvino --model FOLDER --quantize int8 --peer-model q8_0.gguf --program OTHER/bin/python
    python -m benchmarks.peers transformers --model FOLDER --quantize int8 --program OTHER/bin/transformers
    python -m benchmarks.peers --base-url us=http://127.0.0.1:8000/v1 --base-url peer=http://127.0.0.1:8001/v1
    python -m benchmarks.peers --smoke          # the bundled model against itself, one pair: does all of this work?

Both sides get as many threads (--threads), sequences (as many as the most streams) and tokens. How long it takes is
said at the start. openvino_server.py says how that peer's environment is made; transformers' own server needs one with
`pip install 'transformers[serving]' accelerate`, whose bin/transformers is the --program.

The models: `python -m benchmarks.shapes qwen3-0.6b FOLDER --gguf bf16.gguf` makes random weights for both sides, then
`llama-quantize bf16.gguf q8_0.gguf Q8_0` and `llama-quantize --pure bf16.gguf q4_0.gguf Q4_0` make the peer's files.

llama.cpp's programs come from the source package of its Python binding:

    pip download --no-binary llama-cpp-python --no-deps llama-cpp-python && tar xf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF
    cmake --build build --target llama-server llama-quantize         # build/bin; the tree's gguf-py is the package gguf

peers.json with every pair and every request and peers.png go to out/peers/.
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
from benchmarks.checkout import commit
from benchmarks.duel import document as pairs
from benchmarks.duel import medians, plot, rows, table
from benchmarks.goals import GOALS
from benchmarks.known import PEERS, Share
from benchmarks.reading import Reading
from benchmarks.result import add_json_option, model_name, weight_format
from benchmarks.result import measured as result
from engine.load.resources import processor_count

NAMES = ("alone", "prefill", "streams", "reuse")
# Tokens of a sequence: enough for the first questions, and a multiple that pages and blocks of both sides like.
LEAST, ROUND = 512, 256


class Unsound(Exception):
    """A server did not answer as it must, so its times say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Tokens of prompts and answers.

    depth, decoded    prompt and answer of a lone stream
    long              a prompt whose answer is one token
    asked, answered   prompt and answer of each of many streams
    history, turn     what is shared by prompts, and what each adds
    users             who share one prompt
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
        """Return the cells of these names, and how many tokens a sequence of each holds at most."""
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
    """Measure, print, write; 0 if all was measured, 1 if an answer was not whole, 2 if nothing could be measured."""
    parser = make_parser()
    given = parser.parse_args(arguments)
    try:
        return compete(given)
    except BenchError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    except Unsound as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: interrupted\n")


def compete(given: argparse.Namespace) -> int:
    """Return 0 once all is measured and written; Unusable or Unsound say why not."""
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
    reading = Reading(given.threads)

    def watch(measured: Measured) -> None:
        check(measured)
        reading.ask()

    session = Benchmark(options=ask, kind=kind, seed=seed, rounds=rounds, console=Console(stderr=True), watch=watch)
    with ExitStack() as stack:
        share = Share(
            threads=given.threads,
            slots=max(cell.work.streams for cell in cells),
            context=-(-max(LEAST, *(tokens for _, tokens in chosen.values())) // ROUND) * ROUND,
        )
        sides = find_sides(given, share, stack)
        around = environment() | {"commit": commit()}
        options = {name: str(value) for name, value in vars(given).items()} | {"seed": seed, "cells": list(chosen)}
        try:
            asyncio.run(session.run(sides, cells))
        finally:
            # Also of a run that was interrupted: what there is took its time.
            found = session.measured
            if found and found[0].results and found[1].results:
                content = document(found, servers=sides, environment=around, options=options, left_out=())
                write(given, found, content | {"memory read, bytes a second": reading.rates})
                print(f"memory read in between, GB/s: {told(reading.rates)}")
    return 0


def write(given: argparse.Namespace, measured: list[Measured], content: dict[str, object]) -> None:
    """Print the table, write JSON and plot."""
    goals, names = goals_of(given), (measured[0].server, measured[1].server)
    duel = rows(measured, GOALS[goals])
    write_json(given.out / "peers.json", content | {"figures": pairs(duel)})
    if given.json:
        model = given.model or measured[0].model
        weights = weight_format(given.quantize, given.dtype, model)
        peer = PEERS[given.peer].title if given.peer else names[1]
        about = {"model": model_name(model), "weights": weights, "peer": peer}
        result("peers", medians(duel, about)).write(given.json)
        print(given.json)
    # Figures cut to fit a narrow terminal would be worth nothing.
    Console(width=max(Console().width, 150)).print(table(duel, names))
    print(given.out / "peers.json")
    try:
        plot(given.out / "peers.png", duel, names[1], f"{names[0]} beside {names[1]}, goals: {goals}")
        print(given.out / "peers.png")
    except ImportError:
        print(MISSING)


def told(rates: Sequence[float]) -> str:
    """Return the median of bytes a second, and the range, in GB/s."""
    low, middle, high = (1e-9 * pick(rates) for pick in (min, median, max))
    return f"{middle:.1f} ({low:.1f} to {high:.1f}), which is what decoding one stream waits for"


def goals_of(given: argparse.Namespace) -> str:
    """Return the name of the goals; small sizes have none unless asked for."""
    if given.goals or given.smoke:
        return str(given.goals or "none")
    return str(given.quantize if given.peer in (None, "llama.cpp") else given.peer)


def make_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    documented, _, epilog = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="benchmarks.peers",
        description=documented,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("peer", nargs="?", choices=sorted(PEERS), help="who is started beside ours")
    add("--model", default=None, metavar="FOLDER", help="what ours serves, and transformers")
    add("--peer-model", default=None, metavar="PATH", help="what the peer serves (default: --model)")
    add("--program", default=None, metavar="PATH", help="llama-server, or the python that has openvino-genai")
    add("--quantize", default="none", choices=("int8", "int4", "none"), help="ours (default none)")
    add("--dtype", default="auto", help="ours (default auto, which keeps cells in 16 bits where llama.cpp does)")
    add("--threads", type=int, default=processor_count(), metavar="N", help="of both (default: all)")
    add("--cellar", default="", metavar="ARGS", help="more arguments of ours")
    add("--peer-args", default="", metavar="ARGS", help="more arguments of the peer")
    add("--base-url", action="append", default=[], metavar="NAME=URL", help="instead: two running servers, ours first")
    add("--prompts", choices=("ids", "text"), default=None, help="default: what the peer takes, ids before text")
    add("--smoke", action="store_true", help="one pair of small sizes; without a peer, the bundled model twice")
    add("--pairs", type=int, default=None, metavar="N", help="how often both are measured (default 5)")
    add("--cells", default=",".join(NAMES), metavar="NAME,...", help="default: all four")
    add("--long", type=int, default=Sizes().long, metavar="N", help="tokens of the prompt of prefill (default 2048)")
    add("--streams", default="8", metavar="N,...", help="streams at once (default 8)")
    add("--goals", choices=sorted(GOALS), default=None, help="default: of --quantize, or of the peer")
    add("--seed", type=int, default=None, help="of the prompts; default: a new one, so that no cache knows them")
    add("--out", type=Path, default=Path("out/peers"), metavar="FOLDER", help="default: out/peers")
    add_json_option(parser)
    return parser


def find_sides(given: argparse.Namespace, share: Share, stack: ExitStack) -> list[Server]:
    """Return our server and the peer; those started here live as long as `stack`."""
    named = [text.partition("=")[::2] for text in given.base_url]
    if not named and given.peer:
        named = [("cellar", start_ours(given, share, stack)), (given.peer, start_peer(given, share, stack))]
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


def start_ours(given: argparse.Namespace, share: Share, stack: ExitStack) -> str:
    """Start `cellar serve` without drafts: the peer has none."""
    if given.model is None:
        raise BenchError("give --model, the folder that ours serves")
    numbers = ("--dtype", given.dtype, "--quantize", given.quantize, "--drafter", "none")
    size = ("--threads", str(share.threads), "--slots", str(share.slots), "--context", str(share.context))
    arguments = (given.model, *numbers, *size, *shlex.split(given.cellar))
    return stack.enter_context(cellar(arguments, given.out / "cellar.log"))


def start_peer(given: argparse.Namespace, share: Share, stack: ExitStack) -> str:
    """Start the peer."""
    peer = PEERS[given.peer]
    command = [*peer.command(given.program, given.peer_model or given.model, share), *shlex.split(given.peer_args)]
    threads = {"OMP_NUM_THREADS": str(share.threads)}
    log = given.out / f"{given.peer}.log"
    return stack.enter_context(started(command, ready=peer.ready, log=log, environment=threads))


def check(measured: Measured) -> None:
    """Unsound if the last answers are not whole, or not as long as asked for: who says less is not faster."""
    for run in measured.results[-1].runs:
        for sample in run.samples:
            if sample.outcome != OK or sample.completion_tokens != sample.asked_tokens or not sample.arrivals:
                told = (
                    f"{sample.outcome}, {sample.completion_tokens} tokens of {sample.asked_tokens} {sample.text[:200]}"
                )
                raise Unsound(f"{measured.server} answered ({measured.cell.label}): {told}")


if __name__ == "__main__":
    sys.exit(main())
