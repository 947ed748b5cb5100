"""One simulated replica: continuous batching over slots and a prefix cache, with the rules of the real scheduler.

A step has one token of each sequence in decode, and as many prefill tokens as fit the target of a step (the values of
engine/schedule/prefill_budget.py). Steps without prefill are simulated together up to the next change.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.fleet.costs import ServerCosts

# Of engine/schedule/prefill_budget.py: seconds of a step with prefill, beside sequences in decode and alone, and the
# least prefill tokens of a step.
TARGET_SECONDS, TARGET_STEPS, ALONE_SECONDS = 0.06, 3.0, 0.5
LEAST_TOKENS, LEAST_TOKENS_ALONE = 16, 64


@dataclass(slots=True)
class SimulatedRequest:
    """A request and its progress; times in seconds.

    path     names of the segments of its prompt with their tokens: system prompt, then conversation
    cached   prompt tokens found in the cache
    left     prefill tokens left, later tokens of the answer left
    """

    conversation: int
    turn: int
    asked: float
    path: tuple[tuple[str, int], ...]
    answer_tokens: int
    arrived: float = 0.0
    cached: int = 0
    left: int = 0
    position: int = 0
    first: float | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return sum(tokens for _, tokens in self.path)


class PrefixCache:
    """Tokens of prompts and answers by segment, evicted least recently used first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._tokens: OrderedDict[str, int] = OrderedDict()
        self._held = 0

    def match(self, path: tuple[tuple[str, int], ...]) -> int:
        """Leading tokens of a path that are cached."""
        found = 0
        for name, tokens in path:
            have = min(self._tokens.get(name, 0), tokens)
            found += have
            if have < tokens:
                break
        return found

    def insert(self, path: tuple[tuple[str, int], ...]) -> None:
        """Add or extend the segments of a path; the first one becomes the most recent, so its followers go first."""
        for name, tokens in reversed(path):
            before = self._tokens.pop(name, 0)
            self._tokens[name] = max(before, tokens)
            self._held += self._tokens[name] - before
        while self._held > self._capacity and len(self._tokens) > 1:
            self._held -= self._tokens.popitem(last=False)[1]


@dataclass(slots=True)
class SimulatedReplica:
    """The state of one replica: between `since` and `until` it computes one step, or several without prefill.

    slowdown  duration of its steps relative to the costs, while other replicas share its processors
    """

    costs: ServerCosts
    slots: int
    cache: PrefixCache
    waiting: deque[SimulatedRequest] = field(default_factory=deque)
    prefill: deque[SimulatedRequest] = field(default_factory=deque)
    decode: list[SimulatedRequest] = field(default_factory=list)
    slowdown: float = 1.0
    since: float = 0.0
    until: float = math.inf
    version: int = 0
    _seconds: float = 0.0
    _steps: int = 0
    _chunks: list[tuple[SimulatedRequest, int]] = field(default_factory=list)

    @property
    def load(self) -> int:
        """Requests, running and waiting."""
        return len(self.waiting) + len(self.prefill) + len(self.decode)

    def requests(self) -> Iterator[SimulatedRequest]:
        """All requests, running and waiting."""
        yield from (*self.waiting, *self.prefill, *self.decode)

    @property
    def busy(self) -> bool:
        """Whether it computes."""
        return not math.isinf(self.until)

    def slow_down(self, slowdown: float, now: float) -> None:
        """Change the duration of its steps from `now` on."""
        ratio, self.slowdown = slowdown / self.slowdown, slowdown
        if self.busy and ratio != 1:
            # The same share of the steps is done.
            self.since, self.until = now - (now - self.since) * ratio, now + (self.until - now) * ratio
            self._seconds *= ratio
            self.version += 1

    def add(self, request: SimulatedRequest, now: float) -> None:
        """Add a request; it joins at the end of the step that is computed now."""
        request.arrived = now
        self.waiting.append(request)
        if not self.busy:
            self._start(now)
        elif not self._chunks and self._steps > 1:
            self._shorten(max(1, math.ceil((now - self.since) / self._seconds)))

    def finish(self) -> list[SimulatedRequest]:
        """End the steps at `until` and start the next; the finished requests."""
        now, ended = self.until, []
        for request in self.decode:
            request.left -= self._steps
            if request.left <= 0:
                ended.append(request)
        if ended:
            self.decode = [request for request in self.decode if request.left > 0]
        for request, tokens in self._chunks:
            request.left -= tokens
            request.position += tokens
            if request.left == 0:
                ended += self._end_prefill(request, now)
        for request in ended:
            answered = (*request.path[:-1], (request.path[-1][0], request.path[-1][1] + request.answer_tokens))
            self.cache.insert(answered)
        self._start(now)
        return ended

    def _end_prefill(self, request: SimulatedRequest, now: float) -> list[SimulatedRequest]:
        request.first, request.left = now, request.answer_tokens - 1
        self.prefill.remove(request)
        self.cache.insert(request.path)
        if request.left == 0:
            return [request]
        self.decode.append(request)
        return []

    def _start(self, now: float) -> None:
        while self.waiting and len(self.prefill) + len(self.decode) < self.slots:
            self.prefill.append(self.waiting.popleft())
        self.since, self._chunks, self._steps = now, [], 1
        context = sum(request.prompt_tokens + request.answer_tokens - request.left for request in self.decode)
        self._seconds = self.slowdown * self.costs.decode(len(self.decode), context)
        if self.prefill:
            self._seconds += self.slowdown * self._take_chunks()
        elif self.decode:
            self._steps = min(request.left for request in self.decode)
        else:
            self._steps = 0
        self.version += 1
        self.until = now + self._steps * self._seconds if self._steps else math.inf

    def _take_chunks(self) -> float:
        """Give prefill tokens to the requests in their order; the seconds of all by the costs."""
        target = max(TARGET_SECONDS, TARGET_STEPS * self._seconds) if self.decode else ALONE_SECONDS
        allowed, used = (target - self._seconds) / self.slowdown, 0.0
        least = LEAST_TOKENS if self.decode else LEAST_TOKENS_ALONE
        for request in self.prefill:
            if request.left == 0:
                # Requests of one step that share a prefix wait for the first of them, like in the scheduler.
                if any(request.path[0] == other.path[0] for other, _ in self._chunks):
                    continue
                self._look_up(request)
                used += self.costs.reading(request.prompt_tokens)
            fitting = max(self.costs.fitting_tokens(allowed - used, request.position), 0)
            tokens = min(request.left, fitting if self._chunks else max(fitting, least))
            if tokens == 0:
                break
            self._chunks.append((request, tokens))
            used += self.costs.prefill(tokens, request.position)
        return used

    def _look_up(self, request: SimulatedRequest) -> None:
        request.cached = min(self.cache.match(request.path), request.prompt_tokens - 1)
        request.left, request.position = request.prompt_tokens - request.cached, request.cached

    def _shorten(self, steps: int) -> None:
        self._steps = min(steps, self._steps)
        self.until = self.since + self._steps * self._seconds
        self.version += 1
