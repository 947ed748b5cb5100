"""Who gets drafts in a step, from which drafter, and what is learnt from what became of them.

Drafts are rows that may be worth tokens (verify.py decides that). They take no cell from anybody: where the cache is
full there are none, and nobody goes back to the queue for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from engine.draft.depth import Depth
from engine.draft.offer import Candidate
from engine.schedule.draft import Computed, Draft, Drafter, Reader, Want
from engine.schedule.sequence import Sequence as Running
from engine.schedule.step_cost import StepCost
from engine.types.request import MAX_DRAFT_TOKENS
from engine.types.status import DraftCounts

# Whom drafters may guess for, by their kind.
_Served: TypeAlias = Mapping[str, frozenset[Running]]
# A repetition of so many tokens may be likelier right than what a small model says.
_LONG = 4


class _Offer(NamedTuple):
    """What could be drafted for one sequence: `known` already, or else up to the limit."""

    sequence: Running
    drafter: Drafter
    limit: int
    known: tuple[int, ...] | None = None


class _Able(NamedTuple):
    """Whom a kind of drafter may guess for: everybody, and those among them who say themselves how many tokens."""

    kind: str
    everybody: frozenset[Running]
    settled: frozenset[Running]


class Speculation:
    """The drafters, and the depths of their drafts. Belongs to the engine thread.

    quick    drafts at next to no cost, so it is asked before the depth is chosen; None: there is none
    forced   the same, and is nearly always right, so it goes before all others; None: there is none
    slow     pays for each token of a draft, so it drafts what was chosen; None: there is none
    deepest  tokens of a draft at most
    reader   the one of them that guesses from what the model computes; None: nobody does
    """

    def __init__(
        self,
        quick: Drafter | None,
        slow: Drafter | None,
        depth: Depth,
        clock: Callable[[], float],
        *,
        deepest: int = MAX_DRAFT_TOKENS,
        forced: Drafter | None = None,
        reader: Reader | None = None,
    ) -> None:
        self._quick, self._slow, self._forced, self._reader = quick, slow, forced, reader
        self._depth, self._clock, self._deepest = depth, clock, deepest
        self._drafters = tuple(drafter for drafter in (quick, slow, forced) if drafter is not None)
        self._drafted = {drafter.kind: [0] * deepest for drafter in self._drafters}
        self._accepted = {drafter.kind: [0] * deepest for drafter in self._drafters}
        # The sequences of the latest step, its rows, and who may guess for them: mostly they are those of the next one.
        self._present: list[Running] = []
        self._rows = 0
        self._able: list[_Able] = []
        # In so many more steps like it the slow drafter drafts so deep for these, or nobody does for anybody.
        self._again = self._deep = 0
        self._followed: list[Running] = []
        # Seconds of this step that were spent on drafting, and on choosing how much.
        self._drafting = 0.0
        # Seconds that it took to let go of texts that were read: a part of what reading costs.
        self._leaving = 0.0
        # How much of the texts the slow drafter has read, by sequence.
        self._read: dict[str, int] = {}

    @property
    def reads(self) -> bool:
        """Whether anybody wants to be told what steps compute."""
        return self._reader is not None

    @property
    def cost(self) -> StepCost:
        """What steps cost, as far as is learnt from those that are told (`stepped`)."""
        return self._depth.cost

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of drafters that a request may choose from."""
        return tuple(drafter.kind for drafter in self._drafters if drafter is not self._forced)

    def counts(self) -> tuple[DraftCounts, ...]:
        """What became of all drafts that were verified."""
        return tuple(
            DraftCounts(kind, tuple(self._drafted[kind]), tuple(self._accepted[kind])) for kind in self._drafted
        )

    def draft(
        self, sequences: Sequence[Running], *, rows: int, running: int, room: Callable[[int], int]
    ) -> dict[Running, Draft]:
        """Drafts for sequences whose next token a step will tell, for those for whom they seem to pay.

        rows     of the step without drafts
        running  sequences that have a slot, those whose prompts are still read among them
        room     how many of so many drafts there is room for, of all sequences together
        """
        self._drafting = 0.0
        if sequences != self._present:
            self._present, self._able, self._again = list(sequences), self._find(sequences), 0
        elif self._again and rows == self._rows:
            self._again -= 1
            return self._once_more(room) if self._deep else {}
        self._rows = rows
        served, rests = self._served(rows, running)
        if not served:
            self._again, self._deep = rests - 1, 0
            return {}
        offers = self._offers(sequences, served, rows)
        depths = self._depths(offers, rows, running)
        self._again = 0
        if self._is_plain(offers, served):
            self._followed = [offer.sequence for offer in offers]
            self._deep, self._again = self._depth.again(offers[0].drafter.kind, rests - 1)
        return self._drafts(offers, depths, room)

    def _once_more(self, room: Callable[[int], int]) -> dict[Running, Draft]:
        """Drafts of the slow drafter as deep as before."""
        assert self._slow is not None, "nobody drafted"
        limits = [(one, self._limit(one)) for one in self._followed]
        offers = [_Offer(one, self._slow, limit) for one, limit in limits if limit > 0]
        return self._drafts(offers, [min(self._deep, offer.limit) for offer in offers], room)

    def _is_plain(self, offers: Sequence[_Offer], served: _Served) -> bool:
        """Whether only the slow drafter drafts, as deep for all, and has read what there is: so it may go on."""
        slow = self._slow
        if slow is None or not offers or served.keys() != {slow.kind} or any(able.settled for able in self._able):
            return False
        return all(self._unread(offer.sequence) <= self._deepest + 1 for offer in offers)

    def _drafts(self, offers: Sequence[_Offer], depths: list[int], room: Callable[[int], int]) -> dict[Running, Draft]:
        """What drafters make of offers at these depths, or less where there is no room."""
        wanted = sum(depths)
        left = room(wanted) if wanted else 0
        if left < wanted:
            taken = accumulate(depths[:-1], initial=0)
            depths = [max(min(depth, left - before), 0) for depth, before in zip(depths, taken, strict=True)]
        chosen = [(offer, depth) for offer, depth in zip(offers, depths, strict=True) if depth]
        return {offer.sequence: Draft(offer.drafter.kind, tokens) for offer, tokens in self._made(chosen) if tokens}

    def verified(self, draft: Draft, said: Sequence[int]) -> int:
        """Learn from what a sequence said where a draft stood: the tokens that `verify` took for it.

        Returns how many of the draft were said.
        """
        accepted = sum(token == guess for token, guess in zip(said, draft.tokens, strict=False))
        # Behind a wrong token, or the end of the text, nothing was compared.
        judged = min(len(draft.tokens), len(said))
        self._depth.verified(draft.kind, judged, accepted)
        for at in range(len(draft.tokens)):
            self._drafted[draft.kind][at] += 1
            self._accepted[draft.kind][at] += at < accepted
        return accepted

    def stepped(self, rows: int, seconds: float) -> None:
        """Learn what a step of so many rows took, with all that went into it.

        Not what the slow drafter took, which is known, and not thoughts, which come with one step for many.
        """
        self._depth.stepped(rows, seconds - self._drafting)

    def computed(self, sequence: Running, start: int, row: int, length: int) -> None:
        """A step computed `length` rows of a sequence's text, from its token `start` on; `row` is the first of them."""
        if self._reader is not None and sequence.allows_drafter(self._reader.kind):
            self._reader.computed([Computed(_want(sequence, self._limit(sequence)), start, row, length)])

    def forget(self, sequence: Running) -> None:
        """The sequence is over."""
        began = self._clock()
        for drafter in self._drafters:
            drafter.forget(sequence.request.id, sequence.output)
        if self._read.pop(sequence.request.id, None) is not None:
            self._leaving += self._clock() - began
        self._depth.ended(len(sequence.output))

    def rest(self, budget_bytes: int) -> bool:
        """Use a pause to save so much of what outlives the process; False: nothing is left."""
        return any(drafter.rest(budget_bytes) for drafter in self._drafters)

    def _offers(self, sequences: Sequence[Running], served: _Served, rows: int) -> list[_Offer]:
        """For each sequence the better drafter of those that it may have, where one has anything to offer."""
        anyone = set().union(*served.values())
        limits = {one: limit for one in sequences if one in anyone and (limit := self._limit(one)) > 0}
        began = self._clock()
        known, offers = self._known(limits, served), list[_Offer]()
        seconds = self._clock() - began
        slow = self._slow
        patient = served.get(slow.kind, ()) if slow is not None else ()
        for sequence, limit in limits.items():
            drafter, tokens = known.get(sequence, (None, ()))
            other = slow if sequence in patient else None
            if drafter is not None and (other is None or self._outdoes(drafter, tokens, other)):
                offers.append(_Offer(sequence, drafter, len(tokens), tokens))
            elif other is not None:
                offers.append(_Offer(sequence, other, limit))
        if known:
            offered = {offer.drafter.kind for offer in offers}
            for kind in {drafter.kind for drafter, _ in known.values()} - offered:
                self._depth.outdone(kind, rows)
        elif self._quick is not None and self._quick.kind in served and limits:
            self._depth.silent(self._quick.kind, rows, seconds)
        return offers

    def _outdoes(self, drafter: Drafter, tokens: Sequence[int], slow: Drafter) -> bool:
        """Whether what a drafter knows is better than what the slow one would say."""
        return len(tokens) >= _LONG and self._depth.likelier(drafter.kind, slow.kind)

    def _served(self, rows: int, running: int) -> tuple[_Served, int]:
        """Whom each drafter may guess for where it seems worth a thought; and how many steps the others rest."""
        served, least = dict[str, frozenset[Running]](), sys.maxsize
        for kind, everybody, settled in self._able:
            rests = self._depth.rests(kind, rows, running)
            if own := settled if rests else everybody:
                served[kind] = own
            least = min(least, rests or least)
        return served, least

    def _find(self, sequences: Sequence[Running]) -> list[_Able]:
        """Who may guess for sequences, by what their requests say."""
        able = list[_Able]()
        for drafter in self._drafters:
            own = [one for one in sequences if one.allows_drafter(drafter.kind)]
            if drafter is self._forced:
                own = [one for one in own if one.request.grammar is not None]
            if own:
                able.append(_Able(drafter.kind, frozenset(own), frozenset(filter(_settled, own))))
        return able

    def _depths(self, offers: Sequence[_Offer], rows: int, running: int) -> list[int]:
        """The depth of each offer: what the request says, or else what seems to pay beside those."""
        settled = [offer.limit if _settled(offer.sequence) else 0 for offer in offers]
        free = [self._candidate(offer) for offer, own in zip(offers, settled, strict=True) if not own]
        if not free:
            return settled
        began = self._clock()
        depths = iter(self._depth.choose(free, rows=rows + sum(settled), running=running))
        self._drafting += self._clock() - began
        return [own or next(depths) for own in settled]

    def _candidate(self, offer: _Offer) -> Candidate:
        unread = self._unread(offer.sequence) if offer.drafter is self._slow else 0
        return Candidate(
            offer.drafter.kind, offer.limit, unread, len(offer.sequence.output), offer.sequence.remaining_tokens
        )

    def _unread(self, sequence: Running) -> int:
        """Tokens that the slow drafter has to read before it drafts: none if it sees what steps compute."""
        unread = _length(sequence) - self._read.get(sequence.request.id, 0)
        return 0 if self._reader else min(unread, len(sequence.tokens))

    def _known(self, limits: Mapping[Running, int], served: _Served) -> dict[Running, tuple[Drafter, tuple[int, ...]]]:
        """What drafters know that take no time to ask; what is forced goes before what is repeated."""
        known: dict[Running, tuple[Drafter, tuple[int, ...]]] = {}
        for drafter in (self._quick, self._forced):
            if drafter is None or drafter.kind not in served:
                continue
            own = [one for one in limits if one in served[drafter.kind]]
            drafts = drafter.propose([_want(one, limits[one]) for one in own])
            known |= {one: (drafter, tuple(draft)) for one, draft in zip(own, drafts, strict=True) if draft}
        return known

    def _limit(self, sequence: Running) -> int:
        """Tokens to draft at most."""
        asked = sequence.request.speculation.tokens
        # The row behind the last draft tells one token more, and that is the last one that there is room for.
        return min(sequence.remaining_tokens - 1, self._deepest if asked is None else min(asked, self._deepest))

    def _made(self, chosen: Sequence[tuple[_Offer, int]]) -> list[tuple[_Offer, tuple[int, ...]]]:
        """Each offer with its draft, at the chosen depth at most."""
        made = [(offer, offer.known[:depth]) for offer, depth in chosen if offer.known is not None]
        slow = [(offer, depth) for offer, depth in chosen if offer.known is None]
        if self._slow is not None and slow:
            began = self._clock()
            drafts = self._slow.propose([_want(offer.sequence, depth) for offer, depth in slow])
            seconds = self._clock() - began
            self._drafting += seconds
            self._learn(slow, drafts, seconds)
            made += [(offer, tuple(draft)) for (offer, _), draft in zip(slow, drafts, strict=True)]
        return made

    def _learn(self, chosen: Sequence[tuple[_Offer, int]], drafts: Sequence[Sequence[int]], seconds: float) -> None:
        """Note what the slow drafter took; where it had to read up on a text first, that is another matter."""
        assert self._slow is not None, "nobody drafted"
        kind, sequences, levels = self._slow.kind, len(chosen), max(map(len, drafts))
        unread = [self._unread(offer.sequence) for offer, _ in chosen]
        if all(tokens <= depth + 1 for (_, depth), tokens in zip(chosen, unread, strict=True)):
            self._depth.drafted(kind, sequences, levels, seconds)
        else:
            read = sum(tokens for tokens, draft in zip(unread, drafts, strict=True) if draft)
            self._depth.caught_up(kind, sequences, levels, seconds + self._leaving, read)
            self._leaving = 0.0
        self._read |= {
            offer.sequence.request.id: _length(offer.sequence)
            for (offer, _), draft in zip(chosen, drafts, strict=True)
            if draft
        }


def _length(sequence: Running) -> int:
    """Tokens of the text, those among them that a shift dropped."""
    return len(sequence.request.prompt) + len(sequence.output)


def _settled(sequence: Running) -> bool:
    """Whether the request itself says how many tokens to draft: its limit is that number."""
    return sequence.request.speculation.tokens is not None


def _want(sequence: Running, limit: int) -> Want:
    return Want(
        sequence_id=sequence.request.id,
        tokens=sequence.tokens,
        limit=limit,
        draw=sequence.sampling_context(),
        salt=sequence.request.salt,
        prediction=sequence.request.prediction,
        said=len(sequence.output),
    )
