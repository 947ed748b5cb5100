"""The search through a buffer against a search token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as some

from engine.draft.outputs import LONGEST_SUFFIX, SEPARATOR, SHORTEST_SUFFIX, Match, TokenBuffer

# As long as all places are compared, and none as long as what is looked for.
texts = some.lists(some.integers(0, 2), min_size=1, max_size=30) | some.lists(some.integers(0, 9), max_size=30)


def find(end: Sequence[int], source: Sequence[int], stop: int) -> Match:
    """Where a buffer that was read in two pieces has the end of a text."""
    buffer = TokenBuffer(source[: len(source) // 2])
    buffer.extend(source[len(source) // 2 :])
    return buffer.find(np.array(end, dtype=np.int32), stop)


def repeated(text: Sequence[int]) -> Match:
    """Where the end of a text stands in it before."""
    return find(text, text, len(text) - 1)


def occurs(part: Sequence[int], text: Sequence[int]) -> list[int]:
    """Where a part ends in a text: positions of its last token."""
    return [at - 1 for at in range(len(part), len(text) + 1) if list(text[at - len(part) : at]) == list(part)]


def longest(text: Sequence[int], source: Sequence[int], times: int) -> int:
    """The length of the longest suffix of a text that a source has so many times at least; 0 for a single token."""
    found = [length for length in range(len(text) + 1) if len(occurs(text[len(text) - length :], source)) >= times]
    return length if (length := max(found, default=0)) >= SHORTEST_SUFFIX else 0


@given(texts)
@settings(deadline=None, max_examples=150)
def test_the_match_is_the_longest_suffix_that_was_there_before(text: list[int]) -> None:
    """With all places where it stands but the end itself, latest first."""
    match = repeated(text)

    assert longest(text, text, 2) == match.length
    if match.length:
        assert [len(text) - 1, *match.positions] == occurs(text[len(text) - match.length :], text)[::-1]


@given(texts, texts)
@settings(deadline=None, max_examples=150)
def test_the_end_of_another_text_is_matched(text: list[int], other: list[int]) -> None:
    """The longest suffix of it that the buffer has, up to its last token."""
    assert longest(other, text, 1) == find(other, text, len(text)).length


@given(texts)
@settings(deadline=None, max_examples=150)
def test_the_first_token_proposed_is_the_most_frequent_one(text: list[int]) -> None:
    """Behind the longest match, by counting in the text; of equally frequent ones the most recent."""
    match = repeated(text)
    if match.length:
        followed = [text[place + 1] for place in match.positions]
        counts = Counter(followed)
        likeliest = max(counts, key=lambda token: (counts[token], -followed.index(token)))

        assert [likeliest] == TokenBuffer(text).continuation(match.positions, 1, 0.0)


def test_what_is_looked_for_has_an_end() -> None:
    """A repetition of any length counts as one of so many tokens."""
    text = [*range(100), *range(100)]

    assert Match(LONGEST_SUFFIX, (99,)) == repeated(text)


def test_a_continuation_ends_where_it_becomes_unlikely() -> None:
    """The product of relative frequencies stays at the floor or above; three of four, then one of three."""
    text = [0, 1, 2, 3, 9, 0, 1, 2, 4, 9, 0, 1, 2, 5, 9, 0, 1, 7, 9, 0, 1]
    match = repeated(text)

    assert Match(3, (16, 11, 6)) == match
    assert [7, 9, 0] == TokenBuffer(text).continuation(match.positions[:1], 3, 0.5)
    assert [2] == TokenBuffer(text).continuation((16, 11, 6, 1), 5, 0.5)
    assert [2, 5] == TokenBuffer(text).continuation((16, 11, 6, 1), 2, 0.25)


def test_a_loop_goes_on_as_long_as_asked() -> None:
    """Where the text ends, its own repetition continues: a loop of three is drafted for ten."""
    text = [1, 2, 3] * 4

    assert [1, 2, 3, 1, 2, 3, 1, 2, 3, 1] == TokenBuffer(text).continuation(repeated(text).positions, 10, 0.1)


def test_a_separator_is_never_proposed() -> None:
    """What ended a text ends a continuation, where it followed once and where it followed mostly."""
    text = [1, 2, 3, SEPARATOR, 1, 2]

    assert [3] == TokenBuffer(text).continuation(repeated(text).positions, 10, 0.1)
    assert [] == TokenBuffer([1, 2, SEPARATOR, 1, 2, SEPARATOR, 1, 2, 4]).continuation((4, 1, 7), 10, 0.1)


def test_nothing_is_found_where_too_little_was_said() -> None:
    """A single token says nothing, and neither does an empty buffer."""
    for text in ([], [1], [1, 1], [1, 2, 3, 3], [3, 1, 2, 1]):
        assert Match() == repeated(text)
    assert Match() == find([1, 2], [], 0)
