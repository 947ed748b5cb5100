"""Steps an engine by hand: arrivals, cancels, and the answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.core import Core
from engine.types.events import Delta, Embedded, Failed, Finished, PrefillProgress, PromptScored, Started, TokenLogprob
from engine.types.request import Request, SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Job:
    """A request, the step before which it arrives, and the step before which it is cancelled, if it is."""

    request: Request
    arrives: int = 0
    leaves: int | None = None


@dataclass(slots=True)
class Answer:
    """The events of one request."""

    started: list[Started] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    progress: list[PrefillProgress] = field(default_factory=list)
    scored: list[PromptScored] = field(default_factory=list)
    embedded: list[Embedded] = field(default_factory=list)
    end: Finished | Failed | None = None


def play(core: Core, jobs: Iterable[Job], *, most_steps: int = 2000) -> dict[str, Answer]:
    """Run the jobs to their ends; the answers by id."""
    jobs = list(jobs)
    answers = {job.request.id: Answer() for job in jobs}
    cancelled: set[str] = set()
    for step in range(most_steps):
        for job in jobs:
            if job.arrives == step:
                core.submit(job.request)
            if job.leaves == step and job.arrives <= step:
                core.cancel(job.request.id)
                cancelled.add(job.request.id)
        if not core.busy and all(job.arrives <= step for job in jobs):
            return answers
        for name, event in core.step():
            assert name not in cancelled, "an event for a cancelled request"
            take(answers[name], event)
    raise AssertionError(f"not over after {most_steps} steps")


def texts(answers: dict[str, Answer]) -> dict[str, list[int]]:
    """The tokens of each answer."""
    return {name: answer.tokens for name, answer in answers.items()}


def take(answer: Answer, event: object) -> None:
    """Add one event; none may follow the last one."""
    assert answer.end is None, "an event after the end"
    match event:
        case Started():
            answer.started.append(event)
        case PrefillProgress():
            answer.progress.append(event)
        case PromptScored() | Embedded():
            assert not answer.tokens, "what a prompt tells comes before the answer"
            (answer.scored if isinstance(event, PromptScored) else answer.embedded).append(event)
        case Delta():
            answer.tokens += event.tokens
            answer.logprobs += event.logprobs
            answer.text += event.text
        case Finished() | Failed():
            answer.end = event


def ask(name: str, prompt: Iterable[int], count: int | None = 16, **fields: object) -> Request:
    """A greedy request, unless `sampling` is given."""
    return Request(name, tuple(prompt), **{"sampling": GREEDY, "max_tokens": count, **fields})
