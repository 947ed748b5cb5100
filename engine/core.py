"""The engine without threads or clocks of its own: submit, cancel, step; every step returns what happened.

One step is plan > forward > emit > advance. This is one of the two borders that catch every exception: a step that
breaks fails its own sequences, its transaction rolls back, and the others go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Rows

from torch import Tensor

from engine.config import EngineConfig
from engine.load import Loaded
from engine.runner import Runner
from engine.sampling import emit, logprobs
from engine.scheduler import Grant, Scheduler
from engine.sequence import Sequence
from engine.types import (
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    Request,
    Started,
    Stats,
    TokenLogprob,
)
from kvcache.cache import Cache

log = logging.getLogger("cellar.engine")


class Core:
    """Runs requests over one model and one cache. One thread owns it."""

    def __init__(self, loaded: Loaded, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        info = loaded.info
        self.capacity = loaded.capacity
        self.cache = Cache(
            [plan.spec for plan in loaded.layers],
            slots=info.slots,
            capacity=self.capacity,
            cells=loaded.memory.cells,
            state_bytes=loaded.memory.available_bytes // 8 if loaded.recurrent else None,
            dtype=loaded.dtype,
            device=config.device,
        )
        self._loaded, self._config, self._clock = loaded, config, clock
        self._runner = Runner(loaded.model, loaded.layers)
        self._scheduler = Scheduler(self.cache, chunk=config.chunk, on_start=self._start)
        self._sequences: dict[str, Sequence] = {}
        self._events: list[tuple[str, Event]] = []
        self._totals = dict.fromkeys(
            ("steps", "rows", "prompt", "cached", "generated", "shifts", "reused", "failed"), 0
        )
        self._seconds = 0.0

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return self._scheduler.busy or bool(self._events)

    def submit(self, request: Request) -> None:
        """Queue a request; its first event is Started."""
        sequence = Sequence(
            request,
            self._loaded.tokenizer,
            vocabulary=self._loaded.info.vocabulary,
            capacity=self.capacity,
            overflow=self._config.overflow,
            now=self._clock(),
        )
        self._sequences[request.id] = sequence
        self._scheduler.submit(sequence)

    def cancel(self, request_id: str) -> None:
        """Forget a request at once, whatever it is doing; unknown and finished ones are no error."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._scheduler.remove(sequence)

    def step(self) -> list[tuple[str, Event]]:
        """Compute one batch; the events of the requests that it moved on, in order."""
        began = self._clock()
        grants = self._scheduler.plan()
        if grants:
            self._compute(grants)
            self._totals["steps"] += 1
            self._totals["rows"] += sum(grant.span.length for grant in grants)
            self._seconds += self._clock() - began
        events, self._events = self._events, []
        return events

    def stats(self) -> Stats:
        """The state now."""
        totals, remembered = self._totals, self.cache.idle_cells()
        return Stats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            slots=self.cache.slots,
            cells_used=self.cache.cells - self.cache.free_cells - remembered,
            cells_remembered=remembered,
            cells_total=self.cache.cells,
            steps_total=totals["steps"],
            step_seconds_total=self._seconds,
            rows_total=totals["rows"],
            prompt_tokens_total=totals["prompt"],
            cached_tokens_total=totals["cached"],
            generated_tokens_total=totals["generated"],
            context_shifts_total=totals["shifts"],
            preemptions_total=self._scheduler.preemptions,
            prefix_copies_total=totals["reused"],
            failed_total=totals["failed"],
        )

    def _start(self, sequence: Sequence, standing: int) -> None:
        if not sequence.start(standing, self._clock()):
            return
        self._say(sequence, Started(len(sequence.request.prompt), standing, sequence.seed))
        if sequence.limit == 0:
            self._finish(sequence, "length", None)

    def _compute(self, grants: Rows[Grant]) -> None:
        try:
            logits = self._forward(grants)
            complete = [grant.sequence for grant in grants if grant.complete]
            if complete:
                self._emit(complete, logits)
            self._scheduler.computed(grants)
        except Exception as error:
            log.exception("a step failed")
            for grant in grants:
                self._fail(grant.sequence, f"the step failed ({type(error).__name__})")

    def _forward(self, grants: Rows[Grant]) -> Tensor:
        """Logits of the last row of every complete grant, in order."""
        tokens, wanted = [], []
        for grant in grants:
            tokens += grant.sequence.tokens[grant.span.start : grant.span.stop]
            if grant.complete:
                wanted.append(len(tokens) - 1)
        with self.cache.forward([grant.span for grant in grants]) as forward:
            return self._runner.run(forward, tokens, wanted)

    def _emit(self, sequences: Rows[Sequence], logits: Tensor) -> None:
        tokens = emit(logits, [sequence.draw() for sequence in sequences])
        entries = self._logprobs(sequences, logits, tokens)
        for row, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
            if token is None:
                self._fail(sequence, "the model's output has no finite value here")
            else:
                self._advance(sequence, token, entries.get(row))

    def _logprobs(self, sequences: Rows[Sequence], logits: Tensor, tokens: Rows[int | None]) -> dict[int, TokenLogprob]:
        asked = [row for row, sequence in enumerate(sequences) if sequence.request.logprobs is not None]
        asked = [row for row in asked if tokens[row] is not None]
        if not asked:
            return {}
        most = max(sequences[row].request.logprobs or 0 for row in asked)
        chosen, top = logprobs(logits[asked], [tokens[row] or 0 for row in asked], most)
        describe = self._loaded.tokenizer.alternative
        return {
            row: TokenLogprob(
                describe(tokens[row] or 0, chosen[at]),
                tuple(describe(token, value) for token, value in top[at][: sequences[row].request.logprobs]),
            )
            for at, row in enumerate(asked)
        }

    def _advance(self, sequence: Sequence, token: int, entry: TokenLogprob | None) -> None:
        """Take a new token: text for the client, or the end. The only place that decides that a sequence is over."""
        sequence.append(token, self._clock())
        self._totals["generated"] += 1
        request = sequence.request
        if token in request.stop_token_ids:
            return self._finish(sequence, "stop", token)
        if token in self._loaded.eos and not request.ignore_eos:
            return self._finish(sequence, "stop", None)
        self._deliver(sequence, sequence.text.push(token, entry))
        if sequence.text.stop is not None:
            return self._finish(sequence, "stop", sequence.text.stop)
        if len(sequence.output) >= sequence.limit:
            return self._finish(sequence, "length", None)
        return None

    def _finish(self, sequence: Sequence, reason: FinishReason, stop: str | int | None) -> None:
        if sequence.text.stop is None:
            self._deliver(sequence, sequence.text.flush())
        self._say(sequence, Finished(reason, stop, sequence.usage(), sequence.timings(self._clock())))
        self._close(sequence)

    def _fail(self, sequence: Sequence, reason: str) -> None:
        if sequence.request.id not in self._sequences:
            return  # it ended in this very step, before another row broke
        self._totals["failed"] += 1
        # What broke it may stand in its cells: nobody else shall have them.
        sequence.plain = 0
        self._say(sequence, Failed(reason))
        self._close(sequence)

    def _close(self, sequence: Sequence) -> None:
        usage = sequence.usage()
        self._totals["prompt"] += usage.prompt_tokens
        self._totals["cached"] += usage.cached_tokens
        self._totals["reused"] += usage.cached_tokens > 0
        self._totals["shifts"] += usage.context_shifts
        del self._sequences[sequence.request.id]
        self._scheduler.remove(sequence)

    def _deliver(self, sequence: Sequence, delta: Delta | None) -> None:
        if delta is not None:
            self._say(sequence, delta)

    def _say(self, sequence: Sequence, event: Event) -> None:
        self._events.append((sequence.request.id, event))
