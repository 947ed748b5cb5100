"""Measures speculation: what drafts gain over a plain engine, and whether the depths chosen are the best ones.

    python -m benchmarks.speculation [--batches 1 4 8 16] [--agreement 0 0.3 0.6 0.8 0.95] [--rounds 4] [--out out]

In one process, without HTTP. The bundled model says the same requests in several modes: without drafts, with drafts of
a fixed depth, and with depths that the engine chooses (`auto`; `lookup` is that without a model). In each round modes
take turns, in an order left to chance, and a round is new to every cache, prompts included. Some rounds before those
that count teach `auto` what steps cost and how often drafts are right, as a server knows it after its first requests.
Who drafts:

    bundled   the bundled draft model and the lookup, for the longest answers among the held-out dialogues
    0.6       a script that knows what will be said and is right so often, token by token; its level costs --draft-cost

Seconds are of the processor, of the one thread that computes, for the engine's own choices too. Other work on the
machine still changes them, by sharing its caches and its memory. Ratios are medians over the rounds. `auto` is compared
in each round with the mode that was the best in the others: the best of several measured in one round would be the
luckiest too.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine.config import EngineConfig
from engine.core import Core
from engine.draft.depth import AdaptiveDepth, FixedDepth
from engine.draft.drafter import Want
from engine.draft.loading import load_draft, make_speculation
from engine.load import load
from engine.speculation import Speculation
from engine.types import Delta, DrafterChoice, Request, SamplingParams
from models.recipe.evaluate import held_out
from server.bench.prompts import sentence
from server.bench.report import write_json

CONTEXT = 1024
# Who drafts: this, or how often a script is right.
BUNDLED = "bundled"
Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One mode in one round: tokens said, and the seconds of the processor."""

    tokens: int
    seconds: float


@dataclass(slots=True)
class Cell:
    """One pair and batch: all turns by mode, and of the drafts of each mode the shares that were right, by position."""

    pair: str
    batch: int
    turns: dict[str, list[Turn]] = field(default_factory=dict)
    accepted: dict[str, list[float]] = field(default_factory=dict)

    def rate(self, mode: str) -> float:
        """Tokens a second."""
        return statistics.median(turn.tokens / turn.seconds for turn in self.turns[mode])

    def ratio(self, mode: str, other: str = "off") -> float:
        """How many times as fast a mode is as another."""
        return statistics.median(self._ratios(mode, other))

    @property
    def best(self) -> str:
        """The fastest of the modes that choose nothing."""
        return max(self._fixed, key=self.ratio)

    @property
    def to_best(self) -> float:
        """How many times as fast `auto` is as the best of those: in each round the one that was so in the others."""
        found = []
        for number in range(len(self.turns["auto"])):
            others = {mode: _without(self._ratios(mode, "off"), number) for mode in self._fixed}
            best = max(others, key=lambda mode: statistics.median(others[mode]))
            found.append(self._ratios("auto", best)[number])
        return statistics.median(found)

    @property
    def _fixed(self) -> list[str]:
        return [mode for mode in self.turns if mode == "off" or mode.isdigit()]

    def _ratios(self, mode: str, other: str) -> list[float]:
        """By round."""
        pairs = zip(self.turns[mode], self.turns[other], strict=True)
        return [a.tokens / a.seconds * b.seconds / b.tokens for a, b in pairs]


def _without(values: Sequence[float], number: int) -> list[float]:
    """All values but one; that one where it is alone."""
    return [value for at, value in enumerate(values) if at != number] or list(values)


class Scripted:
    """Says what was written down, and takes so many seconds a level; implements Drafter.

    guesses  the text of each sequence behind its prompt, where wrong guesses are wrong already
    """

    kind = "scripted"

    def __init__(self, guesses: Mapping[str, Sequence[int]], prompt: Mapping[str, int], level_seconds: float) -> None:
        self._guesses, self._prompt, self._level_seconds = guesses, prompt, level_seconds

    def propose(self, wants: Sequence[Want]) -> list[list[int]]:
        """The script from where each text stands."""
        until = time.thread_time() + self._level_seconds * max(want.limit for want in wants)
        drafts = [self._draft(want) for want in wants]
        while time.thread_time() < until:
            pass
        return drafts

    def forget(self, sequence_id: str, said: Sequence[int]) -> None:
        """Nothing was kept."""

    def rest(self, budget_bytes: int) -> bool:
        """Nothing outlives the process."""
        return False

    def _draft(self, want: Want) -> list[int]:
        name = want.sequence_id.rpartition(" ")[2]
        said = want.draw.position - self._prompt[name]
        return list(self._guesses[name][said : said + want.limit])


def scripted(
    outputs: Mapping[str, Sequence[int]], prompts: Prompts, agreement: float, level_seconds: float, vocabulary: int
) -> Scripted:
    """A script that is right by chance, at the same places for every mode."""
    chance = random.Random(agreement)
    guesses = {
        name: [token if chance.random() < agreement else (token + 1) % vocabulary for token in tokens]
        for name, tokens in outputs.items()
    }
    return Scripted(guesses, {str(at): len(prompt) for at, prompt in enumerate(prompts)}, level_seconds)


class Bench:
    """The bundled pair, and engines over it.

    words, dialogues  prompts, one of each for every sequence of the largest batch
    """

    def __init__(self, batch: int, max_tokens: int) -> None:
        self._config = EngineConfig(slots=batch, context=CONTEXT, threads=1)
        self._max_tokens = max_tokens
        self.target = load(self._config, lambda phase: None)
        self.draft = load_draft(self._config, self.target, lambda phase: None)
        encode = self.target.tokenizer.encode
        self.words = [tuple(encode(sentence(40, f"{at}"))) for at in range(batch)]
        self.dialogues = [self.target.tokenizer.render_chat(asked).tokens for asked in longest(batch)]

    def core(self, speculation: Speculation | None = None) -> Core:
        """An engine of its own."""
        return Core(self.target, self._config, speculation, time.thread_time)

    def bundled(self, mode: str) -> Core:
        """An engine whose drafts are those that `cellar serve` would make."""
        fixed = int(mode) if mode.isdigit() else None
        drafter: DrafterChoice = (
            "model" if fixed else "none" if mode == "off" else "lookup" if mode == "lookup" else "auto"
        )
        config = replace(self._config, drafter=drafter, draft_tokens=fixed)
        draft = self.draft if drafter in ("model", "auto") else None
        return self.core(make_speculation(config, self.target, draft, time.thread_time))

    def scripted(self, mode: str, script: Scripted) -> Core:
        """An engine whose drafts are written down."""
        depth = FixedDepth(0 if mode == "off" else int(mode)) if mode != "auto" else AdaptiveDepth()
        return self.core(Speculation(None, script, depth, time.thread_time))

    def play(self, core: Core, prompts: Prompts, turn: int, *, ignore_end: bool) -> tuple[Turn, dict[str, list[int]]]:
        """All prompts at once; how long that took, and what was said. No two turns share what is remembered."""
        outputs: dict[str, list[int]] = {str(at): [] for at in range(len(prompts))}
        for at, prompt in enumerate(prompts):
            core.submit(self._request(f"{turn} {at}", prompt, f"{turn}".encode(), ignore_end))
        began = time.thread_time()
        while core.busy:
            for name, event in core.step():
                if isinstance(event, Delta):
                    outputs[name.rpartition(" ")[2]] += event.tokens
        return Turn(sum(map(len, outputs.values())), time.thread_time() - began), outputs

    def _request(self, name: str, prompt: tuple[int, ...], salt: bytes, ignore_end: bool) -> Request:
        sampling = SamplingParams(temperature=0.0)
        return Request(name, prompt, sampling=sampling, max_tokens=self._max_tokens, ignore_eos=ignore_end, salt=salt)


def longest(count: int) -> list[list[dict[str, object]]]:
    """The held-out questions, without tools, that have the longest answers."""
    plain = [one for one in held_out() if not one.tools]
    return [one.prompt() for one in sorted(plain, key=lambda one: len(one.answer), reverse=True)[:count]]


def measure(bench: Bench, pair: str, batch: int, options: argparse.Namespace) -> Cell:
    """All modes of a pair on a batch, round by round; the first rounds teach, and are not counted."""
    prompts = (bench.dialogues if pair == BUNDLED else bench.words)[:batch]
    names = modes(pair, options.depths)
    cores = dict(zip(names, engines(bench, pair, prompts, names, options.draft_cost), strict=True))
    cell = Cell(pair, batch, {mode: [] for mode in names})
    chance = random.Random(0)
    for turn in range(-options.warm, options.rounds):
        # What a mode leaves in the processor's caches makes the next one slower or faster: so it is never the same one.
        for mode in chance.sample(names, len(names)):
            taken, _ = bench.play(cores[mode], prompts, turn, ignore_end=pair != BUNDLED)
            if turn >= 0:
                cell.turns[mode].append(taken)
    cell.accepted = {mode: shares(core) for mode, core in cores.items()}
    return cell


def modes(pair: str, depths: Sequence[int]) -> list[str]:
    """What is compared."""
    return ["off", *map(str, depths), "auto", *(["lookup"] if pair == BUNDLED else [])]


def engines(bench: Bench, pair: str, prompts: Prompts, names: Sequence[str], cost: float) -> Iterator[Core]:
    """An engine for each mode."""
    if pair == BUNDLED:
        yield from map(bench.bundled, names)
        return
    plain = bench.core()
    bench.play(plain, prompts, 0, ignore_end=True)
    taken, outputs = bench.play(plain, prompts, 1, ignore_end=True)
    step_seconds = taken.seconds * len(prompts) / taken.tokens
    script = scripted(outputs, prompts, float(pair), cost * step_seconds, bench.target.info.vocabulary)
    for mode in names:
        yield bench.scripted(mode, script)


def shares(core: Core) -> list[float]:
    """How much of what was drafted was said, by position; of all drafters together."""
    counts = core.stats().drafts
    drafted = [sum(column) for column in zip_longest(*(one.drafted for one in counts), fillvalue=0)]
    accepted = [sum(column) for column in zip_longest(*(one.accepted for one in counts), fillvalue=0)]
    return [right / judged for right, judged in zip(accepted, drafted, strict=True) if judged]


def table(cells: Sequence[Cell]) -> Table:
    """The printed table."""
    result = Table(
        caption="times as fast as without drafts; said: per cent of the drafts at each position, deepest mode"
    )
    names = list(dict.fromkeys(mode for cell in cells for mode in cell.turns if mode != "off"))
    for name in ("who drafts", "batch", "off, tokens/s", *names, "auto to best", "said"):
        result.add_column(name, justify="right")
    for cell in cells:
        ratios = [f"{cell.ratio(mode):.2f}" if mode in cell.turns else "" for mode in names]
        deepest = max((mode for mode in cell.turns if mode.isdigit()), key=int)
        said = " ".join(f"{100 * share:.0f}" for share in cell.accepted[deepest])
        to_best = f"{cell.to_best:.3f} of {cell.best}"
        result.add_row(cell.pair, f"{cell.batch}", f"{cell.rate('off'):.0f}", *ratios, to_best, said)
    return result


def plot(path: Path, cells: Sequence[Cell]) -> None:
    """Draw the gain of every depth and of the chosen ones, a panel a batch."""
    from matplotlib.figure import Figure  # half a second of import, and only needed here

    batches = list(dict.fromkeys(cell.batch for cell in cells))
    figure = Figure(figsize=(4 * len(batches), 4), layout="constrained")
    for panel, batch in zip(figure.subplots(1, len(batches), sharey=True, squeeze=False)[0], batches, strict=True):
        for number, cell in enumerate(one for one in cells if one.batch == batch):
            depths = [mode for mode in cell.turns if mode == "off" or mode.isdigit()]
            colour = f"C{number}"
            panel.plot(
                [int(mode.replace("off", "0")) for mode in depths], list(map(cell.ratio, depths)), "o-", color=colour
            )
            panel.axhline(cell.ratio("auto"), color=colour, linestyle="--", label=f"{cell.pair}, auto")
        panel.set_title(f"batch of {batch}")
        panel.set_xlabel("tokens drafted")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="x-small")
    figure.supylabel("times as fast as without drafts")
    figure.savefig(path, dpi=110)


def document(cells: Sequence[Cell]) -> list[dict[str, object]]:
    """All that was measured, and what it comes to."""
    return [
        {
            **asdict(cell),
            "best": cell.best,
            "auto_to_best": cell.to_best,
            "ratios": {mode: cell.ratio(mode) for mode in cell.turns},
        }
        for cell in cells
    ]


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--agreement", type=float, nargs="*", default=[0.0, 0.3, 0.6, 0.8, 0.95])
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3, 4, 6])
    parser.add_argument("--draft-cost", type=float, default=0.1, help="of a scripted level, in plain steps")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--warm", type=int, default=8, help="rounds before those, from which depths are learnt")
    parser.add_argument("--quick", action="store_true", help="a few tokens only, to see that it works")
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write speculation.json and speculation.png."""
    options = make_parser().parse_args(arguments)
    if options.quick:
        quick = {"batches": [1, 2], "agreement": [0.6], "depths": [2], "max_tokens": 8, "rounds": 1, "warm": 1}
        vars(options).update(quick)
    bench = Bench(max(options.batches), options.max_tokens)
    pairs = [BUNDLED, *map(str, options.agreement)]
    cells = [measure(bench, pair, batch, options) for pair in pairs for batch in options.batches]
    Console().print(table(cells))
    worst = min(cells, key=lambda cell: cell.to_best)
    Console().print(f"auto to best: {worst.to_best:.3f} at worst ({worst.pair}, batch of {worst.batch})")
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / "speculation.json", {"format": 1, "cells": document(cells)})
    plot(options.out / "speculation.png", cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
