"""The suffix automaton against a search through the text itself."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from engine.draft.automaton import SEPARATOR, Match, SuffixAutomaton

texts = some.lists(some.integers(0, 2), min_size=1, max_size=60) | some.lists(some.integers(0, 9), max_size=60)


def automaton(tokens: Sequence[int]) -> SuffixAutomaton:
    """One that has read a text."""
    result = SuffixAutomaton()
    result.read(tokens)
    return result


def occurs(part: Sequence[int], text: Sequence[int]) -> list[int]:
    """Where a part ends in a text: positions of the tokens behind it."""
    return [at for at in range(len(part), len(text) + 1) if list(text[at - len(part) : at]) == list(part)]


def longest(text: Sequence[int], source: Sequence[int], times: int) -> int:
    """The length of the longest suffix of a text that a source has so many times at least."""
    return max(length for length in range(len(text) + 1) if len(occurs(text[len(text) - length :], source)) >= times)


def likeliest(context: Sequence[int], text: Sequence[int]) -> int | None:
    """What followed a context most often, of equals the latest."""
    ends = [at for at in occurs(context, text) if at < len(text)]
    counts = Counter(text[at] for at in ends)
    latest = {text[at]: at for at in ends}
    return max(counts, key=lambda token: (counts[token], latest[token]), default=None)


@given(texts)
@settings(deadline=None, max_examples=150)
def test_the_match_is_the_longest_suffix_that_was_there_before(text: list[int]) -> None:
    """At every length of a text."""
    read = SuffixAutomaton()
    for at, token in enumerate(text):
        read.extend(token)

        assert longest(text[: at + 1], text[: at + 1], 2) == read.repeated().length


@given(texts)
@settings(deadline=None, max_examples=150)
def test_the_first_token_proposed_is_the_most_frequent_one(text: list[int]) -> None:
    """Behind the longest match, by counting in the text; of equally frequent ones the most recent."""
    match = automaton(text).repeated()
    if match.length:
        context = text[len(text) - match.length :]

        assert [likeliest(context, text)] == automaton(text).continuation(match.state, 1, 0.0)


@given(texts, texts)
@settings(deadline=None, max_examples=150)
def test_another_text_is_followed_while_this_one_grows(text: list[int], other: list[int]) -> None:
    """The match of another text's end is the longest there is, whatever was read between its tokens."""
    read, match = SuffixAutomaton(), Match()
    for at in range(max(len(text), len(other))):
        if at < len(text):
            read.extend(text[at])
        if at < len(other):
            match = read.follow(match, other[at])
            best = longest(other[: at + 1], text[: at + 1], 1)

            assert match.length <= best
            assert occurs(other[at + 1 - match.length : at + 1], text[: at + 1])


@given(texts, texts)
@settings(deadline=None, max_examples=150)
def test_another_text_is_matched_exactly_where_nothing_is_read_meanwhile(text: list[int], other: list[int]) -> None:
    """The longest suffix of the other text that this one has."""
    read, match = automaton(text), Match()
    for at, token in enumerate(other):
        match = read.follow(match, token)

        assert longest(other[: at + 1], text, 1) == match.length


def test_a_continuation_ends_where_it_becomes_unlikely() -> None:
    """The product of relative frequencies stays at the floor or above; three of four, then one of three."""
    text = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 5, 9, 1, 7, 9]
    read = automaton([*text, 1])
    match = read.repeated()

    assert 2 == match.length
    assert [2] == read.continuation(automaton([*text, 1]).repeated().state, 5, 0.5)
    assert [2, 5] == read.continuation(match.state, 2, 0.25)


def test_a_loop_goes_on_as_long_as_asked() -> None:
    """Where the text ends, its own repetition continues: a loop of three is drafted for ten."""
    read = automaton([1, 2, 3] * 4)

    assert [1, 2, 3, 1, 2, 3, 1, 2, 3, 1] == read.continuation(read.repeated().state, 10, 0.1)


def test_a_separator_is_never_proposed() -> None:
    """What ended a text ends a continuation."""
    read = automaton([1, 2, 3, SEPARATOR, 1, 2])

    assert [3] == read.continuation(read.repeated().state, 10, 0.1)


def test_nothing_follows_what_was_never_said() -> None:
    """The empty match has no continuation."""
    assert [] == automaton([1, 2, 3]).continuation(0, 5, 0.0)


@pytest.mark.parametrize("kind", ["random", "loop", "sentences"])
def test_time_and_memory_grow_with_the_text_and_no_faster(kind: str) -> None:
    """Under 200 bytes and 100 microseconds a token; the second half of a long text takes about as long as the first."""
    chance = random.Random(1)
    sentences = [[chance.randrange(5000) for _ in range(20)] for _ in range(300)]
    text = {
        "random": [chance.randrange(30_000) for _ in range(20_000)],
        "loop": [7] * 20_000,
        "sentences": [token for _ in range(1000) for token in chance.choice(sentences)],
    }[kind]
    read = SuffixAutomaton()
    times = [time.process_time()]
    for half in (text[:10_000], text[10_000:]):
        read.read(half)
        times.append(time.process_time())

    assert read.bytes < 200 * len(text)
    assert times[2] - times[0] < 100e-6 * len(text)
    assert times[2] - times[1] < 4 * (times[1] - times[0])
