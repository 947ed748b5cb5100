"""Measures the operations of the prefix tree for trees of a thousand to a hundred thousand nodes.

    python -m benchmarks.tree [--nodes 1000 10000 100000] [--operations 2000] [--rounds 3] [--out out]

The token sequences have the shape of conversations: a shared system prompt, a session, a last turn; three edges of 32
tokens. The cached content is a token count, so only the tree is measured. Times are processor times; each figure is the
best of the rounds.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.result import measured
from kvcache.component import CacheComponents
from kvcache.node import TokenArray
from kvcache.offload import OffloadConfig
from kvcache.prefix import PrefixTree

EDGE = 32
SYSTEM_PROMPTS, TURNS = 32, 4
OPERATIONS = ("match", "insert", "trim", "evict")


@dataclass(frozen=True, slots=True)
class TokenCount:
    """References of `CountComponent`: tokens, and whether `trim` would release anything."""

    tokens: int
    trimmable: bool


class CountComponent:
    """A component (kvcache/component.py) with a token count as its content."""

    def resume_length(self, slot: int, length: int) -> int:
        """A slot can resume anywhere."""
        return length

    def acquire(self, slot: int, start: int, stop: int) -> TokenCount:
        """The number of tokens in [start, stop)."""
        return TokenCount(stop - start, trimmable=True)

    def release(self, references: TokenCount) -> None:
        """Nothing to release."""

    def slice(self, references: TokenCount, start: int, stop: int) -> TokenCount:
        """The number of tokens in [start, stop)."""
        return TokenCount(stop - start, references.trimmable)

    def concat(self, first: TokenCount, second: TokenCount) -> TokenCount:
        """The sum of both."""
        return TokenCount(first.tokens + second.tokens, trimmable=True)

    def resume_depth(self, ranges: Sequence[tuple[int, TokenCount]], cached_length: int, length: int) -> int:
        """A slot can resume anywhere."""
        return length

    def attach(self, slot: int, references: TokenCount) -> None:
        """Slots have no content."""

    def freeable(self, references: TokenCount) -> int:
        """All tokens; half of them after `trim`."""
        return references.tokens if references.trimmable else references.tokens // 2

    def unused_by_slots(self, references: TokenCount) -> int:
        """All tokens."""
        return references.tokens

    def over_budget(self) -> int:
        """There is no budget."""
        return 0

    def can_trim(self, references: TokenCount, start: int) -> bool:
        """Whether it was not trimmed before."""
        return references.trimmable

    def trim(self, references: TokenCount, start: int) -> TokenCount:
        """The same tokens, half of them freeable."""
        return TokenCount(references.tokens, trimmable=False)


@dataclass(frozen=True, slots=True)
class OperationTimes:
    """Microseconds of each operation in a tree of `nodes` nodes."""

    nodes: int
    match: float
    insert: float
    evict: float
    trim: float


def conversation(number: int) -> TokenArray:
    """The tokens of a conversation; TURNS consecutive ones share two edges, those of one system prompt one edge."""
    parts = (number // TURNS % SYSTEM_PROMPTS, SYSTEM_PROMPTS + number // TURNS, number)
    return np.concatenate([np.arange(EDGE, dtype=np.int64) + 1000 * part for part in parts])


def grow(nodes: int) -> tuple[PrefixTree, int]:
    """A tree of at least `nodes` nodes, and the number of conversations in it."""
    components = CacheComponents([CountComponent()])  # type: ignore[list-item]
    tree, number = PrefixTree(components, OffloadConfig(), token_bytes=1), 0
    while tree.node_count < nodes:
        tree.insert(0, conversation(number), b"", checkpoint=True)
        number += 1
    return tree, number


def measure(nodes: int, operations: int, rounds: int) -> OperationTimes:
    """The best time of each operation in a tree of `nodes` nodes."""
    count = min(operations, nodes // TURNS)
    times = [measure_round(nodes, count, random.Random(seed)) for seed in range(rounds)]
    return OperationTimes(nodes, **{kind: 1e6 * min(one[kind] for one in times) / count for kind in times[0]})


def measure_round(nodes: int, operations: int, draw: random.Random) -> dict[str, float]:
    """Seconds of `operations` operations of each kind."""
    tree, count = grow(nodes)
    cached = [conversation(draw.randrange(count)) for _ in range(operations)]
    new = [conversation(count + at) for at in range(operations)]
    times = {
        "match": seconds(lambda tokens: tree.extend_slot(0, 0, tokens, b""), cached),
        "insert": seconds(lambda tokens: tree.insert(0, tokens, b"", checkpoint=True), new),
        "trim": seconds(lambda lacking: tree.evict([lacking]), [EDGE // 2] * operations),
    }
    # Trim all remaining nodes: from here on leaves are evicted.
    tree.evict([EDGE * tree.node_count // 2 - EDGE // 2 * operations])
    return {**times, "evict": seconds(lambda lacking: tree.evict([lacking]), [EDGE // 2] * operations)}


def seconds(act: Callable[[Any], object], over: Iterable[Any]) -> float:
    """Processor time of a call for each item, without garbage collection, which visits the whole tree."""
    gc.collect()
    gc.disable()
    began = time.process_time()
    for each in over:
        act(each)
    duration = time.process_time() - began
    gc.enable()
    return duration


def table(rows: Iterable[OperationTimes]) -> Table:
    """The printed table."""
    result = Table(caption="microseconds an operation, best of the rounds; operations a second in brackets")
    for name in ("nodes", *OPERATIONS):
        result.add_column(name, justify="right")
    for row in rows:
        times = [getattr(row, name) for name in OPERATIONS]
        result.add_row(f"{row.nodes:,}", *(f"{time:.1f} ({1e6 / time:,.0f})" for time in times))
    return result


def plot(path: Path, rows: Sequence[OperationTimes]) -> None:
    """Draw operations a second over the nodes."""
    from matplotlib.figure import Figure  # half a second of import, and only needed here

    figure = Figure(figsize=(6, 4), layout="constrained")
    panel = figure.subplots()
    for kind in OPERATIONS:
        panel.plot([row.nodes for row in rows], [1e6 / getattr(row, kind) for row in rows], "o-", label=kind)
    panel.set_xscale("log")
    panel.set_ylim(bottom=0)
    panel.set_xlabel("nodes")
    panel.set_ylabel("operations a second")
    panel.grid(alpha=0.3)
    panel.legend()
    figure.suptitle("the prefix tree alone", fontsize="medium")
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write tree.json and tree.png."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1_000, 10_000, 100_000], help="sizes of trees")
    parser.add_argument("--operations", type=int, default=2000, help="of each kind (default 2000)")
    parser.add_argument("--rounds", type=int, default=3, help="the best one counts (default 3)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of tree.json and tree.png (default out)")
    options = parser.parse_args(arguments)
    rows = [measure(nodes, options.operations, options.rounds) for nodes in options.nodes]
    Console().print(table(rows))
    options.out.mkdir(parents=True, exist_ok=True)
    measured("tree", map(asdict, rows)).write(options.out / "tree.json")
    plot(options.out / "tree.png", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
