"""One request while it lives in the engine: what its cache is about, what the client got, and when it is over."""

from __future__ import annotations

import os

from engine.sampling import Draw, History
from engine.text import TextStream
from engine.tokenizer import Tokenizer
from engine.types import Overflow, Request, Timings, Usage

# Attention leans on the first tokens whatever they are (StreamingLLM, arXiv 2309.17453): a shift spares four.
_SINKS = 4


class Sequence:
    """A running or waiting request. Waiting means that it has no slot; it is over when it is in no queue.

    tokens  what the cache is about: the prompt and the output, less what shifts dropped
    output  what was generated
    plain   leading tokens whose cells depend on nothing but these tokens; others may reuse only those
    """

    def __init__(
        self, request: Request, tokenizer: Tokenizer, *, vocabulary: int, capacity: int, overflow: Overflow, now: float
    ) -> None:
        self.request = request
        self.tokens = list(request.prompt)
        self.output: list[int] = []
        self.slot: int | None = None
        self.plain: int | None = None
        self.overflow = request.overflow or overflow
        self.seed = int.from_bytes(os.urandom(8)) >> 1 if request.sampling.seed is None else request.sampling.seed
        self.text = TextStream(tokenizer.decoder(request.prompt), request.stop)
        self.cached: int | None = None
        self._capacity = capacity
        self._special = tokenizer.special
        self._history = History(request.sampling, request.prompt, vocabulary)
        self._shifts = self._shifted = 0
        self._arrived, self._started, self._first = now, now, now

    @property
    def limit(self) -> int:
        """New tokens at most."""
        room = self._capacity if self.overflow == "shift" else self._capacity - len(self.request.prompt)
        asked = self.request.max_tokens
        if asked is None:
            return room
        return asked if self.overflow == "shift" else min(asked, room)

    @property
    def keep(self) -> int:
        """Tokens at the start that a shift does not drop; at least one behind them can always go."""
        asked = self.request.keep
        if asked is None:
            prompt = self.request.prompt
            leading = next((at for at, token in enumerate(prompt) if token not in self._special), len(prompt))
            asked = leading + _SINKS
        return min(asked, self._capacity // 2)

    @property
    def overfull(self) -> bool:
        """Whether the latest token has no place in the context any more."""
        return len(self.tokens) > self._capacity

    def start(self, cached: int, now: float) -> bool:
        """The sequence got a slot. Returns whether for the first time: after a preemption it has started before."""
        if self.cached is not None:
            return False
        self.cached, self._started = cached, now
        return True

    def gain(self, standing: int) -> None:
        """Others computed more of the prompt, so that the sequence stands at `standing` without work of its own."""
        if not self.output:
            self.cached = standing

    def append(self, token: int, now: float) -> None:
        """Take a token that was emitted for this sequence."""
        if not self.output:
            self._first = now
        self.tokens.append(token)
        self.output.append(token)
        self._history.append(token)

    def drop(self, count: int) -> None:
        """Forget `count` tokens behind `keep`, as the cache did."""
        keep = self.keep
        del self.tokens[keep : keep + count]
        self._shifts += 1
        self._shifted += count

    def draw(self) -> Draw:
        """How the next token is to be drawn. Its position is that in the text, which no shift changes."""
        position = len(self.request.prompt) + len(self.output)
        return Draw(self.request.sampling, self.seed, position, self._history)

    def usage(self) -> Usage:
        """What the request cost so far."""
        return Usage(len(self.request.prompt), len(self.output), self.cached or 0, self._shifts, self._shifted)

    def timings(self, now: float) -> Timings:
        """Where its time went so far."""
        first = self._first if self.output else now
        return Timings(self._started - self._arrived, first - self._started, now - first)
