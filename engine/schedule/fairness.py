"""Fair sharing of slots between owners, and between the requests of an owner.

Max-min fairness over slots: the owner with the fewest slots comes first, then its request with the fewest. Ties are
decided by deficit round robin over computed tokens (Shreedhar and Varghese, SIGCOMM 1995). A request of 64 sequences
gets all slots while no other request waits, and is preempted for later ones. Sequences of a request keep their order.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Iterable
from collections.abc import Sequence as Rows
from typing import Generic, TypeVar

from engine.schedule.sequence import Sequence

# Credit in tokens that a flow in debt gets in each round, and the maximum debt: they bound the rounds that it waits.
QUANTUM = 512
MAX_DEBT = 8 * QUANTUM

Flow = TypeVar("Flow", bound=Hashable)


class DeficitRoundRobin(Generic[Flow]):
    """Deficit round robin over flows; a flow has one or more sequences."""

    def __init__(self) -> None:
        # In the order of the round, first flow first.
        self._credit: OrderedDict[Flow, int] = OrderedDict()
        self._members: Counter[Flow] = Counter()

    def add(self, flow: Flow) -> None:
        """Add a sequence to a flow; a new flow is the last of the round."""
        self._members[flow] += 1
        self._credit.setdefault(flow, QUANTUM)

    def remove(self, flow: Flow) -> None:
        """Remove a sequence from a flow, and the flow with its last sequence."""
        self._members[flow] -= 1
        if not self._members[flow]:
            del self._members[flow], self._credit[flow]

    def charge(self, flow: Flow, tokens: int) -> None:
        """Subtract computed tokens from the credit; no effect on a flow whose last sequence failed in this step."""
        if flow in self._credit:
            self._credit[flow] = max(self._credit[flow] - tokens, -MAX_DEBT)

    def choose(self, flows: Collection[Flow]) -> Flow:
        """The first of these flows with credit; each flow in debt before it gets a quantum and moves to the end."""
        while True:
            for flow in [flow for flow in self._credit if flow in flows]:
                if self._credit[flow] > 0:
                    return flow
                self._credit[flow] += QUANTUM
                self._credit.move_to_end(flow)

    def move_last(self, flow: Flow) -> None:
        """Move a flow that got a slot to the end of the round."""
        self._credit.move_to_end(flow)

    def move_first(self, flow: Flow) -> None:
        """Move a flow that lost a slot to a lack of cells to the start of the round, with credit."""
        self._credit[flow] = max(self._credit[flow], 1)
        self._credit.move_to_end(flow, last=False)


class Fairness:
    """Decides admission and preemption for the slots of one scheduler."""

    def __init__(self) -> None:
        self._owners: DeficitRoundRobin[str] = DeficitRoundRobin()
        self._requests: DeficitRoundRobin[tuple[str, str]] = DeficitRoundRobin()

    def add(self, sequence: Sequence) -> None:
        """Add a submitted sequence."""
        self._owners.add(sequence.owner)
        self._requests.add(sequence.group)

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished sequence."""
        self._owners.remove(sequence.owner)
        self._requests.remove(sequence.group)

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """Charge computed tokens to the owner and the request of a sequence."""
        self._owners.charge(sequence.owner, tokens)
        self._requests.charge(sequence.group, tokens)

    def slot_assigned(self, sequence: Sequence) -> None:
        """Record that a sequence got a slot."""
        self._owners.move_last(sequence.owner)
        self._requests.move_last(sequence.group)

    def slot_lost(self, sequence: Sequence) -> None:
        """Record that a sequence lost its slot to a lack of cells."""
        self._requests.move_first(sequence.group)

    def next_admission(self, waiting: Iterable[Sequence], running: Iterable[Sequence]) -> Sequence | None:
        """The ready waiting sequence of the first rank that gets the next free slot, if any."""
        ready, (owners, requests) = _admissible(waiting), _count_slots(running)
        if not ready:
            return None
        owner = self._owners.choose(_with_fewest_slots({one.owner for one in ready}, owners))
        return self._first_of_owner(owner, ready, requests)

    def find_preemption(self, waiting: Iterable[Sequence], running: Rows[Sequence]) -> tuple[Sequence, Sequence] | None:
        """A waiting sequence and the running one to preempt for it; None: preemption would make no share fairer.

        The victim belongs to an owner with at least two slots more than the owner of the waiting sequence, or else to a
        request of the same owner with at least two more. A better rank is never preempted.
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
        """The first waiting sequence of an owner."""
        group = self._requests.choose(_with_fewest_slots({one.group for one in ready if one.owner == owner}, requests))
        return next(one for one in ready if one.group == group)

    def preemption_victim(self, running: Rows[Sequence]) -> Sequence:
        """The running sequence to preempt when cells run out."""
        return _latest_of_largest(running, *_count_slots(running))


def _admissible(waiting: Iterable[Sequence]) -> list[Sequence]:
    """The ready sequences of the first waiting rank."""
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
    """Slots by owner, and by request."""
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
    """The youngest sequence of the last rank, of the owner and the request with the most slots."""
    return max(reversed(running), key=lambda one: (one.rank, owners[one.owner], requests[one.group]))
