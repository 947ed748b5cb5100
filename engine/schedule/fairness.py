"""Which sequence gets a slot: fair by owner, and within an owner by request.

Slots are shared max-min: the owner with the fewest slots comes first, then its request with the fewest. Among equals
decides deficit round robin over computed tokens (Shreedhar and Varghese, SIGCOMM 1995). So a request of 64 sequences
has all slots while no other request waits, and is preempted for requests that come later. Within a request the order
is that of the queue.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Iterable
from collections.abc import Sequence as Rows
from typing import Generic, TypeVar

from engine.schedule.sequence import Sequence

# Tokens of credit that a flow in debt gets in each round, and of debt at most: a bound to the rounds it waits.
QUANTUM = 512
MAX_DEBT = 8 * QUANTUM

Flow = TypeVar("Flow", bound=Hashable)


class DeficitRoundRobin(Generic[Flow]):
    """Deficit round robin over flows, each of which has sequences."""

    def __init__(self) -> None:
        # In the order of the round.
        self._credit: OrderedDict[Flow, int] = OrderedDict()
        self._members: Counter[Flow] = Counter()

    def add(self, flow: Flow) -> None:
        """The flow gets a sequence; a new flow is the last of the round."""
        self._members[flow] += 1
        self._credit.setdefault(flow, QUANTUM)

    def remove(self, flow: Flow) -> None:
        """A sequence of the flow is over; a flow without one is forgotten."""
        self._members[flow] -= 1
        if not self._members[flow]:
            del self._members[flow], self._credit[flow]

    def charge(self, flow: Flow, tokens: int) -> None:
        """The flow used so much; one whose last sequence failed in this step is forgotten already."""
        if flow in self._credit:
            self._credit[flow] = max(self._credit[flow] - tokens, -MAX_DEBT)

    def choose(self, flows: Collection[Flow]) -> Flow:
        """The first of these flows that has credit; a flow in debt gets a quantum when it is passed over."""
        while True:
            for flow in [flow for flow in self._credit if flow in flows]:
                if self._credit[flow] > 0:
                    return flow
                self._credit[flow] += QUANTUM
                self._credit.move_to_end(flow)

    def move_last(self, flow: Flow) -> None:
        """The flow got a slot, and is the last of the round now."""
        self._credit.move_to_end(flow)

    def move_first(self, flow: Flow) -> None:
        """The flow lost a slot for no use of its own, and is the first to get one again."""
        self._credit[flow] = max(self._credit[flow], 1)
        self._credit.move_to_end(flow, last=False)


class Fairness:
    """The shares of owners and requests in the slots of one scheduler."""

    def __init__(self) -> None:
        self._owners: DeficitRoundRobin[str] = DeficitRoundRobin()
        self._requests: DeficitRoundRobin[tuple[str, str]] = DeficitRoundRobin()

    def add(self, sequence: Sequence) -> None:
        """A sequence was submitted."""
        self._owners.add(sequence.owner)
        self._requests.add(sequence.group)

    def remove(self, sequence: Sequence) -> None:
        """A sequence is over."""
        self._owners.remove(sequence.owner)
        self._requests.remove(sequence.group)

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """So many tokens were computed for a sequence."""
        self._owners.charge(sequence.owner, tokens)
        self._requests.charge(sequence.group, tokens)

    def slot_assigned(self, sequence: Sequence) -> None:
        """A sequence got a slot."""
        self._owners.move_last(sequence.owner)
        self._requests.move_last(sequence.group)

    def slot_lost(self, sequence: Sequence) -> None:
        """A sequence lost its slot because cells ran out."""
        self._requests.move_first(sequence.group)

    def next_admission(self, waiting: Iterable[Sequence], running: Iterable[Sequence]) -> Sequence | None:
        """The waiting sequence that gets a free slot: of the first rank, and ready; None: there is none."""
        ready, (owners, requests) = _admissible(waiting), _count_slots(running)
        if not ready:
            return None
        owner = self._owners.choose(_with_fewest_slots({one.owner for one in ready}, owners))
        return self._first_of_owner(owner, ready, requests)

    def find_preemption(self, waiting: Iterable[Sequence], running: Rows[Sequence]) -> tuple[Sequence, Sequence] | None:
        """A waiting sequence, and the running one to preempt for it; None: preemption would make no share fairer.

        The victim belongs to an owner that has two slots more than the owner of the waiting sequence. Where there is no
        such owner, it belongs to a request of the same owner that has two more. A better rank is never preempted.
        """
        ready, (owners, requests) = _admissible(waiting), _count_slots(running)
        for owner in sorted({one.owner: None for one in ready}, key=lambda owner: owners[owner]):
            sequence = self._first_of_owner(owner, ready, requests)
            served = [one for one in running if one.rank >= sequence.rank]
            others = [one for one in served if owners[one.owner] > owners[owner] + 1]
            same = [one for one in served if one.owner == owner]
            own = [one for one in same if requests[one.group] > requests[sequence.group] + 1]
            if others or own:
                return sequence, _latest_of_largest(others or own, owners, requests)
        return None

    def _first_of_owner(self, owner: str, ready: Rows[Sequence], requests: Counter[tuple[str, str]]) -> Sequence:
        """The sequence of an owner that comes first."""
        group = self._requests.choose(_with_fewest_slots({one.group for one in ready if one.owner == owner}, requests))
        return next(one for one in ready if one.group == group)

    def preemption_victim(self, running: Rows[Sequence]) -> Sequence:
        """The running sequence to preempt where cells run out."""
        return _latest_of_largest(running, *_count_slots(running))


def _admissible(waiting: Iterable[Sequence]) -> list[Sequence]:
    """Those of the first rank that may have a slot."""
    ready: list[Sequence] = []
    rank: int | None = None
    for sequence in waiting:
        rank = sequence.rank if rank is None else rank
        if sequence.rank > rank:
            break
        if sequence.is_ready:
            ready.append(sequence)
    return ready


def _count_slots(running: Iterable[Sequence]) -> tuple[Counter[str], Counter[tuple[str, str]]]:
    """The slots of each owner and of each request."""
    owners: Counter[str] = Counter()
    requests: Counter[tuple[str, str]] = Counter()
    for sequence in running:
        owners[sequence.owner] += 1
        requests[sequence.group] += 1
    return owners, requests


def _with_fewest_slots(flows: Collection[Flow], slots: Counter[Flow]) -> set[Flow]:
    fewest = min(slots[flow] for flow in flows)
    return {flow for flow in flows if slots[flow] == fewest}


def _latest_of_largest(running: Rows[Sequence], owners: Counter[str], requests: Counter[tuple[str, str]]) -> Sequence:
    """Of the last rank the youngest, where slots are the most."""
    return max(reversed(running), key=lambda one: (one.rank, owners[one.owner], requests[one.group]))
