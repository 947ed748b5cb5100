"""The command line of benchmarks.serve, and what of it makes no sense."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
from dataclasses import dataclass
from pathlib import Path

from benchmarks.load import Ask
from benchmarks.report import Level
from benchmarks.target import Unusable


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is measured. `requests` are of each level, server and round; None: four for each stream, 8 at least."""

    levels: tuple[Level, ...]
    requests: int | None
    prompt_tokens: int
    shared_tokens: int
    rounds: int
    seed: int
    ask: Ask

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        for name in ("prompt_tokens", "rounds"):
            if getattr(self, name) < 1:
                raise Unusable(f"--{name.replace('_', '-')} must be 1 or more, not {getattr(self, name)}")
        if not 0 <= self.shared_tokens < self.prompt_tokens:
            raise Unusable(
                f"--shared-prefix must be 0 or more and less than --prompt-tokens {self.prompt_tokens}, "
                f"not {self.shared_tokens}: the rest keeps the prompts apart"
            )
        if self.ask.max_tokens < 1 or self.ask.timeout_seconds <= 0:
            raise Unusable("--max-tokens and --timeout must be more than 0")
        most = max(level.value for level in self.levels if level.kind == "streams") if self.closed else 1
        if self.requests is not None and self.requests < most:
            raise Unusable(f"--requests {self.requests} cannot fill {most:g} streams: give that many or more")

    def __str__(self) -> str:
        shared = f", {self.shared_tokens} of them shared" if self.shared_tokens else ""
        return f"{self.prompt_tokens} tokens in{shared}, {self.ask.max_tokens} out at most"

    @property
    def closed(self) -> bool:
        """Whether a stream sends its next request only when its answer ended."""
        return self.levels[0].kind == "streams"

    def count(self, level: Level) -> int:
        """Return how many requests a run of `level` sends."""
        return self.requests or max(8, 4 * int(level.value)) if self.closed else self.requests or 64


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.serve", description=description)
    add = parser.add_argument
    add("--base-url", action="append", default=[], metavar="[NAME=]URL", help="a server; repeat to compare, in turns")
    add(
        "--serve",
        nargs="?",
        const="",
        metavar="ARGS",
        help="start `cellar serve ARGS` here (default: the bundled model)",
    )
    add("--model", action="append", default=[], help="one for all servers or one each; default: the first they name")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY")
    add("--streams", default=None, metavar="N,...", help="closed loop: chats at once (default 1,8,32)")
    add("--rate", default=None, metavar="R,...", help="open loop instead: Poisson arrivals, R requests a second")
    add("--requests", type=int, default=None, metavar="N", help="of each level (default: 4 a stream, 8 at least; 64)")
    add("--prompt-tokens", type=int, default=256, metavar="N", help="about that many, by the server's own count")
    add("--max-tokens", type=int, default=128, metavar="N", help="of each answer")
    add("--shared-prefix", type=int, default=0, metavar="TOKENS", help="that all prompts begin with (default 0)")
    add("--rounds", type=int, default=1, metavar="N", help="how often everything is measured, in turns (default 1)")
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="for one answer")
    add("--extra", default="{}", metavar="JSON", help='more fields, such as {"ignore_eos": true}; null takes one out')
    add("--seed", type=int, default=None, help="of the prompts; default: a new one, so that no cache knows them")
    add("--allow-remote", action="store_true", help="measure another machine than this one")
    add("--out", type=Path, default=Path("out/serve"), metavar="FOLDER", help="default: out/serve")
    return parser


def read_options(given: argparse.Namespace) -> Options:
    """Return what the command line asks for; Unusable where it makes no sense."""
    if given.streams and given.rate:
        raise Unusable("--streams and --rate are two ways to press: give one")
    if bool(given.base_url) == (given.serve is not None):
        raise Unusable("give --base-url http://127.0.0.1:8000/v1, or --serve to start a server here; not both")
    try:
        extra = json.loads(given.extra)
    except ValueError as error:
        raise Unusable(f"--extra is not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise Unusable("--extra must be a JSON object")
    levels = read_levels("rate", given.rate) if given.rate else read_levels("streams", given.streams or "1,8,32")
    return Options(
        levels=levels,
        requests=given.requests,
        prompt_tokens=given.prompt_tokens,
        shared_tokens=given.shared_prefix,
        rounds=given.rounds,
        seed=given.seed if given.seed is not None else random.SystemRandom().randrange(2**32),
        ask=Ask(max_tokens=given.max_tokens, timeout_seconds=given.timeout, extra=extra),
    )


def read_levels(kind: str, text: str) -> tuple[Level, ...]:
    """Return the levels in a list separated by commas."""
    try:
        values = [float(part) if kind == "rate" else int(part) for part in text.split(",")]
    except ValueError as error:
        raise Unusable(f"--{kind} must be numbers separated by commas, not {text!r}") from error
    if not all(0 < value < math.inf for value in values) or len(set(values)) < len(values):
        raise Unusable(f"--{kind} must be different numbers above 0, not {text!r}")
    return tuple(Level(kind, value) for value in values)
