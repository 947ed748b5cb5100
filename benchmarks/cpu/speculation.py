"""Measures speculative decoding: the speed-up of fixed depths, and the depth chosen at run time beside the best one.

    python -m benchmarks.cpu.speculation [--cells bundled 0 0.3 0.6 0.8 0.95] [--batches 1 4 8 16]
                                     [--requests-per-slot 3] [--null] [--out out]
    python -m benchmarks.cpu.speculation --model FOLDER --quantize int8 --cells mtp --batches 1 8

In one process, without HTTP. The bundled model answers the same requests in several modes: without drafts (off), with
drafts of a fixed depth, with the depth chosen by the engine (auto), and the same without a draft model (lookup). Each
round has new prompts, the same for all modes. Modes alternate in random order every 0.05 s, so that slow phases of the
machine and the contents of processor caches affect all of them. Each round has new engines, built in random order: the
placement of a cache in memory changes the time of a step by up to 4 %. In the warm-up rounds only `auto` runs and
measures step costs and acceptance, as a server does in its first requests. After 6 rounds, and whenever there are half
as many more, modes that are clearly slower than the best one are dropped. Drafters:

    bundled   the bundled draft model and the n-gram lookup; held-out dialogues with long answers, others in each round
    0.6       a script with this acceptance rate per token; a level costs --draft-cost of a step. Each round has another
              script, the same for all modes
    mtp       the MTP layer of --model, such as one that benchmarks.mtp_shape writes; random prompts

Times are processor times of the thread that computes, the engine's scheduling included. Ratios are of the same round;
the reported ratio is the interquartile mean.

`auto` is compared with the best fixed depth. Half of the rounds choose the best depth, the other half measure it, both
ways around: a depth chosen and measured in the same rounds would be overestimated. The interval is the 90 % interval of
a bootstrap over the rounds. With `--requests-per-slot` above 1 a
queue refills the slots and a round ends with its queue: with closed batches, drafts that end easy answers early leave
smaller, less efficient batches. With `--null` the best depth of the warm-up runs a second time in place of `auto`: the
result must be 1 and shows the error of the method.
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
from functools import partial
from itertools import product, zip_longest
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.prompts import sentence
from benchmarks.cpu.comparison import ModeComparison, RoundTime
from benchmarks.held_out import held_out
from benchmarks.result import add_json_option, add_rows, command_parser, measured, model_name
from engine.config import EngineConfig, Quantize
from engine.core import Core
from engine.draft.controller import DepthController
from engine.draft.depth import FixedDepth
from engine.draft.loading import load_draft, make_speculation
from engine.draft.speculation import Speculation
from engine.load.load import load
from engine.schedule.draft import DraftRequest
from engine.types.events import Delta, Finished
from engine.types.request import DrafterChoice, Request, SamplingParams

CONTEXT = 1024
# The drafter: one of these, or the acceptance rate of a script.
BUNDLED, MTP = "bundled", "mtp"
# Tokens of the random prompts for an MTP layer, below this one, which every vocabulary has.
_PROMPT_TOKENS, _COMMON_TOKENS = 64, 2**14
# Processor time of a mode before the next one continues.
_SLICE_SECONDS = 0.05
# Rounds before the first mode is dropped, and the growth of the rounds between later checks.
_FIRST_CHECK, _CHECK_GROWTH = 6, 1.5
# Dialogues from which each round samples.
_DIALOGUES = 48
Prompts = Sequence[tuple[int, ...]]


class Scripted:
    """A drafter with a known acceptance rate and cost; implements Drafter.

    outputs        output tokens of each sequence
    prompts        prompt tokens of each sequence
    acceptance     probability that a draft token is correct; the same positions in all modes of a round
    level_seconds  processor time of a level of depth
    """

    kind = "scripted"

    def __init__(
        self,
        outputs: Mapping[str, Sequence[int]],
        prompts: Mapping[str, int],
        acceptance: float,
        level_seconds: float,
        vocabulary: int,
    ) -> None:
        self._outputs, self._prompts, self._acceptance = outputs, prompts, acceptance
        self._level_seconds, self._vocabulary = level_seconds, vocabulary
        self._scripts: dict[str, list[int]] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """The script from the position of each sequence on."""
        until = time.thread_time() + self._level_seconds * max(request.limit for request in requests)
        drafts = [self._draft(request) for request in requests]
        while time.thread_time() < until:
            pass
        return drafts

    def forget(self, sequence_id: str, tokens: Sequence[int]) -> None:
        """Drop the script of a finished sequence."""
        self._scripts.pop(sequence_id, None)

    def flush(self, budget_bytes: int) -> bool:
        """Nothing is written to disk."""
        return False

    def _draft(self, request: DraftRequest) -> list[int]:
        if request.sequence_id not in self._scripts:
            self._scripts[request.sequence_id] = self._script(request.sequence_id)
        start = request.draw.position - self._prompts[_at(request.sequence_id)]
        return self._scripts[request.sequence_id][start : start + request.limit]

    def _script(self, sequence_id: str) -> list[int]:
        chance = random.Random(f"{self._acceptance} {sequence_id}")
        tokens = self._outputs[_at(sequence_id)]
        return [token if chance.random() < self._acceptance else (token + 1) % self._vocabulary for token in tokens]


def _at(sequence_id: str) -> str:
    """The prompt of a sequence: requests are named by round and prompt."""
    return sequence_id.rpartition(" ")[2]


class RunningRound:
    """An engine core with the requests of a round.

    outputs  output tokens by prompt
    seconds  processor time until now

    With more requests than slots the round ends with its queue, so that every slot is in use in all of it.
    """

    def __init__(self, core: Core, requests: Sequence[Request], slots: int) -> None:
        self._core, self._unfinished = core, len(requests)
        self._end = slots if len(requests) > slots else 1
        self.outputs: dict[str, list[int]] = {_at(request.id): [] for request in requests}
        self.seconds = 0.0
        for request in requests:
            core.submit(request)

    @property
    def busy(self) -> bool:
        """Whether the round goes on."""
        return self._unfinished >= self._end

    def run_to_end(self) -> None:
        """Finish all requests."""
        self._end = 1
        self.run(math.inf)

    @property
    def time(self) -> RoundTime:
        """Tokens and seconds of the round."""
        return RoundTime(sum(map(len, self.outputs.values())), self.seconds)

    def run(self, seconds: float) -> None:
        """Run steps for about this processor time."""
        began = now = time.thread_time()
        while self.busy and now < began + seconds:
            for name, event in self._core.step():
                if isinstance(event, Delta):
                    self.outputs[_at(name)] += event.tokens
                self._unfinished -= isinstance(event, Finished)
            now = time.thread_time()
        self.seconds += now - began


class SpeculationBench:
    """The bundled models or another one, the speculation of each mode, and engines.

    random, words, dialogues  prompts, at least one of each for every request of a round
    """

    def __init__(
        self, batch: int, requests: int, max_tokens: int, model: str | None = None, quantize: Quantize = "none"
    ) -> None:
        self._config = EngineConfig(model=model, quantize=quantize, slots=batch, context=CONTEXT, threads=1)
        self._max_tokens = max_tokens
        self.target = load(self._config, lambda phase: None)
        self.draft = load_draft(self._config, self.target, lambda phase: None)
        # Loaded objects are exempt from garbage collection, which would hit a random mode.
        gc.collect()
        gc.freeze()
        chance = random.Random(0)
        self.random = [tuple(chance.choices(range(_COMMON_TOKENS), k=_PROMPT_TOKENS)) for _ in range(requests)]
        encode = self.target.tokenizer.encode
        self.words = [tuple(encode(sentence(40, f"{at}"))) for at in range(requests)]
        self.dialogues = [self.target.tokenizer.render_chat(one).tokens for one in longest(max(requests, _DIALOGUES))]

    def core(self, speculation: Speculation) -> Core:
        """A new engine; measured costs and acceptance stay in `speculation`."""
        return Core(self.target, self._config, speculation, time.thread_time)

    def served(self, loaded: DrafterChoice, mode: str) -> Speculation:
        """The speculation of `cellar serve`; drafts of a fixed depth are those of the `loaded` drafter alone."""
        drafters: dict[str, DrafterChoice] = {"off": "none", "lookup": "lookup", "auto": "auto"}
        drafter = drafters.get(mode, loaded)
        config = replace(self._config, drafter=drafter, draft_tokens=int(mode) if mode.isdigit() else "auto")
        draft = self.draft if drafter in (loaded, "auto") else None
        return make_speculation(config, self.target, draft, time.thread_time)

    def scripted(self, mode: str, script: Scripted | None = None) -> Speculation:
        """Speculation with a script as the drafter."""
        depth = FixedDepth(0 if mode == "off" else int(mode)) if mode != "auto" else DepthController()
        return Speculation(None, script, depth, time.thread_time)

    def begin(self, core: Core, prompts: Prompts, number: int, *, ignore_end: bool) -> RunningRound:
        """Submit all prompts. The salt keeps rounds from sharing cached prefixes."""
        salt = f"{number}".encode()
        requests = [self._request(f"{number} {at}", prompt, salt, ignore_end) for at, prompt in enumerate(prompts)]
        return RunningRound(core, requests, core.cache.slots)

    def _request(self, name: str, prompt: tuple[int, ...], salt: bytes, ignore_end: bool) -> Request:
        sampling = SamplingParams(temperature=0.0)
        return Request(name, prompt, sampling=sampling, max_tokens=self._max_tokens, ignore_eos=ignore_end, salt=salt)


def longest(count: int) -> list[list[dict[str, object]]]:
    """The held-out conversations without tools that have the longest answers."""
    plain = [one for one in held_out() if not one.tools]
    return [one.messages for one in sorted(plain, key=lambda one: len(one.answer), reverse=True)[:count]]


def measure(bench: SpeculationBench, drafter: str, batch: int, options: argparse.Namespace) -> ModeComparison:
    """All modes of a drafter at a batch size, round by round, for `options.seconds`."""
    until, requests = time.process_time() + options.seconds, batch * options.requests_per_slot
    prompts = {BUNDLED: bench.dialogues, MTP: bench.random}.get(drafter, bench.words)
    if drafter in (BUNDLED, MTP):
        make = partial(bench.served, "model" if drafter == BUNDLED else "mtp")
    else:
        make = scripted_modes(bench, drafter, prompts, batch, options.draft_cost)
    fixed = ["off", *map(str, options.depths)]
    learning = fixed if options.null else ["auto", "lookup"] if drafter == BUNDLED else ["auto"]
    modes = {mode: make(mode) for mode in dict.fromkeys((*fixed, *learning))}
    rounds = Rounds(bench, prompts, requests, ignore_end=drafter != BUNDLED)
    warm_up = [rounds.play(modes, learning, number) for number in range(-options.warm, 0)]
    if options.null:
        best = min(fixed, key=lambda mode: sum(one[mode].seconds for one in warm_up))
        modes["auto"] = make(best)
    cell, active, check = ModeComparison(drafter, batch, {mode: [] for mode in modes}), list(modes), _FIRST_CHECK
    while cell.rounds < options.rounds or time.process_time() < until:
        for mode, time_ in rounds.play(modes, active, cell.rounds).items():
            cell.times[mode].append(time_)
        if cell.rounds >= check:
            check = math.ceil(_CHECK_GROWTH * check)
            active = [mode for mode in active if mode not in cell.clearly_slower()]
    cell.acceptance = {mode: shares(speculation) for mode, speculation in modes.items()}
    return cell


class Rounds:
    """Rounds of a comparison; all modes answer the same prompts."""

    def __init__(self, bench: SpeculationBench, prompts: Prompts, requests: int, *, ignore_end: bool) -> None:
        self._bench, self._prompts, self._requests, self._ignore_end = bench, prompts, requests, ignore_end
        self._chance = random.Random(0)

    def play(self, modes: Mapping[str, Speculation], active: Sequence[str], number: int) -> dict[str, RoundTime]:
        """The time of each active mode in a round."""
        prompts = self._round_prompts(number)
        cores = {mode: self._bench.core(modes[mode]) for mode in self._chance.sample(active, len(active))}
        runs = {mode: self._bench.begin(cores[mode], prompts, number, ignore_end=self._ignore_end) for mode in active}
        while busy := [mode for mode in active if runs[mode].busy]:
            for mode in self._chance.sample(busy, len(busy)):
                runs[mode].run(_SLICE_SECONDS)
        return {mode: running.time for mode, running in runs.items()}

    def _round_prompts(self, number: int) -> Prompts:
        """The prompts of a round: a random sample where there are more prompts than requests.

        Neighbours in the list have answers of similar length, which would end at the same time.
        """
        if len(self._prompts) == self._requests:
            return self._prompts
        return random.Random(number).sample(self._prompts, self._requests)


def scripted_modes(
    bench: SpeculationBench, drafter: str, prompts: Prompts, slots: int, draft_cost: float
) -> Callable[[str], Speculation]:
    """A function from a mode to its speculation with scripts for these prompts."""
    plain = bench.core(bench.scripted("off"))
    for number in (0, 1):
        first = bench.begin(plain, prompts, number, ignore_end=True)
        first.run_to_end()
    level_seconds = draft_cost * first.time.seconds * slots / first.time.tokens
    lengths = {str(at): len(prompt) for at, prompt in enumerate(prompts)}
    script = Scripted(first.outputs, lengths, float(drafter), level_seconds, bench.target.info.vocabulary)
    return lambda mode: bench.scripted(mode, script)


def shares(speculation: Speculation) -> list[float]:
    """Acceptance rate by position, of all drafters together."""
    counts = speculation.counts()
    drafted = [sum(column) for column in zip_longest(*(one.drafted for one in counts), fillvalue=0)]
    accepted = [sum(column) for column in zip_longest(*(one.accepted for one in counts), fillvalue=0)]
    return [accepted_ / drafted_ for accepted_, drafted_ in zip(accepted, drafted, strict=True) if drafted_]


def table(cells: Sequence[ModeComparison]) -> Table:
    """The printed table."""
    result = Table(
        caption="speed relative to no drafts, in the rounds of both (dropped modes: the first rounds only); "
        "accepted: per cent of the drafts at each position, deepest mode"
    )
    names = list(dict.fromkeys(mode for cell in cells for mode in cell.times if mode != "off"))
    for name in ("drafter", "batch", "rounds", "off, tokens/s", *names, "auto / best", "90 % interval", "accepted"):
        result.add_column(name, justify="right")
    for cell in cells:
        ratios = [f"{cell.ratio(mode):.2f}" if mode in cell.times else "" for mode in names]
        deepest = max((mode for mode in cell.times if mode.isdigit()), key=int)
        accepted = " ".join(f"{100 * share:.0f}" for share in cell.acceptance[deepest])
        compared = f"{cell.to_best:.3f} of {cell.best}", "{:.3f} to {:.3f}".format(*cell.interval)
        result.add_row(
            cell.drafter, f"{cell.batch}", f"{cell.rounds}", f"{cell.rate('off'):.0f}", *ratios, *compared, accepted
        )
    return result


def plot(path: Path, cells: Sequence[ModeComparison]) -> None:
    """Draw the speed-up of every depth and of `auto`, one panel per batch size."""
    from matplotlib.figure import Figure  # half a second of import, and only needed here

    batches = list(dict.fromkeys(cell.batch for cell in cells))
    figure = Figure(figsize=(4 * len(batches), 4), layout="constrained")
    for panel, batch in zip(figure.subplots(1, len(batches), sharey=True, squeeze=False)[0], batches, strict=True):
        for number, cell in enumerate(one for one in cells if one.batch == batch):
            depths = [mode for mode in cell.times if mode == "off" or mode.isdigit()]
            colour = f"C{number}"
            panel.plot(
                [int(mode.replace("off", "0")) for mode in depths], list(map(cell.ratio, depths)), "o-", color=colour
            )
            panel.axhline(cell.ratio("auto"), color=colour, linestyle="--", label=f"{cell.drafter}, auto")
        panel.set_title(f"batch of {batch}")
        panel.set_xlabel("tokens drafted")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="x-small")
    figure.supylabel("speed relative to no drafts")
    figure.savefig(path, dpi=110)


def document(cell: ModeComparison) -> dict[str, object]:
    """Round times and results of a comparison."""
    return {
        **asdict(cell),
        "best": cell.best,
        "rounds": cell.rounds,
        "auto_to_best": cell.to_best,
        "interval": cell.interval,
        "ratios": {mode: cell.ratio(mode) for mode in cell.times},
    }


def summary(cell: ModeComparison, model: str | None) -> dict[str, object]:
    """A row for benchmarks.page."""
    if cell.drafter == MTP:
        name = f"MTP of {model_name(str(model))}"
    else:
        name = BUNDLED if cell.drafter == BUNDLED else f"scripted, {float(cell.drafter):g} correct"
    return {
        "drafter": name,
        "accepted": [round(share, 3) for share in cell.acceptance["auto"]],
        "batch": cell.batch,
        "rounds": cell.rounds,
        "plain": round(cell.rate("off")),
        "ratios": {mode: round(cell.ratio(mode), 3) for mode in cell.times if mode != "off"},
        "best": cell.best,
        "auto_to_best": round(cell.to_best, 3),
    }


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command_parser("cpu.speculation", __doc__)
    drafters = [BUNDLED, "0", "0.3", "0.6", "0.8", "0.95"]
    parser.add_argument(
        "--cells", nargs="+", default=drafters, help="drafters: bundled, or acceptance rates of scripts"
    )
    parser.add_argument("--model", default=None, metavar="FOLDER", help="a model with an MTP layer, for the cell mtp")
    parser.add_argument("--quantize", choices=("none", "int8", "int4"), default="none", help="weights of --model")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16], help="batch sizes")
    parser.add_argument("--requests-per-slot", type=int, default=1, help="above 1: a queue refills the slots")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3, 4, 6], help="fixed depths")
    parser.add_argument("--null", action="store_true", help="run the best depth twice, in place of auto")
    parser.add_argument("--draft-cost", type=float, default=0.1, help="of a scripted level, in steps without drafts")
    parser.add_argument("--max-tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--seconds", type=float, default=60.0, help="processor time of each drafter and batch size")
    parser.add_argument("--rounds", type=int, default=4, help="rounds at least")
    parser.add_argument("--warm", type=int, default=4, help="warm-up rounds of auto")
    parser.add_argument("--quick", action="store_true", help="a few tokens only, as a test")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder (default out)")
    add_json_option(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; append each comparison to speculation.jsonl; plot speculation.png."""
    options = make_parser().parse_args(arguments)
    if options.quick:
        quick = {
            "cells": [MTP] if options.model else [BUNDLED, "0.6"],
            "batches": [1, 2],
            "depths": [2],
            "max_tokens": 8,
            "seconds": 0.0,
            "rounds": 2,
        }
        vars(options).update(quick, warm=1)
    benches = {
        batch: SpeculationBench(
            batch, batch * options.requests_per_slot, options.max_tokens, options.model, options.quantize
        )
        for batch in options.batches
    }
    options.out.mkdir(parents=True, exist_ok=True)
    cells = []
    for drafter, batch in product(options.cells, options.batches):
        cells.append(measure(benches[batch], drafter, batch, options))
        with (options.out / "speculation.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(document(cells[-1])) + "\n")
        Console(width=200).print(table(cells[-1:]))
    Console(width=200).print(table(cells))
    worst = min(cells, key=lambda cell: cell.to_best)
    Console().print(f"auto / best: {worst.to_best:.3f} at worst ({worst.drafter}, batch of {worst.batch})")
    plot(options.out / "speculation.png", cells)
    if options.json:
        add_rows(options.json, measured("speculation", [summary(cell, options.model) for cell in cells]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
