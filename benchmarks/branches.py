"""Estimates the gain of draft trees over draft chains, offline, from the ranks of the emitted tokens in a draft model.

    python -m benchmarks.branches [--texts 256]

A draft tree has alternatives for a position: the second-best token beside the best. Its gain follows from ranks: the
number of tokens with a higher score than the emitted one, for each position, given the text before it and the noise of
the target's sampling. A tree is a set of paths of ranks; a step emits the longest matching path and one token more.
Trees are chosen on every other text and evaluated on the others. Drafters:

    bundled, T 0.7   the bundled draft model on the held-out dialogues with the longest answers, at this temperature
    bundled - 0.35   the same with noise on the weights, in standard deviations of each matrix
    5 / 2, T 1       random logits over 50 tokens with deviation 5, draft logits with added noise of deviation 2

Costs are in steps of one token: a step by its number of batch tokens, a branch beside its tokens, and a level of
drafting; a level with more tokens costs more by the same table.
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

from benchmarks.speculation import SpeculationBench, longest
from engine.sample.noise import gumbel
from engine.types.events import Delta
from engine.types.request import Request, SamplingParams

# Ranks by position, with END after each text.
Ranks = NDArray[np.int64]
Path = tuple[int, ...]
END = -1
# Upper limits of a tree: children of a node, levels, batch tokens.
CHILDREN, DEEPEST, MOST = 6, 12, 16
ROWS = (2, 4, 6, 8, 12, 16)
LEVELS = (0.0, 0.1, 0.2)
TOKENS = 128
DISTURBED = (0.0, 0.25, 0.35)
RANDOM = ((5.0, 1.0), (5.0, 2.0))


@dataclass(frozen=True, slots=True)
class Costs:
    """Cost of a step and its drafts, in steps of one token; linear between the measured numbers of tokens."""

    rows: Mapping[int, float]
    branch: float = 0.0
    level: float = 0.0

    def seconds(self, tree: Sequence[Path]) -> float:
        """Cost of drafting and verifying a tree; each level computes all its inner nodes at once."""
        inner = {path[:-1] for path in tree}
        widths = [sum(len(path) == depth for path in inner) for depth in {len(path) for path in inner}]
        branches = len(tree) - len(inner)
        return self._step(len(tree) + 1) + self.branch * branches + self.level * sum(map(self._step, widths))

    def _step(self, rows: int) -> float:
        return float(np.interp(rows, list(self.rows), list(self.rows.values())))


# Measured: steps of Qwen3-0.6B's shape, 4 layers, after 512 cached tokens. With these costs text gains 4 % at most,
# since a chain uses cheap tokens as well; where batch tokens are free it gains 3 to 25 %.
MEASURED = {
    "int8": ({1: 1.0, 2: 1.05, 4: 1.14, 6: 1.33, 8: 1.57, 12: 2.27, 16: 2.91}, 0.015),
    "float32": ({1: 1.0, 2: 1.06, 4: 1.30, 6: 1.31, 8: 1.56, 12: 1.86, 16: 2.31}, 0.01),
    "8 tokens for 1.3 (goal)": ({1: 1.0, 4: 1.15, 8: 1.3, 16: 1.6}, 0.0),
    "free tokens": ({1: 1.0, 16: 1.0}, 0.0),
}


@dataclass(frozen=True, slots=True)
class TreeChoice:
    """A tree, its emitted tokens per step, and its speed relative to no drafts."""

    tree: Sequence[Path]
    tokens: float
    speed: float

    @property
    def shape(self) -> str:
        """Nodes by level."""
        return "+".join(map(str, np.bincount([len(path) for path in self.tree])[1:]))


class RankedTexts:
    """A drafter and the ranks of its texts: one half to choose trees, the other to evaluate them."""

    def __init__(self, name: str, texts: Sequence[Ranks]) -> None:
        self.name = name
        self._training, self._evaluation = (
            np.concatenate([[*text, END] for text in half]) for half in (texts[::2], texts[1::2])
        )
        self._trees: dict[tuple[int, int, int], tuple[list[Path], float]] = {}

    def rates(self, count: int) -> list[float]:
        """Acceptance rate of the most likely token, and of each next one where the tokens before it are rejected."""
        ranks = np.concatenate((self._training, self._evaluation))
        ranks = ranks[ranks != END]
        return [float((ranks == rank).sum() / (ranks >= rank).sum()) for rank in range(count)]

    def best(self, costs: Costs, children: int, rows: Sequence[int]) -> TreeChoice:
        """The best of the most likely trees of any depth; `rows`: batch tokens, including the last emitted one."""
        sizes = [(count - 1, depth) for count in rows for depth in range(1, min(count - 1, DEEPEST) + 1)]
        trees = [self._tree(size, depth, children) for size, depth in sizes]
        tree, _ = max(trees, key=lambda one: one[1] / costs.seconds(one[0]))
        tokens = tokens_a_step(self._evaluation, tree)
        return TreeChoice(tree, tokens, tokens / costs.seconds(tree))

    def _tree(self, size: int, depth: int, children: int) -> tuple[list[Path], float]:
        key = size, depth, children
        if key not in self._trees:
            tree = grown(self._training, *key)
            self._trees[key] = tree, tokens_a_step(self._training, tree)
        return self._trees[key]


def grown(ranks: Ranks, size: int, depth: int, children: int) -> list[Path]:
    """The most likely tree with `size` nodes, at most `depth` levels and `children` children of a node."""
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
    """Emitted tokens per step; no step crosses the end of a text."""
    paths, line, at, steps = set(tree), ranks.tolist(), 0, 0
    while at < len(line):
        path: Path = ()
        while (*path, line[at + len(path)]) in paths:
            path = (*path, line[at + len(path)])
        steps += line[at] != END
        at += len(path) + 1
    return len([rank for rank in line if rank != END]) / steps


def bundled(texts: int, temperature: float) -> Iterator[RankedTexts]:
    """The bundled pair, and the pair with noise on the draft model."""
    bench = SpeculationBench(16, TOKENS)
    core, outputs = bench.core(bench.scripted("off")), [list[int]() for _ in range(texts)]
    prompts = [bench.target.tokenizer.render_chat(asked).tokens for asked in longest(texts)]
    for seed, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=temperature, seed=seed)
        core.submit(Request(f"{seed}", prompt, sampling=sampling, max_tokens=TOKENS))
    while core.busy:
        for name, event in core.step():
            if isinstance(event, Delta):
                outputs[int(name)] += event.tokens
    for share in DISTURBED:
        draft = disturbed(share)
        ranks = []
        for seed, (prompt, tokens) in enumerate(zip(prompts, outputs, strict=True)):
            scores = draft(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].double()
            if temperature:
                scores = scores / temperature + noise(seed, len(prompt), scores)
            ranks.append(ranked(scores, torch.tensor(tokens)))
        yield RankedTexts(f"bundled{f' - {share}' if share else ''}, T {temperature:g}", ranks)


def disturbed(share: float) -> Any:
    """The bundled draft model with normal noise on its matrices, `share` standard deviations of each."""
    draft = AutoModelForCausalLM.from_pretrained("models/draft", dtype=torch.float32)
    chance = torch.Generator().manual_seed(1)
    for weight in (weight for weight in draft.parameters() if weight.ndim > 1):
        weight += share * weight.std() * torch.randn(weight.shape, generator=chance)
    return draft


def noise(seed: int, position: int, like: Tensor) -> Tensor:
    """The sampling noise of the engine for scores [positions, vocabulary] from a position on."""
    places, tokens = (torch.arange(size) for size in like.shape)
    return gumbel(torch.full(like.shape, seed), (position + places)[:, None].expand_as(like), tokens.expand_as(like))


def random_pair(sharpness: float, drift: float, temperature: float) -> RankedTexts:
    """Random logits and a draft with added noise; positions are independent."""
    chance = torch.Generator().manual_seed(7)
    target = torch.randn(40_000, 50, generator=chance) * sharpness
    draft_scores = target + torch.randn(target.shape, generator=chance) * drift
    if temperature:
        shared = noise(0, 0, target)
        target, draft_scores = target / temperature + shared, draft_scores / temperature + shared
    ranks = ranked(draft_scores, target.argmax(-1))
    return RankedTexts(f"{sharpness:g} / {drift:g}, T {temperature:g}", np.split(ranks, 2))


def ranked(scores: Tensor, emitted: Tensor) -> Ranks:
    """The number of tokens in each row of scores [positions, vocabulary] that are higher than the emitted one."""
    return np.asarray((scores > scores.gather(1, emitted[:, None])).sum(1))


def by_rows(pairs: Sequence[RankedTexts]) -> Iterator[list[str]]:
    """Emitted tokens per step of the best chain and the best tree, for each pair."""
    yield ["drafter", "accepted: 1st, 2nd, 3rd", *map(str, ROWS)]
    for pair in pairs:
        both = ([pair.best(Costs({1: 1.0}), most, [rows]).tokens for most in (1, CHILDREN)] for rows in ROWS)
        cells = (f"{chain:.2f} / {tree:.2f}" for chain, tree in both)
        yield [pair.name, " ".join(f"{rate:.2f}" for rate in pair.rates(3)), *cells]


def by_cost(pairs: Sequence[RankedTexts]) -> Iterator[list[str]]:
    """Speed of both relative to no drafts, and the nodes of the tree by level, for each cost."""
    yield ["step cost", "level", *(pair.name for pair in pairs)]
    for (name, (rows, branch)), level in product(MEASURED.items(), LEVELS):
        cost = Costs(rows, branch, level)
        both = ([pair.best(cost, most, range(2, MOST + 1)) for most in (1, CHILDREN)] for pair in pairs)
        yield [name, f"{level:g}", *(f"{chain.speed:.2f} / {tree.speed:.2f} {tree.shape}" for chain, tree in both)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--texts", type=int, default=256, help="held-out dialogues (default 256)")
    options = parser.parse_args(arguments)
    torch.set_grad_enabled(False)
    pairs = [pair for temperature in (0.0, 0.7) for pair in bundled(options.texts, temperature)]
    pairs += [random_pair(sharpness, drift, 1.0) for sharpness, drift in RANDOM]
    for cells in (*by_rows(pairs), *by_cost(pairs)):
        print("| " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
