"""Measures speculation: what drafts gain over a plain engine, and whether the depths chosen are the best ones.

    python -m benchmarks.speculation [--cells bundled 0 0.3 0.6 0.8 0.95] [--batches 1 4 8 16] [--null] [--out out]

In one process, without HTTP. The bundled model says the same requests in several modes: without drafts, with drafts of
a fixed depth, and with depths that the engine chooses (`auto`; `lookup` is that without a model). A round is new to
every cache, prompts included, and the same for all modes, which go on in turns of a twentieth of a second, in an order
left to chance: the machine is slow for all of them, and what a mode leaves in the processor's caches is in the way of
another one each time. Their engines are new in each round, built in such an order: where a cache lies in memory makes
the same steps up to 4 % slower or faster, and must not be a mode's for good. Before the rounds that count, some that
only `auto` plays teach it what steps cost and how often drafts are right, as a server knows it after its first
requests. After 6 rounds, and whenever there are half as many more, modes are given up that are clearly slower than the
best one, so that most of the time goes to comparing what is close. Who drafts:

    bundled   the bundled draft model and the lookup, for held-out dialogues with long answers, others in each round
    0.6       a script that knows what will be said and is right so often, token by token; its level costs --draft-cost.
              Each round has another script, the same for all modes

Seconds are of the processor, of the one thread that computes, for the engine's own choices too. Other work on the
machine still changes them, by sharing its caches and its memory. Ratios are of the same round; what counts is the mean
of their middle half.

`auto` is compared with the best of the modes that choose nothing. That one is chosen by half of the rounds and measured
in the other half, both ways around: the best of several modes in the rounds that chose it is also the luckiest. The
interval holds nine of ten results of the same computation on rounds drawn from these with replacement. With `--null`
the best depth, as it seems in the rounds before those that count, is played a second time in place of `auto`: that must
come out at 1, and shows how far the comparison can be trusted.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product, zip_longest
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.prompts import sentence
from benchmarks.result import add_json_option, measured
from benchmarks.turns import Cell, Turn
from engine.config import EngineConfig
from engine.core import Core
from engine.draft.controller import DepthController
from engine.draft.depth import FixedDepth
from engine.draft.loading import load_draft, make_speculation
from engine.draft.speculation import Speculation
from engine.load.load import load
from engine.schedule.draft import DraftRequest
from engine.types.events import Delta
from engine.types.request import DrafterChoice, Request, SamplingParams
from models.recipe.evaluate import held_out

CONTEXT = 1024
# Who drafts: this, or how often a script is right.
BUNDLED = "bundled"
# How long a mode goes on before it is another's turn.
_TURN_SECONDS = 0.05
# Rounds before a mode is given up, and by what factor there are more before the next one is.
_FAIR, _MORE = 6, 1.5
# Of so many dialogues some are taken in each round.
_DIALOGUES = 48
Prompts = Sequence[tuple[int, ...]]


class Scripted:
    """Knows what will be said, is right so often, and takes so many seconds a level; implements Drafter.

    outputs    what each sequence says behind its prompt
    prompts    how long those are
    agreement  how often a guess is right: by chance, at the same places whoever asks in a round
    """

    kind = "scripted"

    def __init__(
        self,
        outputs: Mapping[str, Sequence[int]],
        prompts: Mapping[str, int],
        agreement: float,
        level_seconds: float,
        vocabulary: int,
    ) -> None:
        self._outputs, self._prompts, self._agreement = outputs, prompts, agreement
        self._level_seconds, self._vocabulary = level_seconds, vocabulary
        self._guesses: dict[str, list[int]] = {}

    def propose(self, wants: Sequence[DraftRequest]) -> list[list[int]]:
        """The script from where each text stands."""
        until = time.thread_time() + self._level_seconds * max(want.limit for want in wants)
        drafts = [self._draft(want) for want in wants]
        while time.thread_time() < until:
            pass
        return drafts

    def forget(self, sequence_id: str, said: Sequence[int]) -> None:
        """The sequence is over."""
        self._guesses.pop(sequence_id, None)

    def flush(self, budget_bytes: int) -> bool:
        """Nothing outlives the process."""
        return False

    def _draft(self, want: DraftRequest) -> list[int]:
        if want.sequence_id not in self._guesses:
            self._guesses[want.sequence_id] = self._script(want.sequence_id)
        said = want.draw.position - self._prompts[_at(want.sequence_id)]
        return self._guesses[want.sequence_id][said : said + want.limit]

    def _script(self, sequence_id: str) -> list[int]:
        chance = random.Random(f"{self._agreement} {sequence_id}")
        tokens = self._outputs[_at(sequence_id)]
        return [token if chance.random() < self._agreement else (token + 1) % self._vocabulary for token in tokens]


def _at(sequence_id: str) -> str:
    """Which of the prompts a sequence has: requests are named by the round and by that."""
    return sequence_id.rpartition(" ")[2]


class Playing:
    """A core in the midst of a round.

    outputs  what each prompt got for an answer so far
    seconds  of the processor
    """

    def __init__(self, core: Core, requests: Sequence[Request]) -> None:
        self._core = core
        self.outputs: dict[str, list[int]] = {_at(request.id): [] for request in requests}
        self.seconds = 0.0
        for request in requests:
            core.submit(request)

    @property
    def busy(self) -> bool:
        """Whether it is not over."""
        return self._core.busy

    @property
    def turn(self) -> Turn:
        """What was said, and how long it took."""
        return Turn(sum(map(len, self.outputs.values())), self.seconds)

    def go(self, seconds: float) -> None:
        """Go on for about so long."""
        began = now = time.thread_time()
        while self._core.busy and now < began + seconds:
            for name, event in self._core.step():
                if isinstance(event, Delta):
                    self.outputs[_at(name)] += event.tokens
            now = time.thread_time()
        self.seconds += now - began


class Bench:
    """The bundled pair, what drafts for it in each mode, and engines over it.

    words, dialogues  prompts, at least one of each for every sequence of the largest batch
    """

    def __init__(self, batch: int, max_tokens: int) -> None:
        self._config = EngineConfig(slots=batch, context=CONTEXT, threads=1)
        self._max_tokens = max_tokens
        self.target = load(self._config, lambda phase: None)
        self.draft = load_draft(self._config, self.target, lambda phase: None)
        # Whose turn it is when what was loaded is looked through for garbage would be left to chance.
        gc.collect()
        gc.freeze()
        encode = self.target.tokenizer.encode
        self.words = [tuple(encode(sentence(40, f"{at}"))) for at in range(batch)]
        self.dialogues = [self.target.tokenizer.render_chat(asked).tokens for asked in longest(max(batch, _DIALOGUES))]

    def core(self, speculation: Speculation) -> Core:
        """A new engine; what is learnt stays with what drafts."""
        return Core(self.target, self._config, speculation, time.thread_time)

    def bundled(self, mode: str) -> Speculation:
        """The drafts that `cellar serve` would make."""
        fixed = int(mode) if mode.isdigit() else None
        drafter: DrafterChoice = (
            "model" if fixed else "none" if mode == "off" else "lookup" if mode == "lookup" else "auto"
        )
        config = replace(self._config, drafter=drafter, draft_tokens=fixed)
        draft = self.draft if drafter in ("model", "auto") else None
        return make_speculation(config, self.target, draft, time.thread_time)

    def scripted(self, mode: str, script: Scripted | None = None) -> Speculation:
        """Drafts that are written down."""
        depth = FixedDepth(0 if mode == "off" else int(mode)) if mode != "auto" else DepthController()
        return Speculation(None, script, depth, time.thread_time)

    def begin(self, core: Core, prompts: Prompts, turn: int, *, ignore_end: bool) -> Playing:
        """All prompts at once. No two rounds share what is remembered."""
        salt = f"{turn}".encode()
        return Playing(
            core, [self._request(f"{turn} {at}", prompt, salt, ignore_end) for at, prompt in enumerate(prompts)]
        )

    def _request(self, name: str, prompt: tuple[int, ...], salt: bytes, ignore_end: bool) -> Request:
        sampling = SamplingParams(temperature=0.0)
        return Request(name, prompt, sampling=sampling, max_tokens=self._max_tokens, ignore_eos=ignore_end, salt=salt)


def longest(count: int) -> list[list[dict[str, object]]]:
    """The held-out questions, without tools, that have the longest answers."""
    plain = [one for one in held_out() if not one.tools]
    return [one.prompt() for one in sorted(plain, key=lambda one: len(one.answer), reverse=True)[:count]]


def measure(bench: Bench, pair: str, batch: int, options: argparse.Namespace) -> Cell:
    """All modes of a pair on a batch, round by round, for as long as a cell may take."""
    until = time.process_time() + options.seconds
    prompts = bench.dialogues if pair == BUNDLED else bench.words[:batch]
    make = bench.bundled if pair == BUNDLED else scripted_modes(bench, pair, prompts, options.draft_cost)
    fixed = ["off", *map(str, options.depths)]
    learning = fixed if options.null else ["auto", "lookup"] if pair == BUNDLED else ["auto"]
    modes = {mode: make(mode) for mode in dict.fromkeys((*fixed, *learning))}
    rounds = Rounds(bench, prompts, batch, ignore_end=pair != BUNDLED)
    learnt = [rounds.play(modes, learning, turn) for turn in range(-options.warm, 0)]
    if options.null:
        best = min(fixed, key=lambda mode: sum(taken[mode].seconds for taken in learnt))
        modes["auto"] = make(best)
    cell, playing, check = Cell(pair, batch, {mode: [] for mode in modes}), list(modes), _FAIR
    while cell.rounds < options.rounds or time.process_time() < until:
        for mode, turn in rounds.play(modes, playing, cell.rounds).items():
            cell.turns[mode].append(turn)
        if cell.rounds >= check:
            check = math.ceil(_MORE * check)
            playing = [mode for mode in playing if mode not in cell.hopeless()]
    cell.accepted = {mode: shares(speculation) for mode, speculation in modes.items()}
    return cell


class Rounds:
    """Rounds of a cell: in each, all modes say the same."""

    def __init__(self, bench: Bench, prompts: Prompts, batch: int, *, ignore_end: bool) -> None:
        self._bench, self._prompts, self._batch, self._ignore_end = bench, prompts, batch, ignore_end
        self._chance = random.Random(0)

    def play(self, modes: Mapping[str, Speculation], playing: Sequence[str], turn: int) -> dict[str, Turn]:
        """What each of the modes that play took, by turns."""
        said = self._asked(turn)
        cores = {mode: self._bench.core(modes[mode]) for mode in self._chance.sample(playing, len(playing))}
        going = {mode: self._bench.begin(cores[mode], said, turn, ignore_end=self._ignore_end) for mode in playing}
        while busy := [mode for mode in playing if going[mode].busy]:
            for mode in self._chance.sample(busy, len(busy)):
                going[mode].go(_TURN_SECONDS)
        return {mode: played.turn for mode, played in going.items()}

    def _asked(self, turn: int) -> Prompts:
        """The prompts of a round: others in each, where there are more than it takes.

        By chance: neighbours have answers of the same length, and would end together.
        """
        if len(self._prompts) == self._batch:
            return self._prompts
        return random.Random(turn).sample(self._prompts, self._batch)


def scripted_modes(bench: Bench, pair: str, prompts: Prompts, draft_cost: float) -> Callable[[str], Speculation]:
    """Makes what drafts in a mode: a script for these prompts."""
    plain = bench.core(bench.scripted("off"))
    for turn in (0, 1):
        played = bench.begin(plain, prompts, turn, ignore_end=True)
        played.go(math.inf)
    level_seconds = draft_cost * played.turn.seconds * len(prompts) / played.turn.tokens
    lengths = {str(at): len(prompt) for at, prompt in enumerate(prompts)}
    script = Scripted(played.outputs, lengths, float(pair), level_seconds, bench.target.info.vocabulary)
    return lambda mode: bench.scripted(mode, script)


def shares(speculation: Speculation) -> list[float]:
    """How much of what was drafted was said, by position; of all drafters together."""
    counts = speculation.counts()
    drafted = [sum(column) for column in zip_longest(*(one.drafted for one in counts), fillvalue=0)]
    accepted = [sum(column) for column in zip_longest(*(one.accepted for one in counts), fillvalue=0)]
    return [right / judged for right, judged in zip(accepted, drafted, strict=True) if judged]


def table(cells: Sequence[Cell]) -> Table:
    """The printed table."""
    result = Table(
        caption="times as fast as without drafts, in the rounds of both (given up: the first ones only); "
        "said: per cent of the drafts at each position, deepest mode"
    )
    names = list(dict.fromkeys(mode for cell in cells for mode in cell.turns if mode != "off"))
    for name in ("who drafts", "batch", "rounds", "off, tokens/s", *names, "auto to best", "nine of ten", "said"):
        result.add_column(name, justify="right")
    for cell in cells:
        ratios = [f"{cell.ratio(mode):.2f}" if mode in cell.turns else "" for mode in names]
        deepest = max((mode for mode in cell.turns if mode.isdigit()), key=int)
        said = " ".join(f"{100 * share:.0f}" for share in cell.accepted[deepest])
        compared = f"{cell.to_best:.3f} of {cell.best}", "{:.3f} to {:.3f}".format(*cell.interval)
        result.add_row(
            cell.pair, f"{cell.batch}", f"{cell.rounds}", f"{cell.rate('off'):.0f}", *ratios, *compared, said
        )
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


def document(cell: Cell) -> dict[str, object]:
    """All that was measured, and what it comes to."""
    return {
        **asdict(cell),
        "best": cell.best,
        "rounds": cell.rounds,
        "auto_to_best": cell.to_best,
        "interval": cell.interval,
        "ratios": {mode: cell.ratio(mode) for mode in cell.turns},
    }


def summary(cell: Cell) -> dict[str, object]:
    """A row for benchmarks.page."""
    return {
        "drafter": cell.pair if cell.pair == BUNDLED else f"scripted, {float(cell.pair):g} correct",
        "batch": cell.batch,
        "rounds": cell.rounds,
        "plain": round(cell.rate("off")),
        "ratios": {mode: round(cell.ratio(mode), 3) for mode in cell.turns if mode != "off"},
        "best": cell.best,
        "auto_to_best": round(cell.to_best, 3),
    }


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cells", nargs="+", default=[BUNDLED, "0", "0.3", "0.6", "0.8", "0.95"], help="who drafts")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3, 4, 6])
    parser.add_argument("--null", action="store_true", help="the best depth once more in place of auto")
    parser.add_argument("--draft-cost", type=float, default=0.1, help="of a scripted level, in plain steps")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each pair and batch")
    parser.add_argument("--rounds", type=int, default=4, help="at least, however long they take")
    parser.add_argument("--warm", type=int, default=4, help="rounds before those, from which depths are learnt")
    parser.add_argument("--quick", action="store_true", help="a few tokens only, to see that it works")
    parser.add_argument("--out", type=Path, default=Path("out"))
    add_json_option(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; a line of speculation.jsonl is added for every cell as it is done, then speculation.png."""
    options = make_parser().parse_args(arguments)
    if options.quick:
        quick = {
            "cells": [BUNDLED, "0.6"],
            "batches": [1, 2],
            "depths": [2],
            "max_tokens": 8,
            "seconds": 0.0,
            "rounds": 2,
        }
        vars(options).update(quick, warm=1)
    bench = Bench(max(options.batches), options.max_tokens)
    options.out.mkdir(parents=True, exist_ok=True)
    cells = []
    for pair, batch in product(options.cells, options.batches):
        cells.append(measure(bench, pair, batch, options))
        with (options.out / "speculation.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(document(cells[-1])) + "\n")
        Console(width=200).print(table(cells[-1:]))
    Console(width=200).print(table(cells))
    worst = min(cells, key=lambda cell: cell.to_best)
    Console().print(f"auto to best: {worst.to_best:.3f} at worst ({worst.pair}, batch of {worst.batch})")
    plot(options.out / "speculation.png", cells)
    if options.json:
        measured("speculation", map(summary, cells)).write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
