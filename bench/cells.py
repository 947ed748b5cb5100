"""The cells of a benchmark: each measures one server in one round and returns figures.

A figure's name ends in its unit: "ms" is better when less, "tokens/s" and "times" when more. Figures are computed from
complete answers; a figure without any is absent.
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
# Tokens by which a prompt of counted words may exceed the requested length.
SPARE_TOKENS = 32
# Cost of a token after a long cached prefix, in prefill tokens.
CACHED_PREFIX_COST = 3


@dataclass(frozen=True, slots=True)
class CellResult:
    """One cell against one server in one round."""

    figures: Figures
    runs: tuple[LoadRun, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of a cell in one round: prompt tokens, and consecutive output tokens of each stream."""

    prompts: int
    generated: int
    streams: int = 1


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement. `axis_position` is its place on the plot's axis, `label` its description."""

    scenario: Scenario
    label: str
    axis_position: float
    work: Workload
    measure: Callable[[LoadGenerator], Awaitable[CellResult]]


def single_stream(tokens: int, *, answered: int, repeats: int, scenario: Scenario = "latency") -> Cell:
    """A single stream: time to first token, and time per output token."""

    async def measure(generator: LoadGenerator) -> CellResult:
        prompts = [
            generator.prompts.unshared(tokens, generator.key, scenario, tokens, number) for number in range(repeats)
        ]
        run = await generator.closed_loop(prompts, answered, streams=1)
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
    """A single stream with a prompt of `share` per cent of the context."""
    tokens = min(context * share // 100, context - answered - SPARE_TOKENS)
    cell = single_stream(tokens, answered=answered, repeats=1, scenario="long")
    return replace(cell, label=f"{share} % of {context}", axis_position=share)


def streams(count: int, *, asked: int, answered: int, requests: int) -> Cell:
    """`count` concurrent streams; each sends its next request when its answer ends."""

    async def measure(generator: LoadGenerator) -> CellResult:
        prompts = [
            generator.prompts.unshared(asked, generator.key, "streams", count, number) for number in range(requests)
        ]
        return concurrent_figures(await generator.closed_loop(prompts, answered, streams=count))

    label = f"{count} stream{'s' if count > 1 else ''}"
    return Cell("throughput", label, count, Workload(requests * asked, requests * answered // count, count), measure)


def arrivals(rate: float, *, asked: int, answered: int, requests: int) -> Cell:
    """Requests with random arrivals, `rate` a second."""

    async def measure(generator: LoadGenerator) -> CellResult:
        prompts = [generator.prompts.unshared(asked, generator.key, "rate", rate, number) for number in range(requests)]
        return concurrent_figures(await generator.open_loop(prompts, answered, rate=rate))

    # The overlap of answers depends on the server; four streams are assumed.
    return Cell(
        "throughput", f"{rate:g} a second", rate, Workload(requests * asked, requests * answered // 4, 4), measure
    )


def concurrent_figures(run: LoadRun) -> CellResult:
    """The figures of concurrent answers."""
    first = [sample.first_token_seconds for sample in run.whole if sample.first_token_seconds is not None]
    gaps = [gap for sample in run.whole for gap in sample.gaps]
    figures: dict[str, float | None] = {RATE: run.tokens_second or None}
    for name, values in (("first token", first), ("between", gaps)):
        for share in (0.5, 0.99):
            figures[f"{name} p{share * 100:.0f}, ms"] = milliseconds(percentile(values, share))
    return CellResult(without_missing(figures), (run,))


def chat(history: int, *, turn: int) -> Cell:
    """A conversation: a first turn of `history` tokens with a cold cache, a second with `turn` more."""

    async def measure(generator: LoadGenerator) -> CellResult:
        first = generator.prompts.unshared(history, generator.key, "chat")
        cold = await generator.single(first, turn)
        answer = "".join(sample.text for sample in cold.whole)
        warm = await generator.single(
            generator.prompts.second_turn(first, answer, turn, generator.key, "second turn"), 1
        )
        return reuse_figures(cold, warm)

    return Cell("reuse", f"second turn of {history}", 0, Workload(history + CACHED_PREFIX_COST * turn, turn), measure)


def users(count: int, *, system: int, turn: int) -> Cell:
    """Users with one system prompt, one after the other; the first has a cold cache."""

    async def measure(generator: LoadGenerator) -> CellResult:
        prompts = [
            generator.prompts.shared_system(system, turn, generator.key, "users", number=number)
            for number in range(count)
        ]
        cold = await generator.single(prompts[0], 1)
        return reuse_figures(cold, await generator.closed_loop(prompts[1:], 1, streams=1))

    label = f"users 2 to {count} of {system}"
    return Cell("reuse", label, 1, Workload(system + count * CACHED_PREFIX_COST * turn, count), measure)


def reuse_figures(cold: LoadRun, warm: LoadRun) -> CellResult:
    """The figures of prompts with a cached prefix, beside one without."""
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
    """The median of the values that are not None; None without any."""
    there = [value for value in values if value is not None]
    return median(there) if there else None


def milliseconds(seconds: float | None) -> float | None:
    """Milliseconds."""
    return None if seconds is None else 1e3 * seconds


def without_missing(figures: dict[str, float | None]) -> Figures:
    """The figures that there are."""
    return {name: value for name, value in figures.items() if value is not None}
