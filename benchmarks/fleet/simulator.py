"""Discrete events of a fleet: arrivals of turns, ends of steps, failures of replicas, on one heap."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.samples import percentile
from benchmarks.fleet.costs import ServerCosts
from benchmarks.fleet.policies import Policy
from benchmarks.fleet.replica import PrefixCache, SimulatedReplica, SimulatedRequest
from benchmarks.fleet.workload import Conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Size of a fleet: replicas, slots and cells (tokens in the cache) of each, and the share that fails midway.

    slowdowns  of steps while 1, 2, ... replicas compute, if all are on one machine; (): each has a machine of its own
    """

    replicas: int
    slots: int
    cells: int
    failures: float = 0.0
    seed: int = 0
    slowdowns: tuple[float, ...] = ()


@dataclass(slots=True)
class FleetResult:
    """Requests with an answer, in the order of their ends, and the mean load of each replica that did not fail.

    interrupted  requests that a failure ended after their first token; they are sent again
    rerouted     requests that a failure ended before their first token
    """

    finished: list[SimulatedRequest] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    interrupted: int = 0
    rerouted: int = 0

    @property
    def hit_share(self) -> float:
        """Cached prompt tokens over all prompt tokens."""
        return sum(one.cached for one in self.finished) / sum(one.prompt_tokens for one in self.finished)

    def first_token(self, share: float) -> float:
        """A percentile of the seconds to the first token."""
        return percentile((one.first - one.asked for one in self.finished if one.first is not None), share) or 0.0

    @property
    def imbalance(self) -> float:
        """The largest load over the mean."""
        return max(self.loads) / (sum(self.loads) / len(self.loads))


class Fleet:
    """A simulated fleet; `run` may be called once."""

    def __init__(
        self,
        options: FleetOptions,
        costs: ServerCosts,
        policy: Callable[[Sequence[str], dict[str, int], int], Policy],
        found: Sequence[Conversation],
    ) -> None:
        names = [f"r{number}" for number in range(options.replicas)]
        self._options, self._conversations = options, found
        self._replicas = {name: SimulatedReplica(costs, options.slots, PrefixCache(options.cells)) for name in names}
        self._loads = dict.fromkeys(names, 0)
        self._policy = policy(names, self._loads, options.seed)
        self._events: list[tuple[float, int, str, int]] = []
        self._number = 0
        self._asks: dict[int, SimulatedRequest] = {}
        self._busy = dict.fromkeys(names, 0.0)
        self._failed: set[str] = set()
        self.result = FleetResult()

    def run(self) -> FleetResult:
        """Simulate all conversations to their ends."""
        for number, conversation in enumerate(self._conversations):
            self._ask(number, 0, conversation.start)
        if self._options.failures:
            self._push(self._conversations[-1].start / 2, "", -1)
        while self._events:
            now, _, name, version = heapq.heappop(self._events)
            if name:
                self._finish(name, version)
            elif version >= 0:
                self._route(self._asks.pop(version), now)
            else:
                self._fail(now)
        seconds = max(one.first or 0.0 for one in self.result.finished)
        self.result.loads = [self._busy[name] / seconds for name in self._replicas if name not in self._failed]
        return self.result

    def _push(self, time: float, name: str, version: int) -> None:
        self._number += 1
        heapq.heappush(self._events, (time, self._number, name, version))

    def _ask(self, conversation: int, turn: int, time: float) -> None:
        found = self._conversations[conversation]
        prompt = found.prompt_tokens(turn)
        path = ((found.group, found.system_tokens), (found.name, prompt - found.system_tokens))
        request = SimulatedRequest(conversation, turn, time, path, found.turns[turn].answer_tokens)
        self._number += 1
        self._asks[self._number] = request
        self._push(time, "", self._number)

    def _route(self, request: SimulatedRequest, now: float) -> None:
        keys = self._conversations[request.conversation].keys(request.turn)
        name = self._policy.choose(keys)
        replica = self._replicas[name]
        before = replica.version
        replica.add(request, now)
        self._load(name, 1)
        if replica.version != before:
            self._push(replica.until, name, replica.version)
            self._share_processors(now)

    def _finish(self, name: str, version: int) -> None:
        replica = self._replicas[name]
        if version != replica.version or name in self._failed:
            return
        now = replica.until
        for request in replica.finish():
            self._load(name, -1)
            self._busy[name] += now - request.arrived
            self.result.finished.append(request)
            turns = self._conversations[request.conversation].turns
            if request.turn + 1 < len(turns):
                self._ask(request.conversation, request.turn + 1, now + turns[request.turn + 1].pause)
        if replica.load:
            self._push(replica.until, name, replica.version)
        self._share_processors(now)

    def _share_processors(self, now: float) -> None:
        """Change the duration of all running steps after a change in the number of computing replicas."""
        if not self._options.slowdowns:
            return
        slowdown = self._options.slowdowns[max(sum(replica.busy for replica in self._replicas.values()), 1) - 1]
        for name, replica in self._replicas.items():
            before = replica.version
            replica.slow_down(slowdown, now)
            if replica.version != before:
                self._push(replica.until, name, replica.version)

    def _load(self, name: str, change: int) -> None:
        self._loads[name] += change
        self._policy.changed(name)

    def _fail(self, now: float) -> None:
        """End a share of the replicas; their requests are sent again to the others."""
        count = round(self._options.failures * len(self._replicas))
        self._failed = set(random.Random(f"failures {self._options.seed}").sample(sorted(self._replicas), count))
        lost = [request for name in sorted(self._failed) for request in self._replicas[name].requests()]
        for name in self._failed:
            del self._loads[name]
        self._policy.replace(set(self._loads))
        for request in lost:
            self.result.interrupted += request.first is not None
            self.result.rerouted += request.first is None
            # The router sends a request without output again itself; the client repeats one with output.
            asked = request.asked if request.first is None else now
            self._route(
                SimulatedRequest(request.conversation, request.turn, asked, request.path, request.answer_tokens), now
            )
