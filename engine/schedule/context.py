"""What the content of a slot is about: the text so far, less what context shifts dropped, and what they dropped.

A shift is a function of the request and the capacity alone. So a sequence that lost its slot does its shifts anew, each
at the same place, and goes on as if nobody had disturbed it (law 4). What was moved by a shift still knows the text
that was dropped; it cannot be computed from its own tokens and must not be found by them. So it is remembered under a
salt of its own, a digest of its past: the same sequence finds it there when it comes back, and nobody else does.

The tokens of a mutual range see each other, so that what is computed for one depends on the whole range. They are known
to the memory by keys made from the whole range, which no token has: it is found whole, or not at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.types.request import RecurrentShift

# Token positions [start, stop).
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class DroppedRange:
    """What a shift drops: `drop` tokens from `start` on."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        """The first token behind."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class _Stage:
    """The time from one shift to the next.

    salt       under which the content is remembered
    restore_length      tokens that cannot be computed at this stage: all of them are found, or none; 0 where nothing was moved
    recomputable_length      leading tokens whose content depends on nothing but these tokens
    protected  ranges that no shift drops or cuts
    bidirectional     those of them whose tokens see each other
    start      where the shift dropped something
    dropped    the tokens that it dropped
    """

    salt: bytes
    restore_length: int
    recomputable_length: int
    protected: tuple[Range, ...]
    bidirectional: tuple[Range, ...]
    start: int = 0
    dropped: tuple[int, ...] = ()


class ContextHistory:
    """The tokens of one sequence through its shifts.

    tokens     what the slot's content is about at the present stage; longer than the capacity where shifts are due
    keep       tokens at the start that no shift drops
    protected  token ranges of the prompt that no shift drops or cuts
    bidirectional     ascending token ranges of the prompt whose tokens see each other; no shift drops or cuts them either
    salt       what is remembered under another salt does not exist for this sequence
    states     what a shift makes of recurrent states, which is part of the past
    """

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        capacity: int,
        keep: int,
        protected: Sequence[Range] = (),
        mutual: Sequence[Range] = (),
        salt: bytes = b"",
        states: RecurrentShift = "rebuild",
    ) -> None:
        self.tokens = list(prompt)
        self._capacity, self._keep_tokens, self._state_mode = capacity, keep, states
        self._stages = [_Stage(salt, 0, capacity, tuple(sorted((*protected, *mutual))), tuple(mutual))]
        self._range_keys = [_bidirectional_keys(prompt[start:stop]) for start, stop in mutual]
        self._stage_index = 0

    @property
    def salt(self) -> bytes:
        """Under which the content of the present stage is remembered."""
        return self._stages[self._stage_index].salt

    @property
    def restore_length(self) -> int:
        """Leading tokens whose content must be found, all of it: it cannot be computed at this stage."""
        return self._stages[self._stage_index].restore_length

    @property
    def recomputable_length(self) -> int:
        """Leading tokens whose content depends on nothing but these tokens."""
        return self._stages[self._stage_index].recomputable_length

    def reset_salt(self, salt: bytes) -> None:
        """Let nothing that was remembered before serve this sequence: its content is computed in another way now."""
        assert not self.total_shifts, "a shifted sequence does not restart"
        self._stages[0] = replace(self._stages[0], salt=salt)

    def prefix_keys(self, length: int) -> list[int]:
        """By what the memory knows the first `length` tokens."""
        keys = self.tokens[:length]
        for (start, _), own in zip(self.bidirectional(0, len(keys)), self._range_keys, strict=False):
            keys[start : start + len(own)] = own[: len(keys) - start]
        return keys

    def bidirectional(self, start: int, stop: int) -> tuple[Range, ...]:
        """The ranges that begin in [start, stop) and whose tokens see each other."""
        mutual = self._stages[self._stage_index].bidirectional
        return tuple(each for each in mutual if start <= each[0] < stop) if mutual else ()

    def align_down(self, length: int) -> int:
        """The most of the first `length` tokens that cuts no range whose tokens see each other."""
        inside = (start for start, stop in self._stages[self._stage_index].bidirectional if start < length < stop)
        return next(inside, length)

    @property
    def shifts(self) -> int:
        """Shifts between the text and the present stage."""
        return self._stage_index

    @property
    def total_shifts(self) -> int:
        """Shifts that the text needed so far."""
        return len(self._stages) - 1

    @property
    def dropped_tokens(self) -> int:
        """Tokens that all shifts so far dropped."""
        return sum(len(stage.dropped) for stage in self._stages)

    def next_drop(self) -> DroppedRange | None:
        """What the next shift drops, at a full context: about the older half behind `keep`; None: nothing may go.

        The oldest stretch between protected ranges that gives half of that is enough; else the one that gives most.
        """
        wanted = max((self._capacity - self._keep_tokens) // 2, 1)
        cuts = [cut for cut in self._droppable_ranges(wanted) if cut.length > 0]
        enough = (cut for cut in cuts if 2 * cut.length >= wanted)
        return next(enough, max(cuts, key=lambda cut: cut.length, default=None))

    def shift(self, dropped: DroppedRange, cached_length: int) -> None:
        """Follow a slot that was shifted by `dropped`.

        standing  where it stands now: behind all that moved; where nothing could move, before the cut and among what
                  is plain, for the rest is computed anew
        """
        if self._stage_index == self.total_shifts:
            self._stages.append(self._next_stage(dropped, cached_length))
        del self.tokens[dropped.start : dropped.stop]
        self._stage_index += 1

    def undo_shift(self) -> None:
        """Return to the stage before the latest shift."""
        stage = self._stages[self._stage_index]
        self.tokens[stage.start : stage.start] = stage.dropped
        self._stage_index -= 1

    def _droppable_ranges(self, target: int) -> list[DroppedRange]:
        """What could be dropped before, between and behind the protected ranges, oldest first."""
        cuts, at = [], self._keep_tokens
        for start, stop in self._stages[self._stage_index].protected:
            cuts.append(DroppedRange(at, min(start - at, target)))
            at = max(at, stop)
        # Of the newest stretch half must stay, for it is what the text goes on from.
        return [*cuts, DroppedRange(at, min((self._capacity - at) // 2, target))]

    def _next_stage(self, dropped_range: DroppedRange, cached_length: int) -> _Stage:
        stage = self._stages[self._stage_index]
        dropped = tuple(self.tokens[dropped_range.start : dropped_range.stop])
        protected = tuple(_shift_range(stretch, dropped_range) for stretch in stage.protected)
        mutual = tuple(_shift_range(stretch, dropped_range) for stretch in stage.bidirectional)
        plain = min(stage.recomputable_length, dropped_range.start)
        if cached_length <= plain:
            # Nothing is left that was ever moved: all that follows is computed from its tokens, like any other.
            return _Stage(self._stages[0].salt, 0, self._capacity, protected, mutual, dropped_range.start, dropped)
        past = repr((stage.salt, dropped_range.start, cached_length, self._state_mode, dropped)).encode()
        return _Stage(
            hashlib.sha256(past).digest(), cached_length, plain, protected, mutual, dropped_range.start, dropped
        )


def _shift_range(protected: Range, dropped: DroppedRange) -> Range:
    """Where a protected range is after a cut, which never touches it."""
    start, stop = protected
    return protected if start < dropped.stop else (start - dropped.length, stop - dropped.length)


def _bidirectional_keys(tokens: Sequence[int]) -> list[int]:
    """A key a token of a range, made from all of its tokens: negative, which no token is."""
    digest = hashlib.shake_256(repr(tuple(tokens)).encode()).digest(8 * len(tokens))
    numbers = np.frombuffer(digest, dtype=np.int64) | np.iinfo(np.int64).min
    return [int(number) for number in numbers]
