"""Who gets drafts in a step, from which drafter, and what is learnt from what became of them.

Drafts are rows that may be worth tokens (verify.py decides that). They take no cell from anybody: where the cache is
full there are none, and nobody goes back to the queue for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.draft.depth import Candidate, Depth
from engine.draft.drafter import Draft, Drafter, Want
from engine.sequence import Sequence as Running

# The longest draft. A longer one is worth its rows in copied text alone, and there the next one follows at once.
DEEPEST = 16
# A repetition of so many tokens is likelier right than what a small model says.
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


class Speculation:
    """The drafters, and the depths of their drafts. Belongs to the engine thread.

    quick    drafts at next to no cost, so it is asked before the depth is chosen; None: there is none
    slow     pays for each token of a draft, so it drafts what was chosen; None: there is none
    deepest  tokens of a draft at most
    """

    def __init__(
        self,
        quick: Drafter | None,
        slow: Drafter | None,
        depth: Depth,
        clock: Callable[[], float],
        *,
        deepest: int = DEEPEST,
    ) -> None:
        self._quick, self._slow = quick, slow
        self._depth, self._clock, self._deepest = depth, clock, deepest
        self.judged, self.accepted = [0] * deepest, [0] * deepest

    def draft(self, sequences: Sequence[Running], *, rows: int, room: int) -> dict[Running, Draft]:
        """Drafts for sequences whose next token a step will tell, for those for whom they seem to pay.

        rows  of the step without drafts
        room  for drafts, all together
        """
        offers = self._offers(sequences)
        if not offers or room < 1:
            return {}
        depths = self._depth.choose([offer.candidate for offer in offers], rows=rows)
        chosen: dict[Running, int] = {}
        for offer, depth in zip(offers, depths, strict=True):
            chosen[offer.sequence] = min(depth, room)
            room -= chosen[offer.sequence]
        return {
            offer.sequence: Draft(offer.drafter.kind, tokens)
            for offer, tokens in self._drafted([offer for offer in offers if chosen[offer.sequence]], chosen)
            if tokens
        }

    def verified(self, draft: Draft, said: Sequence[int]) -> None:
        """Learn from what a sequence said where a draft stood: the tokens that `verify` took for it."""
        judged = min(len(draft.tokens), len(said))
        accepted = sum(token == guess for token, guess in zip(said, draft.tokens, strict=False))
        self._depth.verified(draft.kind, judged, accepted)
        for at in range(judged):
            self.judged[at] += 1
            self.accepted[at] += at < accepted

    def stepped(self, rows: int, seconds: float) -> None:
        """Learn what a step of so many rows took, the time of drafting aside."""
        self._depth.stepped(rows, seconds)

    def observe(self, sequence: Running, tokens: Sequence[int]) -> None:
        """Let the drafters know what a sequence said."""
        for drafter in self._drafters:
            drafter.observe(sequence.request.id, tokens)

    def forget(self, sequence: Running) -> None:
        """The sequence is over."""
        for drafter in self._drafters:
            drafter.forget(sequence.request.id)

    @property
    def _drafters(self) -> list[Drafter]:
        return [drafter for drafter in (self._quick, self._slow) if drafter is not None]

    def _offers(self, sequences: Sequence[Running]) -> list[_Offer]:
        """For each sequence the better drafter of those that it may have, where one has anything to offer."""
        wants = {sequence: want for sequence in sequences if (want := self._want(sequence)).limit > 0}
        repeated = self._repeated({sequence: want for sequence, want in wants.items() if sequence.may_draft("lookup")})
        offers = []
        for sequence, want in wants.items():
            known = repeated.get(sequence, ())
            if self._slow is not None and sequence.may_draft(self._slow.kind) and len(known) < _LONG:
                offers.append(_Offer(sequence, self._slow, want))
            elif self._quick is not None and known:
                offers.append(_Offer(sequence, self._quick, want, known))
        return offers

    def _repeated(self, wants: Mapping[Running, Want]) -> dict[Running, tuple[int, ...]]:
        if self._quick is None or not wants:
            return {}
        drafts = self._quick.propose(list(wants.values()))
        return {sequence: tuple(draft) for sequence, draft in zip(wants, drafts, strict=True)}

    def _want(self, sequence: Running) -> Want:
        return Want(
            sequence_id=sequence.request.id,
            tokens=sequence.tokens,
            # The row behind the last draft tells one token more, and that is the last one that there is room for.
            limit=min(sequence.room - 1, self._deepest),
            draw=sequence.draw(),
            salt=sequence.request.salt,
            prediction=sequence.request.prediction,
        )

    def _drafted(self, offers: Sequence[_Offer], chosen: Mapping[Running, int]) -> list[tuple[_Offer, tuple[int, ...]]]:
        """Each offer with its draft, at the chosen depth at most."""
        made = [(offer, offer.known[: chosen[offer.sequence]]) for offer in offers if offer.known is not None]
        slow = [offer for offer in offers if offer.known is None]
        if self._slow is not None and slow:
            began = self._clock()
            drafts = self._slow.propose([replace(offer.want, limit=chosen[offer.sequence]) for offer in slow])
            self._depth.drafted(self._slow.kind, max(map(len, drafts)), self._clock() - began)
            made += [(offer, tuple(draft)) for offer, draft in zip(slow, drafts, strict=True)]
        return made
