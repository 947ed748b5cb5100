"""Measures the prefix tree alone: what an operation costs among a thousand nodes, and among a hundred thousand.

    python -m benchmarks.tree [--nodes 1000 10000 100000] [--operations 2000] [--rounds 3] [--out out]

Texts are those of conversations: a system prompt that many share, what a session said, a last turn; three edges of 32
tokens. Content is a count, so that nothing but the tree is measured. Times are of the processor, which other work on
the machine does not change much; each figure is the best of the rounds.
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

from bench.report import write_json
from kvcache.component import CacheComponents
from kvcache.node import TokenArray
from kvcache.offload import OffloadConfig
from kvcache.prefix import PrefixTree

EDGE = 32
SYSTEM_PROMPTS, TURNS = 32, 4


@dataclass(frozen=True, slots=True)
class Count:
    """What a component that only counts holds: so many tokens, and whether `thin` would release anything."""

    tokens: int
    trimmable: bool


class Counter:
    """A component (kvcache/component.py) whose content is a number; slots have everything."""

    def standing(self, slot: int, length: int) -> int:
        """Everything is there."""
        return length

    def hold(self, slot: int, start: int, stop: int) -> Count:
        """Count."""
        return Count(stop - start, trimmable=True)

    def release(self, held: Count) -> None:
        """Nothing to release."""

    def part(self, held: Count, start: int, stop: int) -> Count:
        """Count less."""
        return Count(stop - start, held.trimmable)

    def joined(self, first: Count, second: Count) -> Count:
        """Count together."""
        return Count(first.tokens + second.tokens, trimmable=True)

    def deepest(self, stretches: Sequence[tuple[int, Count]], standing: int, length: int) -> int:
        """As far as is wanted."""
        return length

    def restore(self, slot: int, held: Count) -> None:
        """Slots have everything."""

    def freeable(self, held: Count) -> int:
        """All of it; half, where it is thin."""
        return held.tokens if held.trimmable else held.tokens // 2

    def idle(self, held: Count) -> int:
        """No slot uses anything."""
        return held.tokens

    def surplus(self) -> int:
        """There is no limit."""
        return 0

    def can_trim(self, held: Count, start: int) -> bool:
        """Once."""
        return held.trimmable

    def thin(self, held: Count, start: int) -> Count:
        """Half of it."""
        return Count(held.tokens, trimmable=False)


@dataclass(frozen=True, slots=True)
class Figures:
    """Microseconds an operation, in a tree of so many nodes."""

    nodes: int
    recall: float
    remember: float
    evict: float
    thin: float


def text(number: int) -> TokenArray:
    """The conversation of that number; TURNS of them begin alike for two edges, and many more for one."""
    parts = (number // TURNS % SYSTEM_PROMPTS, SYSTEM_PROMPTS + number // TURNS, number)
    return np.concatenate([np.arange(EDGE, dtype=np.int64) + 1000 * part for part in parts])


def plant(nodes: int) -> tuple[PrefixTree, int]:
    """A tree of at least so many nodes, and how many texts it was given."""
    tree, number = PrefixTree(CacheComponents([Counter()]), OffloadConfig(), token_bytes=1), 0  # type: ignore[list-item]
    while tree.node_count < nodes:
        tree.insert(0, text(number), b"", checkpoint=True)
        number += 1
    return tree, number


def measure(nodes: int, operations: int, rounds: int) -> Figures:
    """Time every kind of operation on trees of that many nodes."""
    counted = min(operations, nodes // TURNS)
    times = [measure_once(nodes, counted, random.Random(turn)) for turn in range(rounds)]
    return Figures(nodes, **{kind: 1e6 * min(turn[kind] for turn in times) / counted for kind in times[0]})


def measure_once(nodes: int, operations: int, draw: random.Random) -> dict[str, float]:
    """The seconds that so many operations of each kind take."""
    tree, count = plant(nodes)
    known = [text(draw.randrange(count)) for _ in range(operations)]
    fresh = [text(count + at) for at in range(operations)]
    times = {
        "recall": seconds(lambda tokens: tree.extend_slot(0, 0, tokens, b""), known),
        "remember": seconds(lambda tokens: tree.insert(0, tokens, b"", checkpoint=True), fresh),
        "thin": seconds(lambda lacking: tree.evict([lacking]), [EDGE // 2] * operations),
    }
    # Once all is thin, whole ends go.
    tree.evict([EDGE * tree.node_count // 2 - EDGE // 2 * operations])
    return {**times, "evict": seconds(lambda lacking: tree.evict([lacking]), [EDGE // 2] * operations)}


def seconds(act: Callable[[Any], object], over: Iterable[Any]) -> float:
    """The time that doing something for each takes, without the collector of garbage, which looks at the whole tree."""
    gc.collect()
    gc.disable()
    began = time.process_time()
    for each in over:
        act(each)
    taken = time.process_time() - began
    gc.enable()
    return taken


def table(figures: Iterable[Figures]) -> Table:
    """The printed table."""
    result = Table(caption="microseconds an operation, best of the rounds; operations a second in brackets")
    for name in ("nodes", "recall", "remember", "thin", "evict"):
        result.add_column(name, justify="right")
    for row in figures:
        times = (row.recall, row.remember, row.thin, row.evict)
        result.add_row(f"{row.nodes:,}", *(f"{taken:.1f} ({1e6 / taken:,.0f})" for taken in times))
    return result


def plot(path: Path, figures: Sequence[Figures]) -> None:
    """Draw operations a second over the nodes."""
    from matplotlib.figure import Figure  # half a second of import, and only needed here

    figure = Figure(figsize=(6, 4), layout="constrained")
    panel = figure.subplots()
    for kind in ("recall", "remember", "thin", "evict"):
        panel.plot([row.nodes for row in figures], [1e6 / getattr(row, kind) for row in figures], "o-", label=kind)
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
    parser.add_argument("--nodes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--operations", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args(arguments)
    figures = [measure(nodes, options.operations, options.rounds) for nodes in options.nodes]
    Console().print(table(figures))
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / "tree.json", {"format": 1, "figures": [asdict(row) for row in figures]})
    plot(options.out / "tree.png", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
