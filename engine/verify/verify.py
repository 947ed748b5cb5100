"""Runs requests in every condition that must not change their text, and compares the answers with those alone."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from engine.config import EngineConfig
from engine.draft.loading import load_draft
from engine.draft.mtp_head import MtpHead
from engine.errors import ModelUnsupported
from engine.load.load import LoadedModel, load
from engine.load.machine.device import resolve_device
from engine.types.request import DrafterChoice, Request
from engine.types.status import ModelInfo
from engine.verify.comparison import ROUNDING_LIMITS, Answer, Comparison, compare
from engine.verify.cores import CoreFactory, run_alone, run_together
from engine.verify.requests import NEW_TOKENS, choices, make_requests, shared_start, with_drafts

# Prompt tokens of a step with small chunks: odd, so that chunks end inside tiles and pages.
_SMALL_CHUNK = 19
_MAX_SLOTS, _CHOICES = 8, 4
# Tokens of a short prompt with a long answer, and the context in which that answer needs two shifts.
_SHORT_PROMPT, _LONG_ANSWER, _SHIFT_CONTEXT = 40, 120, 64


@dataclass(frozen=True, slots=True)
class ConditionResult:
    """The comparisons in one condition.

    exercised  whether the condition occurred: cached tokens, accepted drafts, preemptions, shifts
    evidence   the count that shows it
    """

    name: str
    exercised: bool
    evidence: str
    seconds: float
    comparisons: tuple[Comparison, ...]

    @property
    def passed(self) -> bool:
        """Whether all answers are equal, or ties by rounding."""
        return all(comparison.verdict in ("equal", "tie") for comparison in self.comparisons)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The model, the kind of comparison, and the result of each condition."""

    model: ModelInfo
    bitwise: bool
    rounding_limit: float
    conditions: tuple[ConditionResult, ...]

    @property
    def passed(self) -> bool:
        """Whether all conditions passed."""
        return all(condition.passed for condition in self.conditions)


@dataclass(frozen=True, slots=True)
class ConditionAnswers:
    """The answers in a condition, and the count that shows that it occurred."""

    answers: Mapping[str, Answer]
    count: int
    unit: str


def load_and_verify(config: EngineConfig, on_phase: Callable[[str], None]) -> VerifyReport:
    """Load the model with its draft model, and verify it. Raises ModelError."""
    config = resolve_device(config)
    if config.tensor_parallel > 1:
        raise ModelUnsupported(config.model or "the model", "verify runs in one process: without --tensor-parallel")
    loaded = load(config, on_phase)
    if loaded.encoder is not None:
        raise ModelUnsupported(loaded.info.name, "has an encoder; verify is for models with text as their only input")
    return Verification(config, loaded, load_draft(config, loaded, on_phase), on_phase).run()


class Verification:
    """The conditions of one model."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        draft: LoadedModel | MtpHead | None,
        on_phase: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self._cores = CoreFactory(config, loaded, draft)
        self._loaded, self._config, self._on_phase = loaded, config, on_phase
        longest = loaded.capacity - NEW_TOKENS
        lengths = (1, config.chunk // 2, config.chunk, config.chunk + 1, 2 * config.chunk + 3)
        self._requests = make_requests(loaded, sorted({max(min(length, longest), 1) for length in lengths}))
        self._context = min(max(len(request.prompt) for request in self._requests) + NEW_TOKENS, loaded.capacity)
        self._slots = min(loaded.info.slots, _MAX_SLOTS)
        self._limit = ROUNDING_LIMITS[loaded.dtype]
        self._expected: dict[str, Answer] = {}

    def run(self) -> VerifyReport:
        """Verify every condition that the settings permit."""
        info = self._loaded.info
        return VerifyReport(info, info.batch_invariant, self._limit, tuple(self._results()))

    def _results(self) -> Iterator[ConditionResult]:
        yield self._check("cached prompt", self._cached)
        yield self._check("cached part of a prompt", self._partly_cached)
        yield self._check("batch", self._batch)
        yield self._check("batch in small chunks", partial(self._batch, chunk=_SMALL_CHUNK))
        yield self._check("few cells", self._few_cells)
        for drafter in self._drafters():
            yield self._check(f"drafts: {drafter}", partial(self._drafted, drafter))
        yield self._check("choices", self._several_choices)
        if self._loaded.capacity >= _SHIFT_CONTEXT:
            yield self._check("two context shifts", self._shifted)
        if self._config.disk_cache_folder is not None:
            yield self._check("restart with a disk cache", self._restarted)

    def _check(self, name: str, condition: Callable[[], ConditionAnswers]) -> ConditionResult:
        self._on_phase(name)
        began = time.monotonic()
        outcome = condition()
        bitwise = self._loaded.info.batch_invariant
        comparisons = tuple(
            compare(id, self._expected[id], answer, bitwise=bitwise, rounding_limit=self._limit)
            for id, answer in outcome.answers.items()
        )
        seconds = time.monotonic() - began
        return ConditionResult(name, outcome.count > 0, f"{outcome.count} {outcome.unit}", seconds, comparisons)

    def _cached(self) -> ConditionAnswers:
        """Each answer alone and cold, the expected one; then again with its prompt in the cache."""
        answers: dict[str, Answer] = {}
        with self._cores.open(context=self._context) as core:
            for request in self._requests:
                self._expected |= run_alone(core, [request])
                answers |= run_alone(core, [request])
        return _cached_outcome(answers)

    def _partly_cached(self) -> ConditionAnswers:
        answers: dict[str, Answer] = {}
        with self._cores.open(context=self._context) as core:
            for request in self._requests:
                run_alone(core, [shared_start(request)])
                answers |= run_alone(core, [request])
        return _cached_outcome(answers)

    def _batch(self, chunk: int | None = None) -> ConditionAnswers:
        with self._cores.open(context=self._context, slots=self._slots, chunk=chunk) as core:
            answers = run_together(core, self._requests)
            return ConditionAnswers(answers, self._slots - 1, "other sequences")

    def _few_cells(self) -> ConditionAnswers:
        """Prompts that fit the cells together, and answers that do not."""
        new_tokens = min(_LONG_ANSWER, self._loaded.capacity - _SHORT_PROMPT)
        requests = [replace(request, id=f"long {request.id}") for request in self._short_requests(new_tokens)]
        context = _SHORT_PROMPT + new_tokens
        with self._cores.open(context=context) as core:
            self._expected |= run_alone(core, requests)
        with self._cores.open(context=context, slots=self._slots, cells=context + _SHORT_PROMPT) as core:
            answers = run_together(core, requests)
            return ConditionAnswers(answers, core.stats().preemptions_total, "preemptions")

    def _short_requests(self, new_tokens: int) -> list[Request]:
        return make_requests(self._loaded, (_SHORT_PROMPT, _SHORT_PROMPT // 2), new_tokens)

    def _drafters(self) -> Iterator[DrafterChoice]:
        with self._cores.open(context=self._context, drafts=True) as core:
            kinds = [counts.kind for counts in core.stats().drafts]
        yield from (cast("DrafterChoice", kind) for kind in ("lookup", "model", "mtp") if kind in kinds)

    def _drafted(self, drafter: DrafterChoice) -> ConditionAnswers:
        requests = [with_drafts(request, drafter, self._expected[request.id].tokens) for request in self._requests]
        with self._cores.open(context=self._context, slots=self._slots, drafts=True) as core:
            answers = run_together(core, requests)
            drafted = sum(sum(counts.drafted) for counts in core.stats().drafts if counts.kind == drafter)
            return ConditionAnswers(answers, drafted, "draft tokens")

    def _several_choices(self) -> ConditionAnswers:
        request = next(request for request in reversed(self._requests) if request.sampling.temperature > 0)
        requests = list(choices(request, _CHOICES))
        with self._cores.open(context=self._context) as core:
            cold = [replace(request, salt=request.id.encode()) for request in requests]
            self._expected |= run_alone(core, cold)
        with self._cores.open(context=self._context, slots=self._slots) as core:
            answers = run_together(core, requests)
            tokens = sum(len(request.prompt) + len(answers[request.id].tokens) - 1 for request in requests)
            return ConditionAnswers(answers, tokens - core.stats().batch_tokens_total, "shared tokens")

    def _shifted(self) -> ConditionAnswers:
        requests = [
            replace(request, id=f"shifted {request.id}", overflow="shift")
            for request in self._short_requests(_LONG_ANSWER)
        ]
        with self._cores.open(context=_SHIFT_CONTEXT) as core:
            self._expected |= run_alone(core, requests)
        with self._cores.open(context=_SHIFT_CONTEXT, slots=self._slots, chunk=_SMALL_CHUNK) as core:
            answers = run_together(core, requests)
        return ConditionAnswers(
            answers, min(answer.context_shifts for answer in answers.values()) // 2, "x two shifts each"
        )

    def _restarted(self) -> ConditionAnswers:
        with tempfile.TemporaryDirectory() as folder:
            with self._cores.open(context=self._context, disk_cache=folder) as core:
                run_alone(core, self._requests)
                while core.flush_when_idle():
                    pass
            with self._cores.open(context=self._context, disk_cache=folder) as core:
                return _cached_outcome(run_alone(core, self._requests))


def _cached_outcome(answers: Mapping[str, Answer]) -> ConditionAnswers:
    return ConditionAnswers(answers, sum(answer.cached_tokens for answer in answers.values()), "cached tokens")
