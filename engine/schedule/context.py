"""The tokens that the cells of a slot hold: the text so far, less what context shifts dropped.

A context shift is a function of the request and the capacity alone: a sequence that lost its slot repeats its shifts at
the same positions and samples the same tokens. Keys and values that a shift moved were computed with the dropped tokens
in view; they cannot be recomputed from the remaining tokens and must not match them. They are cached under a salt of
their own, a digest of the history, which only the same sequence finds again.

Contents (images, sounds) have the same placeholder tokens whatever they show: the prefix cache knows them by keys that
are derived from the digest of the content and equal no token. Tokens of a bidirectional range attend to each other, so
their keys and values depend on the whole range, which is matched whole or not at all; where a range is not part of one
content, its keys are derived from the keys of the whole range.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.types.content import Content
from engine.types.request import RecurrentShift

# Token positions [start, stop).
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class DroppedRange:
    """The tokens that a context shift drops: `length` of them from `start` on."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        """The first token after the range."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class _Stage:
    """The time between two context shifts.

    salt                 of the prefix cache
    restore_length       leading tokens that must come from the prefix cache, because a shift moved some of them; or 0
    recomputable_length  leading tokens whose keys and values depend on no dropped token
    protected            ranges that no shift drops or splits
    contents             ranges of contents, which are protected
    bidirectional        ranges whose tokens attend to each other, which are protected
    start, dropped       position and tokens of the range that the shift before this stage dropped
    """

    salt: bytes
    restore_length: int
    recomputable_length: int
    protected: tuple[Range, ...]
    contents: tuple[Range, ...]
    bidirectional: tuple[Range, ...]
    start: int = 0
    dropped: tuple[int, ...] = ()


class ContextHistory:
    """The tokens of one sequence through its context shifts.

    tokens         of the current stage; more than the capacity where a shift is due
    keep_tokens    tokens at the start that no shift drops
    protected      token ranges of the prompt that no shift drops or splits
    contents       images and sounds of the prompt, ascending; protected as well
    bidirectional  ascending token ranges of the prompt whose tokens attend to each other; protected as well
    salt           separates its entries in the prefix cache from those of other salts
    state_mode     what a shift does with recurrent states, which is part of the history

    salts  all salts so far
    """

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        capacity: int,
        keep_tokens: int,
        protected: Sequence[Range] = (),
        contents: Sequence[Content] = (),
        bidirectional: Sequence[Range] = (),
        salt: bytes = b"",
        state_mode: RecurrentShift = "rebuild",
    ) -> None:
        self.tokens = list(prompt)
        self._capacity, self._keep_tokens, self._state_mode = capacity, keep_tokens, state_mode
        content_ranges = tuple((content.start, content.stop) for content in contents)
        ranges = tuple(sorted((*protected, *content_ranges, *bidirectional)))
        self._stages = [_Stage(salt, 0, capacity, ranges, content_ranges, tuple(bidirectional))]
        self._content_keys = [_range_keys(content.digest, content.stop - content.start) for content in contents]
        self._stage_index = 0
        self._bidirectional_keys: list[list[int]] = []
        self._bidirectional_keys = self._find_bidirectional_keys(len(prompt))
        self.salts = {salt}

    @property
    def salt(self) -> bytes:
        """The salt of the current stage in the prefix cache."""
        return self._stage.salt

    @property
    def restore_length(self) -> int:
        """Leading tokens that must come from the prefix cache: at this stage they cannot be computed."""
        return self._stage.restore_length

    @property
    def recomputable_length(self) -> int:
        """Leading tokens with keys and values that depend on no dropped token."""
        return self._stage.recomputable_length

    @property
    def shifts(self) -> int:
        """Context shifts before the current stage."""
        return self._stage_index

    @property
    def total_shifts(self) -> int:
        """Context shifts of the sequence so far, including shifts that a preempted sequence has yet to repeat."""
        return len(self._stages) - 1

    @property
    def dropped_tokens(self) -> int:
        """Tokens that all shifts so far dropped."""
        return sum(len(stage.dropped) for stage in self._stages)

    def reset_salt(self, salt: bytes) -> None:
        """Use another salt: from now on keys and values are computed in another way."""
        assert not self.total_shifts, "a shifted sequence does not restart"
        self._stages[0] = replace(self._stages[0], salt=salt)
        self.salts.add(salt)

    def prefix_keys(self, length: int) -> list[int]:
        """The keys of the first `length` tokens in the prefix cache."""
        keys = self.tokens[:length]
        stage = self._stage
        for (start, _), range_keys in zip(stage.contents, self._content_keys, strict=True):
            _write_keys(keys, start, range_keys)
        for (start, _), range_keys in zip(stage.bidirectional, self._bidirectional_keys, strict=False):
            _write_keys(keys, start, range_keys)
        return keys

    @property
    def content_ranges(self) -> tuple[Range, ...]:
        """The ranges of the contents."""
        return self._stage.contents

    @property
    def drops(self) -> Iterator[DroppedRange]:
        """The ranges that the shifts before this stage dropped, in order."""
        for stage in self._stages[1 : self._stage_index + 1]:
            yield DroppedRange(stage.start, len(stage.dropped))

    def bidirectional(self, start: int, stop: int) -> tuple[Range, ...]:
        """The bidirectional ranges that begin in [start, stop)."""
        ranges = self._stage.bidirectional
        return tuple(span for span in ranges if start <= span[0] < stop) if ranges else ()

    def align_down(self, length: int) -> int:
        """The largest length up to `length` that splits no bidirectional range."""
        return next((start for start, stop in self._stage.bidirectional if start < length < stop), length)

    def next_drop(self) -> DroppedRange | None:
        """The range that the next shift drops from a full context: half of the tokens after `keep_tokens`, or less.

        The oldest range between protected ones that has at least half of that length, else the longest; None: no token
        may be dropped.
        """
        target = max((self._capacity - self._keep_tokens) // 2, 1)
        ranges = [droppable for droppable in self._droppable_ranges(target) if droppable.length > 0]
        sufficient = (droppable for droppable in ranges if 2 * droppable.length >= target)
        return next(sufficient, max(ranges, key=lambda droppable: droppable.length, default=None))

    def shift(self, dropped: DroppedRange, cached_length: int) -> None:
        """Drop a range that the slot dropped.

        cached_length  of the slot after the shift: all remaining tokens if their keys were rotated; otherwise up to
                       `dropped.start`, and tokens after that are recomputed
        """
        if self._stage_index == self.total_shifts:
            self._stages.append(self._next_stage(dropped, cached_length))
            self.salts.add(self._stages[-1].salt)
        del self.tokens[dropped.start : dropped.stop]
        self._stage_index += 1

    def undo_shift(self) -> None:
        """Return to the stage before the last shift."""
        stage = self._stage
        self.tokens[stage.start : stage.start] = stage.dropped
        self._stage_index -= 1

    @property
    def _stage(self) -> _Stage:
        return self._stages[self._stage_index]

    def _find_bidirectional_keys(self, length: int) -> list[list[int]]:
        """By bidirectional range of the prompt its keys; none inside of one content, whose keys depend on all of it."""
        keys, ranges = self.prefix_keys(length), self._stage.contents
        return [
            []
            if any(first <= start and stop <= last for first, last in ranges)
            else _range_keys(repr(keys[start:stop]).encode(), stop - start)
            for start, stop in self._stage.bidirectional
        ]

    def _droppable_ranges(self, target: int) -> list[DroppedRange]:
        """Ranges of up to `target` tokens before, between and after the protected ranges, oldest first."""
        ranges, start = [], self._keep_tokens
        for protected_start, protected_stop in self._stage.protected:
            ranges.append(DroppedRange(start, min(protected_start - start, target)))
            start = max(start, protected_stop)
        # Half of the tokens after the last protected range stay: the text continues from them.
        return [*ranges, DroppedRange(start, min((self._capacity - start) // 2, target))]

    def _next_stage(self, drop: DroppedRange, cached_length: int) -> _Stage:
        stage = self._stage
        dropped = tuple(self.tokens[drop.start : drop.stop])
        protected = tuple(_shift_range(span, drop) for span in stage.protected)
        contents = tuple(_shift_range(span, drop) for span in stage.contents)
        bidirectional = tuple(_shift_range(span, drop) for span in stage.bidirectional)
        ranges = (protected, contents, bidirectional)
        recomputable = min(stage.recomputable_length, drop.start)
        if cached_length <= recomputable:
            # No moved key is left: all further tokens are computed from the remaining ones, as in a new sequence.
            first_salt = self._stages[0].salt
            return _Stage(first_salt, 0, self._capacity, *ranges, drop.start, dropped)
        history = repr((stage.salt, drop.start, cached_length, self._state_mode, dropped)).encode()
        salt = hashlib.sha256(history).digest()
        return _Stage(salt, cached_length, recomputable, *ranges, drop.start, dropped)


def _shift_range(protected: Range, dropped: DroppedRange) -> Range:
    """The positions of a protected range after a shift, which never drops tokens of it."""
    start, stop = protected
    return protected if start < dropped.stop else (start - dropped.length, stop - dropped.length)


def _write_keys(keys: list[int], start: int, range_keys: Sequence[int]) -> None:
    """Overwrite the keys from `start` on, as far as there are any."""
    if start < len(keys):
        keys[start : start + len(range_keys)] = range_keys[: len(keys) - start]


def _range_keys(digest: bytes, count: int) -> list[int]:
    """A key for each token of a range by its offset, of 63 bits and negative, so that it equals no token."""
    numbers = np.frombuffer(hashlib.shake_256(digest).digest(8 * count), dtype=np.int64) | np.iinfo(np.int64).min
    return [int(number) for number in numbers]
