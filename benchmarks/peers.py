"""Measures us and a peer alternately in one run, both over HTTP, and prints the medians and their ratio.

    python -m benchmarks.peers --cellar "--model FOLDER --quantize int8 SAME" --peer "llama-server -m q8_0.gguf MORE"
    python -m benchmarks.peers --base-url us=http://127.0.0.1:8000/v1 --base-url peer=http://127.0.0.1:8001/v1
    python -m benchmarks.peers --smoke          # the bundled model against itself, one pair: does all of this work?

SAME is `--threads 2 --slots 8 --context 3072 --drafter none`, and MORE is `--port {port} -t 2 -np 8 -c 24576 -fa on`,
so both sides have as many threads, sequences and tokens. {port} is replaced by a free port; every server that
speaks /v1/completions with token ids can be the peer (--peer-ready is where it answers 200 once it is ready).

The models: `python -m benchmarks.shapes qwen3-0.6b FOLDER --gguf bf16.gguf` makes random weights for both sides, then
`llama-quantize bf16.gguf q8_0.gguf Q8_0` and `llama-quantize --pure bf16.gguf q4_0.gguf Q4_0` make the peer's files.

llama.cpp's programs come from the source package of its Python binding:

    pip download --no-binary llama-cpp-python --no-deps llama-cpp-python && tar xf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF
    cmake --build build --target llama-server llama-quantize         # build/bin; the tree's gguf-py is the package gguf

peers.json with every pair and peers.png go to out/peers/.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.contest import SMOKE, Cell, Contestant, Figures, Sizes, Unsound, cells
from benchmarks.duel import Duel, document, plot, table
from benchmarks.load import Server
from benchmarks.report import write_json
from benchmarks.target import Unusable, ask_models, check_url, environment, only_model, serving, started

ALONE = "--drafter none"


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write; 0 if all was measured, 1 if an answer was not whole, 2 if nothing could be measured."""
    parser = make_parser()
    given = parser.parse_args(arguments)
    given.pairs = given.pairs if given.pairs is not None else 1 if given.smoke else 5
    given.seed = given.seed if given.seed is not None else random.SystemRandom().randrange(2**32)
    try:
        given.out.mkdir(parents=True, exist_ok=True)
        chosen = cells(given.cells.split(","), read_counts(given.streams))
        if not chosen:
            raise Unusable("--cells names none of alone, prefill, streams and reuse")
        if given.pairs < 1:
            raise Unusable(f"--pairs must be 1 or more, not {given.pairs}")
        with ExitStack() as stack:
            sides = find_sides(given, stack)
            around = environment()
            run = measure(sides, chosen, sizes=SMOKE if given.smoke else Sizes(), pairs=given.pairs, seed=given.seed)
            duel = asyncio.run(run)
    except Unusable as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    except Unsound as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    options = {"cellar": given.cellar, "peer": given.peer, "seed": given.seed, "cells": list(chosen)}
    write_json(given.out / "peers.json", document(duel, environment=around, options=options))
    # Figures cut to fit a narrow terminal would be worth nothing.
    Console(width=max(Console().width, 130)).print(table(duel))
    print(given.out / "peers.json")
    try:
        plot(given.out / "peers.png", duel, f"{around['cpu']}, {around['threads']} threads")
        print(given.out / "peers.png")
    except ImportError as error:
        print(f"no plot: {error} (pip install matplotlib)")
    return 0


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
    add("--cellar", default=None, metavar="ARGS", help="start `cellar serve ARGS`")
    add("--peer", default=None, metavar="COMMAND", help="start the peer; {port} is replaced by a free port")
    add("--peer-ready", default="/health", metavar="PATH", help="where the peer answers 200 (default /health)")
    add("--base-url", action="append", default=[], metavar="NAME=URL", help="instead: two running servers, ours first")
    add("--smoke", action="store_true", help="one pair of small sizes; without servers, the bundled model twice")
    add("--pairs", type=int, default=None, metavar="N", help="how often both are measured (default 5)")
    add("--cells", default="alone,prefill,streams,reuse", metavar="NAME,...", help="default: all four")
    add("--streams", default="8", metavar="N,...", help="streams at once (default 8)")
    add("--seed", type=int, default=None, help="of the prompts; default: a new one, so that no cache knows them")
    add("--out", type=Path, default=Path("out/peers"), metavar="FOLDER", help="default: out/peers")
    return parser


def read_counts(text: str) -> list[int]:
    """Return the numbers of streams in a list separated by commas."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise Unusable(f"--streams must be whole numbers separated by commas, not {text!r}") from error
    if min(counts) < 1:
        raise Unusable(f"--streams must be 1 or more, not {text!r}")
    return counts


def find_sides(given: argparse.Namespace, stack: ExitStack) -> tuple[Server, Server]:
    """Return our server and the peer; those started here live as long as `stack`."""
    named = [text.partition("=")[::2] for text in given.base_url]
    if not named and given.smoke and given.cellar is None and given.peer is None:
        named = [
            (name, stack.enter_context(serving(ALONE, given.out / f"{name}.log")))
            for name in ("cellar", "cellar again")
        ]
    elif not named and given.cellar is not None and given.peer is not None:
        ours = stack.enter_context(serving(given.cellar, given.out / "cellar.log"))
        peer = stack.enter_context(started(given.peer, ready=given.peer_ready, log=given.out / "peer.log"))
        named = [("cellar", ours), ("peer", peer)]
    if len(named) != 2:
        raise Unusable("give --cellar and --peer, or --base-url NAME=URL twice, or --smoke")
    first, second = (side(name, check_url(url, allow_remote=False)) for name, url in named)
    return first, second


def side(name: str, url: str) -> Server:
    """Return the server at `url` with the first model that it names."""
    return Server(name, url, only_model(url, ask_models(url, None)))


async def measure(
    sides: tuple[Server, Server], chosen: dict[str, Cell], *, sizes: Sizes, pairs: int, seed: int
) -> Duel:
    """Return all pairs; who goes first changes from turn to turn, so that a drift of the machine meets both."""
    duel = Duel((sides[0].name, sides[1].name))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # While one side is measured the other closes idle connections, and a request on such a one fails.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:  # no proxy to this machine
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("warming up", total=2 * pairs * len(chosen))
            for one in sides:
                await warm_up(Contestant(client, one, sizes, f"{seed} warm-up"))
            for turn in range(pairs):
                order = sides if turn % 2 == 0 else sides[::-1]
                for name, cell in chosen.items():
                    found: dict[str, Figures] = {}
                    for one in order:
                        progress.update(bar, description=f"{one.name}, {name}, pair {turn + 1}")
                        found[one.name] = await cell(Contestant(client, one, sizes, f"{seed} {turn}"))
                        progress.advance(bar)
                    duel.add(found[sides[0].name], found[sides[1].name])
    return duel


async def warm_up(one: Contestant) -> None:
    """Send two short requests at once, which are not measured."""
    await one.ask_at_once([one.prompt(one.sizes.asked, number) for number in range(2)], 8)


if __name__ == "__main__":
    sys.exit(main())
