"""Lower bounds of waits compared with the waits on a simulated machine, and refusals of timeouts that are too short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from engine.core import Core
from engine.load.load import LoadedModel
from engine.schedule.scheduled import ScheduledSequence
from engine.schedule.step import StepResult
from engine.schedule.step_cost import Work
from engine.schedule.wait_predictor import CERTAINTY, WaitPredictor
from engine.types.events import Finished
from engine.types.request import Request, Tier
from tests.engine.kit.models import END, Models, core
from tests.engine.kit.play import ask

SCENARIOS = 10
TIERS: tuple[Tier, ...] = ("priority", "default", "flex")


def answer_length(name: str) -> int:
    """Tokens of a request's answer, with the end token."""
    return Random(name).choice((1, 4, 30, 100))


@dataclass
class Machine:
    """A model without weights: the answer of a request ends after a length that its id decides; steps take time.

    jitter  of step times, as a share
    """

    random: Random
    token_seconds: float
    jitter: float
    now: float = 0.0
    first: dict[str, float] = field(default_factory=dict)

    def engine(self, loaded: LoadedModel, **settings: Any) -> Core:
        """An engine on this machine."""
        engine = core(loaded, context=2304, itl_target_ms="auto", **settings)
        engine._stepper, engine._clock, self._cache = self, lambda: self.now, engine.cache  # type: ignore[assignment]
        return engine

    def run(self, batch: Sequence[ScheduledSequence], *, returns_states: bool) -> list[StepResult]:
        """Cells are allocated, nothing is computed."""
        with self._cache.forward([scheduled.batch_span for scheduled in batch]):
            pass
        work = Work.of(scheduled.batch_span for scheduled in batch)
        noise = 1 + self.jitter * self.random.uniform(-1, 1)
        self.now += noise * (0.006 + self.token_seconds * work.batch_tokens + 4e-6 * work.cells + 1e-7 * work.pairs)
        return [StepResult(scheduled, self._tokens(scheduled)) for scheduled in batch]

    def _tokens(self, scheduled: ScheduledSequence) -> tuple[int, ...]:
        if not scheduled.is_sampled:
            return ()
        sequence = scheduled.sequence
        self.first.setdefault(sequence.request.id, self.now)
        return (END if len(sequence.output) + 1 >= answer_length(sequence.request.id) else 7,)


def traffic(random: Random, count: int) -> list[Request]:
    """Requests that partly share prefixes, of a few owners and tiers, some with several choices or a timeout."""
    prefixes = [[random.randrange(250) for _ in range(random.randint(1, 1500))] for _ in range(3)]
    owners, tiers = random.randint(1, 2), random.randint(1, 3)
    requests: list[Request] = []
    while len(requests) < count:
        prompt = random.choice(prefixes) if random.random() < 0.4 else []
        prompt = [*prompt, *(random.randrange(250) for _ in range(random.choice((1, 40, 300, 700))))]
        fields: dict[str, Any] = {
            "owner": f"{random.randrange(owners)}",
            "group": f"group {len(requests)}",
            "tier": random.choice(TIERS[:tiers]),
            "timeout_seconds": random.choice((None, None, None, 0.5, 5.0)),
        }
        for _ in range(random.choice((1, 1, 1, 3))):
            requests.append(ask(f"{random.random()}", prompt, 120, **fields))
    return requests


@dataclass
class Comparison:
    """Predicted and measured seconds until the first token."""

    predicted: float
    measured: float


def comparisons(loaded: LoadedModel, seed: int) -> list[Comparison]:
    """Of requests that got a first token; those without a timeout of their own are served to it."""
    random = Random(seed)
    machine = Machine(random, random.choice((2e-4, 1e-3, 3e-3)), random.choice((0.0, 0.1)))
    slots = random.randint(1, 4)
    cells = random.choice((slots * 2304, slots * 2304, 2304))
    engine = machine.engine(loaded, slots=slots, cells=cells, chunk=random.choice((128, 512)), drafter="none")
    waiting = traffic(random, random.randint(10, 40))
    submitted: dict[str, tuple[float, float]] = {}
    while waiting or engine.busy:
        arrivals = random.choice((0, 0, 1, 12)) if engine.busy else 1
        for request in waiting[:arrivals]:
            layout = engine._layout(request)
            assert layout is not None
            predicted = engine._waits.first_token_seconds(engine._sequence(request, None, layout))
            submitted[request.id] = machine.now, predicted
            # What another request refuses is not what this one waits for.
            engine._queue(engine._sequence(request, None, layout))
        del waiting[:arrivals]
        engine.step()
    return [
        Comparison(predicted, machine.first[name] - arrived)
        for name, (arrived, predicted) in submitted.items()
        if name in machine.first
    ]


@pytest.mark.parametrize("seed", range(SCENARIOS))
def test_no_refused_request_would_be_in_time(loaded: Models, seed: int) -> None:
    """The predicted wait is a lower bound: no timeout is both refused and long enough for the first token."""
    pairs = comparisons(loaded("llama"), seed)

    assert pairs
    assert [pair for pair in pairs if pair.predicted > pair.measured] == []


@pytest.mark.slow
def test_no_refused_request_would_be_in_time_in_many_scenarios(loaded: Models) -> None:
    """Nor in 300; and a good part of the doomed requests is refused: those with a timeout shorter than their wait."""
    random, doomed, refused = Random(0), 0, 0
    for seed in range(1000, 1300):
        for pair in comparisons(loaded("llama"), seed):
            assert pair.predicted <= pair.measured, seed
            timeout = 10 ** random.uniform(-1, 1)
            doomed += timeout < pair.measured
            refused += timeout < CERTAINTY * pair.predicted
    print(f"{refused} of {doomed} doomed requests are refused early")
    assert refused > doomed / 6


def test_a_timeout_that_is_too_short_is_refused(loaded: Models) -> None:
    """After long prompts of its owner, or for its own prompt; never without a timeout or a measured step."""
    machine = Machine(Random(0), 1e-3, 0.0)
    engine = machine.engine(loaded("llama"), slots=1, chunk=512, drafter="none")
    prompts = [[number, *range(200)] * 5 for number in range(6)]
    assert engine.submit(ask("not measured", prompts[0], timeout_seconds=1e-3)) is None
    assert engine.submit(ask("cached", prompts[0])) is None
    while engine.busy:
        engine.step()
    for number, prompt in enumerate(prompts[1:5]):
        assert engine.submit(ask(f"{number}", prompt)) is None
        engine.step()

    assert engine.submit(ask("too late", (1, 2), timeout_seconds=0.5)) is not None
    assert engine.submit(ask("in time", (1, 2), timeout_seconds=30.0)) is None
    assert engine.submit(ask("without a limit", (1, 2))) is None
    assert engine.submit(ask("a long prompt", prompts[5], owner="another", timeout_seconds=0.1)) is not None
    assert engine.submit(ask("the same, cached", prompts[0], owner="another", timeout_seconds=0.1)) is None


def test_prefixes_of_too_many_tokens_are_not_compared(loaded: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then only the prompt of the request itself counts; a comparison is reused until the next step or request."""
    machine = Machine(Random(0), 1e-3, 0.0)
    engine = machine.engine(loaded("llama"), slots=1, drafter="none")
    for number in range(4):
        assert engine.submit(ask(f"{number}", [number, *range(200)] * 5)) is None
        engine.step()
    compared: list[int] = []
    compare = WaitPredictor._compare
    monkeypatch.setattr(
        WaitPredictor, "_compare", lambda self, others: (compared.append(len(others)), compare(self, others))
    )

    for name in "abc":
        assert engine.submit(ask(name, (1, 2), timeout_seconds=0.5)) is not None
    monkeypatch.setattr("engine.schedule.wait_predictor.MAX_COMPARED_TOKENS", 3000)
    assert engine.submit(ask("d", (1, 2), timeout_seconds=0.5)) is None
    assert compared == [4]


def test_the_place_in_the_queue_is_free_when_predicted(loaded: Models) -> None:
    """When the first of the running requests is at its limit, before any output has shown a usual length."""
    machine = Machine(Random(0), 1e-3, 0.0)
    engine = machine.engine(loaded("llama"), slots=2, drafter="none")
    names = [name for name in map(str, range(40)) if answer_length(name) == 100]
    assert engine.stats().free_place_seconds == 0.0
    for name, limit in zip(names, (70, 40), strict=False):
        engine.submit(ask(name, [int(name), *range(100)], limit))
    predicted: list[tuple[float, float]] = []
    while not any(isinstance(event, Finished) for _, event in engine.step()):
        predicted.append((machine.now, engine.stats().free_place_seconds))

    assert len(predicted) > 40
    for began, seconds in predicted[20:]:
        assert began + seconds == pytest.approx(machine.now, rel=0.1)
