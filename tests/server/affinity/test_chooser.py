"""The choice of a replica."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from server.affinity.chooser import CHOICES, CONVERSATION_WORTH, PREFIX_WORTH, ReplicaChooser
from server.affinity.keys import RequestKeys
from server.affinity.memory import PrefixMemory

NAMES = [f"r{number}" for number in range(6)]
CONVERSATIONS, PREFIXES = ["", "c1", "c2", "c3"], ["p1", "p2", "p3", "p4"]
KEYS = st.builds(
    RequestKeys, st.sampled_from(CONVERSATIONS), st.lists(st.sampled_from(PREFIXES), unique=True).map(tuple)
)
LOADS = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 30))


class Routing(RuleBasedStateMachine):
    """Requests, changes of the replicas and of their loads in any order, with two choosers side by side."""

    @initialize()
    def start(self) -> None:
        """Both begin alike."""
        self.choosers = [ReplicaChooser(NAMES, keys_per_replica=4) for _ in range(2)]

    @rule(keys=KEYS, loads=LOADS)
    def request(self, keys: RequestKeys, loads: dict[str, int]) -> None:
        """Choices are available, different, below the limit of load, and the same from both choosers."""
        one, other = (chooser.choose(keys, loads) for chooser in self.choosers)
        available = self.choosers[0].replicas & loads.keys()

        assert one == other
        assert len(one) == len(set(one)) <= CHOICES
        assert set(one) <= available
        assert bool(one) == bool(available)
        if one:
            assert loads[one[0]] < min(loads[name] for name in one) + CONVERSATION_WORTH
            for chooser in self.choosers:
                chooser.record(keys, one[0])

    @rule(names=st.sets(st.sampled_from(NAMES)))
    def change(self, names: set[str]) -> None:
        """Replicas come and go."""
        for chooser in self.choosers:
            chooser.replace(names)

    @invariant()
    def bounded(self) -> None:
        """The memory has at most the limit of each replica."""
        for chooser in self.choosers:
            assert chooser.known_keys <= 4 * len(chooser.replicas)


TestRouting = Routing.TestCase
TestRouting.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def even(load: int = 0) -> dict[str, float]:
    """All replicas with one load."""
    return dict.fromkeys(NAMES, load)


def test_a_conversation_stays_where_it_is_up_to_the_limit() -> None:
    """Its replica has fewer than CONVERSATION_WORTH requests more than the least loaded choice."""
    chooser, keys = ReplicaChooser(NAMES), RequestKeys("c1")
    chooser.record(keys, "r3")

    assert "r3" == chooser.choose(keys, even())[0]
    assert "r3" == chooser.choose(keys, {**even(20), "r3": 20 + CONVERSATION_WORTH - 1})[0]
    assert "r3" != chooser.choose(keys, {**even(20), "r3": 20 + CONVERSATION_WORTH})[0]


def test_a_moved_conversation_stays_at_its_new_replica() -> None:
    """The last replica of a conversation has its last turns."""
    chooser, keys = ReplicaChooser(NAMES), RequestKeys("c1")
    for replica in ("r3", "r5"):
        chooser.record(keys, replica)

    assert "r5" == chooser.choose(keys, even())[0]


def test_a_new_conversation_goes_where_its_longest_prefix_is() -> None:
    """A longer known prefix stands above a shorter one, and above less load."""
    chooser = ReplicaChooser(NAMES)
    chooser.record(RequestKeys("c1", ("long", "short")), "r1")
    chooser.record(RequestKeys("c2", ("other", "short")), "r2")

    assert "r1" == chooser.choose(RequestKeys("c3", ("long", "short")), {**even(), "r1": 3})[0]
    assert "r2" == chooser.choose(RequestKeys("c3", ("longest", "other", "short")), {**even(), "r2": 3})[0]


def test_a_shorter_prefix_counts_where_the_replica_of_the_longest_is_full() -> None:
    """The limit of load is that of a prefix."""
    chooser = ReplicaChooser(NAMES)
    chooser.record(RequestKeys("c1", ("short",)), "r2")
    chooser.record(RequestKeys("c2", ("long",)), "r1")
    loads = {**even(), "r1": PREFIX_WORTH, "r2": 1}

    assert "r2" == chooser.choose(RequestKeys("c3", ("long", "short")), loads)[0]


def test_a_popular_prefix_spreads_over_as_many_replicas_as_it_needs() -> None:
    """One prefix of all requests: every replica gets it, and no load exceeds another's by more than the limit."""
    chooser, loads = ReplicaChooser(NAMES), Counter(even())
    for number in range(120):
        keys = RequestKeys(f"c{number}", ("prefix",))
        replica = chooser.choose(keys, loads)[0]
        chooser.record(keys, replica)
        loads[replica] += 1

    assert 120 == sum(loads.values())
    assert max(loads.values()) <= min(loads.values()) + PREFIX_WORTH


def test_requests_without_keys_go_to_the_less_loaded_of_two() -> None:
    """The loads stay close."""
    chooser, loads = ReplicaChooser(NAMES), Counter(even())
    for _ in range(600):
        replica = chooser.choose(RequestKeys(), loads)[0]
        chooser.record(RequestKeys(), replica)
        loads[replica] += 1

    assert max(loads.values()) <= 1.2 * min(loads.values())


def test_a_replica_that_comes_back_is_empty() -> None:
    """A restarted replica has an empty cache: its former conversations go by load."""
    chooser, keys = ReplicaChooser(NAMES), [RequestKeys(f"c{number}") for number in range(100)]
    for key in keys:
        chooser.record(key, "r1")
    chooser.replace([name for name in NAMES if name != "r1"])
    chooser.replace(NAMES)

    assert 0 == chooser.known_keys
    assert 50 > sum(chooser.choose(key, even())[0] == "r1" for key in keys)


def test_few_unseen_conversations_move_with_an_added_replica() -> None:
    """Routers without a memory agree; one replica more than six takes a seventh of the conversations, others stay."""
    keys = [RequestKeys(f"c{number}") for number in range(1000)]
    loads = {**even(), "added": 0}
    before = [ReplicaChooser(NAMES).choose(key, even())[0] for key in keys]
    chooser = ReplicaChooser([*NAMES, "added"])
    after = [chooser.choose(key, loads)[0] for key in keys]

    assert {"added"} == {new for old, new in zip(before, after, strict=True) if old != new}
    assert 1000 / 7 == pytest.approx(after.count("added"), rel=0.5)


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(PREFIXES))))
def test_the_memory_keeps_the_most_recent_keys(added: list[tuple[str, str]]) -> None:
    """The two most recent keys of each replica, and nothing of others."""
    memory = PrefixMemory(keys_per_replica=2)
    for replica, key in added:
        memory.add(replica, (key,))
    recent = {name: [*dict.fromkeys(key for replica, key in reversed(added) if replica == name)][:2] for name in NAMES}

    assert {key: {name for name in NAMES if key in recent[name]} for key in PREFIXES} == {
        key: set(memory.holders(key)) for key in PREFIXES
    }
    assert len(memory) == sum(map(len, recent.values()))
