"""Random traffic: shared prefixes, arrivals, cancels, chunks, more requests than slots, and sometimes few cells."""

from __future__ import annotations

import random
from dataclasses import dataclass

from engine.core import Core
from engine.load.load import LoadedModel
from tests.engine.kit.models import CONTEXT, VOCABULARY, core
from tests.engine.kit.play import Job, ask

LONGEST = 24


@dataclass(frozen=True, slots=True)
class Mix:
    """Settings of an engine and its traffic."""

    slots: int
    chunk: int
    cells: int
    jobs: tuple[Job, ...]

    def core(self, loaded: LoadedModel) -> Core:
        """An engine with the settings."""
        return core(loaded, slots=self.slots, chunk=self.chunk, cells=self.cells)


def prompts(seed: int) -> list[tuple[int, ...]]:
    """36 prompts with shared prefixes of all lengths; some are prefixes of others, some are equal."""
    chance = random.Random(seed)
    stems = [tuple(chance.randrange(VOCABULARY) for _ in range(length)) for length in (1, 7, 16, 40, 66)]
    some = []
    for _ in range(36):
        stem = chance.choice(stems)
        cut = chance.choice((len(stem), chance.randint(1, len(stem))))
        tail = tuple(chance.randrange(VOCABULARY) for _ in range(chance.choice((0, 0, 1, 3, 12, 30))))
        some.append(stem[:cut] + tail)
    return some


def mix(seed: int, pool: list[tuple[int, ...]], *, scarce: bool = False) -> Mix:
    """A random mix; `scarce`: too few cells for its slots, so that sequences are preempted."""
    chance = random.Random(seed)
    slots = chance.choice((1, 2, 3, 4, 8))
    cells = CONTEXT + chance.choice((0, 5, 40)) if scarce else slots * CONTEXT
    jobs = []
    for number in range(chance.randint(2, 10)):
        arrives = chance.choice((0, chance.randint(0, 40)))
        leaves = arrives + chance.randint(0, 30) if chance.random() < 0.25 else None
        count = chance.choice((1, 2, chance.randint(1, LONGEST), LONGEST))
        jobs.append(Job(ask(f"{seed}-{number}", chance.choice(pool), count), arrives, leaves))
    return Mix(slots, chance.choice((1, 2, 3, 7, 16, 64, 256)), cells, tuple(jobs))
