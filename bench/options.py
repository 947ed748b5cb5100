"""Options of `cellar bench`. Imported by every command: no heavy imports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cyclopts import Parameter

Kind = Literal["text", "ids"]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Options of `cellar bench` beside the model and the options of `cellar serve`.

    Parameters
    ----------
    base_url
        A running server in place of one started here, as [NAME=]URL. Repeatable: several are measured in turns.
    allow_remote
        Measure another machine than this one.
    only
        Which of latency, throughput, reuse and long, separated by commas. Default: all.
    prompts
        Chats of words, or random token ids for /v1/completions.
    lengths
        Tokens of the prompts of a lone stream, separated by commas.
    streams
        Closed loop: how many chats at once, separated by commas.
    rate
        Open loop instead: requests a second that arrive at random, separated by commas.
    requests
        Of each number of streams or rate, in each round; without throughput, of each length of a lone stream. Default:
        2 a stream, 4 at least; 32 of a rate; 3 of a length.
    prompt_tokens
        Tokens of each prompt of many streams.
    max_tokens
        Tokens of each answer; half as many where a stream is alone.
    rounds
        Repetitions of each measurement; the tables show the median, the lowest and the highest.
    timeout
        Seconds for one answer.
    extra
        More fields of every request, as JSON, such as {"top_k": 1}; null takes one out.
    seed
        Of the prompts. Default: random, so that no prompt is cached.
    out
        Folder for bench.json and the plots.
    """

    base_url: list[str] | None = None
    allow_remote: bool = False
    only: str = "latency,throughput,reuse,long"
    prompts: Kind = "text"
    lengths: str = "32,512,2048"
    streams: str = "1,8,32"
    rate: str | None = None
    requests: int | None = None
    prompt_tokens: int = 256
    max_tokens: int = 128
    rounds: int = 3
    timeout: float = 600.0
    extra: str = "{}"
    seed: int | None = None
    out: Path = Path("out/bench")
