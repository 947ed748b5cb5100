"""Conversations of a simulated fleet: system prompts by Zipf's law, several turns, and the keys of their requests."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from server.affinity.keys import RequestKeys, request_keys

CHARACTERS_PER_TOKEN = 4
ZIPF_EXPONENT = 0.9
# Bounds of uniform distributions, in tokens; turns of a conversation. The means are 600, 80, 120 and 4.
SYSTEM_TOKENS, USER_TOKENS, ANSWER_TOKENS, TURNS = (200, 1000), (20, 140), (40, 200), (1, 7)
# Mean seconds between an answer and the next turn, exponential.
THINK_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation: tokens of its message and answer, and the pause before it."""

    user_tokens: int
    answer_tokens: int
    pause: float


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns behind the system prompt of a group; `start` is the time of the first one.

    known_keys  keys of the turns, where they come from other texts than those of `keys`
    """

    name: str
    group: str
    system_tokens: int
    start: float
    turns: tuple[Turn, ...]
    known_keys: tuple[RequestKeys, ...] = ()

    def prompt_tokens(self, turn: int) -> int:
        """Tokens of the prompt of a turn: with all earlier messages and answers."""
        earlier = sum(one.user_tokens + one.answer_tokens for one in self.turns[:turn])
        return self.system_tokens + earlier + self.turns[turn].user_tokens

    def keys(self, turn: int) -> RequestKeys:
        """Routing keys of a turn, from the body of a chat of this length."""
        if self.known_keys:
            return self.known_keys[turn]
        messages: list[dict[str, str]] = [{"role": "system", "content": text(self.group, self.system_tokens)}]
        for number, one in enumerate(self.turns[: turn + 1]):
            messages.append({"role": "user", "content": text(f"{self.name} {number}", one.user_tokens)})
            messages.append({"role": "assistant", "content": text(f"answer {number}", one.answer_tokens)})
        return request_keys({"model": "m", "messages": messages[:-1]})

    def with_keys(self) -> Conversation:
        """The same with the keys of all turns, which are computed once for several simulations."""
        return replace(self, known_keys=tuple(self.keys(turn) for turn in range(len(self.turns))))


def text(beginning: str, tokens: int) -> str:
    """A text of that many tokens, other than those with another beginning."""
    length = CHARACTERS_PER_TOKEN * tokens
    return (f"{beginning} " * (length // (len(beginning) + 1) + 1))[:length]


def conversations(requests: int, groups: int, rate: float, seed: int) -> list[Conversation]:
    """Conversations with about that many requests; `rate` requests a second arrive on average."""
    source = random.Random(f"workload {seed}")
    lengths = [source.randint(*SYSTEM_TOKENS) for _ in range(groups)]
    shares = [*accumulate((number + 1) ** -ZIPF_EXPONENT for number in range(groups))]
    found: list[Conversation] = []
    time, asked = 0.0, 0
    while asked < requests:
        time += source.expovariate(rate * 2 / sum(TURNS))
        group = bisect(shares, source.random() * shares[-1])
        turns = tuple(turns_of(source))
        found.append(Conversation(f"conversation {len(found)}", f"group {group}", lengths[group], time, turns))
        asked += len(turns)
    return found


def turns_of(source: random.Random) -> Iterator[Turn]:
    """The turns of one conversation."""
    for number in range(source.randint(*TURNS)):
        pause = source.expovariate(1 / THINK_SECONDS) if number else 0.0
        yield Turn(source.randint(*USER_TOKENS), source.randint(*ANSWER_TOKENS), pause)


def mean_prompt(found: Sequence[Conversation]) -> tuple[float, float]:
    """Mean tokens of a prompt, and of the new tokens in it where all earlier ones are cached."""
    prompts = [one.prompt_tokens(turn) for one in found for turn in range(len(one.turns))]
    fresh = [turn.user_tokens for one in found for turn in one.turns]
    return sum(prompts) / len(prompts), sum(fresh) / len(fresh)
