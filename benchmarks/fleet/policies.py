"""Routing policies of the simulated fleet: the shipped one, and those of other routers."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from server.affinity.chooser import ReplicaChooser
from server.affinity.keys import RequestKeys
from server.affinity.ring import HashRing


class Policy(Protocol):
    """Chooses the replica of each request; it has the loads of all replicas, exact at any time."""

    def choose(self, keys: RequestKeys) -> str:
        """The replica of a request, which it gets."""
        ...

    def replace(self, replicas: Collection[str]) -> None:
        """Change the replicas."""
        ...

    def changed(self, replica: str) -> None:
        """The load of a replica changed."""
        ...


class ListPolicy:
    """A policy over the list of replicas."""

    def __init__(self, replicas: Sequence[str], loads: dict[str, int], seed: int) -> None:
        self._loads, self._seed = loads, seed
        self._turns: Counter[str] = Counter()
        self._replicas = list(replicas)
        self.replace(replicas)

    def replace(self, replicas: Collection[str]) -> None:
        """See Policy."""
        self._replicas = sorted(replicas)

    def changed(self, replica: str) -> None:
        """See Policy."""

    def _numbers(self, keys: RequestKeys) -> random.Random:
        """Random numbers that depend on the conversation and the turn: the same in a simulation and in a real run."""
        self._turns[keys.conversation] += 1
        return random.Random(f"{self._seed} {keys.conversation} {self._turns[keys.conversation]}")


class RandomPolicy(ListPolicy):
    """Any replica."""

    def choose(self, keys: RequestKeys) -> str:
        """See Policy."""
        return self._numbers(keys).choice(self._replicas)


class RoundRobin(ListPolicy):
    """One replica after the other."""

    _number = 0

    def choose(self, keys: RequestKeys) -> str:
        """See Policy."""
        self._number += 1
        return self._replicas[self._number % len(self._replicas)]


class PowerOfTwo(ListPolicy):
    """The less loaded of two random replicas."""

    def choose(self, keys: RequestKeys) -> str:
        """See Policy."""
        numbers = self._numbers(keys)
        return min((numbers.choice(self._replicas) for _ in range(2)), key=self._loads.__getitem__)


class LeastLoaded(ListPolicy):
    """The least loaded of all replicas, by a heap with outdated entries."""

    def replace(self, replicas: Collection[str]) -> None:
        """See Policy."""
        super().replace(replicas)
        self._source = random.Random(f"policy {self._seed}")
        self._heap = [(self._loads[name], self._source.random(), name) for name in self._replicas]
        self._present = set(replicas)
        heapq.heapify(self._heap)

    def changed(self, replica: str) -> None:
        """See Policy."""
        if replica in self._present:
            heapq.heappush(self._heap, (self._loads[replica], self._source.random(), replica))

    def choose(self, keys: RequestKeys) -> str:
        """See Policy."""
        while self._heap[0][0] != self._loads[self._heap[0][2]]:
            heapq.heappop(self._heap)
        return self._heap[0][2]


class RingPolicy(ListPolicy):
    """The owner of a key on the ring."""

    def __init__(self, replicas: Sequence[str], loads: dict[str, int], seed: int) -> None:
        self._ring = HashRing()
        super().__init__(replicas, loads, seed)

    def replace(self, replicas: Collection[str]) -> None:
        """See Policy."""
        super().replace(replicas)
        self._ring.replace(replicas)


class ConversationHash(RingPolicy):
    """The owner of the conversation."""

    def choose(self, keys: RequestKeys) -> str:
        """See Policy."""
        return next(self._ring.walk(keys.conversation))


class PrefixHash(RingPolicy):
    """The owner of the first characters, the shortest prefix with a key."""

    def choose(self, keys: RequestKeys) -> str:
        """See Policy."""
        return next(self._ring.walk(keys.prefixes[-1]))


class BoundedHash(RingPolicy):
    """The owner of the conversation, or its first successor with at most 1.25 times the mean load (bounded loads)."""

    FACTOR = 1.25
    _total = 0

    def __init__(self, replicas: Sequence[str], loads: dict[str, int], seed: int) -> None:
        super().__init__(replicas, loads, seed)
        self._seen = dict(loads)

    def changed(self, replica: str) -> None:
        """See Policy."""
        self._total += self._loads[replica] - self._seen[replica]
        self._seen[replica] = self._loads[replica]

    def choose(self, keys: RequestKeys) -> str:
        """See Policy."""
        most = self.FACTOR * (self._total + 1) / len(self._replicas)
        walk = self._ring.walk(keys.conversation)
        return next(replica for replica in walk if self._loads[replica] < most)


class Affinity(ListPolicy):
    """The shipped policy: server.affinity."""

    def __init__(self, replicas: Sequence[str], loads: dict[str, int], seed: int) -> None:
        self._chooser = ReplicaChooser()
        super().__init__(replicas, loads, seed)

    def replace(self, replicas: Collection[str]) -> None:
        """See Policy."""
        self._chooser.replace(replicas)

    def choose(self, keys: RequestKeys) -> str:
        """See Policy."""
        replica = self._chooser.choose(keys, self._loads)[0]
        self._chooser.record(keys, replica)
        return replica


POLICIES: dict[str, Callable[[Sequence[str], dict[str, int], int], Policy]] = {
    "random": RandomPolicy,
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "power of two": PowerOfTwo,
    "prefix hash": PrefixHash,
    "conversation hash": ConversationHash,
    "bounded hash": BoundedHash,
    "affinity": Affinity,
}
