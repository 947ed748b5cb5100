"""The synchronous engine: submit, cancel, step. A step returns the events of its requests.

A step schedules, drafts, runs the forward, verifies drafts and delivers tokens. An exception fails the sequences that
cause it: a forward is a transaction on the cache, which is rolled back, and then computes each sequence alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from contextlib import ExitStack
from dataclasses import replace

import torch

from engine.adapters.adapter import Adapter
from engine.config import EngineConfig
from engine.draft.depth import FixedDepth
from engine.draft.speculation import Speculation
from engine.errors import TimeoutTooShort
from engine.grammar.matcher import GrammarMatcher
from engine.load.cache import model_cache, offload_config
from engine.load.contents import with_ranges
from engine.load.load import LoadedModel
from engine.schedule.content_inputs import ContentInputs, EncodingFailed
from engine.schedule.encoder_inputs import EncoderInputs
from engine.schedule.inspection import Inspection
from engine.schedule.prefill_budget import Budget
from engine.schedule.replay import replay
from engine.schedule.scheduled import ScheduledSequence
from engine.schedule.scheduler import Scheduler, ShiftFailed
from engine.schedule.sequence import Sequence
from engine.schedule.step import Stepper, StepResult
from engine.schedule.step_cost import StepCost, Work
from engine.schedule.totals import Totals
from engine.schedule.wait_predictor import WaitPredictor
from engine.step.content import TEXT_LAYOUT, PromptLayout
from engine.types.events import Delta, Event, Failed, Finished, FinishReason, PrefillProgress, Started, TokenLogprob
from engine.types.request import Request
from engine.types.snapshot import EngineSnapshot
from engine.types.status import Stats

log = logging.getLogger("cellar.engine")

# Flushed to disk at once when idle. A request that arrives meanwhile waits for it, 10 to 160 ms.
_FLUSH_BYTES = 16 * 2**20
# Limits the logits of scored prompt tokens in a step; and the tokens that are scored whatever the vocabulary.
_SCORED_LOGITS_BYTES, _MIN_SCORED_TOKENS = 64 * 2**20, 16


class Core:
    """Runs requests over one model and one cache. One thread owns it."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        speculation: Speculation | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = with_ranges(config, loaded.content_encoder)
        self.capacity = loaded.capacity
        self.cache = model_cache(config, loaded)
        self._loaded, self._config, self._clock = loaded, config, clock
        self._cost = speculation.cost if speculation else StepCost()
        self._speculation = speculation or self._no_speculation()
        self._stepper = Stepper(loaded, self.cache)
        self._budget = Budget(self._cost, max_tokens=config.chunk, target_seconds=config.itl_target_seconds)
        scored = max(_SCORED_LOGITS_BYTES // (4 * loaded.info.vocabulary), _MIN_SCORED_TOKENS)
        self._scheduler = Scheduler(
            self.cache,
            self._budget,
            max_scored=scored,
            on_start=self._on_slot_assigned,
            computes_together=self._stepper.computes_together,
        )
        self._totals = Totals()
        self._waits = WaitPredictor(self.cache, self._scheduler, self._budget, self._totals)
        self._inspection = Inspection(self.cache, self._scheduler, self._totals, clock)
        offload, device = offload_config(config, loaded.identity), torch.device(config.device)
        self.encoder_inputs = EncoderInputs(loaded.encoder, offload, device)
        self.content_inputs = ContentInputs(loaded.content_encoder, offload, device)
        self._sequences: dict[str, Sequence] = {}
        self._events: list[tuple[str, Event]] = []
        # Called with the ids of HTTP requests, or of requests without one, before they are computed.
        self.on_compute: Callable[[tuple[str, ...]], None] = lambda requests: None
        # Time that the current step spent on finishing sequences.
        self._finish_seconds = 0.0

    @property
    def busy(self) -> bool:
        """Whether a step has anything to compute or to deliver."""
        return self._scheduler.busy or bool(self._events)

    def submit(self, request: Request, matcher: GrammarMatcher | None = None) -> TimeoutTooShort | None:
        """Queue a request, or return why it is refused; without a `matcher` its grammar is compiled here.

        Its first event is Started. An exception fails it, and leaves nothing of it here.
        """
        if request.grammar is not None and matcher is None:
            matcher = self._loaded.grammars.matcher(request.grammar)
        try:
            if (layout := self._layout(request)) is not None:
                sequence = self._sequence(request, matcher, layout)
                if (refusal := self._waits.refusal(sequence)) is not None:
                    return refusal
                self._queue(sequence)
        except Exception as error:
            log.exception("a request could not be queued")
            self._totals.failed += 1
            self._events.append((request.id, Failed(f"it could not be queued ({type(error).__name__})")))
        return None

    def _sequence(self, request: Request, matcher: GrammarMatcher | None, layout: PromptLayout) -> Sequence:
        return Sequence(
            self._loaded.adapters.with_salt(request),
            self._loaded.tokenizer,
            vocabulary=self._loaded.info.vocabulary,
            capacity=self.capacity,
            overflow=self._config.overflow,
            checkpoint_interval=self._config.checkpoint if self._loaded.recurrent else None,
            now=self._clock(),
            end_tokens=self._loaded.eos,
            matcher=matcher,
            rope_switch=self._loaded.switch,
            layout=layout,
        )

    def _queue(self, sequence: Sequence) -> None:
        adapters, id = self._loaded.adapters, sequence.request.id
        sequence.adapter = adapters.acquire(sequence.request.adapter)
        with ExitStack() as undo:
            undo.callback(adapters.release, sequence.adapter)
            self._scheduler.submit(sequence)
            self._sequences[id] = sequence
            undo.pop_all()

    def close(self) -> None:
        """End the thread of an encoding in progress."""
        self.content_inputs.close()

    def load_adapter(self, adapter: Adapter) -> None:
        """Load an adapter: requests name it from now on; sequences of an earlier one with its name keep that."""
        self._loaded.adapters.load(adapter)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; its sequences keep it. KeyError for an unknown name."""
        self._loaded.adapters.unload(name)

    def cancel(self, request_id: str) -> None:
        """Remove a request, running or waiting, without an event; unknown and finished ids are ignored."""
        if (sequence := self._sequences.get(request_id)) is not None:
            self._leave(sequence)

    def set_unread(self, request_id: str, is_unread: bool) -> None:
        """Record whether the client leaves the output of a request unread; unknown and finished ids are ignored."""
        if (sequence := self._sequences.get(request_id)) is not None:
            self._scheduler.set_unread(sequence, is_unread)

    def step(self) -> list[tuple[str, Event]]:
        """Compute one batch; its events with the ids of their requests, in order."""
        began = self._clock()
        self._finish_expired(began)
        self._replay(began)
        self._encode_media()
        scheduling, self._finish_seconds = self._clock(), 0.0
        scheduled = self._schedule()
        if scheduled:
            try:
                self._compute(scheduled, scheduling)
            except Exception as error:
                log.exception("a step failed")
                for part in scheduled:
                    self._fail(part.sequence, f"the step failed ({type(error).__name__})")
            self._totals.steps += 1
            self._totals.step_seconds += self._clock() - began
        self._encode_contents(began)
        events, self._events = self._events, []
        return events

    def flush_when_idle(self) -> bool:
        """Flush some cached prefixes, encoder entries and draft outputs to disk; False: all of them are flushed."""
        files = self.encoder_inputs.files, self.content_inputs.files
        try:
            flushed = self.cache.flush_to_disk(_FLUSH_BYTES) > 0 or any(of_kind.flush_one() for of_kind in files)
            return flushed or self._speculation.flush(_FLUSH_BYTES)
        except Exception:
            log.exception("cached content is not written; it is tried again later")
            return False

    def stats(self) -> Stats:
        """The current statistics."""
        drafts, encoders = self._speculation.counts(), self.content_inputs.counts
        return self._inspection.stats(self._loaded.adapters, drafts, encoders, self._waits.free_place_seconds())

    def snapshot(self, owner: str, salt: bytes) -> EngineSnapshot:
        """The state now, with sequences of `owner` and cached prefixes under `salt`."""
        return self._inspection.snapshot(owner, salt, self.stats())

    def _on_slot_assigned(self, sequence: Sequence, cached_length: int) -> None:
        prompt_tokens = len(sequence.request.prompt)
        cached_length = min(cached_length, prompt_tokens)
        if not sequence.stats.record_start(cached_length, self._clock()):
            return
        self._emit(sequence, Started(prompt_tokens, cached_length, sequence.sampling.seed, tuple(sequence.earlier)))
        if sequence.max_new_tokens == 0 and sequence.scores is None and sequence.pooler is None:
            self._finish(sequence, "length", None)

    def _finish_expired(self, now: float) -> None:
        """Finish all sequences, running or waiting, that passed their deadline."""
        for sequence in tuple(self._sequences.values()):
            if sequence.deadline is not None and sequence.deadline <= now:
                self._finish(sequence, "length", "deadline")
            elif sequence.request.emitted and sequence.slot is not None and sequence.is_context_full:
                # Earlier tokens that no engine of this size emits: its shifts leave nothing to drop.
                self._finish(sequence, "length", None)

    def _replay(self, began: float) -> None:
        """Add tokens of earlier streams to waiting sequences, for a bounded time."""
        for sequence, failed in replay(self._scheduler.waiting, lambda: self._clock() - began):
            if failed is not None:
                self._fail(sequence, failed.reason, caused_by_request=failed.caused_by_request)
            elif (ending := sequence.earlier_ending) is not None:
                self._on_slot_assigned(sequence, 0)
                self._finish(sequence, *ending)

    def _encode_media(self) -> None:
        """Encode the media of waiting sequences; media that fail the encoder fail their own request."""
        for sequence in tuple(self._scheduler.waiting):
            try:
                if not self.encoder_inputs.prepare(sequence):
                    return
            except Exception as error:
                log.exception("an encoder failed")
                self._fail(sequence, f"the media could not be encoded ({type(error).__name__})")

    def _encode_contents(self, began: float) -> None:
        """Encode a content that running sequences compute next, after the step that `began`; a failure fails these."""
        scheduler = self._scheduler
        sequences = [
            sequence
            for sequence in scheduler.running
            if sequence.contents is not None and not scheduler.waits_for_leader(sequence)
        ]
        try:
            self.content_inputs.release_computed(scheduler.cached_length)
            self.content_inputs.prepare(sequences, scheduler.cached_length, lambda: self._encoding_seconds(began))
        except Exception as error:
            log.exception("an encoder failed")
            reason = f"an image or a sound could not be encoded ({type(error.__cause__ or error).__name__})"
            for sequence in error.sequences if isinstance(error, EncodingFailed) else sequences:
                self._fail(sequence, reason)

    def _encoding_seconds(self, began: float) -> float:
        return self._budget.encoding_seconds(self._scheduler.decode_work, self._clock() - began)

    def _layout(self, request: Request) -> PromptLayout | None:
        """The layout of a prompt; None: the request has failed."""
        encoder = self._loaded.content_encoder
        if not request.contents or encoder is None:
            return TEXT_LAYOUT
        try:
            return encoder.layout(request.prompt, request.contents)
        except Exception as error:
            log.exception("a prompt with images or sounds has no layout")
            reason = f"the model refuses this order of texts, images and sounds ({type(error).__name__})"
            self._events.append((request.id, Failed(reason, caused_by_request=True)))
            return None

    def _schedule(self) -> list[ScheduledSequence]:
        """The spans of the next step. A shift that fails fails its sequence; other exceptions fail all that run."""
        while True:
            try:
                return self._scheduler.schedule()
            except ShiftFailed as error:
                log.exception("a context shift failed")
                self._fail(error.sequence, f"{error} ({type(error.__cause__).__name__})")
            except Exception as error:
                log.exception("the scheduler failed")
                for sequence in tuple(self._scheduler.running) or tuple(self._scheduler.waiting)[:1]:
                    self._fail(sequence, f"the scheduler failed ({type(error).__name__})")
                return []

    def _compute(self, batch: Rows[ScheduledSequence], began: float) -> None:
        """Run a step; `began` is the time before it was scheduled."""
        work = Work.of([scheduled.span for scheduled in batch])
        self._totals.record_batch(work.batch_tokens)
        self._cost.expect(work)
        batch = self._add_drafts(batch, work.batch_tokens)
        results = self._run(batch)
        sound = [result for result in results if not self._fail_if_broken(result)]
        self._scheduler.record_step([result.scheduled for result in results])
        for result in sound:
            self._accept(result)
        if self._speculation.reads_hidden_states:
            self._notify_drafters(results)
        # Step time includes the post-processing of tokens, but not finishing a sequence.
        draft_tokens = sum([len(scheduled.draft_tokens) for scheduled in batch])
        self._speculation.stepped(work.batch_tokens + draft_tokens, self._clock() - began - self._finish_seconds)

    def _run(self, batch: Rows[ScheduledSequence]) -> list[StepResult]:
        """The results of a step. After an exception each sequence is computed alone, and fails if that fails too."""
        requests = [scheduled.sequence.request for scheduled in batch]
        self.on_compute(tuple([request.group or request.id for request in requests]))
        try:
            return self._stepper.run(batch, returns_states=self._speculation.reads_hidden_states)
        except Exception as error:
            log.exception("a step failed")
            if len(batch) == 1:
                self._fail(batch[0].sequence, f"the step failed ({type(error).__name__})")
                return []
        return [result for scheduled in batch for result in self._run([scheduled])]

    def _add_drafts(self, batch: Rows[ScheduledSequence], batch_tokens: int) -> Rows[ScheduledSequence]:
        """Add drafts to a step of `batch_tokens`, as far as cells are free or evictable."""
        decoding = [scheduled.sequence for scheduled in batch if scheduled.is_sampled]
        try:
            drafts = self._speculation.draft(
                decoding,
                batch_tokens=batch_tokens,
                free_cells=lambda max_tokens: self._draft_capacity(batch_tokens, max_tokens),
            )
        except Exception:
            # The output does not depend on drafts.
            log.exception("a drafter failed; speculative decoding is disabled")
            self._speculation = self._no_speculation()
            return batch
        vocabulary = self._loaded.info.vocabulary
        drafts = {sequence: kept for sequence, draft in drafts.items() if (kept := draft.before_content(vocabulary))}
        if not drafts:
            return batch
        drafted = [replace(scheduled, draft=drafts.get(scheduled.sequence)) for scheduled in batch]
        # Groups of sliding-window layers have few cells: the draft may not fit there.
        return drafted if not self.cache.evict_for([scheduled.batch_span for scheduled in drafted]) else batch

    def _draft_capacity(self, batch_tokens: int, limit: int) -> int:
        """Cells for up to `limit` draft tokens in a step of `batch_tokens`; cached prefixes are evicted for them."""
        free = self.cache.free_cells - batch_tokens
        return limit if free >= limit else free + self.cache.evict(limit - free)

    def _notify_drafters(self, results: Rows[StepResult]) -> None:
        """Pass the hidden states of accepted tokens to drafters that read them."""
        try:
            for result in results:
                sequence, span = result.scheduled.sequence, result.scheduled.span
                if sequence.request.id in self._sequences and result.batch_states is not None:
                    accepted = span.length + max(len(result.tokens) - 1, 0)
                    self._speculation.computed(sequence, span.start, result.batch_states[:accepted])
        except Exception:
            log.exception("a drafter failed; speculative decoding is disabled")
            self._speculation = self._no_speculation()

    def _no_speculation(self) -> Speculation:
        return Speculation(None, None, FixedDepth(0, self._cost), self._clock)

    def _fail_if_broken(self, result: StepResult) -> bool:
        """Fail a sequence with logits or hidden states that are not finite; its cells are not cached.

        If its own constraints permit no token, the tokens before are valid and delivered first.
        """
        if not result.is_broken:
            return False
        sequence = result.scheduled.sequence
        reason = sequence.sampling.deadlock_reason(result.tokens)
        if reason is not None:
            self._accept_tokens(result)
        self._fail(
            sequence, reason or "the model's output has no finite value here", caused_by_request=reason is not None
        )
        return True

    def _accept(self, result: StepResult) -> None:
        """Deliver the output of a step for a sequence; an exception fails it."""
        sequence = result.scheduled.sequence
        try:
            if not sequence.output:
                self._accept_prompt(result)
            self._accept_tokens(result)
        except Exception as error:
            log.exception("the output of a sequence failed")
            self._fail(sequence, f"the output failed ({type(error).__name__})")

    def _accept_tokens(self, result: StepResult) -> None:
        """Add the sampled tokens of a sequence, up to its end or a None."""
        sequence, draft = result.scheduled.sequence, result.scheduled.draft
        tokens = [token for token in result.tokens if token is not None]
        accepted = 0
        if draft is not None:
            accepted = self._speculation.verified(draft, tokens)
            sequence.stats.rejected_tokens += len(draft.tokens)
        entries = result.logprobs or (None,) * len(tokens)
        for index, (token, entry) in enumerate(zip(tokens, entries, strict=True)):
            if sequence.request.id in self._sequences:
                # A stop string may end the text inside a draft: accepted tokens after it are not emitted.
                sequence.stats.accepted_tokens += index < accepted
                sequence.stats.rejected_tokens -= index < accepted
                self._accept_token(sequence, token, entry)

    def _accept_prompt(self, result: StepResult) -> None:
        """Collect scores and hidden states of the prompt; deliver them when the prompt is complete."""
        sequence, stop = result.scheduled.sequence, result.scheduled.span.stop
        if sequence.request.progress:
            self._emit(sequence, PrefillProgress(stop, len(sequence.request.prompt)))
        if sequence.scores is not None:
            sequence.scores.extend([entry for entry in result.scores if entry is not None])
        if sequence.pooler is not None and result.hidden_states is not None:
            sequence.pooler.add(result.hidden_states)
        if not result.scheduled.is_complete:
            return
        for output in (sequence.scores, sequence.pooler):
            if output is not None:
                self._emit(sequence, output.event())
        sequence.scores = sequence.pooler = None
        if sequence.max_new_tokens == 0:
            self._finish(sequence, "length", None)

    def _accept_token(self, sequence: Sequence, token: int, entry: TokenLogprob | None) -> None:
        """Add a token and deliver its text; finish the sequence at an end or stop token, a stop string or a limit."""
        sequence.append(token, self._clock())
        self._totals.generated_tokens += 1
        if entry is not None:
            entry = entry.without_output_of(sequence.is_omitted)
        end_logprob = entry
        if not sequence.sampling.is_stop_token(token):
            end_logprob = None
            self._deliver(sequence, sequence.text.push(token, entry))
            if sequence.text.error:
                return self._fail(sequence, sequence.text.error, caused_by_request=True)
        if (ending := sequence.ending(token)) is not None:
            self._finish(sequence, *ending, end_logprob)
        return None

    def _finish(
        self, sequence: Sequence, reason: FinishReason, stop: str | int | None, end_logprob: TokenLogprob | None = None
    ) -> None:
        began = self._clock()
        try:
            if sequence.text.stop is None and sequence.is_replayed:
                self._deliver(sequence, sequence.text.flush())
            delivered = max(sequence.text.released_tokens, len(sequence.request.emitted))
            undelivered = tuple(sequence.output[delivered:])
            usage, timings = sequence.usage(), sequence.stats.timings(began)
            self._emit(sequence, Finished(reason, stop, usage, timings, end_logprob, undelivered))
        except Exception as error:
            log.exception("the output of a sequence failed")
            return self._fail(sequence, f"the output failed ({type(error).__name__})")
        self._leave(sequence)
        self._finish_seconds += self._clock() - began
        return None

    def _fail(self, sequence: Sequence, reason: str, *, caused_by_request: bool = False) -> None:
        """Fail a sequence; `caused_by_request`: its constraints are the cause."""
        if sequence.request.id not in self._sequences:
            return  # it finished in this step, before another sequence failed
        self._totals.failed += 1
        self._emit(sequence, Failed(reason, caused_by_request))
        # Its cells may hold values that are not finite: they are not cached.
        self._remove(sequence, self._scheduler.discard)

    def _leave(self, sequence: Sequence) -> None:
        """Remove a finished or cancelled sequence and cache its tokens."""
        self._remove(sequence, self._scheduler.remove)

    def _remove(self, sequence: Sequence, unschedule: Callable[[Sequence], None]) -> None:
        """Remove a sequence from all parts; an exception in one of them keeps it in no other one."""
        del self._sequences[sequence.request.id]
        for forget in (
            self._inspection.record_finished,
            unschedule,
            self._totals.record_end,
            lambda leaving: self._loaded.adapters.release(leaving.adapter),
            self._forget_drafts,
            self.encoder_inputs.release,
            self.content_inputs.release,
        ):
            try:
                forget(sequence)
            except Exception:
                log.exception("a sequence was not removed as a whole")
        if not self._sequences:
            # No step follows.
            self.content_inputs.close()

    def _forget_drafts(self, sequence: Sequence) -> None:
        try:
            self._speculation.forget(sequence)
        except Exception:
            log.exception("a drafter failed; speculative decoding is disabled")
            self._speculation = self._no_speculation()

    def _deliver(self, sequence: Sequence, delta: Delta | None) -> None:
        if delta is not None:
            self._emit(sequence, delta)

    def _emit(self, sequence: Sequence, event: Event) -> None:
        self._events.append((sequence.request.id, event))
