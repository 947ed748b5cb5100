"""The search in a token buffer, compared with a search token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as some

from engine.draft.outputs import LONGEST_SUFFIX, SEPARATOR, SHORTEST_SUFFIX, Match, TokenBuffer

# Short enough to compare all positions, and for matches below LONGEST_SUFFIX.
texts = some.lists(some.integers(0, 2), min_size=1, max_size=30) | some.lists(some.integers(0, 9), max_size=30)


def find(end: Sequence[int], source: Sequence[int], stop: int) -> Match:
    """The match of the end of a text in a buffer that is extended once."""
    buffer = TokenBuffer(source[: len(source) // 2])
    buffer.extend(source[len(source) // 2 :])
    return buffer.find(np.array(end, dtype=np.int32), stop)


def repeated(text: Sequence[int]) -> Match:
    """The match of the end of a text earlier in the text."""
    return find(text, text, len(text) - 1)


def occurs(part: Sequence[int], text: Sequence[int]) -> list[int]:
    """The positions of the last token of each occurrence."""
    return [at - 1 for at in range(len(part), len(text) + 1) if list(text[at - len(part) : at]) == list(part)]


def longest(text: Sequence[int], source: Sequence[int], times: int) -> int:
    """The length of the longest suffix of a text that a source has at least `times` times; 0 for a single token."""
    found = [length for length in range(len(text) + 1) if len(occurs(text[len(text) - length :], source)) >= times]
    return length if (length := max(found, default=0)) >= SHORTEST_SUFFIX else 0


@given(texts)
@settings(deadline=None, max_examples=150)
def test_the_match_is_the_longest_repeated_suffix(text: list[int]) -> None:
    """With all its earlier positions, latest first."""
    match = repeated(text)

    assert longest(text, text, 2) == match.length
    if match.length:
        assert [len(text) - 1, *match.positions] == occurs(text[len(text) - match.length :], text)[::-1]


@given(texts, texts)
@settings(deadline=None, max_examples=150)
def test_the_end_of_another_text_is_matched(text: list[int], other: list[int]) -> None:
    """Its longest suffix that occurs in the buffer."""
    assert longest(other, text, 1) == find(other, text, len(text)).length


@given(texts)
@settings(deadline=None, max_examples=150)
def test_the_first_token_proposed_is_the_most_frequent_one(text: list[int]) -> None:
    """After the longest match; of equally frequent tokens the most recent one."""
    match = repeated(text)
    if match.length:
        followed = [text[place + 1] for place in match.positions]
        counts = Counter(followed)
        likeliest = max(counts, key=lambda token: (counts[token], -followed.index(token)))

        assert [likeliest] == TokenBuffer(text).continuation(match.positions, 1, 0.0)


def test_a_match_has_a_longest_length() -> None:
    """A longer repetition counts as LONGEST_SUFFIX tokens."""
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


def test_a_loop_is_continued_to_the_limit() -> None:
    """At the end of the text the continuation repeats itself: a loop of three tokens gives ten."""
    text = [1, 2, 3] * 4

    assert [1, 2, 3, 1, 2, 3, 1, 2, 3, 1] == TokenBuffer(text).continuation(repeated(text).positions, 10, 0.1)


def test_a_separator_is_never_proposed() -> None:
    """It ends a continuation, also where it is the most frequent next token."""
    text = [1, 2, 3, SEPARATOR, 1, 2]

    assert [3] == TokenBuffer(text).continuation(repeated(text).positions, 10, 0.1)
    assert [] == TokenBuffer([1, 2, SEPARATOR, 1, 2, SEPARATOR, 1, 2, 4]).continuation((4, 1, 7), 10, 0.1)


def test_a_single_token_is_no_match() -> None:
    """Nor is anything in an empty buffer."""
    for text in ([], [1], [1, 1], [1, 2, 3, 3], [3, 1, 2, 1]):
        assert Match() == repeated(text)
    assert Match() == find([1, 2], [], 0)
