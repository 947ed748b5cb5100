"""All operations in random order on caches of every kind: reused content is what was computed, and no cell leaks.

Windows, chunks and recurrent states, salts and checkpoints, copies and shifts, partly accepted drafts, exhausted
pools, and processes that end at any point; the operations are in tests/kvcache/random_cache.py. Exact lengths and
sharing are checked by test_laws.py; here they are only bounded.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvcache import disk, offload, prefix
from tests.kvcache.random_cache import World

# How often each operation comes; prompts most often, for the rest needs something to work on.
WEIGHTS = {
    "request": 20,
    "feed": 12,
    "again": 6,
    "recall": 3,
    "remember": 6,
    "clear": 2,
    "fork": 6,
    "rewind": 4,
    "shift": 8,
    "make_room": 3,
    "evict": 4,
    "forget": 1,
    "save": 5,
    "restart": 1,
    "reopen": 1,
    "lose": 1,
}
# What has to have happened, or the laws were not put to the test.
HAPPENINGS = (
    "forward",
    "forward that failed",
    "kept in part",
    "copy",
    "rewind",
    "shift",
    "shift that moves nothing",
    "recalled",
    "recalled from the shelf",
    "restart",
    "lose",
    "make room",
    "evict",
)


@contextmanager
def small_parts() -> Iterator[None]:
    """Load and offload short ranges, in entries of a few tokens, without waiting for fsync."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix, "MIN_LOAD_TOKENS", 2)
        patch.setattr(prefix, "MIN_OFFLOAD_TOKENS", 3)
        patch.setattr(offload, "MAX_ENTRY_BYTES", 240)
        patch.setattr(offload, "WRITE_BUFFER_BYTES", 1000)
        patch.setattr(disk.os, "fsync", lambda descriptor: None)
        yield


class Everything(RuleBasedStateMachine):
    """Random operations with every choice made by hypothesis, so that failures are minimised."""

    def __init__(self, tally: Counter[str]) -> None:
        super().__init__()
        self.tally, self.folder = tally, Path(tempfile.mkdtemp())

    @initialize(draw=st.randoms(use_true_random=False))
    def begin(self, draw: random.Random) -> None:
        """A cache of any kind."""
        self.world = World(self.folder, draw, self.tally)

    @rule(operation=st.sampled_from(list(Counter(WEIGHTS).elements())), draw=st.randoms(use_true_random=False))
    def step(self, operation: str, draw: random.Random) -> None:
        """Any operation."""
        self.world.draw = draw
        self.world.step(operation)
        self.world.inspect()

    def teardown(self) -> None:
        """Every cell is free at the end."""
        if hasattr(self, "world"):
            self.world.close()
        shutil.rmtree(self.folder)


def run(examples: int, steps: int) -> Counter[str]:
    """Run histories chosen by hypothesis; the count of each operation."""
    tally: Counter[str] = Counter()
    profile = settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[phase for phase in (Phase.generate, Phase.shrink) if phase in settings.default.phases],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(lambda: Everything(tally), settings=profile)
    return tally


def play(seed: int, operations: int, every: int, folder: Path) -> Counter[str]:
    """Run one seeded history; check slots after each step and the whole cache every `every` steps."""
    world = World(folder, random.Random(seed))
    chances = tuple(WEIGHTS), tuple(WEIGHTS.values())
    steps = 0
    while world.tally["operations"] < operations:
        (operation,) = world.draw.choices(*chances)
        world.step(operation)
        steps += 1
        if steps % every == 0:
            world.inspect()
    world.close()
    return world.tally


def test_any_history_reuses_what_was_computed() -> None:
    with small_parts():
        tally = run(40, 30)

    assert 1000 < tally["operations"]


@pytest.mark.parametrize("seed", range(20))
def test_long_histories_reuse_what_was_computed(seed: int, tmp_path: Path) -> None:
    with small_parts():
        tally = play(seed, 500, 1, tmp_path)

    assert 500 <= tally["operations"]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_million_operations_reuse_what_was_computed(tmp_path: Path) -> None:
    tally: Counter[str] = Counter()
    with small_parts():
        for seed in range(1000, 2000):
            folder = tmp_path / str(seed)
            tally += play(seed, 1000, 20, folder)
            shutil.rmtree(folder, ignore_errors=True)

    assert 10**6 <= tally["operations"]
    assert 1000 < min(tally[happening] for happening in HAPPENINGS)
