"""A request inside the engine: its tokens, its slot, its sampling state, and its counts and times."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from functools import cached_property
from typing import get_args

from engine.errors import InvalidRequest
from engine.grammar.matcher import GrammarMatcher
from engine.model.rope import RopeSwitch
from engine.output.text import TextStream
from engine.sample.constraints import Constraints
from engine.sample.logprobs import PromptScores
from engine.sample.penalties import PenaltyHistory
from engine.sample.pooling import PromptPooler
from engine.sample.sampler import SamplingContext
from engine.schedule.contents import SequenceContents
from engine.schedule.context import ContextHistory
from engine.step.content import TEXT_LAYOUT, PromptLayout
from engine.step.encoder_mask import EncoderMask
from engine.text.tokenizer import Tokenizer
from engine.types.events import Delta, FinishReason, Timings, Usage
from engine.types.request import Overflow, Request, Tier

# Attention sinks: a context shift keeps the first four tokens (StreamingLLM, arXiv 2309.17453).
_ATTENTION_SINKS = 4
_TIERS: tuple[str, ...] = get_args(Tier)
# Why a text ends, and the stop that ended it.
Ending = tuple[FinishReason, str | int | None]


class SamplingState:
    """What the next token of a sequence depends on besides its logits: seed, position, penalties and constraints."""

    def __init__(
        self, request: Request, *, vocabulary: int, end_tokens: frozenset[int], matcher: GrammarMatcher | None
    ) -> None:
        self.seed = int.from_bytes(os.urandom(8)) >> 1 if request.sampling.seed is None else request.sampling.seed
        self._request, self._vocabulary, self._end_tokens = request, vocabulary, end_tokens
        # The position in the text, which context shifts do not change.
        self._position = len(request.prompt)
        prompt = [token for token in text_tokens(request) if token < vocabulary]
        self._history = PenaltyHistory(request.sampling, prompt, vocabulary)
        self._constraints = Constraints.for_request(
            request, prompt, vocabulary=vocabulary, end_tokens=end_tokens, matcher=matcher
        )

    def append(self, token: int) -> None:
        """Follow the text by one emitted token."""
        self._position += 1
        self._history.append(token)
        if self._constraints is not None:
            self._constraints.append(token)

    @property
    def matches_grammar(self) -> bool:
        """Whether the grammar of the request permits the emitted tokens."""
        return self._constraints is None or self._constraints.matches_grammar

    def context(self) -> SamplingContext:
        """How to sample the next token."""
        return SamplingContext(self._request.sampling, self.seed, self._position, self._history, self._constraints)

    def is_end_token(self, token: int) -> bool:
        """Whether the token is an EOS that ends the text; `ignore_eos` does not apply to grammars, which end in EOS."""
        return token in self._end_tokens and (not self._request.ignore_eos or self._request.grammar is not None)

    def is_stop_token(self, token: int) -> bool:
        """Whether the token ends the text: an end token, or a stop token of the request."""
        return token in self._request.stop_token_ids or self.is_end_token(token)

    def deadlock_reason(self, sampled: Collection[int | None]) -> str | None:
        """Why the constraints permit no token after the sampled ones up to a None; None: they are not the cause."""
        if self._constraints is None or None not in sampled:
            return None
        tokens = [token for token in sampled if token is not None]
        return self._constraints.after(tokens).deadlock_reason(self._vocabulary)


class SequenceStats:
    """Token counts and timestamps of a sequence.

    arrived          when it was queued
    cached_tokens    of the prompt that were reused; None until it first gets a slot
    accepted_tokens, rejected_tokens  draft tokens
    matched_tokens   of the prompt that the prefix cache held, even where it had no checkpoint to resume at
    diverged         whether other cached sequences continue differently there
    """

    def __init__(self, now: float) -> None:
        self.arrived = now
        self.cached_tokens: int | None = None
        self.accepted_tokens = self.rejected_tokens = self.matched_tokens = 0
        self.diverged = False
        self._started: float | None = None
        self._first_token: float | None = None

    def record_start(self, cached_tokens: int, now: float) -> bool:
        """The sequence got a slot. False after a preemption: only the first slot counts."""
        if self.cached_tokens is not None:
            return False
        self.cached_tokens, self._started = cached_tokens, now
        return True

    def record_token(self, now: float) -> None:
        """A token was emitted; the first one ends the prompt time."""
        if self._first_token is None:
            self._first_token = now

    def timings(self, now: float) -> Timings:
        """Seconds in the queue, on the prompt and on the output until `now`."""
        started = now if self._started is None else self._started
        first = now if self._first_token is None else self._first_token
        return Timings(started - self.arrived, first - started, now - first)


class Sequence:
    """A running or waiting request; a waiting one has no slot.

    context         the tokens that the slot caches: prompt and output, less what context shifts dropped
    tokens          those of the context, in one list for good; longer than the capacity where shifts are due
    output          generated tokens
    encoder_mask    which encoder entries each token attends to; required before it gets a slot (`is_ready`)
    earlier         the deltas of the tokens that an earlier stream emitted, as far as they are added (`replay`)
    earlier_ending  the end of the text, if it is among these tokens
    contents        images and sounds of its prompt; None: there are none
    adapter         the slot of its adapter; 0: none
    is_unread       whether the client leaves its output unread
    scores, pooler  of the prompt; None where the request asks for none, or they are complete and delivered
    long_factors    whether all its keys are rotated by the long factors of LongRoPE (engine/model/rope.py)
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
        layout: PromptLayout = TEXT_LAYOUT,
    ) -> None:
        self.request, self.stats = request, SequenceStats(now)
        self.sampling = SamplingState(request, vocabulary=vocabulary, end_tokens=end_tokens, matcher=matcher)
        detokenizer = tokenizer.detokenizer(request.prompt, special=request.include_special_tokens)
        self._skipped_tokens = detokenizer.skipped_tokens
        self.text = TextStream(
            detokenizer,
            request.stop,
            request.stop_regex,
            min_tokens=request.min_tokens,
            at_once=request.tokens_at_once,
        )
        self.earlier: list[Delta] = []
        self.earlier_ending: Ending | None = None
        self.output: list[int] = []
        self.slot: int | None = None
        self.encoder_mask: EncoderMask | None = None
        self.adapter = 0
        self.is_unread = False
        self.overflow = request.overflow or overflow
        self.scores = None if request.score_from is None else PromptScores(request.prompt, request.score_from)
        self.pooler = None if request.pooling is None else PromptPooler(request.pooling, len(request.prompt))
        self._capacity, self._rope_switch = capacity, rope_switch
        self.long_factors = rope_switch is not None and self._exceeds_original_context(len(request.prompt))
        self.context = ContextHistory(
            request.prompt,
            capacity=capacity,
            keep_tokens=self._tokens_to_keep(tokenizer.special_tokens),
            protected=request.protected,
            contents=request.contents,
            bidirectional=layout.bidirectional,
            salt=self._salt(),
            state_mode=request.recurrent_shift,
        )
        self.contents = SequenceContents(layout, self.context) if request.contents else None
        self.tokens = self.context.tokens
        self._bidirectional = layout.bidirectional
        self._checkpoints: set[int] = set()
        self._add_prompt_checkpoints(checkpoint_interval)

    @property
    def owner(self) -> str:
        """The first level of fair sharing."""
        return self.request.owner

    @property
    def group(self) -> tuple[str, str]:
        """The second level of fair sharing: the sequences of one request of an owner."""
        return self.request.owner, self.request.group or self.request.id

    @property
    def rank(self) -> int:
        """Of its tier; lower ranks are served first."""
        return _TIERS.index(self.request.tier)

    @property
    def deadline(self) -> float | None:
        """When the sequence is finished in any state; None: never."""
        seconds = self.request.timeout_seconds
        return None if seconds is None else self.stats.arrived + seconds

    @property
    def has_started(self) -> bool:
        """Whether it got a slot before."""
        return self.stats.cached_tokens is not None

    @property
    def is_ready(self) -> bool:
        """Whether it may get a slot: its media are encoded, and its earlier tokens are added."""
        return (self.request.media is None or self.encoder_mask is not None) and self.is_replayed

    @property
    def is_replayed(self) -> bool:
        """Whether all tokens that an earlier stream emitted are added."""
        return len(self.output) >= len(self.request.emitted)

    @property
    def reusable_length(self) -> int:
        """Tokens that may come from the prefix cache, up to the first token that needs logits or hidden states.

        Always less than all tokens: the last one gives the logits of the next.
        """
        needed = [prompt.next_position for prompt in (self.scores, self.pooler) if prompt is not None]
        return min([len(self.tokens) - 1, *needed])

    @cached_property
    def max_new_tokens(self) -> int:
        """The limit of the output: `max_tokens`, or what the context leaves."""
        if self.request.pooling is not None:
            return 0
        available = self._capacity if self.overflow == "shift" else self._capacity - len(self.request.prompt)
        requested = self.request.max_tokens
        if requested is None:
            return available
        return requested if self.overflow == "shift" else min(requested, available)

    @property
    def remaining_tokens(self) -> int:
        """Tokens that one step may emit: up to the output limit, a context shift or a change of rotary factors."""
        remaining = min(self.max_new_tokens - len(self.output), self._capacity + 1 - len(self.tokens))
        if self._rope_switch is None or not self._rope_switch.recomputes or self.has_uniform_factors:
            return remaining
        return min(remaining, self._rope_switch.original_length + 1 - len(self.tokens))

    @property
    def is_context_full(self) -> bool:
        """Whether the latest token does not fit the context and no token may be dropped for it."""
        return len(self.tokens) > self._capacity and self.context.next_drop() is None

    @property
    def needs_long_factors(self) -> bool:
        """Whether its keys must be recomputed with the long factors, as `generate` does (`switch_to_long_factors`)."""
        if self.long_factors or self._rope_switch is None or not self._rope_switch.recomputes:
            return False
        return self._exceeds_original_context(len(self.tokens))

    @property
    def has_uniform_factors(self) -> bool:
        """Whether all its keys have the same rotary factors, so that a context shift can rotate them."""
        return self.long_factors or self._rope_switch is None or self._capacity <= self._rope_switch.original_length

    def switch_to_long_factors(self) -> None:
        """Use the long rotary factors from now on; the slot must be empty."""
        self.long_factors = True
        self.context.reset_salt(self._salt())

    def allows_drafter(self, kind: str) -> bool:
        """Whether the request permits drafts of this kind of drafter; models that draft read text only."""
        if self.contents is not None and kind in ("model", "mtp"):
            return False
        return self.request.speculation.drafter in ("auto", kind)

    def sampling_context(self) -> SamplingContext:
        """How to sample the next token."""
        return self.sampling.context()

    def is_omitted(self, token: int) -> bool:
        """Whether the output text leaves out the token, if it is sampled."""
        return token in self._skipped_tokens or self.sampling.is_stop_token(token)

    def append(self, token: int, now: float) -> None:
        """Add an emitted token."""
        self.stats.record_token(now)
        self._append(token)

    def replay(self, count: int) -> None:
        """Add the next `count` tokens that an earlier stream emitted.

        InvalidRequest if tokens follow the end, or if the grammar of the request forbids one.
        """
        start = len(self.output)
        for token in self.request.emitted[start : start + count]:
            if self.earlier_ending is not None:
                reason = f"'continue_from' has more tokens than the answer, which ends after {len(self.output)}"
                raise InvalidRequest("continue_from", reason)
            self._append(token)
            if not self.sampling.matches_grammar:
                reason = f"the grammar of the request forbids token {token} at position {len(self.output) - 1}"
                raise InvalidRequest("continue_from", f"{reason} of 'continue_from'")
            delta = None if self.sampling.is_stop_token(token) else self.text.push(token)
            self.earlier.append(delta or Delta("", (token,)))
            self.earlier_ending = self.ending(token)

    def ending(self, token: int) -> Ending | None:
        """Why the text ends after its latest token, which `text` has unless it is a stop token; None: it goes on."""
        if token in self.request.stop_token_ids:
            return "stop", token
        if self.sampling.is_end_token(token):
            return "stop", None
        if self.text.stop is not None:
            return "stop", self.text.stop
        if len(self.output) >= self.max_new_tokens or self.is_context_full:
            return "length", None
        return None

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        self.output.append(token)
        self.sampling.append(token)

    def add_checkpoint(self, position: int) -> None:
        """Add a position of the prompt to resume at, unless it lies inside a bidirectional range."""
        inside = any(start < position < stop for start, stop in self._bidirectional)
        if 0 < position < len(self.request.prompt) and not inside:
            self._checkpoints.add(position)

    def checkpoints(self, start: int, stop: int) -> list[int]:
        """The checkpoints in (start, stop], ascending; none after a context shift."""
        if self.context.shifts:
            return []
        return sorted(position for position in self._checkpoints if start < position <= stop)

    def record_prefix_match(self, length: int, *, diverged: bool) -> None:
        """The prefix cache holds the first `length` tokens: they become a checkpoint."""
        self.add_checkpoint(length)
        if self.stats.cached_tokens is None:
            self.stats.matched_tokens, self.stats.diverged = min(length, len(self.request.prompt)), diverged

    def update_cached(self, cached_length: int) -> None:
        """Another sequence computed more of the prompt: its slot now caches `cached_length` tokens."""
        if not self.output:
            self.stats.cached_tokens = cached_length

    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(
            prompt_tokens=len(self.request.prompt),
            completion_tokens=len(self.output),
            cached_tokens=self.stats.cached_tokens or 0,
            context_shifts=self.context.total_shifts,
            shifted_tokens=self.context.dropped_tokens,
            accepted_tokens=self.stats.accepted_tokens,
            rejected_tokens=self.stats.rejected_tokens,
            matched_tokens=self.stats.matched_tokens,
            diverged=self.stats.diverged,
        )

    def _exceeds_original_context(self, length: int) -> bool:
        """Whether a text of `length` tokens fills a slot beyond the original context of the model."""
        assert self._rope_switch is not None, "there is one set of rotary factors"
        return min(length, self._capacity) > self._rope_switch.original_length

    def _salt(self) -> bytes:
        """Keys and values depend on the media and on the rotary factors too."""
        media = b"" if self.request.media is None else self.request.media.digest
        salt = self.request.salt + media
        return hashlib.sha256(b"extended" + salt).digest() if self.long_factors else salt

    def _add_prompt_checkpoints(self, interval: int | None) -> None:
        length = len(self.request.prompt)
        # The same prompt again resumes before its last token, which gives the first logits.
        regular = range(interval, length, interval) if interval else ()
        for position in (*self.request.checkpoints, self.reusable_length, length - 1, *regular):
            self.add_checkpoint(position)

    def _tokens_to_keep(self, special_tokens: frozenset[int]) -> int:
        """Tokens at the start that context shifts keep: at most half of the context."""
        keep = self.request.keep
        if keep is None:
            prompt = self.request.prompt
            first = next((index for index, token in enumerate(prompt) if token not in special_tokens), len(prompt))
            keep = first + _ATTENTION_SINKS
        return min(keep, self._capacity // 2)


def text_tokens(request: Request) -> list[int]:
    """The tokens of the prompt outside of contents; placeholders of `media` may lie outside of the vocabulary."""
    tokens = list(request.prompt)
    for content in reversed(request.contents):
        del tokens[content.start : content.stop]
    return tokens
