"""A model's own head as a drafter (heads.py): it guesses from the states that the model has behind its tokens.

It reads pairs, of a state and the token behind it, so it can read only what the model computed while it listened.
States wait until a draft is wanted; long texts are read meanwhile, for they would wait in megabytes. Where a text was
taken from what the model remembers and the head does not, it begins behind that: it sees less and errs more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from engine.draft.chain import Rows, chain, unread
from engine.draft.heads import HeadRunner, LastStates
from engine.draft.seats import Seat, Seats
from engine.schedule.draft import Computed, Want
from kvcache.cache import Cache
from kvcache.spec import Span


@dataclass(slots=True)
class _Past:
    """What the head knows of a sequence: it holds the pairs from the token `base` on, so many as its seat has tokens.

    states   [rows, width] behind the tokens of the text from `start` on, that are still to be read
    dropped  tokens that context shifts had taken from the text when they came
    """

    start: int
    states: Tensor
    dropped: int
    base: int = 0

    @property
    def stop(self) -> int:
        """The first token whose state did not come yet."""
        return self.start + len(self.states)

    def take(self, computed: Computed, states: Tensor, dropped: int) -> None:
        """States behind the tokens from `computed.start` on."""
        if dropped != self.dropped:
            # What waits moves with the text; a head that had begun behind its start begins anew.
            self.start -= dropped - self.dropped
            self.base = 0 if self.base == 0 else self.start
            self.dropped = dropped
        if self.start <= computed.start <= self.stop and self.start >= 0:
            self.states = torch.cat((self.states[: computed.start - self.start], states))
        else:
            self.start, self.states = computed.start, states

    def between(self, start: int, stop: int) -> Tensor:
        """The states behind the tokens [start, stop)."""
        return self.states[start - self.start : stop - self.start]

    def release(self, start: int) -> None:
        """What stands before `start` is not needed any more."""
        if start > self.start:
            self.states = self.states[start - self.start :].clone()
            self.start = start


class HeadDrafter:
    """Proposes what the model's head says; implements Drafter and Reader.

    cache    over the head's layer, with a slot for each sequence that runs at once
    chunk    pairs that it catches up with in one call; who lags by more gets no draft yet
    waiting  states of a sequence that wait at most
    """

    kind = "mtp"

    def __init__(self, cache: Cache, runner: HeadRunner, states: LastStates, *, chunk: int, waiting: int = 256) -> None:
        self._cache, self._runner, self._states = cache, runner, states
        self._chunk, self._waiting = chunk, waiting
        self._seats = Seats(cache)
        self._pasts: dict[str, _Past] = {}

    def computed(self, rows: Sequence[Computed]) -> None:
        """Take the states of a step, and read what would wait too long."""
        for one in rows:
            want, states = one.want, self._states.rows[one.row : one.row + one.length].clone()
            dropped = want.draw.position - len(want.tokens)
            past = self._pasts.setdefault(want.sequence_id, _Past(one.start, states[:0], dropped))
            past.take(one, states, dropped)
            if len(past.states) > self._waiting:
                self._catch_up(want, past)

    def propose(self, wants: Sequence[Want]) -> list[list[int]]:
        """For each want what the head says; none where a state is missing, or most is still to be read."""
        drafts: list[list[int]] = [[] for _ in wants]
        ready = [at for at, want in enumerate(wants) if self._is_ready(want)]
        pairs, seats = self._seated([wants[at] for at in ready])
        rows = unread(pairs, seats, capacity=self._cache.capacity, most=self._chunk)
        pasts = [self._pasts[want.sequence_id] for want in pairs]
        carried: dict[int, Tensor] = {}
        found = chain(pairs, seats, rows, lambda rows: self._read(seats, pasts, rows, carried))
        for want, seat, past in zip(pairs, seats, pasts, strict=True):
            # What was read of a draft was read with guessed states.
            self._seats.rewind(seat, len(want.tokens))
            # The state before the last token stays: the same draft may be wanted once more.
            past.release(past.base + len(seat.tokens) - 1)
        for at, draft in zip(ready, found, strict=True):
            drafts[at] = draft
        return drafts

    def forget(self, sequence_id: str, said: Sequence[int]) -> None:
        """The sequence is over: what was computed for it may serve others."""
        self._pasts.pop(sequence_id, None)
        self._seats.forget(sequence_id, said)

    def rest(self, budget_bytes: int) -> bool:
        """Save what is remembered to the shelf."""
        return self._cache.flush_to_disk(budget_bytes) > 0

    def _is_ready(self, want: Want) -> bool:
        """Whether the state behind the token before the last one is there."""
        past = self._pasts.get(want.sequence_id)
        return past is not None and past.start <= len(want.tokens) - 2 < past.stop

    def _seated(self, wants: Sequence[Want]) -> tuple[list[Want], list[Seat]]:
        """The wants in pairs, and their seats; those that lack states before what waits begin anew with that."""
        pairs = [self._paired(want) for want in wants]
        seats = self._seats.follow(pairs)
        for at, want in enumerate(wants):
            past = self._pasts[want.sequence_id]
            if past.base + len(seats[at].tokens) < past.start:
                past.base = past.start
                self._seats.leave(want.sequence_id)
                pairs[at] = self._paired(want)
                (seats[at],) = self._seats.follow([pairs[at]])
                seats[at].plain = 0
        return pairs, seats

    def _paired(self, want: Want) -> Want:
        """The tokens that are the second of a pair; what is remembered of pairs hangs on the text's first token too."""
        base = self._pasts[want.sequence_id].base
        salt = b"" if base else want.salt + want.tokens[0].to_bytes(4, "little")
        return replace(want, tokens=want.tokens[base + 1 :], salt=salt)

    def _catch_up(self, want: Want, past: _Past) -> None:
        """Read pairs whose second token is known."""
        known = want.tokens[: past.stop + 1]
        ahead = len(want.tokens) - len(known)
        draw = replace(want.draw, position=want.draw.position - ahead)
        (pair,), (seat,) = self._seated([replace(want, tokens=known, draw=draw, limit=0, said=want.said - ahead)])
        rows = unread([pair], [seat], capacity=self._cache.capacity, most=self._chunk)
        if rows and self._read([seat], [past], rows, {}) is not None:
            past.release(past.base + len(seat.tokens) - 1)
            self._seats.remember(seat)

    def _read(
        self, seats: Sequence[Seat], pasts: Sequence[_Past], rows: Rows, carried: dict[int, Tensor]
    ) -> Tensor | None:
        """Logits after the rows, one of each seat that has some; None if the cache has no room for them.

        carried  the head's own state behind what a seat read last: that of the model is there for the text alone
        """
        spans = [Span(seats[at].slot, len(seats[at].tokens), len(tokens)) for at, tokens in rows.items()]
        if self._cache.evict_for(spans):
            return None
        ends = [stop - 1 for stop in accumulate(span.length for span in spans)]
        states = []
        for at, span in zip(rows, spans, strict=True):
            first = pasts[at].base + span.start
            states.append(carried[at] if at in carried else pasts[at].between(first, first + span.length))
        with self._cache.forward(spans) as forward:
            read = [token for tokens in rows.values() for token in tokens]
            guess = self._runner.read(forward, read, torch.cat(states), ends)
        for at, end, tokens in zip(rows, ends, rows.values(), strict=True):
            carried[at] = guess.states[end : end + 1]
            seats[at].tokens += tokens
        return guess.logits
