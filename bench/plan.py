"""The plan that the options of `cellar bench` make: which cells are measured, and what of it makes no sense."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from bench.cells import SPARE_TOKENS, Cell, Scenario, arrivals, chat, long_context, single_stream, streams, users
from bench.client import RequestOptions
from bench.options import BenchOptions
from bench.target import BenchError

SHARES = (25, 50, 90)
HISTORY, TURN, USERS = 2048, 32, 64
# Fewer tokens of a known beginning say nothing about reuse.
MIN_HISTORY = 128
# Of each length of a lone stream, beside the other scenarios.
REPEATS = 3
SCENARIOS = get_args(Scenario)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What is measured; lengths are tokens. `requests` None: two for each stream, four at least, 32 of a rate.

    repeats  requests of each length of a lone stream
    """

    only: tuple[str, ...]
    lengths: list[int]
    streams: list[int]
    rates: list[float]
    requests: int | None
    repeats: int
    prompt_tokens: int
    answer_tokens: int

    @property
    def single_stream_tokens(self) -> int:
        """Tokens of the answer of a lone stream."""
        return max(2, self.answer_tokens // 2)

    def cells(self, context: int | None) -> tuple[list[Cell], list[str]]:
        """What can be measured within a context, and in words what cannot."""
        cells, left_out = [], []
        for name, cell in self._candidates(context):
            if cell is not None:
                cells.append(cell)
            else:
                left_out.append(name)
        if not cells:
            raise BenchError(f"nothing of this can be measured: {'; '.join(left_out)}")
        return cells, left_out

    def _candidates(self, context: int | None) -> Iterator[tuple[str, Cell | None]]:
        room = math.inf if context is None else context - SPARE_TOKENS
        small = f"does not fit a context of {context}"
        if "latency" in self.only:
            for tokens in self.lengths:
                fits = tokens + self.single_stream_tokens <= room
                cell = single_stream(tokens, answered=self.single_stream_tokens, repeats=self.repeats) if fits else None
                yield f"latency of {tokens} tokens {small}", cell
        if "throughput" in self.only:
            fits = self.prompt_tokens + self.answer_tokens <= room
            for cell in self._concurrent_cells():
                yield f"{cell.label} {small}", cell if fits else None
        if "reuse" in self.only:
            history = min(HISTORY, int(room) // 2) if context else HISTORY
            for cell in (chat(history, turn=TURN), users(USERS, system=history, turn=TURN)):
                yield f"{cell.label} {small}", cell if history >= MIN_HISTORY else None
        if "long" in self.only:
            for share in SHARES:
                reason = (
                    "long context: the server does not report its context, so give --context"
                    if context is None
                    else small
                )
                yield (
                    reason,
                    None if context is None else long_context(share, context, answered=self.single_stream_tokens),
                )

    def _concurrent_cells(self) -> Iterator[Cell]:
        for count in self.streams:
            requests = self.requests or max(4, 2 * count)
            yield streams(count, asked=self.prompt_tokens, answered=self.answer_tokens, requests=requests)
        for rate in self.rates:
            yield arrivals(rate, asked=self.prompt_tokens, answered=self.answer_tokens, requests=self.requests or 32)


def plan_of(options: BenchOptions) -> BenchPlan:
    """The plan of the options. Raises BenchError for invalid options."""
    for name in ("prompt_tokens", "max_tokens", "rounds", "timeout", "requests"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise BenchError(f"--{name.replace('_', '-')} must be more than 0, not {value}")
    only = tuple(part.strip() for part in options.only.split(","))
    if unknown := [name for name in only if name not in SCENARIOS]:
        raise BenchError(f"--only must be some of {', '.join(SCENARIOS)}, not {unknown[0]!r}")
    crowded = "throughput" in only
    counts = read_counts("--streams", options.streams) if crowded and not options.rate else []
    if options.requests is not None and options.requests < max(counts, default=1):
        raise BenchError(f"--requests {options.requests} cannot fill {max(counts)} streams: give that many or more")
    return BenchPlan(
        only=tuple(name for name in SCENARIOS if name in only),
        lengths=read_counts("--lengths", options.lengths),
        streams=counts,
        rates=read_numbers("--rate", options.rate) if options.rate else [],
        requests=options.requests,
        repeats=REPEATS if crowded else options.requests or REPEATS,
        prompt_tokens=options.prompt_tokens,
        answer_tokens=options.max_tokens,
    )


def request_options(options: BenchOptions) -> RequestOptions:
    """What every request asks for; BenchError where --extra is no object."""
    try:
        extra = json.loads(options.extra)
    except ValueError as error:
        raise BenchError(f"--extra is not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise BenchError("--extra must be a JSON object")
    # Answers of one length, from servers that know the field; the probe finds those that refuse it.
    return RequestOptions(timeout_seconds=options.timeout, extra={"ignore_eos": True, **extra})


def read_counts(flag: str, text: str) -> list[int]:
    """The whole numbers in a list separated by commas; BenchError where one is none."""
    numbers = read_numbers(flag, text)
    if any(number != int(number) for number in numbers):
        raise BenchError(f"{flag} must be whole numbers separated by commas, not {text!r}")
    return [int(number) for number in numbers]


def read_numbers(flag: str, text: str) -> list[float]:
    """The numbers in a list separated by commas; BenchError where one is none, not above 0 or there twice."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise BenchError(f"{flag} must be numbers separated by commas, not {text!r}") from error
    if not all(0 < number < math.inf for number in numbers) or len(set(numbers)) < len(numbers):
        raise BenchError(f"{flag} must be different numbers above 0, not {text!r}")
    return numbers
