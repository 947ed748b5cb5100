"""A simulated machine: the clock of an engine advances by the formula of its step time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.core import Core
from engine.load.load import LoadedModel
from engine.schedule.scheduled import ScheduledSequence
from engine.schedule.step import StepResult
from engine.schedule.step_cost import Work
from engine.types.events import Delta
from engine.types.request import Request
from tests.engine.kit.models import core

Seconds = Callable[[Work], float]


def smollm(work: Work) -> float:
    """About SmolLM2-135M in int8 on one core: 900 prompt tokens a second, 8 ms for one token."""
    return max(0.008, 0.006 + 0.0011 * work.batch_tokens) + 4e-6 * work.cells + 4e-7 * work.pairs


@dataclass
class Step:
    """One step: its end, its duration, its decoded tokens and its prompt tokens."""

    end: float
    seconds: float
    speaking: int
    prompt: dict[str, int]

    @property
    def rows(self) -> int:
        """Prompt tokens."""
        return sum(self.prompt.values())


@dataclass
class Machine:
    """Runs one engine and records its steps and the times of tokens. `seconds` may be replaced during a run."""

    seconds: Seconds = smollm
    now: float = 0.0
    steps: list[Step] = field(default_factory=list)
    arrived: dict[str, float] = field(default_factory=dict)
    said: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)

    def engine(self, loaded: LoadedModel, **settings: Any) -> Core:
        """An engine on this machine, with its own inter-token latency target."""
        engine = core(loaded, **{"itl_target_ms": "auto", "context": 2304, "slots": 8, **settings})
        self._stepper, engine._stepper = engine._stepper, self  # type: ignore[assignment]
        engine._clock = lambda: self.now
        return engine

    def run(self, grants: Sequence[ScheduledSequence], *, returns_states: bool) -> list[StepResult]:
        """Runs the engine's stepper and advances the clock."""
        said = self._stepper.run(grants, returns_states=returns_states)
        took = self.seconds(Work.of(grant.batch_span for grant in grants))
        self.now += took
        for each in said:
            if each.tokens:
                self.said.setdefault(each.scheduled.sequence.request.id, []).append(self.now)
        prompt = {grant.sequence.request.id: grant.span.length for grant in grants if grant.span.length > 1}
        self.steps.append(Step(self.now, took, len(grants) - len(prompt), prompt))
        return said

    def play(self, engine: Core, requests: Iterable[tuple[float, Request]]) -> None:
        """Serve requests that arrive at given seconds to their ends."""
        waiting = sorted(requests, key=lambda pair: pair[0])
        while waiting or engine.busy:
            if not engine.busy:
                self.now = max(self.now, waiting[0][0])
            while waiting and waiting[0][0] <= self.now:
                self.arrived[waiting[0][1].id] = waiting[0][0]
                engine.submit(waiting.pop(0)[1])
            for name, event in engine.step():
                if isinstance(event, Delta):
                    self.tokens.setdefault(name, []).extend(event.tokens)

    @property
    def first(self) -> dict[str, float]:
        """Seconds from each arrival to its first token."""
        return {name: times[0] - self.arrived[name] for name, times in self.said.items()}

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens of all requests, longest first."""
        gaps = [
            later - earlier for times in self.said.values() for earlier, later in zip(times, times[1:], strict=False)
        ]
        return sorted(gaps, reverse=True)

    @property
    def mixed(self) -> list[Step]:
        """The steps with decoded tokens and prompt tokens."""
        return [step for step in self.steps if step.rows and step.speaking]
