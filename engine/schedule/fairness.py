"""Fair sharing of slots between owners, and between the requests of an owner.

Max-min fairness over slots: the owner with the fewest slots comes first, then its request with the fewest. Ties are
decided by deficit round robin over computed tokens (Shreedhar and Varghese, SIGCOMM 1995); every second slot goes to a
flow that had none before. A request of 64 sequences gets all slots while no other request waits, and is preempted for
later ones. Equal requests take turns: a sequence that has used up its time slice is preempted for one that waits.
Sequences of a request keep their order.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Iterable
from collections.abc import Sequence as Rows
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.schedule.sequence import Sequence

# Credit in tokens that a flow in debt gets in each round, and the maximum debt: they bound the rounds that it waits.
QUANTUM = 512
MAX_DEBT = 8 * QUANTUM
# Computed steps after which a sequence is preempted for an equal one.
TIME_SLICE_STEPS = 32
# Further steps for each token that would be evicted and computed again: recomputation stays a small part.
_STEPS_PER_EVICTED_TOKEN = 4

Flow = TypeVar("Flow", bound=Hashable)


class DeficitRoundRobin(Generic[Flow]):
    """Deficit round robin over flows; a flow has one or more sequences."""

    def __init__(self) -> None:
        # In the order of the round, first flow first.
        self._credit: OrderedDict[Flow, int] = OrderedDict()
        self._members: Counter[Flow] = Counter()
        # Flows that got a slot before, and whether the next slot is for one that got none.
        self._served: set[Flow] = set()
        self._prefers_new = True

    def add(self, flow: Flow) -> None:
        """Add a sequence to a flow; a new flow is the last of the round."""
        self._members[flow] += 1
        self._credit.setdefault(flow, QUANTUM)

    def remove(self, flow: Flow) -> None:
        """Remove a sequence from a flow, and the flow with its last sequence."""
        self._members[flow] -= 1
        if not self._members[flow]:
            del self._members[flow], self._credit[flow]
            self._served.discard(flow)

    def was_served(self, flow: Flow) -> bool:
        """Whether a flow got a slot before."""
        return flow in self._served

    def charge(self, flow: Flow, tokens: int) -> None:
        """Subtract computed tokens from the credit; no effect on a flow after its last sequence failed in the step."""
        if flow in self._credit:
            self._credit[flow] = max(self._credit[flow] - tokens, -MAX_DEBT)

    def choose(self, flows: Collection[Flow]) -> Flow:
        """The first of these flows with credit; each flow in debt before it gets a quantum and moves to the end.

        Flows that had no slot before and others are preferred alternately.
        """
        preferred = {flow for flow in flows if (flow not in self._served) == self._prefers_new} or flows
        while True:
            for flow in [flow for flow in self._credit if flow in preferred]:
                if self._credit[flow] > 0:
                    return flow
                self._credit[flow] += QUANTUM
                self._credit.move_to_end(flow)

    def move_last(self, flow: Flow) -> None:
        """Move a flow that got a slot to the end of the round."""
        self._credit.move_to_end(flow)
        self._prefers_new = flow in self._served
        self._served.add(flow)

    def move_first(self, flow: Flow) -> None:
        """Move a flow that lost a slot to a lack of cells to the start of the round, with credit."""
        self._credit[flow] = max(self._credit[flow], 1)
        self._credit.move_to_end(flow, last=False)


class OwnerTurns:
    """Turns of owners that come and go: the owner with the fewest is next, of equal ones the first in the queue.

    A new owner has as many turns as the latest one, so that it delays no other owner more than once.
    """

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}
        self._latest = 0

    def choose(self, queue: Rows[Sequence]) -> Sequence:
        """The sequence with the next turn."""
        self._turns = {sequence.owner: self._turns.get(sequence.owner, self._latest + 1) for sequence in queue}
        chosen = min(queue, key=lambda sequence: self._turns[sequence.owner])
        self._latest = self._turns[chosen.owner]
        self._turns[chosen.owner] += 1
        return chosen


class Fairness:
    """Decides admission and preemption for the slots of one scheduler."""

    def __init__(self) -> None:
        self._owners: DeficitRoundRobin[str] = DeficitRoundRobin()
        self._requests: DeficitRoundRobin[tuple[str, str]] = DeficitRoundRobin()
        # Steps that each running sequence computed since it got its slot.
        self._steps: dict[Sequence, int] = {}

    def add(self, sequence: Sequence) -> None:
        """Add a submitted sequence; an exception leaves the shares as they were."""
        with ExitStack() as undo:
            self._owners.add(sequence.owner)
            undo.callback(self._owners.remove, sequence.owner)
            self._requests.add(sequence.group)
            undo.pop_all()

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished sequence."""
        self._owners.remove(sequence.owner)
        self._requests.remove(sequence.group)

    def charge(self, sequence: Sequence, tokens: int) -> bool:
        """Charge the computed tokens of a step to the owner and the request of a sequence.

        Whether its time slice has ended.
        """
        self._owners.charge(sequence.owner, tokens)
        self._requests.charge(sequence.group, tokens)
        if sequence not in self._steps:
            return False
        self._steps[sequence] += 1
        return self._steps[sequence] >= TIME_SLICE_STEPS

    def is_new(self, sequence: Sequence) -> bool:
        """Whether its request never got a slot: such requests of an owner get their first slots in order."""
        return not self._requests.was_served(sequence.group)

    def least_steps(self, sequence: Sequence, waiting: Sequence, running: Iterable[Sequence]) -> int:
        """Steps before a running sequence may be preempted for a waiting one."""
        if sequence.is_unread or _Shares(running).excess(sequence, waiting) > 1:
            return 0
        return max(TIME_SLICE_STEPS - self._steps[sequence], 0)

    def slot_assigned(self, sequence: Sequence) -> None:
        """Record that a sequence got a slot."""
        self._owners.move_last(sequence.owner)
        self._requests.move_last(sequence.group)
        self._steps[sequence] = 0

    def slot_released(self, sequence: Sequence) -> None:
        """Record that a sequence has no slot any more."""
        self._steps.pop(sequence, None)

    def slot_lost(self, sequence: Sequence) -> None:
        """Record that a sequence lost its slot to a lack of cells."""
        self._requests.move_first(sequence.group)

    def next_admission(self, waiting: Iterable[Sequence], running: Iterable[Sequence]) -> Sequence | None:
        """The ready waiting sequence of the first rank that gets the next free slot, if any."""
        ready, shares = _admissible(waiting), _Shares(running)
        ready = [sequence for sequence in ready if not sequence.is_unread] or ready
        if not ready:
            return None
        owner = self._owners.choose(_with_fewest_slots({sequence.owner for sequence in ready}, shares.owners))
        return self._first_of_owner(owner, ready, shares)

    def find_preemption(self, waiting: Iterable[Sequence], running: Rows[Sequence], cells: int) -> Preemption | None:
        """The preemption that makes the shares of slots fairer, now or over time; None: there is none.

        The victim belongs to an owner with at least two slots more than the owner of the waiting sequence, or else to a
        request of the same owner with at least two more. With one slot more it is preempted at the end of its time
        slice, or at once if its output is not read. Time slices are longer if the sequences that got a slot before need
        more than `cells`. A better rank is never preempted.
        """
        waiting = tuple(waiting)
        started_tokens = sum(len(sequence.tokens) for sequence in (*running, *waiting) if sequence.has_started)
        free_tokens = cells - started_tokens
        ready, shares = [sequence for sequence in _admissible(waiting) if not sequence.is_unread], _Shares(running)
        # An older sequence whose return would evict many cells does not delay the first token of a new one.
        new = [sequence for sequence in ready if not sequence.has_started]
        first = self._find_preemption(ready, running, shares, free_tokens)
        return first or (self._find_preemption(new, running, shares, free_tokens) if len(new) < len(ready) else None)

    def _find_preemption(
        self, ready: Rows[Sequence], running: Rows[Sequence], shares: _Shares, free_tokens: int
    ) -> Preemption | None:
        """For the first ready sequence that gets a slot."""
        owners = {sequence.owner for sequence in ready}
        while owners:
            owner = self._owners.choose(_with_fewest_slots(owners, shares.owners))
            owners.remove(owner)
            next_admitted = self._first_of_owner(owner, ready, shares)
            served = [sequence for sequence in running if sequence.rank >= next_admitted.rank]
            excess = {sequence: shares.excess(sequence, next_admitted) for sequence in served}
            others = [sequence for sequence in served if sequence.owner != owner and excess[sequence] > 1]
            same = [sequence for sequence in served if sequence.owner == owner and excess[sequence] > 1]
            if others or same:
                return Preemption(next_admitted, shares.latest_of_largest(others or same))
            added = 0 if next_admitted.has_started else len(next_admitted.tokens)
            evicted = len(next_admitted.tokens) if added > free_tokens else 0
            equal = [
                sequence
                for sequence in served
                if excess[sequence] == 1 and (sequence.is_unread or self._slice_ended(sequence, evicted))
            ]
            if equal:
                victim = max(equal, key=lambda sequence: (sequence.rank, sequence.is_unread, self._steps[sequence]))
                return Preemption(next_admitted, victim, is_time_slice=True)
        return None

    def _slice_ended(self, sequence: Sequence, evicted: int) -> bool:
        """Whether the slot of a running sequence goes to an equal one, for which `evicted` cells are evicted."""
        steps = TIME_SLICE_STEPS + _STEPS_PER_EVICTED_TOKEN * min(evicted, len(sequence.tokens))
        return self._steps[sequence] >= steps

    def _first_of_owner(self, owner: str, ready: Rows[Sequence], shares: _Shares) -> Sequence:
        """The first waiting sequence of an owner."""
        groups = {sequence.group for sequence in ready if sequence.owner == owner}
        group = self._requests.choose(_with_fewest_slots(groups, shares.requests))
        return next(sequence for sequence in ready if sequence.group == group)

    def preemption_victim(self, running: Rows[Sequence]) -> Sequence:
        """The running sequence to preempt when cells run out: one whose output is not read, if there is one."""
        unread = [sequence for sequence in running if sequence.is_unread]
        return _Shares(running).latest_of_largest(unread or running)


@dataclass(frozen=True, slots=True)
class Preemption:
    """A waiting sequence, the running one to preempt for it, and whether the shares are equal: a time slice ended."""

    sequence: Sequence
    victim: Sequence
    is_time_slice: bool = False


class _Shares:
    """Slots by owner, and by request."""

    def __init__(self, running: Iterable[Sequence]) -> None:
        self.owners: Counter[str] = Counter()
        self.requests: Counter[tuple[str, str]] = Counter()
        for sequence in running:
            self.owners[sequence.owner] += 1
            self.requests[sequence.group] += 1

    def excess(self, running: Sequence, waiting: Sequence) -> int:
        """Slots that the owner of a running sequence has more than the waiting one's; of one owner, its request."""
        if running.owner != waiting.owner:
            return self.owners[running.owner] - self.owners[waiting.owner]
        return self.requests[running.group] - self.requests[waiting.group]

    def latest_of_largest(self, running: Rows[Sequence]) -> Sequence:
        """The youngest sequence of the last rank, of the owner and the request with the most slots."""
        return max(
            reversed(running),
            key=lambda sequence: (sequence.rank, self.owners[sequence.owner], self.requests[sequence.group]),
        )


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


def _with_fewest_slots(flows: Collection[Flow], slots: Counter[Flow]) -> set[Flow]:
    fewest = min(slots[flow] for flow in flows)
    return {flow for flow in flows if slots[flow] == fewest}
