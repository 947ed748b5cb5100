"""The ring of consistent hashing."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.affinity import ring
from server.affinity.ring import POINTS, HashRing

KEYS = [f"key {number}" for number in range(4000)]
NAMES = st.sets(st.text(min_size=1, max_size=8), min_size=1, max_size=12)


def owners(hash_ring: HashRing) -> list[str]:
    """The nearest replica of each of KEYS."""
    return [next(hash_ring.walk(key)) for key in KEYS]


@pytest.mark.parametrize("count", [1, 2, 3, 10, 50])
def test_an_added_replica_takes_its_share_of_the_keys_and_moves_no_other(count: int) -> None:
    """About 1 / n of the keys move, all of them to the added replica; its removal moves them back."""
    hash_ring = HashRing([f"r{number}" for number in range(count)])
    before = owners(hash_ring)
    hash_ring.replace([*hash_ring.replicas, "added"])
    after = owners(hash_ring)
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    hash_ring.replace(hash_ring.replicas - {"added"})

    assert {"added"} == set(moved)
    assert len(moved) == pytest.approx(len(KEYS) / (count + 1), rel=0.5)
    assert before == owners(hash_ring)


def test_replicas_own_similar_shares() -> None:
    """With 64 points each, no replica of twenty has twice the mean."""
    counts = Counter(owners(HashRing([f"r{number}" for number in range(20)])))

    assert 20 == len(counts)
    assert max(counts.values()) < 2 * len(KEYS) / 20


@given(NAMES, st.text())
def test_a_walk_has_each_replica_once(names: set[str], key: str) -> None:
    """A walk ends after one round."""
    assert sorted(names) == sorted(HashRing(names).walk(key))


@given(NAMES, NAMES, st.text())
def test_the_ring_depends_on_its_replicas_alone(names: set[str], earlier: set[str], key: str) -> None:
    """The order of changes has no effect."""
    changed = HashRing(earlier)
    changed.replace(names)

    assert [*HashRing(names).walk(key)] == [*changed.walk(key)]


def test_an_empty_ring_has_no_replicas() -> None:
    """A walk is empty."""
    assert [] == [*HashRing().walk("key")]


class CountedPosition(int):
    """A position that counts its comparisons."""

    comparisons = 0

    def __lt__(self, other: int) -> bool:
        CountedPosition.comparisons += 1
        return int(self) < int(other)

    def __gt__(self, other: int) -> bool:
        CountedPosition.comparisons += 1
        return int(self) > int(other)


def test_a_lookup_needs_comparisons_by_the_logarithm_of_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most log2 of the points, rounded up, with 10,000 replicas."""
    hash_ring = HashRing([f"r{number}" for number in range(10_000)])
    original = ring.position
    monkeypatch.setattr(ring, "position", lambda key: CountedPosition(original(key)))
    CountedPosition.comparisons = 0
    for key in KEYS[:100]:
        next(hash_ring.walk(key))

    assert 0 < CountedPosition.comparisons <= 100 * (10_000 * POINTS).bit_length()
