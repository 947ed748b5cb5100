"""Measures throughput and latency for values of `--itl-target-ms`, on the engine without HTTP.

    python -m benchmarks.pacing FOLDER --quantize int8 --requests 8             # all at once
    python -m benchmarks.pacing FOLDER --slots 32 --requests 100 --rate 1.5     # random arrivals, 1.5 a second
    python -m benchmarks.pacing FOLDER --rate 1 --long 0.1                      # one prompt of ten is 6 times longer

The targets alternate by rounds, with new prompts in each. Time is the processor time of one thread, and idle periods
are skipped, so other work on the machine has little effect. Figures are medians over the rounds.
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
COLUMNS = ("tokens/s", "first token p50", "p99", "between tokens p50", "p99", "maximum, ms")


@dataclass
class MeasuredEngine:
    """An engine with one target, its clock, and the times of its tokens by request, in seconds."""

    core: Core
    skipped: float = 0.0
    token_times: dict[str, list[float]] = field(default_factory=dict)

    def now(self) -> float:
        """Processor time plus skipped idle time."""
        return time.thread_time() + self.skipped

    def round(self, arrivals: Sequence[tuple[float, Request]]) -> list[float]:
        """Run requests with arrival times in seconds; returns the figures of COLUMNS."""
        begin, waiting = self.now(), list(arrivals)
        self.token_times = {}
        while waiting or self.core.busy:
            if not self.core.busy:
                self.skipped += max(begin + waiting[0][0] - self.now(), 0.0)
            while waiting and begin + waiting[0][0] <= self.now():
                self.core.submit(waiting.pop(0)[1])
            self.core.step()
        firsts = [self.token_times[request.id][0] - begin - arrival for arrival, request in arrivals]
        pairs = [zip(times, times[1:], strict=False) for times in self.token_times.values()]
        gaps = [later - earlier for pair in pairs for earlier, later in pair]
        rate = sum(map(len, self.token_times.values())) / (self.now() - begin)
        seconds = (quantile(firsts, 0.5), quantile(firsts, 0.99), quantile(gaps, 0.5), quantile(gaps, 0.99), max(gaps))
        return [rate, *(1000 * each for each in seconds)]


class StepRecorder:
    """Wraps the stepper of a side and records the times of its tokens."""

    def __init__(self, side: MeasuredEngine) -> None:
        self._stepper, self._side = side.core._stepper, side

    def run(self, scheduled: Sequence[ScheduledSequence]) -> list[StepResult]:
        """Stepper.run."""
        results = self._stepper.run(scheduled)
        for each in results:
            if each.tokens:
                times = self._side.token_times.setdefault(each.scheduled.sequence.request.id, [])
                times.extend([self._side.now()] * len(each.tokens))
        return results


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
    add("model", help="folder, such as benchmarks.shapes writes")
    add("--dtype", default="float32")
    add("--quantize", default="none")
    add("--slots", type=int, default=8)
    add("--requests", type=int, default=8, help="in a round (default 8)")
    add("--rate", type=float, default=0.0, help="arrivals per second (default 0: all at once)")
    add("--prompt-tokens", type=int, default=256, help="default 256")
    add("--long", type=float, default=0.0, help="share of prompts with six times the length (default 0)")
    add("--max-tokens", type=int, default=128, help="of each answer (default 128)")
    add("--targets", default="0,auto", metavar="MS,...", help="to compare (default 0,auto)")
    add("--rounds", type=int, default=3, help="after one warm-up round (default 3)")
    return parser


def side(loaded: LoadedModel, config: EngineConfig) -> MeasuredEngine:
    """Return an engine with a shared model."""
    one = MeasuredEngine(Core(loaded, config))
    one.core._clock, one.core._stepper = one.now, StepRecorder(one)  # type: ignore[assignment]
    return one


def arrivals(given: argparse.Namespace, loaded: LoadedModel, seed: str) -> list[tuple[float, Request]]:
    """Return requests with random tokens and their arrival times, which are equal for all targets of a round."""
    timing, words = random.Random(seed.split()[0]), random.Random(seed)
    found, at = [], 0.0
    for number in range(given.requests):
        at += timing.expovariate(given.rate) if given.rate else 0.0
        length = (6 if timing.random() < given.long else 1) * given.prompt_tokens
        prompt = tuple(words.randrange(loaded.info.vocabulary) for _ in range(length))
        request = Request(f"{seed} {number}", prompt, GREEDY, max_tokens=given.max_tokens, ignore_eos=True)
        found.append((at, request))
    return found


def target(text: str) -> float | None:
    """Return the target in milliseconds; None for auto."""
    return None if text == "auto" else float(text)


def quantile(values: Sequence[float], part: float) -> float:
    """Return the quantile of the values."""
    return sorted(values)[min(int(part * len(values)), len(values) - 1)]


if __name__ == "__main__":
    sys.exit(main())
