"""Measures the same GGUF files in Cellar and a peer, in turns: speed, first token, start, memory and accuracy.

    python -m benchmarks.gguf.files --prepare FOLDER --quantizer llama-quantize   # random weights in published shapes
    python -m benchmarks.gguf.files FOLDER/*.gguf --program llama-server --json benchmarks/results/gguf.json

The peer is llama.cpp, or ik_llama.cpp with --peer ik_llama.cpp.

Cells, chosen by --cells: `alone` (a prompt of 512 and the decode behind it), `prefill` (a prompt of 2,048), `streams`
(8 and 32 of them), `server` (first and second start, and resident memory), `accuracy` (log-probabilities of texts that
the model with dequantised weights in float32 samples). Rows are added to --json and --out as they are measured: an
interrupted run keeps them, and a run with the same --out measures only the missing cells. --quick takes small sizes, to
test the commands.

The model is the file's name without its quantisation: qwen3-0.6b-Q4_K_M.gguf is Qwen3-0.6B.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from gguf import GGUFReader
from rich.console import Console
from rich.table import Table

from bench.benchmark import Benchmark
from bench.cells import DECODE, Cell
from bench.client import RequestOptions, Server
from bench.launch import cellar, started
from bench.plan import read_counts
from bench.report import digits, write_json
from bench.target import BenchError, find
from benchmarks.gguf.token_scores import AT_ONCE, LIKELY, Loss, Place, ask_ours, ask_peer, loss
from benchmarks.result import add_json_option, add_rows, command_parser, measured, model_name
from benchmarks.serving.goals import GOALS
from benchmarks.serving.memory_bandwidth import MemoryBandwidth
from benchmarks.serving.paired_figures import PairedFigure, medians, rows
from benchmarks.serving.peer_programs import PEERS, Resources
from benchmarks.serving.peers import CONTEXT_STEP, MIN_CONTEXT, Sizes, check
from benchmarks.shapes import SHAPES, write_folder, write_gguf
from engine.kernels.cache_folder import cache_folder
from engine.load.machine.resources import processor_count
from engine.load.read.gguf_model import read_gguf_config, read_gguf_model

CELLS = ("alone", "prefill", "streams", "server", "accuracy")
FORMATS = ("Q8_0", "Q6_K", "Q4_K_M", "Q4_0")
QUICK = Sizes(depth=64, decoded=8, long=96, asked=16, answered=8)
# Fewer tokens for each stream than in benchmarks.serving.peers: a file is measured in minutes.
FULL = Sizes(depth=512, decoded=32, long=2048, asked=64, answered=64)
# Slots of the sessions without concurrent streams.
ALONE_SLOTS = 1
# Sampled texts for the accuracy: how many, the random tokens at their start, and the sampled ones.
TEXTS, START_TOKENS, TEXT_TOKENS, QUICK_TOKENS = 4, 8, 48, 8
FIRST_START, START, MEMORY = "first start, ms", "start, ms", "resident, MiB"
PERPLEXITY, DISTANCE = "perplexity, %", "distance, millinats"
READ = "weights read in decode, GB/s"
# Tables of which a token reads one row.
LOOKED_UP = ("token_embd.weight", "per_layer_token_embd.weight")
# What Cellar keeps of a served file in its cache folder; compiled kernels are of the machine.
CACHED_OF_FILES = ("checks", "tokenizers", "weights")
# Figures of which less is better, beside those in milliseconds.
LESS_IS_BETTER = (MEMORY, DISTANCE)
_quantisation = re.compile(r"[-.](i?q\d\w*|bf16|f16|f32|mxfp4\w*)$", re.IGNORECASE)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A file, and its model and quantisation by its name."""

    path: Path

    @property
    def weights(self) -> str:
        """The quantisation in upper case."""
        found = _quantisation.search(self.path.stem)
        return found[1].upper() if found else "GGUF"

    @property
    def model(self) -> str:
        """The published name of the model."""
        return model_name(_quantisation.sub("", self.path.stem))

    @property
    def token_bytes(self) -> int:
        """The bytes of the weights that a token reads: of experts those that it uses, of an embedding table a row."""
        reader = GGUFReader(self.path)
        architecture = reader.fields["general.architecture"].contents()
        used, count = (reader.fields.get(f"{architecture}.expert_{name}") for name in ("used_count", "count"))
        share = used.contents() / count.contents() if used and count else 1
        names = {tensor.name for tensor in reader.tensors}
        # A tied table is the output projection too.
        looked_up = LOOKED_UP if "output.weight" in names else LOOKED_UP[1:]
        return sum(
            round(tensor.n_bytes * (share if "_exps." in tensor.name else 1))
            for tensor in reader.tensors
            if tensor.name not in looked_up
        )

    @property
    def about(self) -> dict[str, str]:
        """The fields of all rows of this file."""
        return {"model": self.model, "weights": self.weights}


class Rows:
    """The rows measured so far beside a peer, in a file."""

    def __init__(self, path: Path, peer: str) -> None:
        self._path = path
        self.peer = peer
        self.rows: list[Row] = json.loads(path.read_text()) if path.exists() else []

    def of(self, file: GgufFile) -> list[Row]:
        """The rows of a file."""
        return [row for row in self.rows if row.items() >= (file.about | {"peer": self.peer}).items()]

    def has(self, file: GgufFile, cell: str) -> bool:
        """Whether a cell of a file is measured."""
        return any(row["cell"] == cell for row in self.of(file))

    def add(self, added: Sequence[Row]) -> list[Row]:
        """Keep rows; return them with the name of the peer."""
        named = [row | {"peer": self.peer} for row in added]
        self.rows.extend(named)
        write_json(self._path, self.rows)
        return named


class Machine:
    """The programs and the resources that both servers get."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given

    @contextmanager
    def servers(self, file: GgufFile, slots: int, tokens: int) -> Iterator[tuple[list[Server], list[float]]]:
        """Start both servers; yield them, and the seconds of both starts."""
        context = -(-max(MIN_CONTEXT, tokens) // CONTEXT_STEP) * CONTEXT_STEP
        resources = Resources(threads=self.given.threads, slots=slots, context=context)
        with ExitStack() as stack:
            found, seconds = [], []
            for name, start in (("cellar", self._cellar), (self.given.peer, self._peer)):
                began = time.monotonic()
                url = stack.enter_context(start(file, resources))
                seconds.append(time.monotonic() - began)
                found.append(find(name, url, model=None, api_key=None, context=None))
            yield found, seconds

    def first_starts(self, file: GgufFile, slots: int, tokens: int) -> list[float]:
        """Start and end both servers, Cellar with nothing of a file in its cache folder: it checks the model, and later
        starts reuse the outcome. The seconds of both starts.
        """
        for kind in CACHED_OF_FILES:
            shutil.rmtree(self._cache_home / "kvcellar" / kind, ignore_errors=True)
        with self.servers(file, slots, tokens) as (_, seconds):
            return seconds

    @cached_property
    def _cache_home(self) -> Path:
        """The folder of Cellar's cache folder, which has the compiled kernels of the user's."""
        folder = self.given.out.resolve() / "cache"
        kernels = folder / "kvcellar" / "kernels"
        kernels.parent.mkdir(parents=True, exist_ok=True)
        if not kernels.is_symlink():
            (own := cache_folder("kernels")).mkdir(parents=True, exist_ok=True)
            kernels.symlink_to(own)
        return folder

    def _cellar(self, file: GgufFile, resources: Resources) -> Any:
        size = ("--threads", str(resources.threads), "--slots", str(resources.slots))
        arguments = (str(file.path), *size, "--context", str(resources.context), "--drafter", "none")
        environment = {"XDG_CACHE_HOME": str(self._cache_home)}
        return cellar(arguments, self.given.out / "cellar.log", environment)

    def _peer(self, file: GgufFile, resources: Resources) -> Any:
        peer = PEERS[self.given.peer]
        command = peer.command(self.given.program, str(file.path), resources)
        threads = {"OMP_NUM_THREADS": str(resources.threads)}
        return started(command, ready=peer.ready, log=self.given.out / f"{self.given.peer}.log", environment=threads)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write; 2 if a program or a file is missing."""
    parser = make_parser()
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    try:
        if given.prepare:
            prepare(given.prepare, given.shapes.split(","), given.formats.split(","), given.quantizer)
            return 0
        path = given.json or given.out / "gguf.json"
        found = measure_files([GgufFile(file) for file in given.files], given, path)
    except BenchError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    Console(width=max(Console().width, 130)).print(table(found, given.peer))
    print(path)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = command_parser("gguf.files", __doc__)
    add = parser.add_argument
    add("files", nargs="*", type=Path, metavar="FILE", help="GGUF files")
    add("--prepare", type=Path, default=None, metavar="FOLDER", help="write files with random weights instead")
    add("--shapes", default=",".join(SHAPES), metavar="NAME,...", help="of --prepare (default: all)")
    add("--formats", default=",".join(FORMATS), metavar="NAME,...", help=f"of --prepare (default {','.join(FORMATS)})")
    add("--quantizer", default="llama-quantize", metavar="PATH", help="llama-quantize, for --prepare")
    add("--peer", choices=("llama.cpp", "ik_llama.cpp"), default="llama.cpp", help="default: llama.cpp")
    add("--program", default=None, metavar="PATH", help="llama-server of the peer")
    add("--threads", type=int, default=processor_count(), metavar="N", help="of both servers (default: all)")
    add("--cells", default=",".join(CELLS), metavar="NAME,...", help="default: all")
    add("--streams", default="8,32", metavar="N,...", help="concurrent streams (default 8,32)")
    add("--pairs", type=int, default=1, metavar="N", help="rounds of both servers (default 1)")
    add("--quick", action="store_true", help="small sizes")
    add("--out", type=Path, default=Path("out/gguf"), metavar="FOLDER", help="default: out/gguf")
    add_json_option(parser)
    return parser


def prepare(folder: Path, shapes: Sequence[str], formats: Sequence[str], quantizer: str) -> None:
    """Write each shape in each format; files that exist stay. Raises BenchError if llama-quantize fails."""
    folder.mkdir(parents=True, exist_ok=True)
    for shape in shapes:
        raw = folder / f"{shape}-BF16.gguf"
        if not raw.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                write_folder(SHAPES[shape], Path(scratch))
                write_gguf(Path(scratch), raw)
        for name in formats:
            file = folder / f"{shape}-{name}.gguf"
            if not file.exists():
                quantise(raw, file, name, quantizer)
            print(file)


def quantise(raw: Path, file: Path, name: str, quantizer: str) -> None:
    """Write a file in another format; it appears when it is complete."""
    part = file.with_suffix(".part")
    try:
        subprocess.run([quantizer, str(raw), str(part), name], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BenchError(f"{quantizer} did not write {name}: {error}") from error
    part.replace(file)


def measure_files(files: Sequence[GgufFile], given: argparse.Namespace, path: Path) -> list[Row]:
    """Return the rows of all files, measured now or before; new ones are added to the results at `path`."""
    unknown = set(given.cells.split(",")) - set(CELLS)
    if unknown or not files:
        raise BenchError(f"--cells are of {', '.join(CELLS)}" if unknown else "name GGUF files, or --prepare FOLDER")
    if absent := [file.path for file in files if not file.path.is_file()]:
        raise BenchError(f"there is no file {absent[0]}")
    kept, machine, run = Rows(given.out / "rows.json", given.peer), Machine(given), measured("gguf", ())
    for file in files:
        for found in measurements(machine, file, kept):
            add_rows(path, replace(run, rows=kept.add(found)))
    return [row for file in files for row in kept.of(file)]


def measurements(machine: Machine, file: GgufFile, kept: Rows) -> Iterator[list[Row]]:
    """Measure the missing cells of a file; yield the rows of each session."""
    for cells, slots, tokens in sessions(file, kept, machine.given):
        yield measure(machine, file, cells, slots=slots, tokens=tokens)
    if "accuracy" in machine.given.cells.split(",") and not kept.has(file, "accuracy"):
        yield accuracy(machine, file)


def sessions(file: GgufFile, kept: Rows, given: argparse.Namespace) -> Iterator[tuple[list[Cell], int, int]]:
    """Yield the missing cells of a file: those of one stream together, each number of streams alone."""
    names = given.cells.split(",")
    cells = (QUICK if given.quick else FULL).cells(names, read_counts("--streams", given.streams))
    missing = [(cell, tokens) for cell, tokens in cells.values() if not kept.has(file, cell.label)]
    alone = [(cell, tokens) for cell, tokens in missing if cell.work.streams == 1]
    if alone or ("server" in names and not kept.has(file, "server")):
        yield [cell for cell, _ in alone], ALONE_SLOTS, max((tokens for _, tokens in alone), default=0)
    for cell, tokens in missing:
        if cell.work.streams > 1:
            yield [cell], cell.work.streams, tokens


def measure(machine: Machine, file: GgufFile, cells: Sequence[Cell], *, slots: int, tokens: int) -> list[Row]:
    """Start both servers, measure cells in turns; with one slot also the start and the memory."""
    given = machine.given
    session = Benchmark(
        options=RequestOptions(timeout_seconds=1200.0, extra={"ignore_eos": True}),
        kind="ids",
        seed=random.SystemRandom().randrange(2**32),
        rounds=given.pairs,
        console=Console(stderr=True),
        watch=check,
    )
    first = machine.first_starts(file, slots, tokens) if slots == ALONE_SLOTS else []
    bandwidth = MemoryBandwidth(given.threads)
    bandwidth.measure()
    with machine.servers(file, slots, tokens) as (servers, seconds):
        if cells:
            asyncio.run(session.run(servers, cells))
        figures = rows(session.measured, GOALS["none"])
        if slots == ALONE_SLOTS:
            figures += [paired("server", MEMORY, *resident_sizes())]
            for figure, times in ((FIRST_START, first), (START, seconds)):
                figures.append(paired("server", figure, *(1000 * each for each in times)))
    found = [row | {"ratio": better(row)} for row in medians(figures, file.about)]
    return [*found, *(read_rate(file, row, bandwidth.rates[0]) for row in found if row["figure"] == DECODE)]


def read_rate(file: GgufFile, decode: Row, bandwidth: float) -> Row:
    """The bytes of a token times the decode rate, beside the memory bandwidth; such a row has no ratio."""
    size = file.token_bytes / 1e9
    rates = {name: round(decode[name] * size, 2) for name in ("cellar", "other")}
    return file.about | {"cell": decode["cell"], "figure": READ, "limit": round(bandwidth / 1e9, 2)} | rates


def paired(cell: str, figure: str, ours: float, peers: float) -> PairedFigure:
    """One pair of values."""
    return PairedFigure(cell, figure, [ours], [peers], None)


def better(row: Row) -> float:
    """How many times better Cellar is, also for sizes and errors."""
    return round(row["other"] / row["cellar"], 3) if row["figure"] in LESS_IS_BETTER and row["cellar"] else row["ratio"]


def resident_sizes() -> tuple[float, float]:
    """Resident MiB of Cellar's process and llama.cpp's."""
    sizes: dict[bool, float] = {}
    for child in psutil.Process().children():
        sizes["server.cli" in " ".join(child.cmdline())] = child.memory_info().rss / 2**20
    return sizes[True], sizes[False]


def accuracy(machine: Machine, file: GgufFile) -> list[Row]:
    """Return the errors of log-probabilities in both servers."""
    texts, places = sampled(file.path, QUICK_TOKENS if machine.given.quick else TEXT_TOKENS)
    with machine.servers(file, AT_ONCE, max(map(len, texts))) as (servers, _):
        ours, peers = asyncio.run(scores(servers, texts, places))
    return accuracy_rows(file, loss(places, ours), loss(places, peers))


def accuracy_rows(file: GgufFile, ours: Loss, peers: Loss) -> list[Row]:
    """Return the change of the perplexity in percent, which has no ratio, and the error in millinats."""
    about = file.about | {"cell": "accuracy"}
    changes = (round(100 * (each.perplexity - 1), 3) for each in (ours, peers))
    perplexity = about | {"figure": PERPLEXITY} | dict(zip(("cellar", "other"), changes, strict=True))
    distance = about | {
        "figure": DISTANCE,
        "cellar": 1000 * ours.distance,
        "other": 1000 * peers.distance,
        "ratio": 1.0,
    }
    return [perplexity, distance | {"ratio": better(distance)}]


def sampled(path: Path, length: int) -> tuple[list[list[int]], list[Place]]:
    """Return texts of the model with dequantised weights in float32, and the log-probabilities of their tokens.

    Each token is one of the LIKELY first, which the peer lists.
    """
    config = read_gguf_config(path)
    model = read_gguf_model(path, config, torch.float32)[0].eval()
    torch.manual_seed(0)
    starts = torch.randint(config.vocab_size // 2, (TEXTS, START_TOKENS))
    with torch.inference_mode():
        texts = model.generate(
            starts,
            attention_mask=torch.ones_like(starts),
            do_sample=True,
            top_k=LIKELY,
            max_new_tokens=length,
            min_new_tokens=length,
            pad_token_id=0,
            eos_token_id=None,
        )
        truth = model(input_ids=texts, use_cache=False).logits.log_softmax(-1)
    found = truth[:, :-1].gather(2, texts[:, 1:, None])[..., 0]
    positions = itertools.product(range(TEXTS), range(START_TOKENS, texts.shape[1]))
    return texts.tolist(), [Place(text, at, float(found[text, at - 1])) for text, at in positions]


async def scores(servers: Sequence[Server], texts: list[list[int]], places: list[Place]) -> list[list[float]]:
    """Return the log-probabilities of both servers."""
    ours, peers = servers
    async with httpx.AsyncClient(timeout=600, trust_env=False) as http:
        return [await ask_ours(http, ours.url, texts, places), await ask_peer(http, peers.url, texts, places)]


def table(found: Sequence[Row], peer: str) -> Table:
    """Return the printed table."""
    result = Table(caption="times better: a higher rate, a lower time, size or error")
    for heading in ("model", "weights", "cell", "figure", "Cellar", peer, "times better"):
        result.add_column(heading, justify="right" if heading in ("Cellar", peer, "times better") else "left")
    for row in found:
        values = (digits(row[name]) if name in row else "" for name in ("cellar", "other", "ratio"))
        result.add_row(row["model"], row["weights"], row["cell"], row["figure"], *values)
    return result


if __name__ == "__main__":
    sys.exit(main())
