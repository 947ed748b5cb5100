"""Who sits where in the cache of a drafter: each sequence has a slot that follows its text.

What a slot holds is remembered under its tokens when its sequence is over, so that a sequence that comes back or shares
a prompt is followed by recalling; one whose context was shifted, by shifting. A slot may lag by any length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.schedule.draft import Want
from engine.text.prefix import common_prefix_length
from kvcache.cache import Cache
from kvcache.errors import OutOfCells

# Tokens that are missing before somebody else's work is looked for.
_WORTH_A_LOOK = 16


@dataclass(slots=True)
class Seat:
    """A slot of the drafter's cache.

    used     when it was wanted last
    tokens   what it holds
    plain    tokens of it at the start that were never shifted, and may serve others; None: all
    dropped  tokens that context shifts had taken from the text when it was wanted last
    checked  leading tokens of the text that were compared then: they are the same until a shift
    said     tokens of the output that the text had then, its last token among them
    """

    slot: int
    salt: bytes
    used: int
    tokens: list[int] = field(default_factory=list)
    plain: int | None = None
    dropped: int = 0
    checked: int = 0
    said: int = 0


class Seats:
    """The slots of a cache, by sequence."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._free = list(range(cache.slots - 1, -1, -1))
        self._seats: dict[str, Seat] = {}
        self._clock = 0

    def follow(self, wants: Sequence[Want]) -> list[Seat]:
        """The seat of each sequence, standing at a beginning of its text, before the last token."""
        self._clock += 1
        return [self._follow(want) for want in wants]

    def rewind(self, seat: Seat, length: int) -> None:
        """Let a seat hold its first tokens only, as many as asked for or fewer."""
        del seat.tokens[self._cache.rewind(seat.slot, min(length, len(seat.tokens))) :]

    def remember(self, seat: Seat) -> None:
        """Let others have what a seat holds."""
        self._cache.insert_prefix(seat.slot, seat.tokens[: seat.plain], salt=seat.salt)

    def forget(self, sequence_id: str, said: Sequence[int] = ()) -> None:
        """The sequence is over: what was computed of its text may serve others, and of drafts what became output.

        said  its output
        """
        seat = self._seats.get(sequence_id)
        if seat is None:
            return
        text = seat.checked + 1
        later = list(said[seat.said :]) if seat.said >= 0 else []
        self.rewind(seat, text + common_prefix_length(seat.tokens[text:], later))
        self.remember(seat)
        self.leave(sequence_id)

    def leave(self, sequence_id: str) -> None:
        """The sequence gives up its seat, and what that holds serves nobody."""
        seat = self._seats.pop(sequence_id)
        self._cache.clear(seat.slot)
        self._free.append(seat.slot)

    def _follow(self, want: Want) -> Seat:
        seat = self._seats.get(want.sequence_id)
        if seat is None:
            seat = self._seats[want.sequence_id] = Seat(self._slot(), want.salt, self._clock)
        seat.used = self._clock
        common, dropped = self._common(seat, want), want.draw.position - len(want.tokens) - seat.dropped
        if dropped > 0:
            common = self._shift(seat, want, common, dropped)
        seat.dropped, seat.checked, seat.said = seat.dropped + dropped, len(want.tokens) - 1, want.said
        if common < len(seat.tokens):
            self.rewind(seat, common)
        if len(seat.tokens) + _WORTH_A_LOOK < len(want.tokens) - 1:
            standing = self._cache.reuse_prefix(seat.slot, want.tokens[:-1], salt=seat.salt)
            seat.tokens += want.tokens[len(seat.tokens) : standing]
        return seat

    def _common(self, seat: Seat, want: Want) -> int:
        """How much of the text, but for its last token, the seat holds. What was compared before is not again."""
        dropped, end = want.draw.position - len(want.tokens), len(want.tokens) - 1
        at = min(seat.checked, len(seat.tokens)) if dropped == seat.dropped else 0
        return at + common_prefix_length(seat.tokens[at:end], list(want.tokens[at:end]))

    def _shift(self, seat: Seat, want: Want, keep: int, drop: int) -> int:
        """Drop what was dropped from the text behind `keep`; how much of the text the seat holds then."""
        if not 0 < drop <= len(seat.tokens) - keep:
            return keep
        try:
            standing = self._cache.shift(seat.slot, keep, drop)
        except OutOfCells:
            return keep
        del seat.tokens[keep : keep + drop]
        del seat.tokens[standing:]
        seat.plain = keep if seat.plain is None else min(keep, seat.plain)
        end = len(want.tokens) - 1
        return common_prefix_length(seat.tokens[:end], list(want.tokens[:end]))

    def _slot(self) -> int:
        """A free slot; that of the sequence that was not wanted for longest if there is none."""
        if not self._free:
            self.forget(min(self._seats, key=lambda name: self._seats[name].used))
        return self._free.pop()
