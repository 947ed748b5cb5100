"""One request while it lives in the engine: what its cache is about, what the client got, and when it is over."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from functools import cached_property
from typing import get_args

from engine.grammar.matcher import Matcher
from engine.model.rope import RopeSwitch
from engine.model.sight import Sight
from engine.output.text import TextStream
from engine.sample.constraints import Rules
from engine.sample.logprobs import Scores
from engine.sample.penalties import History
from engine.sample.pooling import Pool
from engine.sample.sampler import Draw
from engine.schedule.context import Lineage
from engine.text.tokenizer import Tokenizer
from engine.types.events import Timings, Usage
from engine.types.request import Overflow, Request, Tier

# Attention leans on the first tokens whatever they are (StreamingLLM, arXiv 2309.17453): a shift spares four.
_SINKS = 4


class Sequence:
    """A running or waiting request. Waiting means that it has no slot; it is over when it is in no queue.

    output   what was generated
    accepted, refused  drafted tokens that were said, and that were not
    lineage  what the slot is about: the prompt and the output, less what shifts dropped
    tokens   those of the lineage; longer than the capacity where shifts are due
    sight    what its rows see of its media; it gets no slot without (`ready`)
    scores, pool  what is gathered of the prompt's rows; None where nothing is asked for, or all has been told
    extended whether all of its rows are rotated by the long factors (engine/model/rope.py)
    rank     who is served first: lower ones
    owner, group  whose share of the slots it takes: that of an owner, and of one of the owner's requests
    deadline when it ends, wherever it is; None: when it is done
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        *,
        vocabulary: int,
        capacity: int,
        overflow: Overflow,
        now: float,
        checkpoint: int | None = None,
        ends: frozenset[int] = frozenset(),
        matcher: Matcher | None = None,
        switch: RopeSwitch | None = None,
    ) -> None:
        self.request = request
        self.output: list[int] = []
        self.slot: int | None = None
        self.sight: Sight | None = None
        self.overflow = request.overflow or overflow
        self.seed = int.from_bytes(os.urandom(8)) >> 1 if request.sampling.seed is None else request.sampling.seed
        decoder = tokenizer.decoder(request.prompt, special=request.special)
        self.text = TextStream(decoder, request.stop, request.stop_regex, least=request.min_tokens)
        self.cached: int | None = None
        self._capacity, self._found = capacity, (0, False)
        self.accepted = self.refused = 0
        self.scores = None if request.score_from is None else Scores(request.prompt, request.score_from)
        self.pool = None if request.pooling is None else Pool(request.pooling, len(request.prompt))
        self.owner, self.group = request.owner, (request.owner, request.group or request.id)
        self.rank = get_args(Tier).index(request.tier)
        self.deadline = None if request.timeout_seconds is None else now + request.timeout_seconds
        self._vocabulary, self._ends, self._switch = vocabulary, ends, switch
        self.extended = switch is not None and self._is_beyond(switch, len(request.prompt))
        self.lineage = Lineage(
            request.prompt,
            capacity=capacity,
            keep=self._keep(tokenizer.special),
            protected=request.protected,
            mutual=request.mutual,
            salt=self._salt(),
            states=request.recurrent_shift,
        )
        # One list for good: shifts change it in place.
        self.tokens = self.lineage.tokens
        self._marks: set[int] = set()
        self._mark_prompt(checkpoint)
        # The token of an image may lie behind the vocabulary.
        said = [token for token in request.prompt if token < vocabulary]
        self._history = History(request.sampling, said, vocabulary)
        self._rules = Rules.of(request, said, vocabulary=vocabulary, ends=ends, matcher=matcher)
        self._arrived, self._started, self._first = now, now, now

    @property
    def ready(self) -> bool:
        """Whether it may have a slot: what it looks at must be encoded before."""
        return self.request.media is None or self.sight is not None

    @property
    def reusable(self) -> int:
        """Tokens that need not be computed if others were before: no row behind them is needed.

        At least one token stays, for without a row there are no logits.
        """
        needed = [gathered.next for gathered in (self.scores, self.pool) if gathered is not None]
        return min([len(self.tokens) - 1, *needed])

    @property
    def outgrown(self) -> bool:
        """Whether its content must be computed anew by the long rotary factors, as `generate` does it (`extend`)."""
        if self.extended or self._switch is None or not self._switch.restarts:
            return False
        return self._is_beyond(self._switch, len(self.tokens))

    @property
    def is_rotated_alike(self) -> bool:
        """Whether one set of rotary factors holds for all of its keys, so that a shift can turn them."""
        return self.extended or self._switch is None or self._capacity <= self._switch.original

    def extend(self) -> None:
        """Rotate all rows by the long factors from now on; the slot must be empty."""
        self.extended = True
        self.lineage.restart(self._salt())

    @cached_property
    def limit(self) -> int:
        """New tokens at most."""
        if self.request.pooling is not None:
            return 0
        room = self._capacity if self.overflow == "shift" else self._capacity - len(self.request.prompt)
        asked = self.request.max_tokens
        if asked is None:
            return room
        return asked if self.overflow == "shift" else min(asked, room)

    @property
    def room(self) -> int:
        """Tokens that it may say at once: what is left of its limit, and of its context."""
        room = min(self.limit - len(self.output), self._capacity + 1 - len(self.tokens))
        if self._switch is None or not self._switch.restarts or self.is_rotated_alike:
            return room
        # What follows is computed by other factors than what is there.
        return min(room, self._switch.original + 1 - len(self.tokens))

    def may_draft(self, kind: str) -> bool:
        """Whether the request lets this kind of drafter guess for it."""
        return self.request.speculation.drafter in ("auto", kind)

    @property
    def cornered(self) -> bool:
        """Whether the latest token has no place in the context, and nothing may be dropped for it."""
        return len(self.tokens) > self._capacity and self.lineage.cut() is None

    def mark(self, position: int) -> None:
        """Take note that this place in the prompt is worth resuming at; nobody can inside a mutual range."""
        if 0 < position < len(self.request.prompt) and not any(a < position < b for a, b in self.request.mutual):
            self._marks.add(position)

    def marks(self, start: int, stop: int) -> list[int]:
        """The places worth resuming at in (start, stop], in order. After a shift there are none."""
        return [] if self.lineage.shifts else sorted(mark for mark in self._marks if start < mark <= stop)

    def find(self, known: int, *, parted: bool) -> None:
        """So much of the prompt is remembered, and whether others went on differently there."""
        self.mark(known)
        if self.cached is None:
            self._found = known, parted

    def start(self, cached: int, now: float) -> bool:
        """The sequence got a slot. Returns whether for the first time: after a preemption it has started before."""
        if self.cached is not None:
            return False
        self.cached, self._started = cached, now
        return True

    def gain(self, standing: int) -> None:
        """Others computed more of the prompt, so that the sequence stands at `standing` without work of its own."""
        if not self.output:
            self.cached = standing

    def append(self, token: int, now: float) -> None:
        """Take a token that was emitted for this sequence."""
        if not self.output:
            self._first = now
        self.tokens.append(token)
        self.output.append(token)
        self._history.append(token)
        if self._rules is not None:
            self._rules.append(token)

    def draw(self) -> Draw:
        """How the next token is to be drawn. Its position is that in the text, which no shift changes."""
        position = len(self.request.prompt) + len(self.output)
        return Draw(self.request.sampling, self.seed, position, self._history, self._rules)

    def ends(self, token: int) -> bool:
        """Whether a token is an end of this text. A grammar says itself where its text ends, so that is not ignored."""
        return token in self._ends and (not self.request.ignore_eos or self.request.grammar is not None)

    def stops(self, token: int) -> bool:
        """Whether the text is over with a token, be it an end or one that the request stops at."""
        return token in self.request.stop_token_ids or self.ends(token)

    def deadlock(self, said: Collection[int | None]) -> str | None:
        """Why nothing can follow what a step said, up to a None; None: it is not for the request's own rules."""
        if self._rules is None or None not in said:
            return None
        known = [token for token in said if token is not None]
        return self._rules.after(known).deadlock(self._vocabulary)

    def usage(self) -> Usage:
        """What the request cost so far."""
        past = self.lineage
        return Usage(
            prompt_tokens=len(self.request.prompt),
            completion_tokens=len(self.output),
            cached_tokens=self.cached or 0,
            context_shifts=past.farthest,
            shifted_tokens=past.dropped,
            accepted_tokens=self.accepted,
            refused_tokens=self.refused,
            known_tokens=self._found[0],
            parted=self._found[1],
        )

    def timings(self, now: float) -> Timings:
        """Where its time went so far."""
        started = now if self.cached is None else self._started
        first = self._first if self.output else now
        return Timings(started - self._arrived, first - started, now - first)

    def _is_beyond(self, switch: RopeSwitch, length: int) -> bool:
        """Whether a slot ever holds more than the original length while the text is `length` tokens long."""
        return min(length, self._capacity) > switch.original

    def _salt(self) -> bytes:
        """What is computed under one image is wrong under another, and by other rotary factors too."""
        media = b"" if self.request.media is None else self.request.media.digest
        salt = self.request.salt + media
        return hashlib.sha256(b"extended" + salt).digest() if self.extended else salt

    def _mark_prompt(self, checkpoint: int | None) -> None:
        length = len(self.request.prompt)
        # The same prompt again needs a row for its logits: so it is taken up before its last token.
        regular = range(checkpoint, length, checkpoint) if checkpoint else ()
        for position in (*self.request.marks, self.reusable, length - 1, *regular):
            self.mark(position)

    def _keep(self, special: frozenset[int]) -> int:
        """Tokens at the start that a shift does not drop; at least one behind them can always go."""
        asked = self.request.keep
        if asked is None:
            prompt = self.request.prompt
            asked = next((at for at, token in enumerate(prompt) if token not in special), len(prompt)) + _SINKS
        return min(asked, self._capacity // 2)
