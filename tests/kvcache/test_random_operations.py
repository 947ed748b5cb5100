"""All operations in random order on caches of every kind: reused content equals computed content, and no cell leaks.

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
from tests.kvcache.random_cache import RandomCache
from tests.selection import quick

# Weight of each operation; prompts are the most frequent, because all others need content.
WEIGHTS = {
    "request": 20,
    "feed": 12,
    "reuse_again": 6,
    "reuse": 3,
    "insert": 6,
    "clear": 2,
    "fork": 6,
    "rewind": 4,
    "shift": 8,
    "evict_for": 3,
    "evict": 4,
    "reset": 1,
    "save": 5,
    "restart": 1,
    "reopen": 1,
    "damage_file": 1,
}
# Operations that must have happened.
REQUIRED = (
    "forward",
    "failed forward",
    "partly kept",
    "copy",
    "rewind",
    "shift",
    "shift without move",
    "reused",
    "reused from disk",
    "restart",
    "damage_file",
    "evict for",
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

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts, self.folder = counts, Path(tempfile.mkdtemp())

    @initialize(draw=st.randoms(use_true_random=False))
    def begin(self, draw: random.Random) -> None:
        """A cache of any kind."""
        self.subject = RandomCache(self.folder, draw, self.counts)

    @rule(operation=st.sampled_from(list(Counter(WEIGHTS).elements())), draw=st.randoms(use_true_random=False))
    def step(self, operation: str, draw: random.Random) -> None:
        """Any operation."""
        self.subject.draw = draw
        self.subject.step(operation)
        self.subject.inspect()

    def teardown(self) -> None:
        """Every cell is free at the end."""
        if hasattr(self, "subject"):
            self.subject.close()
        shutil.rmtree(self.folder)


def run(examples: int, steps: int) -> Counter[str]:
    """Run histories chosen by hypothesis; the count of each operation."""
    counts: Counter[str] = Counter()
    profile = settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[phase for phase in (Phase.generate, Phase.shrink) if phase in settings.default.phases],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(lambda: Everything(counts), settings=profile)
    return counts


def play(seed: int, operations: int, every: int, folder: Path, device: str = "cpu") -> Counter[str]:
    """Run one seeded history; check slots after each step and the whole cache every `every` steps."""
    subject = RandomCache(folder, random.Random(seed), device=device)
    chances = tuple(WEIGHTS), tuple(WEIGHTS.values())
    steps = 0
    while subject.counts["operations"] < operations:
        (operation,) = subject.draw.choices(*chances)
        subject.step(operation)
        steps += 1
        if steps % every == 0:
            subject.inspect()
    subject.close()
    return subject.counts


def test_any_history_reuses_what_was_computed() -> None:
    with small_parts():
        counts = run(25, 30)

    assert 1000 < counts["operations"]


@pytest.mark.parametrize("seed", quick(range(3), range(10)))
def test_long_histories_reuse_what_was_computed(seed: int, device: str, tmp_path: Path) -> None:
    with small_parts():
        counts = play(seed, 500, 1 if device == "cpu" else 20, tmp_path, device)

    assert 500 <= counts["operations"]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_million_operations_reuse_what_was_computed(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    with small_parts():
        for seed in range(1000, 2000):
            folder = tmp_path / str(seed)
            counts += play(seed, 1000, 20, folder)
            shutil.rmtree(folder, ignore_errors=True)

    assert 10**6 <= counts["operations"]
    assert 1000 < min(counts[happening] for happening in REQUIRED)
