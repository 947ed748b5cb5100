"""What trees of drafts would bring over chains: counted offline, from where a draft ranks what is said.

    python -m benchmarks.branches [--texts 256]

A tree of drafts holds further guesses for one place: the second-best token beside the best. What it brings follows from
ranks: for each place of a text, how many tokens the draft, with the model's own noise and given the text before it,
likes better than the one that is said there. A tree is a set of paths of ranks. A step says the longest of them that
comes true, and one token more. Trees are chosen on every other text and judged on the rest. Who drafts:

    bundled, T 0.7   the bundled draft, for the longest answers among the held-out dialogues, at this temperature
    bundled - 0.35   the same with weights disturbed by so many of their own standard deviations
    5 / 2, T 1       a drift of 2 from random logits of 50 tokens with deviation 5, all places alike (algorithms.md 3.1)

Costs are in steps of one row: what rows cost, what each branch costs beside its rows, and what a level of drafting of
one row costs; a level that computes more rows costs more by the same table.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.speculation import Bench, longest
from engine.sample.noise import gumbel
from engine.types.events import Delta
from engine.types.request import Request, SamplingParams

# The ranks of texts, place by place, and END behind each text.
Ranks = NDArray[np.int64]
Path = tuple[int, ...]
END = -1
# Children of a node, levels and rows of a tree at most.
CHILDREN, DEEPEST, MOST = 6, 12, 16
ROWS = (2, 4, 6, 8, 12, 16)
LEVELS = (0.0, 0.1, 0.2)
TOKENS = 128
DISTURBED = (0.0, 0.25, 0.35)
RANDOM = ((5.0, 1.0), (5.0, 2.0))


@dataclass(frozen=True, slots=True)
class Costs:
    """What a step and its drafts cost, in steps of one row; between the known numbers of rows lie straight lines."""

    rows: Mapping[int, float]
    branch: float = 0.0
    level: float = 0.0

    def seconds(self, tree: Sequence[Path]) -> float:
        """A step that verifies the tree, and the drafting: each level computes what has children, all at once."""
        inner = {path[:-1] for path in tree}
        widths = [sum(len(path) == depth for path in inner) for depth in {len(path) for path in inner}]
        branches = len(tree) - len(inner)
        return self._step(len(tree) + 1) + self.branch * branches + self.level * sum(map(self._step, widths))

    def _step(self, rows: int) -> float:
        return float(np.interp(rows, list(self.rows), list(self.rows.values())))


# Measured: steps of Qwen3-0.6B's shape, 4 layers, behind 512 tokens (docs/performance.md).
MEASURED = {
    "int8": ({1: 1.0, 2: 1.05, 4: 1.14, 6: 1.33, 8: 1.57, 12: 2.27, 16: 2.91}, 0.015),
    "float32": ({1: 1.0, 2: 1.06, 4: 1.30, 6: 1.31, 8: 1.56, 12: 1.86, 16: 2.31}, 0.01),
    "8 rows for 1.3 (goal)": ({1: 1.0, 4: 1.15, 8: 1.3, 16: 1.6}, 0.0),
    "rows for nothing": ({1: 1.0, 16: 1.0}, 0.0),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """A tree, the tokens a step that it came to, and how many times as fast that is as no drafts."""

    tree: Sequence[Path]
    tokens: float
    speed: float

    @property
    def shape(self) -> str:
        """Nodes by level."""
        return "+".join(map(str, np.bincount([len(path) for path in self.tree])[1:]))


class Pair:
    """A model and who drafts for it: the ranks of its texts, half of them to choose trees by, half to judge them."""

    def __init__(self, name: str, texts: Sequence[Ranks]) -> None:
        self.name = name
        self._taught, self._judged = (
            np.concatenate([[*text, END] for text in half]) for half in (texts[::2], texts[1::2])
        )
        self._trees: dict[tuple[int, int, int], tuple[list[Path], float]] = {}

    def rates(self, count: int) -> list[float]:
        """How often the first guess is right, and each further one where all before it are wrong."""
        ranks = np.concatenate((self._taught, self._judged))
        ranks = ranks[ranks != END]
        return [float((ranks == rank).sum() / (ranks >= rank).sum()) for rank in range(count)]

    def best(self, costs: Costs, children: int, rows: Sequence[int]) -> Choice:
        """Of the likeliest trees of so many rows, the last token's among them, and of any depth."""
        asked = [(count - 1, depth) for count in rows for depth in range(1, min(count - 1, DEEPEST) + 1)]
        tried = [self._tree(size, depth, children) for size, depth in asked]
        tree, _ = max(tried, key=lambda one: one[1] / costs.seconds(one[0]))
        tokens = tokens_a_step(self._judged, tree)
        return Choice(tree, tokens, tokens / costs.seconds(tree))

    def _tree(self, size: int, depth: int, children: int) -> tuple[list[Path], float]:
        key = size, depth, children
        if key not in self._trees:
            tree = grown(self._taught, *key)
            self._trees[key] = tree, tokens_a_step(self._taught, tree)
        return self._trees[key]


def grown(ranks: Ranks, size: int, depth: int, children: int) -> list[Path]:
    """The likeliest tree of so many nodes, no deeper and no wider than this: no path is likelier than its beginning."""
    queue: list[tuple[int, Path, Ranks]] = [(0, (), np.flatnonzero(ranks != END))]
    tree: list[Path] = []
    while queue and len(tree) <= size:
        _, path, places = heapq.heappop(queue)
        tree.append(path)
        for child in range(children if len(path) < depth else 0):
            behind = places[ranks[places] == child] + 1
            heapq.heappush(queue, (-len(behind), (*path, child), behind))
    return tree[1:]


def tokens_a_step(ranks: Ranks, tree: Sequence[Path]) -> float:
    """Walk through the texts, step by step; a step ends with its text."""
    known, line, at, steps = set(tree), ranks.tolist(), 0, 0
    while at < len(line):
        path: Path = ()
        while (*path, line[at + len(path)]) in known:
            path = (*path, line[at + len(path)])
        steps += line[at] != END
        at += len(path) + 1
    return len([rank for rank in line if rank != END]) / steps


def bundled(texts: int, temperature: float) -> Iterator[Pair]:
    """The bundled pair, and the same with a disturbed draft."""
    bench = Bench(16, TOKENS)
    core, said = bench.core(), [list[int]() for _ in range(texts)]
    prompts = [bench.target.tokenizer.render_chat(asked).tokens for asked in longest(texts)]
    for seed, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=temperature, seed=seed)
        core.submit(Request(f"{seed}", prompt, sampling=sampling, max_tokens=TOKENS))
    while core.busy:
        for name, event in core.step():
            if isinstance(event, Delta):
                said[int(name)] += event.tokens
    for share in DISTURBED:
        draft = disturbed(share)
        ranks = []
        for seed, (prompt, tokens) in enumerate(zip(prompts, said, strict=True)):
            scores = draft(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].double()
            if temperature:
                scores = scores / temperature + noise(seed, len(prompt), scores)
            ranks.append(ranked(scores, torch.tensor(tokens)))
        yield Pair(f"bundled{f' - {share}' if share else ''}, T {temperature:g}", ranks)


def disturbed(share: float) -> Any:
    """The bundled draft, with normal noise on its matrices of so many of their standard deviations."""
    draft = AutoModelForCausalLM.from_pretrained("models/draft", dtype=torch.float32)
    chance = torch.Generator().manual_seed(1)
    for weight in (weight for weight in draft.parameters() if weight.ndim > 1):
        weight += share * weight.std() * torch.randn(weight.shape, generator=chance)
    return draft


def noise(seed: int, position: int, like: Tensor) -> Tensor:
    """What the engine adds to scores [places, vocabulary] from a position on."""
    places, tokens = (torch.arange(size) for size in like.shape)
    return gumbel(torch.full(like.shape, seed), (position + places)[:, None].expand_as(like), tokens.expand_as(like))


def random_pair(sharpness: float, drift: float, temperature: float) -> Pair:
    """Random logits and a draft that drifts from them: what is said at one place tells nothing of the next."""
    chance = torch.Generator().manual_seed(7)
    target = torch.randn(40_000, 50, generator=chance) * sharpness
    guess = target + torch.randn(target.shape, generator=chance) * drift
    if temperature:
        shared = noise(0, 0, target)
        target, guess = target / temperature + shared, guess / temperature + shared
    ranks = ranked(guess, target.argmax(-1))
    return Pair(f"{sharpness:g} / {drift:g}, T {temperature:g}", np.split(ranks, 2))


def ranked(scores: Tensor, said: Tensor) -> Ranks:
    """How many tokens of each row [rows, vocabulary] have a higher score than the one that is said."""
    return np.asarray((scores > scores.gather(1, said[:, None])).sum(1))


def by_rows(pairs: Sequence[Pair]) -> Iterator[list[str]]:
    """Tokens a step of the best chain and the best tree, for each pair."""
    yield ["who drafts", "right: 1st, 2nd, 3rd", *map(str, ROWS)]
    for pair in pairs:
        both = ([pair.best(Costs({1: 1.0}), most, [rows]).tokens for most in (1, CHILDREN)] for rows in ROWS)
        cells = (f"{chain:.2f} / {tree:.2f}" for chain, tree in both)
        yield [pair.name, " ".join(f"{rate:.2f}" for rate in pair.rates(3)), *cells]


def by_cost(pairs: Sequence[Pair]) -> Iterator[list[str]]:
    """How many times as fast as no drafts both are, and the tree's nodes by level, for each cost."""
    yield ["rows", "level", *(pair.name for pair in pairs)]
    for (name, (rows, branch)), level in product(MEASURED.items(), LEVELS):
        cost = Costs(rows, branch, level)
        both = ([pair.best(cost, most, range(2, MOST + 1)) for most in (1, CHILDREN)] for pair in pairs)
        yield [name, f"{level:g}", *(f"{chain.speed:.2f} / {tree.speed:.2f} {tree.shape}" for chain, tree in both)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--texts", type=int, default=256)
    options = parser.parse_args(arguments)
    torch.set_grad_enabled(False)
    pairs = [pair for warmth in (0.0, 0.7) for pair in bundled(options.texts, warmth)]
    pairs += [random_pair(sharpness, drift, 1.0) for sharpness, drift in RANDOM]
    for cells in (*by_rows(pairs), *by_cost(pairs)):
        print("| " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
