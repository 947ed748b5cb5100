"""The choice of a replica: the one of the conversation, else one with the longest known prefix, else two by their load.

Affinity ends at a limit of load: a replica is passed over if the least loaded of four has clearly fewer requests. So a
popular prefix spreads over as many replicas as its requests need.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import islice

from server.affinity.keys import RequestKeys
from server.affinity.memory import KEYS_PER_REPLICA, PrefixMemory
from server.affinity.ring import HashRing, position

# Extra requests that a replica may have, over the least loaded of four, before a known prefix, or a conversation, no
# longer decides: of the pairs from (1, 2) to (8, 16) the fastest in benchmarks/fleet/simulate.py at 60 and 90 % of the
# capacity of 100 replicas with 8 slots.
PREFIX_WORTH, CONVERSATION_WORTH = 4, 8
# Replicas of one answer of the chooser: the first gets the request, the others follow where it fails.
CHOICES = 4


class ReplicaChooser:
    """Chooses replicas for requests by their keys and by the keys of earlier requests; one thread owns it.

    keys_per_replica  bound of the memory: keys of one replica
    """

    def __init__(self, replicas: Collection[str] = (), *, keys_per_replica: int = KEYS_PER_REPLICA) -> None:
        self._ring = HashRing(replicas)
        self._memory = PrefixMemory(keys_per_replica)
        self._recorded = 0

    @property
    def replicas(self) -> frozenset[str]:
        """All replicas, available or not."""
        return self._ring.replicas

    @property
    def known_keys(self) -> int:
        """Keys in the memory."""
        return len(self._memory)

    def replace(self, replicas: Collection[str]) -> None:
        """Change the replicas; keys of a removed one are dropped. O(n): to be called after a change."""
        for removed in self.replicas.difference(replicas):
            self._memory.remove(removed)
        self._ring.replace(replicas)

    def record(self, keys: RequestKeys, replica: str) -> None:
        """Record that a replica got a request: its cache has the prompt from now on."""
        self._recorded += 1
        if replica not in self.replicas:
            return
        # The shortest prefix is added, and therefore dropped, last.
        self._memory.add(replica, keys.prefixes)
        if keys.conversation:
            self._memory.move(replica, keys.conversation)

    def choose(self, keys: RequestKeys, loads: Mapping[str, float]) -> tuple[str, ...]:
        """Up to CHOICES replicas for a request, the best first; none if no known replica is available.

        loads  running and waiting requests of each available replica; a replica without an entry is never chosen
        """
        spread = self._least_loaded(keys, loads)
        if not spread:
            return ()
        best = spread[0]
        first = next((replica for replica in self._affine(keys, loads, loads[best])), best)
        return tuple(dict.fromkeys((first, *spread)))[:CHOICES]

    def _affine(self, keys: RequestKeys, loads: Mapping[str, float], reference: float) -> Iterator[str]:
        """Replicas below the limit of load: of the conversation, then of the prefixes, the longest first."""
        limit = reference + CONVERSATION_WORTH
        for replica in self._memory.holders(keys.conversation):
            if loads.get(replica, limit) < limit:
                yield replica
        limit = reference + PREFIX_WORTH
        for key in keys.prefixes:
            holders = self._memory.holders(key)
            two = (holders[self._draw(number) % len(holders)] for number in range(2)) if holders else ()
            yield from sorted(
                (replica for replica in two if loads.get(replica, limit) < limit), key=lambda replica: loads[replica]
            )

    def _least_loaded(self, keys: RequestKeys, loads: Mapping[str, float]) -> list[str]:
        """Four available replicas at most, by load: two neighbours of the conversation on the ring, and two at random.

        The neighbours come first among equals, so that routers without a common memory agree.
        """
        home = keys.conversation or (keys.prefixes[0] if keys.prefixes else str(self._recorded))
        four = dict.fromkeys((*self._available(home, loads), *self._available(str(self._recorded), loads)))
        return sorted(four, key=lambda replica: loads[replica])

    def _available(self, key: str, loads: Mapping[str, float]) -> list[str]:
        return list(islice((replica for replica in self._ring.walk(key) if replica in loads), 2))

    def _draw(self, number: int) -> int:
        return position(f"{self._recorded} {number}")
