"""What an engine core does with its cache, as stories that a divided model must repeat token for token."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from engine.config import EngineConfig
from engine.core import Core
from engine.draft.loading import make_speculation
from engine.draft.speculation import Speculation
from engine.load.load import LoadedModel
from engine.parallel.messages import geometry_of
from engine.parallel.runner import TensorParallelRunner
from engine.types.request import Request, SamplingParams
from tests.engine.kit.play import Answer, Job, ask, play

CHUNK = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a story: tokens by request, numbers that agree but for rounding, and what the engine counted."""

    tokens: dict[str, list[int]]
    numbers: list[float]
    counts: dict[str, int]


def core_of(
    loaded: LoadedModel,
    *,
    slots: int,
    cells: int,
    context: int,
    speculation: Speculation | None = None,
    **settings: object,
) -> Core:
    """A core over a loaded model, with a cache of its own on every rank."""
    info = dataclasses.replace(loaded.info, slots=slots, context=context)
    sized = dataclasses.replace(loaded, info=info, memory=dataclasses.replace(loaded.memory, cells=cells))
    if isinstance(sized.runner, TensorParallelRunner):
        sized.runner.workers.send(geometry_of(sized))
    options = {"drafter": "none", "itl_target_ms": 0.0, "chunk": CHUNK, **settings}
    config = EngineConfig(model=info.folder, context=context, slots=slots, cells=cells, **options)
    return Core(sized, config, speculation or make_speculation(config, sized, None, time.monotonic))


def prompts() -> list[list[int]]:
    """Four prompts of different lengths, which begin alike; the longest takes several chunks."""
    generator = torch.Generator().manual_seed(5)
    shared = torch.randint(3, 250, (40,), generator=generator).tolist()
    return [shared[: 4 + 12 * at] + torch.randint(3, 250, (6 + at,), generator=generator).tolist() for at in range(4)]


def outcome(core: Core, jobs: Iterable[Request | Job]) -> Outcome:
    """The answers to the requests."""
    answers = play(core, [job if isinstance(job, Job) else Job(job) for job in jobs])
    stats = core.stats()
    drafted = sum(sum(each.drafted) for each in stats.drafts)
    counts = {
        "cached": stats.cached_tokens_total,
        "shifts": stats.context_shifts_total,
        "preemptions": stats.preemptions_total,
        "accepted": sum(sum(each.accepted) for each in stats.drafts),
        "drafted": drafted,
        "failed": stats.failed_total,
    }
    numbers = [number for answer in answers.values() for number in _numbers(answer)]
    return Outcome({name: answer.tokens for name, answer in answers.items()}, numbers, counts)


def _numbers(answer: Answer) -> list[float]:
    scored = [entry for event in answer.scored for entry in event.entries if entry is not None]
    vectors = [np.frombuffer(event.vector, "<f4").tolist() for event in answer.embedded]
    return [*(entry.chosen.logprob for entry in (*answer.logprobs, *scored)), *chain(*vectors)]


def batch(loaded: LoadedModel) -> Outcome:
    """Prompts in chunks, arriving in turn, in one batch; then prompts that continue them, and a sampled text."""
    core = core_of(loaded, slots=4, cells=512, context=128)
    first = outcome(
        core, [Job(ask(f"{at}", prompt, 24, ignore_eos=True), 2 * at) for at, prompt in enumerate(prompts())]
    )
    further = [[*prompt, *first.tokens[f"{at}"][:10]] for at, prompt in enumerate(prompts())]
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=7)
    jobs = [ask(f"hit {at}", prompt, 16, ignore_eos=True) for at, prompt in enumerate(further)]
    second = outcome(core, [*jobs, ask("sampled", further[0], 16, ignore_eos=True, sampling=sampling)])
    return Outcome(first.tokens | second.tokens, [], second.counts)


def drafts(loaded: LoadedModel) -> Outcome:
    """Drafts of the lookup, some of them right, for two texts that repeat themselves."""
    core = core_of(loaded, slots=2, cells=256, context=128, drafter="lookup", draft_tokens=3)
    return outcome(core, [ask(f"{at}", [5, 6, 7, 8 + at] * 5, 48, ignore_eos=True) for at in range(2)])


def shifts(loaded: LoadedModel) -> Outcome:
    """A full context that shifts several times, beside a text that does not."""
    core = core_of(loaded, slots=2, cells=128, context=48)
    long = ask("long", prompts()[1], 100, ignore_eos=True, overflow="shift", keep=2)
    return outcome(core, [long, ask("short", prompts()[0], 30, ignore_eos=True)])


def shared_shifts(loaded: LoadedModel) -> Outcome:
    """A shift in private copies: the cells of its prompt are those of the prefix tree and of another slot, too."""
    core = core_of(loaded, slots=2, cells=160, context=48)
    prompt = prompts()[2][:30]
    first = ask("first", prompt, 60, ignore_eos=True, overflow="shift", keep=2)
    return outcome(core, [Job(first), Job(ask("second", [*prompt, 9], 10, ignore_eos=True), 4)])


def preemption(loaded: LoadedModel) -> Outcome:
    """Three texts in cells for two: one is preempted and resumes."""
    core = core_of(loaded, slots=3, cells=96, context=64)
    return outcome(core, [ask(f"{at}", prompt, 30, ignore_eos=True) for at, prompt in enumerate(prompts()[:3])])


def numbers(loaded: LoadedModel) -> Outcome:
    """Log-probabilities of sampled and of prompt tokens, and a pooled hidden state, in one batch with a text."""
    core = core_of(loaded, slots=4, cells=256, context=64)
    prompt = prompts()[1]
    jobs = [
        ask("scored", prompt, 4, ignore_eos=True, logprobs=2, score_from=3),
        ask("vector", prompt, pooling="mean"),
        ask("text", prompts()[0], 8, ignore_eos=True),
    ]
    return outcome(core, jobs)


STORIES: dict[str, Callable[[LoadedModel], Outcome]] = {
    story.__name__: story for story in (batch, drafts, shifts, shared_shifts, preemption, numbers)
}
# By story, what it must have counted.
COUNTED = {"batch": "cached", "drafts": "accepted", "shifts": "shifts", "shared_shifts": "shifts"}
COUNTED["preemption"] = "preemptions"
