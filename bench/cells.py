"""What can be measured: each cell asks one server in one round and returns figures.

A figure's name ends in its unit: "ms" is better when less, "tokens/s" and "times" when more. Figures are of whole
answers; one without any is left out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from bench.load_generator import LoadGenerator
from bench.samples import LoadRun, percentile

Scenario = Literal["latency", "throughput", "reuse", "long"]
Figures = dict[str, float]

PREFILL, DECODE = "prefill, tokens/s", "decode, tokens/s"
FIRST, TOKEN = "first token, ms", "a token, ms"
RATE = "answers, tokens/s"
COLD, WARM, SLOWEST = "first token cold, ms", "warm, ms", "slowest warm, ms"
FASTER = "cold / warm, times"
# Tokens that a prompt of counted words may be longer than asked for.
SPARE_TOKENS = 32
# A token behind a long known beginning takes about as long as so many of a prompt.
CACHED_PREFIX_COST = 3


@dataclass(frozen=True, slots=True)
class CellResult:
    """One cell against one server in one round."""

    figures: Figures
    runs: tuple[LoadRun, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """How much a cell computes in one round: tokens of prompts, and tokens said one after the other by each stream."""

    prompts: int
    generated: int
    streams: int = 1


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing to measure. `at` places it on the plot's axis, `label` says the same in words."""

    scenario: Scenario
    label: str
    at: float
    work: Workload
    measure: Callable[[LoadGenerator], Awaitable[CellResult]]


def single_stream(tokens: int, *, answered: int, repeats: int, scenario: Scenario = "latency") -> Cell:
    """The cell of single streams: a prompt until its first token, and the tokens behind it."""

    async def measure(asker: LoadGenerator) -> CellResult:
        prompts = [asker.prompts.unshared(tokens, asker.key, scenario, tokens, number) for number in range(repeats)]
        run = await asker.closed_loop(prompts, answered, streams=1)
        prefill = median_or_none(
            (sample.prompt_tokens or tokens) / sample.first_token_seconds
            for sample in run.whole
            if sample.first_token_seconds
        )
        token = median_or_none(sample.seconds_per_token for sample in run.whole)
        figures = {
            FIRST: milliseconds(median_or_none(sample.first_token_seconds for sample in run.whole)),
            PREFILL: prefill,
            TOKEN: milliseconds(token),
            DECODE: 1 / token if token else None,
        }
        return CellResult(without_missing(figures), (run,))

    return Cell(scenario, f"prompt of {tokens}", tokens, Workload(repeats * tokens, repeats * answered), measure)


def long_context(share: int, context: int, *, answered: int) -> Cell:
    """The cell of one stream behind a prompt that fills `share` per cent of the context."""
    tokens = min(context * share // 100, context - answered - SPARE_TOKENS)
    cell = single_stream(tokens, answered=answered, repeats=1, scenario="long")
    return replace(cell, label=f"{share} % of {context}", at=share)


def streams(count: int, *, asked: int, answered: int, requests: int) -> Cell:
    """The cell of so many streams that start at once, each sending again when its answer ended."""

    async def measure(asker: LoadGenerator) -> CellResult:
        prompts = [asker.prompts.unshared(asked, asker.key, "streams", count, number) for number in range(requests)]
        return concurrent_figures(await asker.closed_loop(prompts, answered, streams=count))

    label = f"{count} stream{'s' if count > 1 else ''}"
    return Cell("throughput", label, count, Workload(requests * asked, requests * answered // count, count), measure)


def arrivals(rate: float, *, asked: int, answered: int, requests: int) -> Cell:
    """The cell of requests that arrive at random, `rate` a second."""

    async def measure(asker: LoadGenerator) -> CellResult:
        prompts = [asker.prompts.unshared(asked, asker.key, "rate", rate, number) for number in range(requests)]
        return concurrent_figures(await asker.open_loop(prompts, answered, rate=rate))

    # How many answers overlap depends on the server; that of one stream is the worst case.
    return Cell(
        "throughput", f"{rate:g} a second", rate, Workload(requests * asked, requests * answered // 4, 4), measure
    )


def concurrent_figures(run: LoadRun) -> CellResult:
    """The figures of many answers at once."""
    first = [sample.first_token_seconds for sample in run.whole if sample.first_token_seconds is not None]
    gaps = [gap for sample in run.whole for gap in sample.gaps]
    figures: dict[str, float | None] = {RATE: run.tokens_second or None}
    for name, values in (("first token", first), ("between", gaps)):
        for share in (0.5, 0.99):
            figures[f"{name} p{share * 100:.0f}, ms"] = milliseconds(percentile(values, share))
    return CellResult(without_missing(figures), (run,))


def chat(history: int, *, turn: int) -> Cell:
    """The cell of a conversation: its first turn of `history` tokens is cold, the second has `turn` more."""

    async def measure(asker: LoadGenerator) -> CellResult:
        first = asker.prompts.unshared(history, asker.key, "chat")
        cold = await asker.one(first, turn)
        answer = "".join(sample.text for sample in cold.whole)
        warm = await asker.one(asker.prompts.second_turn(first, answer, turn, asker.key, "second turn"), 1)
        return reuse_figures(cold, warm)

    return Cell("reuse", f"second turn of {history}", 0, Workload(history + CACHED_PREFIX_COST * turn, turn), measure)


def users(count: int, *, system: int, turn: int) -> Cell:
    """The cell of users who come one after the other with one system prompt; the first of them is cold."""

    async def measure(asker: LoadGenerator) -> CellResult:
        prompts = [
            asker.prompts.shared_system(system, turn, asker.key, "users", number=number) for number in range(count)
        ]
        cold = await asker.one(prompts[0], 1)
        return reuse_figures(cold, await asker.closed_loop(prompts[1:], 1, streams=1))

    label = f"users 2 to {count} of {system}"
    return Cell("reuse", label, 1, Workload(system + count * CACHED_PREFIX_COST * turn, count), measure)


def reuse_figures(cold: LoadRun, warm: LoadRun) -> CellResult:
    """The figures of prompts whose beginning is known, beside one that is not."""
    before = median_or_none(sample.first_token_seconds for sample in cold.whole)
    after = [sample.first_token_seconds for sample in warm.whole if sample.first_token_seconds is not None]
    behind = median_or_none(after)
    figures = {
        COLD: milliseconds(before),
        WARM: milliseconds(behind),
        SLOWEST: milliseconds(max(after, default=None)),
        FASTER: before / behind if before and behind else None,
    }
    return CellResult(without_missing(figures), (cold, warm))


def median_or_none(values: Iterable[float | None]) -> float | None:
    """The median of those that are known, None of none."""
    there = [value for value in values if value is not None]
    return median(there) if there else None


def milliseconds(seconds: float | None) -> float | None:
    """Milliseconds."""
    return None if seconds is None else 1e3 * seconds


def without_missing(figures: dict[str, float | None]) -> Figures:
    """The figures that there are."""
    return {name: value for name, value in figures.items() if value is not None}
