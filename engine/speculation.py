"""Who gets drafts in a step, from which drafter, and what is learnt from what became of them.

Drafts are rows that may be worth tokens (verify.py decides that). They take no cell from anybody: where the cache is
full there are none, and nobody goes back to the queue for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from engine.cost import StepCost
from engine.draft.depth import Candidate, Depth
from engine.draft.drafter import Computed, Draft, Drafter, Reader, Want
from engine.sequence import Sequence as Running
from engine.status import DraftCounts
from engine.types import LONGEST_DRAFT

# Whom drafters may guess for, by their kind.
_Served: TypeAlias = Mapping[str, set[Running]]
# A repetition of so many tokens may be likelier right than what a small model says.
_LONG = 4


@dataclass(frozen=True, slots=True)
class _Offer:
    """What could be drafted for one sequence: `known` already, or else up to the limit of its want."""

    sequence: Running
    drafter: Drafter
    want: Want
    known: tuple[int, ...] | None = None

    @property
    def candidate(self) -> Candidate:
        """As the choice of depths sees it."""
        return Candidate(self.drafter.kind, self.want.limit if self.known is None else len(self.known))

    @property
    def settled(self) -> bool:
        """Whether the request itself says how many tokens to draft: its limit is that number."""
        return _settled(self.sequence)


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
        deepest: int = LONGEST_DRAFT,
        forced: Drafter | None = None,
        reader: Reader | None = None,
    ) -> None:
        self._quick, self._slow, self._forced, self._reader = quick, slow, forced, reader
        self._depth, self._clock, self._deepest = depth, clock, deepest
        self._drafters = tuple(drafter for drafter in (quick, slow, forced) if drafter is not None)
        self._drafted = {drafter.kind: [0] * deepest for drafter in self._drafters}
        self._accepted = {drafter.kind: [0] * deepest for drafter in self._drafters}
        # Seconds of this step that were spent on choosing and drafting.
        self._thinking = 0.0
        # For whom the slow drafter drafted in the step before and in this one: so it knows their texts.
        self._followed: set[str] = set()
        self._following: set[str] = set()

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

    def draft(self, sequences: Sequence[Running], *, rows: int, room: Callable[[int], int]) -> dict[Running, Draft]:
        """Drafts for sequences whose next token a step will tell, for those for whom they seem to pay.

        rows  of the step without drafts
        room  how many of so many drafts there is room for, of all sequences together
        """
        served = self._served(sequences, rows)
        if not served:
            return {}
        offers = self._offers(sequences, served, rows)
        began = self._clock()
        depths = self._depths(offers, rows)
        self._thinking += self._clock() - began
        wanted = sum(depth for _, depth in depths)
        if wanted == 0:
            return {}
        left, chosen = room(wanted), dict[Running, int]()
        for offer, depth in depths:
            chosen[offer.sequence] = max(min(depth, left), 0)
            left -= chosen[offer.sequence]
        return {
            offer.sequence: Draft(offer.drafter.kind, tokens)
            for offer, tokens in self._made([offer for offer in offers if chosen[offer.sequence]], chosen)
            if tokens
        }

    def verified(self, draft: Draft, said: Sequence[int]) -> int:
        """Learn from what a sequence said where a draft stood: the tokens that `verify` took for it.

        Returns how many of the draft were said.
        """
        judged = min(len(draft.tokens), len(said))
        accepted = sum(token == guess for token, guess in zip(said, draft.tokens, strict=False))
        self._depth.verified(draft.kind, judged, accepted)
        for at in range(len(draft.tokens)):
            self._drafted[draft.kind][at] += 1
            self._accepted[draft.kind][at] += at < accepted
        return accepted

    def stepped(self, rows: int, seconds: float) -> None:
        """Learn what a step of so many rows took, with all that went into it.

        What the slow drafter took is known, and what choosing depths took has nothing to do with those chosen.
        """
        self._depth.stepped(rows, seconds - self._thinking)
        self._thinking = 0.0
        self._followed, self._following = self._following, set()

    def computed(self, sequence: Running, start: int, row: int, length: int) -> None:
        """A step computed `length` rows of a sequence's text, from its token `start` on; `row` is the first of them."""
        if self._reader is not None and sequence.may_draft(self._reader.kind):
            self._reader.computed([Computed(self._want(sequence), start, row, length)])

    def forget(self, sequence: Running) -> None:
        """The sequence is over."""
        for drafter in self._drafters:
            drafter.forget(sequence.request.id, sequence.output)

    def rest(self, budget_bytes: int) -> bool:
        """Use a pause to save so much of what outlives the process; False: nothing is left."""
        return any(drafter.rest(budget_bytes) for drafter in self._drafters)

    def _offers(self, sequences: Sequence[Running], served: _Served, rows: int) -> list[_Offer]:
        """For each sequence the better drafter of those that it may have, where one has anything to offer."""
        anyone = set().union(*served.values())
        wants = {one: want for one in sequences if one in anyone and (want := self._want(one)).limit > 0}
        known, offers = self._known(wants, served), []
        for sequence, want in wants.items():
            drafter, tokens = known.get(sequence, (None, ()))
            slow = self._slow if self._slow is not None and sequence in served.get(self._slow.kind, ()) else None
            if drafter is not None and (slow is None or self._outdoes(drafter, tokens, slow)):
                offers.append(_Offer(sequence, drafter, want, tokens))
            elif slow is not None:
                offers.append(_Offer(sequence, slow, want))
        offered = {offer.drafter.kind for offer in offers}
        for kind in {drafter.kind for drafter, _ in known.values()} - offered:
            self._depth.outdone(kind, rows)
        if self._quick is not None and self._quick.kind in served and offers and not known:
            self._depth.silent(self._quick.kind, rows)
        return offers

    def _outdoes(self, drafter: Drafter, tokens: Sequence[int], slow: Drafter) -> bool:
        """Whether what a drafter knows is better than what the slow one would say."""
        return len(tokens) >= _LONG and self._depth.likelier(drafter.kind, slow.kind)

    def _served(self, sequences: Sequence[Running], rows: int) -> _Served:
        """Whom each drafter may guess for where it seems worth a thought; where all rest, this is all that is done."""
        served, settled = {}, [one for one in sequences if _settled(one)]
        for drafter in self._drafters:
            asking = settled if self._depth.rests(drafter.kind, rows) else sequences
            if drafter is self._forced:
                asking = [one for one in asking if one.request.grammar is not None]
            if own := {one for one in asking if one.may_draft(drafter.kind)}:
                served[drafter.kind] = own
        return served

    def _depths(self, offers: Sequence[_Offer], rows: int) -> list[tuple[_Offer, int]]:
        """Each offer with its depth: what the request says, or else what seems to pay beside those."""
        settled = [(offer, offer.candidate.limit) for offer in offers if offer.settled]
        free = [offer for offer in offers if not offer.settled]
        rows += sum(depth for _, depth in settled)
        depths = self._depth.choose([offer.candidate for offer in free], rows=rows) if free else []
        return [*settled, *zip(free, depths, strict=True)]

    def _known(self, wants: Mapping[Running, Want], served: _Served) -> dict[Running, tuple[Drafter, tuple[int, ...]]]:
        """What drafters know that take no time to ask; what is forced goes before what is repeated."""
        known: dict[Running, tuple[Drafter, tuple[int, ...]]] = {}
        for drafter in (self._quick, self._forced):
            own = [] if drafter is None else [one for one in wants if one in served.get(drafter.kind, ())]
            if drafter is not None and own:
                drafts = drafter.propose([wants[one] for one in own])
                known |= {one: (drafter, tuple(draft)) for one, draft in zip(own, drafts, strict=True) if draft}
        return known

    def _want(self, sequence: Running) -> Want:
        asked = sequence.request.speculation.tokens
        return Want(
            sequence_id=sequence.request.id,
            tokens=sequence.tokens,
            # The row behind the last draft tells one token more, and that is the last one that there is room for.
            limit=min(sequence.room - 1, self._deepest if asked is None else min(asked, self._deepest)),
            draw=sequence.draw(),
            salt=sequence.request.salt,
            prediction=sequence.request.prediction,
            said=len(sequence.output),
        )

    def _made(self, offers: Sequence[_Offer], chosen: Mapping[Running, int]) -> list[tuple[_Offer, tuple[int, ...]]]:
        """Each offer with its draft, at the chosen depth at most."""
        made = [(offer, offer.known[: chosen[offer.sequence]]) for offer in offers if offer.known is not None]
        slow = [offer for offer in offers if offer.known is None]
        if self._slow is not None and slow:
            began = self._clock()
            drafts = self._slow.propose([replace(offer.want, limit=chosen[offer.sequence]) for offer in slow])
            seconds = self._clock() - began
            self._thinking += seconds
            self._learn(slow, drafts, seconds)
            made += [(offer, tuple(draft)) for offer, draft in zip(slow, drafts, strict=True)]
        return made

    def _learn(self, offers: Sequence[_Offer], drafts: Sequence[Sequence[int]], seconds: float) -> None:
        """Note what the slow drafter took; where it had to read up on a text first, that is another matter."""
        assert self._slow is not None, "nobody drafted"
        names = [offer.sequence.request.id for offer in offers]
        learn = self._depth.drafted if self._followed.issuperset(names) else self._depth.caught_up
        learn(self._slow.kind, len(offers), max(map(len, drafts)), seconds)
        self._following = {name for name, draft in zip(names, drafts, strict=True) if draft}


def _settled(sequence: Running) -> bool:
    return sequence.request.speculation.tokens is not None
