"""What can be measured: each cell asks one server in one round and returns figures.

A figure's name ends in its unit: "ms" is better when less, "tokens/s" and "times" when more. Figures are of whole
answers; one without any is left out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from bench.asker import Asker
from bench.samples import Run, percentile

Scenario = Literal["latency", "throughput", "reuse", "long"]
Figures = dict[str, float]

PREFILL, DECODE = "prefill, tokens/s", "decode, tokens/s"
FIRST, TOKEN = "first token, ms", "a token, ms"
RATE = "answers, tokens/s"
COLD, WARM, SLOWEST = "first token cold, ms", "warm, ms", "slowest warm, ms"
FASTER = "cold / warm, times"
# Tokens that a prompt of counted words may be longer than asked for.
SPARE = 32
# A token behind a long known beginning takes about as long as so many of a prompt.
DEEP = 3


@dataclass(frozen=True, slots=True)
class Result:
    """One cell against one server in one round."""

    figures: Figures
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """How much a cell computes in one round: tokens of prompts, and tokens said one after the other by each stream."""

    prompts: int
    said: int
    streams: int = 1


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing to measure. `at` places it on the plot's axis, `label` says the same in words."""

    scenario: Scenario
    label: str
    at: float
    work: Work
    measure: Callable[[Asker], Awaitable[Result]]


def lone(tokens: int, *, answered: int, repeats: int, scenario: Scenario = "latency") -> Cell:
    """The cell of single streams: a prompt until its first token, and the tokens behind it."""

    async def measure(asker: Asker) -> Result:
        prompts = [asker.prompts.lone(tokens, asker.key, scenario, tokens, number) for number in range(repeats)]
        run = await asker.closed(prompts, answered, streams=1)
        prefill = middle((sample.prompt_tokens or tokens) / sample.first for sample in run.whole if sample.first)
        token = middle(sample.token for sample in run.whole)
        figures = {
            FIRST: thousand(middle(sample.first for sample in run.whole)),
            PREFILL: prefill,
            TOKEN: thousand(token),
            DECODE: 1 / token if token else None,
        }
        return Result(known(figures), (run,))

    return Cell(scenario, f"prompt of {tokens}", tokens, Work(repeats * tokens, repeats * answered), measure)


def deep(share: int, context: int, *, answered: int) -> Cell:
    """The cell of one stream behind a prompt that fills `share` per cent of the context."""
    tokens = min(context * share // 100, context - answered - SPARE)
    cell = lone(tokens, answered=answered, repeats=1, scenario="long")
    return replace(cell, label=f"{share} % of {context}", at=share)


def streams(count: int, *, asked: int, answered: int, requests: int) -> Cell:
    """The cell of so many streams that start at once, each sending again when its answer ended."""

    async def measure(asker: Asker) -> Result:
        prompts = [asker.prompts.lone(asked, asker.key, "streams", count, number) for number in range(requests)]
        return crowd(await asker.closed(prompts, answered, streams=count))

    label = f"{count} stream{'s' if count > 1 else ''}"
    return Cell("throughput", label, count, Work(requests * asked, requests * answered // count, count), measure)


def arrivals(rate: float, *, asked: int, answered: int, requests: int) -> Cell:
    """The cell of requests that arrive at random, `rate` a second."""

    async def measure(asker: Asker) -> Result:
        prompts = [asker.prompts.lone(asked, asker.key, "rate", rate, number) for number in range(requests)]
        return crowd(await asker.opened(prompts, answered, rate=rate))

    # How many answers overlap depends on the server; that of one stream is the worst case.
    return Cell("throughput", f"{rate:g} a second", rate, Work(requests * asked, requests * answered // 4, 4), measure)


def crowd(run: Run) -> Result:
    """The figures of many answers at once."""
    first = [sample.first for sample in run.whole if sample.first is not None]
    gaps = [gap for sample in run.whole for gap in sample.gaps]
    figures: dict[str, float | None] = {RATE: run.tokens_second or None}
    for name, values in (("first token", first), ("between", gaps)):
        for share in (0.5, 0.99):
            figures[f"{name} p{share * 100:.0f}, ms"] = thousand(percentile(values, share))
    return Result(known(figures), (run,))


def chat(history: int, *, turn: int) -> Cell:
    """The cell of a conversation: its first turn of `history` tokens is cold, the second has `turn` more."""

    async def measure(asker: Asker) -> Result:
        first = asker.prompts.lone(history, asker.key, "chat")
        cold = await asker.one(first, turn)
        answer = "".join(sample.text for sample in cold.whole)
        warm = await asker.one(asker.prompts.second_turn(first, answer, turn, asker.key, "second turn"), 1)
        return reused(cold, warm)

    return Cell("reuse", f"second turn of {history}", 0, Work(history + DEEP * turn, turn), measure)


def users(count: int, *, system: int, turn: int) -> Cell:
    """The cell of users who come one after the other with one system prompt; the first of them is cold."""

    async def measure(asker: Asker) -> Result:
        prompts = [asker.prompts.user(system, turn, asker.key, "users", number=number) for number in range(count)]
        cold = await asker.one(prompts[0], 1)
        return reused(cold, await asker.closed(prompts[1:], 1, streams=1))

    label = f"users 2 to {count} of {system}"
    return Cell("reuse", label, 1, Work(system + count * DEEP * turn, count), measure)


def reused(cold: Run, warm: Run) -> Result:
    """The figures of prompts whose beginning is known, beside one that is not."""
    before = middle(sample.first for sample in cold.whole)
    after = [sample.first for sample in warm.whole if sample.first is not None]
    behind = middle(after)
    figures = {
        COLD: thousand(before),
        WARM: thousand(behind),
        SLOWEST: thousand(max(after, default=None)),
        FASTER: before / behind if before and behind else None,
    }
    return Result(known(figures), (cold, warm))


def middle(values: Iterable[float | None]) -> float | None:
    """The median of those that are known, None of none."""
    there = [value for value in values if value is not None]
    return median(there) if there else None


def thousand(seconds: float | None) -> float | None:
    """Milliseconds."""
    return None if seconds is None else 1e3 * seconds


def known(figures: dict[str, float | None]) -> Figures:
    """The figures that there are."""
    return {name: value for name, value in figures.items() if value is not None}
