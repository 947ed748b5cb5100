"""Measures what a target of time between tokens (`--itl-target-ms`) costs and brings, on the engine without HTTP.

    python -m benchmarks.pacing FOLDER --quantize int8 --requests 8             # that arrive together
    python -m benchmarks.pacing FOLDER --slots 32 --requests 100 --rate 1.5     # by chance, so many a second
    python -m benchmarks.pacing FOLDER --rate 1 --long 0.1                      # one prompt of ten is 6 times as long

The targets take turns, round by round, with other prompts each. Time is the processor time of one thread, and an idle
machine waits for nobody, so other work on the machine hardly matters. Figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from engine.config import EngineConfig
from engine.core import Core
from engine.load.load import LoadedModel, load
from engine.schedule.scheduler import ScheduledSequence
from engine.schedule.step import StepResult
from engine.types.request import Request, SamplingParams

GREEDY = SamplingParams(temperature=0.0)
COLUMNS = ("tokens/s", "first token p50", "p99", "between tokens p50", "p99", "most, ms")


@dataclass
class Side:
    """One engine with one target, its clock, and when it said tokens: by request, in seconds of a round."""

    core: Core
    skipped: float = 0.0
    said: dict[str, list[float]] = field(default_factory=dict)

    def now(self) -> float:
        """Processor time, and what was skipped because nothing was to be done."""
        return time.thread_time() + self.skipped

    def round(self, arrivals: Sequence[tuple[float, Request]]) -> list[float]:
        """Serve requests that arrive at some seconds; the figures of COLUMNS."""
        begin, waiting = self.now(), list(arrivals)
        self.said = {}
        while waiting or self.core.busy:
            if not self.core.busy:
                self.skipped += max(begin + waiting[0][0] - self.now(), 0.0)
            while waiting and begin + waiting[0][0] <= self.now():
                self.core.submit(waiting.pop(0)[1])
            self.core.step()
        firsts = [self.said[request.id][0] - begin - arrival for arrival, request in arrivals]
        pairs = [zip(times, times[1:], strict=False) for times in self.said.values()]
        gaps = [later - earlier for pair in pairs for earlier, later in pair]
        rate = sum(map(len, self.said.values())) / (self.now() - begin)
        seconds = (share(firsts, 0.5), share(firsts, 0.99), share(gaps, 0.5), share(gaps, 0.99), max(gaps))
        return [rate, *(1000 * each for each in seconds)]


class Ear:
    """Stands in for the stepper of a side and notes when tokens are said."""

    def __init__(self, side: Side) -> None:
        self._stepper, self._side = side.core._stepper, side

    def run(self, grants: Sequence[ScheduledSequence]) -> list[StepResult]:
        """Stepper.run."""
        said = self._stepper.run(grants)
        for each in said:
            if each.tokens:
                times = self._side.said.setdefault(each.scheduled.sequence.request.id, [])
                times.extend([self._side.now()] * len(each.tokens))
        return said


def main(arguments: list[str] | None = None) -> int:
    """Measure and print a row for each target."""
    given = make_parser().parse_args(arguments)
    torch.set_num_threads(1)
    config = EngineConfig(
        model=given.model,
        dtype=given.dtype,
        quantize=given.quantize,
        threads=1,
        slots=given.slots,
        context=6 * given.prompt_tokens + given.max_tokens,
        drafter="none",
    )
    loaded = load(config, lambda phase: print(phase, file=sys.stderr))
    sides = {text: side(loaded, replace(config, itl_target_ms=target(text))) for text in given.targets.split(",")}
    found: dict[str, list[list[float]]] = {text: [] for text in sides}
    for number in range(-1, given.rounds):
        for text, one in list(sides.items())[:: 1 if number % 2 else -1]:
            figures = one.round(arrivals(given, loaded, f"{number} {text}"))
            if number >= 0:
                found[text].append(figures)
    print(f"| target, ms | {' | '.join(COLUMNS)} |\n{'|---' * (1 + len(COLUMNS))}|")
    for text, rounds in found.items():
        print(
            f"| {text} | {' | '.join(f'{statistics.median(figures):.4g}' for figures in zip(*rounds, strict=True))} |"
        )
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    summary, _, epilog = (__doc__ or "").partition("\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("benchmarks.pacing", description=summary, epilog=epilog, formatter_class=raw)
    add = parser.add_argument
    add("model", help="a folder, such as benchmarks.shapes makes")
    add("--dtype", default="float32")
    add("--quantize", default="none")
    add("--slots", type=int, default=8)
    add("--requests", type=int, default=8, help="of a round (default 8)")
    add("--rate", type=float, default=0.0, help="that arrive a second; 0, the default: all at once")
    add("--prompt-tokens", type=int, default=256, help="default 256")
    add("--long", type=float, default=0.0, help="share of prompts that are six times as long (default 0)")
    add("--max-tokens", type=int, default=128, help="of each answer (default 128)")
    add("--targets", default="0,auto", metavar="MS,...", help="to compare (default 0,auto)")
    add("--rounds", type=int, default=3, help="after a first one that does not count (default 3)")
    return parser


def side(loaded: LoadedModel, config: EngineConfig) -> Side:
    """Return an engine over a model that several share."""
    one = Side(Core(loaded, config))
    one.core._clock, one.core._stepper = one.now, Ear(one)  # type: ignore[assignment]
    return one


def arrivals(given: argparse.Namespace, loaded: LoadedModel, seed: str) -> list[tuple[float, Request]]:
    """Return requests of random tokens, with the seconds at which they come: the same for all targets of a round."""
    turn, words = random.Random(seed.split()[0]), random.Random(seed)
    found, at = [], 0.0
    for number in range(given.requests):
        at += turn.expovariate(given.rate) if given.rate else 0.0
        length = (6 if turn.random() < given.long else 1) * given.prompt_tokens
        prompt = tuple(words.randrange(loaded.info.vocabulary) for _ in range(length))
        request = Request(f"{seed} {number}", prompt, GREEDY, max_tokens=given.max_tokens, ignore_eos=True)
        found.append((at, request))
    return found


def target(text: str) -> float | None:
    """Return what a target on the command line means."""
    return None if text == "auto" else float(text)


def share(values: Sequence[float], part: float) -> float:
    """Return the value that so many are at most."""
    return sorted(values)[min(int(part * len(values)), len(values) - 1)]


if __name__ == "__main__":
    sys.exit(main())
