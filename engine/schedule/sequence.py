"""One request while it lives in the engine: what its cache is about, what the client got, and when it is over."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from functools import cached_property
from typing import get_args

from engine.grammar.matcher import GrammarMatcher
from engine.model.encoder_mask import EncoderMask
from engine.model.rope import RopeSwitch
from engine.output.text import TextStream
from engine.sample.constraints import Constraints
from engine.sample.logprobs import PromptScores
from engine.sample.penalties import PenaltyHistory
from engine.sample.pooling import PromptPooler
from engine.sample.sampler import SamplingContext
from engine.schedule.context import ContextHistory
from engine.text.tokenizer import Tokenizer
from engine.types.events import Timings, Usage
from engine.types.request import Overflow, Request, Tier

# Attention leans on the first tokens whatever they are (StreamingLLM, arXiv 2309.17453): a shift spares four.
_ATTENTION_SINKS = 4


class Sequence:
    """A running or waiting request. Waiting means that it has no slot; it is over when it is in no queue.

    output   what was generated
    accepted, refused  drafted tokens that were said, and that were not
    context  what the slot is about: the prompt and the output, less what shifts dropped
    tokens   those of the lineage; longer than the capacity where shifts are due
    encoder_mask    what its rows see of its media; it gets no slot without (`ready`)
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
        checkpoint_interval: int | None = None,
        end_tokens: frozenset[int] = frozenset(),
        matcher: GrammarMatcher | None = None,
        rope_switch: RopeSwitch | None = None,
    ) -> None:
        self.request = request
        self.output: list[int] = []
        self.slot: int | None = None
        self.encoder_mask: EncoderMask | None = None
        self.overflow = request.overflow or overflow
        self.seed = int.from_bytes(os.urandom(8)) >> 1 if request.sampling.seed is None else request.sampling.seed
        decoder = tokenizer.detokenizer(request.prompt, special=request.include_special_tokens)
        self.text = TextStream(decoder, request.stop, request.stop_regex, min_tokens=request.min_tokens)
        self.cached_tokens: int | None = None
        self._capacity, self._prefix_match = capacity, (0, False)
        self.accepted_tokens = self.rejected_tokens = 0
        self.scores = None if request.score_from is None else PromptScores(request.prompt, request.score_from)
        self.pool = None if request.pooling is None else PromptPooler(request.pooling, len(request.prompt))
        self.owner, self.group = request.owner, (request.owner, request.group or request.id)
        self.rank = get_args(Tier).index(request.tier)
        self.deadline = None if request.timeout_seconds is None else now + request.timeout_seconds
        self._vocabulary, self._end_tokens, self._rope_switch = vocabulary, end_tokens, rope_switch
        self.long_factors = rope_switch is not None and self._exceeds_original_context(rope_switch, len(request.prompt))
        self.context = ContextHistory(
            request.prompt,
            capacity=capacity,
            keep=self._tokens_to_keep(tokenizer.special_tokens),
            protected=request.protected,
            mutual=request.bidirectional,
            salt=self._salt(),
            states=request.recurrent_shift,
        )
        # One list for good: shifts change it in place.
        self.tokens = self.context.tokens
        self._checkpoints: set[int] = set()
        self._add_prompt_checkpoints(checkpoint_interval)
        # The token of an image may lie behind the vocabulary.
        said = [token for token in request.prompt if token < vocabulary]
        self._history = PenaltyHistory(request.sampling, said, vocabulary)
        self._rules = Constraints.for_request(
            request, said, vocabulary=vocabulary, end_tokens=end_tokens, matcher=matcher
        )
        self._arrived, self._started, self._first = now, now, now

    @property
    def is_ready(self) -> bool:
        """Whether it may have a slot: what it looks at must be encoded before."""
        return self.request.media is None or self.encoder_mask is not None

    @property
    def reusable_length(self) -> int:
        """Tokens that need not be computed if others were before: no row behind them is needed.

        At least one token stays, for without a row there are no logits.
        """
        needed = [gathered.next_position for gathered in (self.scores, self.pool) if gathered is not None]
        return min([len(self.tokens) - 1, *needed])

    @property
    def needs_long_factors(self) -> bool:
        """Whether its content must be computed anew by the long rotary factors, as `generate` does it (`extend`)."""
        if self.long_factors or self._rope_switch is None or not self._rope_switch.recomputes:
            return False
        return self._exceeds_original_context(self._rope_switch, len(self.tokens))

    @property
    def has_uniform_factors(self) -> bool:
        """Whether one set of rotary factors holds for all of its keys, so that a shift can turn them."""
        return self.long_factors or self._rope_switch is None or self._capacity <= self._rope_switch.original_length

    def switch_to_long_factors(self) -> None:
        """Rotate all rows by the long factors from now on; the slot must be empty."""
        self.long_factors = True
        self.context.reset_salt(self._salt())

    @cached_property
    def max_new_tokens(self) -> int:
        """New tokens at most."""
        if self.request.pooling is not None:
            return 0
        room = self._capacity if self.overflow == "shift" else self._capacity - len(self.request.prompt)
        asked = self.request.max_tokens
        if asked is None:
            return room
        return asked if self.overflow == "shift" else min(asked, room)

    @property
    def remaining_tokens(self) -> int:
        """Tokens that it may say at once: what is left of its limit, and of its context."""
        room = min(self.max_new_tokens - len(self.output), self._capacity + 1 - len(self.tokens))
        if self._rope_switch is None or not self._rope_switch.recomputes or self.has_uniform_factors:
            return room
        # What follows is computed by other factors than what is there.
        return min(room, self._rope_switch.original_length + 1 - len(self.tokens))

    def allows_drafter(self, kind: str) -> bool:
        """Whether the request lets this kind of drafter guess for it."""
        return self.request.speculation.drafter in ("auto", kind)

    @property
    def is_context_full(self) -> bool:
        """Whether the latest token has no place in the context, and nothing may be dropped for it."""
        return len(self.tokens) > self._capacity and self.context.next_drop() is None

    def add_checkpoint(self, position: int) -> None:
        """Take note that this place in the prompt is worth resuming at; nobody can inside a mutual range."""
        if 0 < position < len(self.request.prompt) and not any(a < position < b for a, b in self.request.bidirectional):
            self._checkpoints.add(position)

    def checkpoints(self, start: int, stop: int) -> list[int]:
        """The places worth resuming at in (start, stop], in order. After a shift there are none."""
        return [] if self.context.shifts else sorted(mark for mark in self._checkpoints if start < mark <= stop)

    def record_prefix_match(self, length: int, *, diverged: bool) -> None:
        """So much of the prompt is remembered, and whether others went on differently there."""
        self.add_checkpoint(length)
        if self.cached_tokens is None:
            self._prefix_match = length, diverged

    def start(self, cached_tokens: int, now: float) -> bool:
        """The sequence got a slot. Returns whether for the first time: after a preemption it has started before."""
        if self.cached_tokens is not None:
            return False
        self.cached_tokens, self._started = cached_tokens, now
        return True

    def update_cached(self, cached_length: int) -> None:
        """Others computed more of the prompt, so that the sequence stands at `cached_length` without work of its own."""
        if not self.output:
            self.cached_tokens = cached_length

    def append(self, token: int, now: float) -> None:
        """Take a token that was emitted for this sequence."""
        if not self.output:
            self._first = now
        self.tokens.append(token)
        self.output.append(token)
        self._history.append(token)
        if self._rules is not None:
            self._rules.append(token)

    def draw(self) -> SamplingContext:
        """How the next token is to be drawn. Its position is that in the text, which no shift changes."""
        position = len(self.request.prompt) + len(self.output)
        return SamplingContext(self.request.sampling, self.seed, position, self._history, self._rules)

    def is_end_token(self, token: int) -> bool:
        """Whether a token is an end of this text. A grammar says itself where its text ends, so that is not ignored."""
        return token in self._end_tokens and (not self.request.ignore_eos or self.request.grammar is not None)

    def is_stop_token(self, token: int) -> bool:
        """Whether the text is over with a token, be it an end or one that the request stops at."""
        return token in self.request.stop_token_ids or self.is_end_token(token)

    def deadlock_reason(self, sampled: Collection[int | None]) -> str | None:
        """Why nothing can follow what a step said, up to a None; None: it is not for the request's own rules."""
        if self._rules is None or None not in sampled:
            return None
        known = [token for token in sampled if token is not None]
        return self._rules.after(known).deadlock_reason(self._vocabulary)

    def usage(self) -> Usage:
        """What the request cost so far."""
        past = self.context
        return Usage(
            prompt_tokens=len(self.request.prompt),
            completion_tokens=len(self.output),
            cached_tokens=self.cached_tokens or 0,
            context_shifts=past.total_shifts,
            shifted_tokens=past.dropped_tokens,
            accepted_tokens=self.accepted_tokens,
            rejected_tokens=self.rejected_tokens,
            matched_tokens=self._prefix_match[0],
            diverged=self._prefix_match[1],
        )

    def timings(self, now: float) -> Timings:
        """Where its time went so far."""
        started = now if self.cached_tokens is None else self._started
        first = self._first if self.output else now
        return Timings(started - self._arrived, first - started, now - first)

    def _exceeds_original_context(self, switch: RopeSwitch, length: int) -> bool:
        """Whether a slot ever holds more than the original length while the text is `length` tokens long."""
        return min(length, self._capacity) > switch.original_length

    def _salt(self) -> bytes:
        """What is computed under one image is wrong under another, and by other rotary factors too."""
        media = b"" if self.request.media is None else self.request.media.digest
        salt = self.request.salt + media
        return hashlib.sha256(b"extended" + salt).digest() if self.long_factors else salt

    def _add_prompt_checkpoints(self, interval: int | None) -> None:
        length = len(self.request.prompt)
        # The same prompt again needs a row for its logits: so it is taken up before its last token.
        regular = range(interval, length, interval) if interval else ()
        for position in (*self.request.checkpoints, self.reusable_length, length - 1, *regular):
            self.add_checkpoint(position)

    def _tokens_to_keep(self, special: frozenset[int]) -> int:
        """Tokens at the start that a shift does not drop; at least one behind them can always go."""
        asked = self.request.keep
        if asked is None:
            prompt = self.request.prompt
            asked = (
                next((at for at, token in enumerate(prompt) if token not in special), len(prompt)) + _ATTENTION_SINKS
            )
        return min(asked, self._capacity // 2)
