"""Benchmark results as JSON documents of one schema; benchmarks.page makes docs/performance.md from them.

    {"benchmark": name, "command": command line, "machine": {"cpu", "cores", ...}, "commit": hash, "date": ISO date,
     "rows": [...]}

A file may also hold a list of such documents. "transcribed": true marks rows that were copied from an older page;
"commit" is then the commit that recorded them. "note" is shown on the page, below the sources.

Rows by benchmark:

    peers        model, weights, peer, cell, figure, cellar, other (medians), ratio, lowest, highest
    speculation  drafter, batch, accepted (shares by position), plain (tokens/s without drafts), ratios by mode, best
    quality      model, outliers, weights, server, perplexity (times float32's), divergence (nats)
    gguf         model, weights, peer, cell, figure, cellar, other, ratio (above 1: ours is better) or limit or neither
    routers      name, requests, errors, cached_share, equal_texts, unary_p50_ms, first_chunk_p50_ms, tokens_per_second
    ray_faults   step, replicas, streams by their ends, seconds; or requests, errors, cached_share
    kills        step, streams by their ends, equal (to those of a replica alone), resumed, seconds
    overload     model, clients, retry, answers, refusals, errors, seconds, tokens_per_processor_second, ratio
    load         model, scenario, and its figures (benchmarks/serving/load.py)
    sharing      model, requests, cell, newcomers, median and worst seconds; or tokens/s with and without time slices
    encodings    model, streams, itl_target_ms, cell (with images or not), images, tokens, p50 and p99 between tokens
    gpu          device, shape, mode, cell, tokens_per_second, step_ms, host_ms, share_of_bandwidth, teraflops
    adapters     model, streams, rank, dtype, mode, step_ms, speed (relative to steps without adapters)
    gpu_kernels  target, shape, kernel, registers, spilled_bytes, shared_bytes
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.machine import environment
from bench.report import write_json

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# Fields that identify a row; a row of a later date replaces one with the same values.
KEYS = {
    "peers": ("model", "weights", "peer", "cell", "figure"),
    "speculation": ("drafter", "batch"),
    "quality": ("model", "outliers", "weights", "server"),
    "gguf": ("model", "weights", "peer", "cell", "figure"),
    "fleet": ("replicas", "policy", "load"),
}
# The same, of results that are not on the page: those of docs/scale.md and of GPUs.
OTHER_KEYS = {
    "gpu": ("device", "shape", "mode", "cell"),
    "gpu_kernels": ("target", "shape", "kernel"),
    "routers": ("name",),
    "ray_faults": ("step", "replicas"),
    "kills": ("step",),
    "overload": ("model", "clients", "retry"),
    "load": ("model", "scenario"),
    "sharing": ("model", "requests", "cell"),
    "adapters": ("model", "streams", "rank", "dtype", "mode"),
    "adapter_loads": ("model", "streams", "rank", "loads", "mode"),
    "encodings": ("model", "streams", "itl_target_ms", "cell"),
    "fleet_validation": ("replicas", "policy"),
}
# Names of models on the page, by size.
MODELS = ("SmolLM2-135M", "Gemma 3 270M", "Qwen3-0.6B", "Llama-3.2-1B")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkResult:
    """One document; equal rows of a later date replace its rows on the page."""

    benchmark: str
    command: str
    machine: dict[str, Any]
    commit: str | None
    date: str
    rows: list[dict[str, Any]]
    transcribed: bool = False
    note: str = ""

    @property
    def cpu(self) -> str:
        """The name of the processor."""
        return str(self.machine["cpu"]).replace("(R)", "")

    def write(self, path: Path) -> None:
        """Write the document to a file, without empty fields."""
        write_json(path, self.content())

    def content(self) -> dict[str, Any]:
        """The document without empty fields."""
        optional = ("transcribed", "note")
        return {name: value for name, value in asdict(self).items() if value or name not in optional}

    @property
    def run(self) -> tuple[str | None, ...]:
        """What identifies a run."""
        return self.benchmark, self.cpu, self.command, self.commit, self.date

    def keys(self) -> set[tuple[Any, ...]]:
        """What identifies the rows: benchmark, processor, and the row's fields."""
        return {self.key(row) for row in self.rows}

    def key(self, row: dict[str, Any]) -> tuple[Any, ...]:
        """What identifies a row."""
        return (self.benchmark, self.cpu, *(row[name] for name in (KEYS | OTHER_KEYS)[self.benchmark]))

    def without(self, keys: set[tuple[Any, ...]]) -> BenchmarkResult:
        """The document without some rows."""
        return replace(self, rows=[row for row in self.rows if self.key(row) not in keys])


def load(folder: Path = RESULTS) -> list[BenchmarkResult]:
    """All results of a folder, the oldest first."""
    found = [result for path in sorted(folder.glob("*.json")) for result in documents(path)]
    return sorted(found, key=lambda result: result.date)


def documents(path: Path) -> list[BenchmarkResult]:
    """The results of a file; none without the file."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return [BenchmarkResult(**document) for document in (content if isinstance(content, list) else [content])]


def add_rows(path: Path, added: BenchmarkResult) -> None:
    """Add the rows of a result to a file, instead of earlier rows of the same kind."""
    kept = [result.without(added.keys()) for result in documents(path)]
    # A run adds its rows in parts.
    same = [result for result in kept if result.run == added.run]
    others = [result for result in kept if result.rows and result not in same]
    joined = replace(added, rows=[row for result in (*same, added) for row in result.rows])
    write_json(path, [result.content() for result in (*others, joined)])


def measured(benchmark: str, rows: Iterable[dict[str, Any]], note: str = "") -> BenchmarkResult:
    """A result of this process: its command line, machine, commit and the time."""
    return BenchmarkResult(
        benchmark=benchmark,
        command=command_line(sys.argv),
        machine=environment(),
        commit=commit(),
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M"),
        rows=list(rows),
        note=note,
    )


def command_line(argv: Sequence[str]) -> str:
    """The command of `python -m` with these arguments of a process; absolute paths are shortened to file names."""
    program, *arguments = argv
    path = Path(program)
    module = ".".join(path.with_suffix("").relative_to(ROOT).parts) if path.is_relative_to(ROOT) else path.stem
    short = [Path(argument).name if argument.startswith("/") else argument for argument in arguments]
    return f"python -m {module} {shlex.join(short)}".strip()


def commit() -> str | None:
    """The commit of this checkout, with "+" where files differ from it; None outside a checkout."""
    head = git("rev-parse", "--short=12", "HEAD")
    return head and head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def git(*arguments: str) -> str | None:
    """The output of git; None if it fails or is missing."""
    try:
        run = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


def model_name(path: str) -> str:
    """The published name of a model in a folder such as qwen3-0.6b; the folder's name where it has none."""
    return {name.lower().replace(" ", "-"): name for name in MODELS}.get(Path(path).name.lower(), Path(path).name)


def weight_format(quantize: str, dtype: str, model: str) -> str:
    """The format of the weights: quantised, or of a --dtype, or of the checkpoint."""
    if quantize != "none" or dtype != "auto":
        return quantize if quantize != "none" else dtype
    config = Path(model) / "config.json"
    settings = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
    return str(settings.get("dtype") or settings.get("torch_dtype") or "auto")


def command_parser(name: str, documentation: str | None) -> ArgumentParser:
    """The parser of benchmarks.NAME; its help is the documentation of the module."""
    summary, _, details = (documentation or "").partition("\n")
    return ArgumentParser(f"benchmarks.{name}", None, summary, details, formatter_class=RawDescriptionHelpFormatter)


def add_json_option(parser: ArgumentParser) -> None:
    """Add --json FILE."""
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write rows for benchmarks.page here")
