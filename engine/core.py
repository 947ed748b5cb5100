"""The engine without threads or clocks of its own: submit, cancel, step; every step returns what happened.

One step is plan > forward > emit > advance. This is one of the two borders that catch every exception: a step that
breaks fails its own sequences, its transaction rolls back, and the others go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import replace

import torch

from engine.config import EngineConfig
from engine.draft.depth import FixedDepth
from engine.draft.speculation import Speculation
from engine.grammar.matcher import GrammarMatcher
from engine.load.load import LoadedModel
from engine.load.memory import max_batch_tokens
from engine.load.offload import offload_config
from engine.schedule.encoder_inputs import EncoderInputs
from engine.schedule.prefill_budget import Budget
from engine.schedule.scheduler import ScheduledSequence, Scheduler
from engine.schedule.sequence import Sequence
from engine.schedule.step import Stepper, StepResult
from engine.schedule.step_cost import StepCost
from engine.schedule.work import Work
from engine.types.events import Delta, Event, Failed, Finished, FinishReason, PrefillProgress, Started, TokenLogprob
from engine.types.request import Request
from engine.types.status import Stats
from kvcache.cache import Cache
from kvcache.encoder_files import EncoderFiles

log = logging.getLogger("cellar.engine")

# What a pause saves at a time: a request that arrives meanwhile waits for it, some 10 to 50 ms.
_FLUSH_BYTES = 16 * 2**20
# Scores need a row of logits each: of a large vocabulary, not all rows of a step have one.
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
        info, kept = loaded.info, offload_config(config, loaded.identity)
        self.capacity = loaded.capacity
        self.cache = Cache(
            [plan.spec for plan in loaded.layers],
            slots=info.slots,
            capacity=self.capacity,
            cells=loaded.memory.cells,
            max_batch_tokens=max_batch_tokens(config, info.slots),
            state_bytes=loaded.memory.available_bytes // 8 if loaded.recurrent else None,
            offload=kept,
            dtype=loaded.kv_dtype,
            device=config.device,
        )
        self._loaded, self._config, self._clock = loaded, config, clock
        self._stepper = Stepper(loaded, self.cache)
        self._cost = speculation.cost if speculation else StepCost()
        self._speculation = speculation or self._no_speculation()
        budget = Budget(self._cost, most=config.chunk, target_seconds=config.itl_target_seconds)
        scored = max(_SCORED_LOGITS_BYTES // (4 * info.vocabulary), _MIN_SCORED_TOKENS)
        self._scheduler = Scheduler(self.cache, budget, max_scored=scored, on_start=self._on_slot_assigned)
        self.encoder_inputs = EncoderInputs(loaded.encoder, EncoderFiles(kept, torch.device(config.device)))
        self._sequences: dict[str, Sequence] = {}
        self._events: list[tuple[str, Event]] = []
        self._totals = dict.fromkeys(
            ("steps", "rows", "prompt", "cached", "generated", "shifts", "reused", "failed"), 0
        )
        self._seconds = 0.0
        # Of the step at hand, what the ends of sequences took.
        self._finish_seconds = 0.0

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return self._scheduler.busy or bool(self._events)

    def submit(self, request: Request, matcher: GrammarMatcher | None = None) -> None:
        """Queue a request, with what follows its grammar if that is compiled already; its first event is Started."""
        if request.grammar is not None and matcher is None:
            matcher = self._loaded.grammars.matcher(request.grammar)
        sequence = Sequence(
            request,
            self._loaded.tokenizer,
            vocabulary=self._loaded.info.vocabulary,
            capacity=self.capacity,
            overflow=self._config.overflow,
            checkpoint_interval=self._config.checkpoint if self._loaded.recurrent else None,
            now=self._clock(),
            end_tokens=self._loaded.eos,
            matcher=matcher,
            rope_switch=self._loaded.switch,
        )
        self._sequences[request.id] = sequence
        self._scheduler.submit(sequence)

    def cancel(self, request_id: str) -> None:
        """Forget a request at once, whatever it is doing; unknown and finished ones are no error."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._scheduler.remove(sequence)
            self._close(sequence)

    def step(self) -> list[tuple[str, Event]]:
        """Compute one batch; the events of the requests that it moved on, in order."""
        began = self._clock()
        self._finish_expired(began)
        self._encode_media()
        grants = self._scheduler.schedule()
        if grants:
            self._compute(grants)
            self._totals["steps"] += 1
            self._seconds += self._clock() - began
        events, self._events = self._events, []
        return events

    def flush_when_idle(self) -> bool:
        """Use a pause to save a little of what is remembered; False: nothing is left to be saved."""
        saved = self.cache.flush_to_disk(_FLUSH_BYTES) > 0 or self.encoder_inputs.files.flush_one()
        return saved or self._speculation.rest(_FLUSH_BYTES)

    def stats(self) -> Stats:
        """The state now."""
        totals, remembered = self._totals, self.cache.evictable_cells()
        (memory_bytes, disk_bytes), counts = self.cache.offloaded_bytes, self.cache.prefix_counts
        return Stats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            slots=self.cache.slots,
            cells_used=self.cache.cells - self.cache.free_cells - remembered,
            cells_cached=remembered,
            cells_total=self.cache.cells,
            offload_memory_bytes=memory_bytes,
            offload_disk_bytes=disk_bytes,
            steps_total=totals["steps"],
            step_seconds_total=self._seconds,
            batch_tokens_total=totals["rows"],
            prompt_tokens_total=totals["prompt"],
            cached_tokens_total=totals["cached"],
            generated_tokens_total=totals["generated"],
            context_shifts_total=totals["shifts"],
            preemptions_total=self._scheduler.preemptions,
            prefix_hits_total=totals["reused"],
            failed_total=totals["failed"],
            evicted_tokens_total=counts.evicted,
            trimmed_tokens_total=counts.trimmed,
            loaded_tokens_total=counts.loaded,
            written_tokens_total=counts.written,
            drafts=self._speculation.counts(),
        )

    def _on_slot_assigned(self, sequence: Sequence, cached_length: int) -> None:
        if not sequence.start(cached_length, self._clock()):
            return
        self._emit(sequence, Started(len(sequence.request.prompt), cached_length, sequence.seed))
        if sequence.max_new_tokens == 0 and sequence.scores is None and sequence.pool is None:
            self._finish(sequence, "length", None)

    def _finish_expired(self, now: float) -> None:
        """End those whose time is up, wherever they are."""
        for sequence in tuple(self._sequences.values()):
            if sequence.deadline is not None and sequence.deadline <= now:
                self._finish(sequence, "length", "deadline")

    def _encode_media(self) -> None:
        """Let those next in line have what they look at; media that break the encoder fail their request alone."""
        for sequence in tuple(self._scheduler.waiting):
            try:
                if not self.encoder_inputs.prepare(sequence):
                    return
            except Exception as error:
                log.exception("an encoder failed")
                self._fail(sequence, f"the media could not be encoded ({type(error).__name__})")

    def _compute(self, scheduled: Rows[ScheduledSequence]) -> None:
        try:
            work = Work.of([grant.span for grant in scheduled])
            self._totals["rows"] += work.rows
            self._cost.expect(work)
            began, self._finish_seconds = self._clock(), 0.0
            scheduled = self._add_drafts(scheduled, work.rows)
            said = self._stepper.run(scheduled)
            sound = [each for each in said if not self._fail_if_broken(each)]
            self._scheduler.record_step(scheduled)
            for each in sound:
                if not each.scheduled.sequence.output:
                    self._accept_prompt(each)
                self._accept_tokens(each)
            if self._speculation.reads:
                self._notify_drafters(said)
            # With what became of it: that is work for tokens, and for steps, as well. An end is neither's.
            guesses = sum([len(grant.draft_tokens) for grant in scheduled])
            self._speculation.stepped(work.rows + guesses, self._clock() - began - self._finish_seconds)
        except Exception as error:
            log.exception("a step failed")
            for grant in scheduled:
                self._fail(grant.sequence, f"the step failed ({type(error).__name__})")

    def _add_drafts(self, scheduled: Rows[ScheduledSequence], batch_tokens: int) -> Rows[ScheduledSequence]:
        """The grants, of so many rows, with drafts, as far as these seem to pay and nobody else has cells for them."""
        complete = [grant.sequence for grant in scheduled if grant.is_sampled]
        try:
            running = len(self._scheduler.running)
            drafts = self._speculation.draft(
                complete, rows=batch_tokens, running=running, room=lambda most: self._draft_capacity(batch_tokens, most)
            )
        except Exception:
            # Nobody's text depends on a guess: it is given up, and no request is.
            log.exception("a drafter failed, and drafts no more")
            self._speculation = self._no_speculation()
            return scheduled
        if not drafts:
            return scheduled
        longer = [replace(grant, draft=drafts.get(grant.sequence)) for grant in scheduled]
        # Layers that see little have few cells: there the rows may not fit though tokens would.
        return longer if not self.cache.evict_for([grant.batch_span for grant in longer]) else scheduled

    def _draft_capacity(self, batch_tokens: int, most: int) -> int:
        """Cells for `most` drafts beside the rows of a step, as far as there are; what is remembered makes room."""
        room = self.cache.free_cells - batch_tokens
        return most if room >= most else room + self.cache.evict(most - room)

    def _notify_drafters(self, results: Rows[StepResult]) -> None:
        """Let a drafter read what the step computed for those who go on, without the rows of refused guesses."""
        row = 0
        try:
            for each in results:
                sequence, span = each.scheduled.sequence, each.scheduled.span
                if sequence.request.id in self._sequences:
                    kept = span.length + max(len(each.tokens) - 1, 0)
                    self._speculation.computed(sequence, span.start, row, kept)
                row += span.length + len(each.scheduled.draft_tokens)
        except Exception:
            log.exception("a drafter failed, and drafts no more")
            self._speculation = self._no_speculation()

    def _no_speculation(self) -> Speculation:
        return Speculation(None, None, FixedDepth(0, self._cost), self._clock)

    def _fail_if_broken(self, result: StepResult) -> bool:
        """Whether a sequence broke. It fails before anything of it is remembered; what its own rules ended is sound up
        to there.
        """
        if not result.is_broken:
            return False
        sequence = result.scheduled.sequence
        reason = sequence.deadlock_reason(result.tokens)
        if reason is not None:
            self._accept_tokens(result)
        self._fail(sequence, reason or "the model's output has no finite value here", own=reason is not None)
        return True

    def _accept_tokens(self, result: StepResult) -> None:
        """Take what a sequence said, up to its end or a None."""
        sequence, draft = result.scheduled.sequence, result.scheduled.draft
        tokens = [token for token in result.tokens if token is not None]
        accepted = 0
        if draft is not None:
            accepted = self._speculation.verified(draft, tokens)
            sequence.rejected_tokens += len(draft.tokens)
        entries = result.logprobs or (None,) * len(tokens)
        for at, (token, entry) in enumerate(zip(tokens, entries, strict=True)):
            if sequence.request.id in self._sequences:
                # A stop string may end the text inside a draft: what is right behind it is not said either.
                sequence.accepted_tokens += at < accepted
                sequence.rejected_tokens -= at < accepted
                self._advance(sequence, token, entry)

    def _accept_prompt(self, result: StepResult) -> None:
        """Take what became known of a prompt; what was asked about it is told when the prompt is whole."""
        sequence, stop = result.scheduled.sequence, result.scheduled.span.stop
        if sequence.request.progress:
            self._emit(sequence, PrefillProgress(stop, len(sequence.request.prompt)))
        if sequence.scores is not None:
            sequence.scores.extend([entry for entry in result.scores if entry is not None])
        if sequence.pool is not None and result.hidden_states is not None:
            sequence.pool.add(result.hidden_states)
        if not result.scheduled.is_complete:
            return
        for gathered in (sequence.scores, sequence.pool):
            if gathered is not None:
                self._emit(sequence, gathered.event())
        sequence.scores = sequence.pool = None
        if sequence.max_new_tokens == 0:
            self._finish(sequence, "length", None)

    def _advance(self, sequence: Sequence, token: int, entry: TokenLogprob | None) -> None:
        """Take a new token: text for the client, or the end. The only place that decides that a sequence is over."""
        sequence.append(token, self._clock())
        self._totals["generated"] += 1
        request = sequence.request
        if token in request.stop_token_ids:
            return self._finish(sequence, "stop", token, entry)
        if sequence.is_end_token(token):
            return self._finish(sequence, "stop", None, entry)
        self._deliver(sequence, sequence.text.push(token, entry))
        if sequence.text.error:
            return self._fail(sequence, sequence.text.error, own=True)
        if sequence.text.stop is not None:
            return self._finish(sequence, "stop", sequence.text.stop)
        if len(sequence.output) >= sequence.max_new_tokens or sequence.is_context_full:
            return self._finish(sequence, "length", None)
        return None

    def _finish(
        self, sequence: Sequence, reason: FinishReason, stop: str | int | None, end_logprob: TokenLogprob | None = None
    ) -> None:
        began = self._clock()
        if sequence.text.stop is None:
            self._deliver(sequence, sequence.text.flush())
        rest = tuple(sequence.output[sequence.text.released_tokens :])
        self._emit(sequence, Finished(reason, stop, sequence.usage(), sequence.timings(began), end_logprob, rest))
        self._scheduler.remove(sequence)
        self._close(sequence)
        self._finish_seconds += self._clock() - began

    def _fail(self, sequence: Sequence, reason: str, *, own: bool = False) -> None:
        if sequence.request.id not in self._sequences:
            return  # it ended in this very step, before another row broke
        self._totals["failed"] += 1
        self._emit(sequence, Failed(reason, own))
        # What broke it may stand in its cells: nobody else shall have them.
        self._scheduler.discard(sequence)
        self._close(sequence)

    def _close(self, sequence: Sequence) -> None:
        usage = sequence.usage()
        # Of one that left the queue without a slot nothing was computed, nor found.
        self._totals["prompt"] += 0 if sequence.cached_tokens is None else usage.prompt_tokens
        self._totals["cached"] += usage.cached_tokens
        self._totals["reused"] += usage.cached_tokens > 0
        self._totals["shifts"] += usage.context_shifts
        del self._sequences[sequence.request.id]
        self._speculation.forget(sequence)
        self.encoder_inputs.release(sequence)

    def _deliver(self, sequence: Sequence, delta: Delta | None) -> None:
        if delta is not None:
            self._emit(sequence, delta)

    def _emit(self, sequence: Sequence, event: Event) -> None:
        self._events.append((sequence.request.id, event))
