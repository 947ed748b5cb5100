"""Output text: whole characters, cut at the first stop, independent of the deltas."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from engine.errors import ContextTooLong, InvalidRequest
from engine.output.stop_regex import StopRegex, check_stop_regex
from engine.output.text import StopStringMatcher, TextStream
from engine.text.tokenizer import Tokenizer
from engine.types.events import Delta, Logprob, TokenLogprob
from tests.engine.kit.models import CONTEXT, VOCABULARY

LETTERS = st.text("ab<|é😀", max_size=24)
STOPS = st.lists(st.text("ab<|é😀", min_size=1, max_size=4), max_size=3)


class ByteDetokenizer:
    """A detokenizer for tokens that are bytes: whole characters only, U+FFFD for an incomplete one at the end."""

    skipped_tokens: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self._bytes = b""
        self._sent = 0

    def push(self, token: int) -> str:
        """The characters that this byte completes."""
        self._bytes += bytes([token])
        try:
            text = self._bytes[self._sent :].decode()
        except UnicodeDecodeError:
            return ""
        self._sent = len(self._bytes)
        return text

    def flush(self) -> str:
        """The incomplete character at the end."""
        return self._bytes[self._sent :].decode(errors="replace")


def cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Reference: the stop that is complete first ends the text; of several, the longest."""
    for length in range(len(text) + 1):
        ends = [stop for stop in stops if stop and text[:length].endswith(stop)]
        if ends:
            stop = max(ends, key=len)
            return text[: length - len(stop)], stop
    return text, None


def stream(tokens: Sequence[int], stops: Sequence[str]) -> tuple[list[Delta], str | None]:
    """The deltas of byte tokens, and the stop that ended them."""
    text = TextStream(ByteDetokenizer(), stops)
    deltas = []
    for token in tokens:
        deltas.append(text.push(token))
        if text.stop is not None:
            return [delta for delta in deltas if delta], text.stop
    deltas.append(text.flush())
    return [delta for delta in deltas if delta], text.stop


@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 24), max_size=8))
@settings(max_examples=600, deadline=None, database=None, derandomize=True)
def test_stops_do_not_depend_on_the_deltas(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher, released, found = StopStringMatcher(stops), "", None
    edges = [0, *sorted(min(edge, len(text)) for edge in cuts), len(text)]
    for start, stop in zip(edges, edges[1:], strict=False):
        piece, found = matcher.push(text[start:stop])
        released += piece
        if found is not None:
            break
    if found is None:
        released += matcher.flush()

    assert cut(text, stops) == (released, found)


@given(text=LETTERS, stops=STOPS)
@settings(max_examples=250, deadline=None, database=None, derandomize=True)
def test_only_a_possible_stop_is_held_back(text: str, stops: list[str]) -> None:
    matcher, released = StopStringMatcher(stops), ""
    for at, letter in enumerate(text, start=1):
        piece, found = matcher.push(letter)
        released += piece
        if found is not None:
            return
        begins = [length for stop in stops for length in range(1, len(stop)) if text[:at].endswith(stop[:length])]
        assert text[: at - max(begins, default=0)] == released


@given(text=LETTERS, stops=STOPS)
@settings(max_examples=250, deadline=None, database=None, derandomize=True)
def test_text_is_released_in_whole_characters(text: str, stops: list[str]) -> None:
    deltas, found = stream(text.encode(), stops)

    assert cut(text, stops) == ("".join(delta.text for delta in deltas), found)
    assert not any("\ufffd" in delta.text for delta in deltas)


@given(text=LETTERS)
@settings(max_examples=150, deadline=None, database=None, derandomize=True)
def test_every_token_is_released_once_and_in_order(text: str) -> None:
    tokens = list(text.encode())
    deltas, _ = stream(tokens, ["<|zz"])

    assert tokens == [token for delta in deltas for token in delta.tokens]


@given(text=LETTERS, stops=STOPS, min_tokens=st.integers(0, 12))
@settings(max_examples=250, deadline=None, database=None, derandomize=True)
def test_no_stop_counts_before_min_tokens(text: str, stops: list[str], min_tokens: int) -> None:
    early = len(text.encode()[: max(min_tokens - 1, 0)].decode(errors="ignore"))
    whole = TextStream(ByteDetokenizer(), stops, min_tokens=min_tokens)
    released, expected = "", (text, None)
    for length in range(early + 1, len(text) + 1):
        if ends := [stop for stop in stops if text[:length].endswith(stop)]:
            expected = (text[: length - len(max(ends, key=len))], max(ends, key=len))
            break
    for token in text.encode():
        delta = whole.push(token)
        released += "" if delta is None else delta.text
        if whole.stop is not None:
            break
    else:
        delta = whole.flush()
        released += "" if delta is None else delta.text

    assert expected == (released, whole.stop)


def test_a_stop_across_three_deltas_is_found() -> None:
    assert ("say ", "<|end|>") == joined(b"say <|end|> more", ["<|end|>"])


def test_a_partial_stop_that_fails_is_released() -> None:
    assert ("a <|en b", None) == joined(b"a <|en b", ["<|end|>"])


def test_the_stop_that_is_complete_first_wins() -> None:
    assert ("x", "bc") == joined(b"xbcd", ["abcd", "bc"])


def test_a_partial_stop_at_the_end_is_text() -> None:
    assert ("hello <|e", None) == joined(b"hello <|e", ["<|end|>"])


def test_an_incomplete_character_is_released_at_the_end() -> None:
    """As U+FFFD."""
    deltas, _ = stream("é".encode()[:1], [])

    assert ["\ufffd"] == [delta.text for delta in deltas]


def test_a_stop_in_the_flushed_text_counts() -> None:
    deltas, found = stream(b"ab\xc3", ["b\ufffd"])

    assert ("a", "b\ufffd") == ("".join(delta.text for delta in deltas), found)


def joined(tokens: bytes, stops: list[str]) -> tuple[str, str | None]:
    """The text of all deltas, and the stop."""
    deltas, found = stream(tokens, stops)
    return "".join(delta.text for delta in deltas), found


def test_logprobs_are_released_with_their_text() -> None:
    text = TextStream(ByteDetokenizer(), ["<end>"])
    chosen = [Logprob(token, chr(token), bytes([token]), -float(token)) for token in b"ab<end>"]
    entries = [TokenLogprob(alternative, ()) for alternative in chosen]
    deltas = [text.push(entry.chosen.token, entry) for entry in entries]
    released = [(delta.tokens, tuple(entry.chosen.token for entry in delta.logprobs)) for delta in deltas if delta]

    assert [((97,), (97,)), ((98,), (98,))] == released
    assert "<end>" == text.stop


@pytest.fixture(scope="module")
def tokenizer(folder: Callable[[str], Path]) -> Tokenizer:
    """The byte-level tokenizer of the tiny models."""
    return Tokenizer(AutoTokenizer.from_pretrained(folder("llama")), vocabulary_size=VOCABULARY, context=CONTEXT)


@given(text=st.text(max_size=30), prompt=st.text(max_size=10))
@settings(max_examples=150, deadline=None, database=None, derandomize=True)
def test_decoding_token_by_token_gives_the_text(tokenizer: Tokenizer, text: str, prompt: str) -> None:
    detokenizer = tokenizer.detokenizer(tokenizer.encode(prompt))
    pieces = [detokenizer.push(token) for token in tokenizer.encode(text)]

    assert text == "".join((*pieces, detokenizer.flush()))


@given(tokens=st.lists(st.integers(0, 255), max_size=30))
@settings(max_examples=150, deadline=None, database=None, derandomize=True)
def test_any_tokens_decode_as_all_at_once(tokenizer: Tokenizer, tokens: list[int]) -> None:
    detokenizer = tokenizer.detokenizer([])
    pieces = [detokenizer.push(token) for token in tokens]
    whole = tokenizer._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    assert whole == "".join((*pieces, detokenizer.flush()))


def test_text_beyond_the_context_is_refused_before_tokenizing(tokenizer: Tokenizer) -> None:
    with pytest.raises(ContextTooLong) as raised:
        tokenizer.encode("the " * 10**6)

    assert not raised.value.exact
    assert CONTEXT == raised.value.capacity


@pytest.mark.parametrize(
    ("expressions", "pieces", "text", "stop"),
    [
        ((r"\d{3}-\d{2}",), ["call 555", "-1", "23 now"], "call 555-12", r"\d{3}-\d{2}"),
        ((r"é+!", "b"), ["aé", "éé! b"], "aééé!", "é+!|b"),
        ((r"(a+)+c",), ["a" * 500, "b"], "a" * 500 + "b", None),
        (("b.",), ["ab\nbc", "d"], "ab\nbc", "b."),
    ],
)
def test_a_text_ends_behind_a_stop_regex_match(
    expressions: Sequence[str], pieces: Sequence[str], text: str, stop: str | None
) -> None:
    for parts in (pieces, ["".join(pieces)], list("".join(pieces))):
        stream = TextStream(TextDetokenizer(parts), (), expressions)
        emitted = [delta.text for number in range(len(parts)) if stream.stop is None and (delta := stream.push(number))]

        assert text == "".join(emitted)
        assert stop == stream.stop


def test_stop_strings_and_stop_regex_work_together() -> None:
    first, second = (
        TextStream(TextDetokenizer(["abc"]), ("c",), ("b",)),
        TextStream(TextDetokenizer(["abc"]), ("b",), ("b",)),
    )
    late = TextStream(TextDetokenizer(["ab", "ab"]), (), ("b",), min_tokens=2)

    assert ("ab", "b") == (text_of(first.push(0)), first.stop)
    assert ("a", "b") == (text_of(second.push(0)), second.stop)
    assert ("ab", None) == (text_of(late.push(0)), late.stop)
    assert ("ab", "b") == (text_of(late.push(1)), late.stop)


def test_a_match_may_begin_behind_an_ignored_one() -> None:
    """Both in the delta before `min_tokens`."""
    stream = TextStream(TextDetokenizer(["END EN", "D."]), (), ("END",), min_tokens=2)

    assert "END EN" == text_of(stream.push(0))
    assert ("D", "END") == (text_of(stream.push(1)), stream.stop)


@pytest.mark.parametrize("stop_regex", ["(", "(?=a)", "a*", r"\bx"])
def test_invalid_stop_expressions_are_refused(stop_regex: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        StopRegex([stop_regex])

    assert "stop_regex" == refused.value.field


@pytest.mark.parametrize(
    ("expressions", "words"),
    [
        (("good", "bad("), "'bad(' cannot be followed: unclosed group"),
        (("^a$",), "'^a$' cannot be followed: lookarounds"),
        (("a)|(b",), "'a)|(b' cannot be followed: unopened group"),
        (("(?x)a #", "b"), "cannot be followed: unclosed group"),
        (("(" + "a" * 500,), f"'({'a' * 79}...' cannot be followed: unclosed group"),
        (("\ud800",), "half of a surrogate pair"),
        (("a", "b?"), "empty text"),
    ],
)
def test_an_error_shows_the_expression_that_was_sent(expressions: tuple[str, ...], words: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)) as refused:
        check_stop_regex(expressions)

    assert "(?s:.)" not in refused.value.reason


def test_a_stop_regex_with_too_many_states_reports_it() -> None:
    stop_regex, random = StopRegex(["(a.{300}b)"]), Random(0)
    text = "".join(random.choice("ac") for _ in range(6000))

    assert stop_regex.push(text) is None
    assert "too many states" in stop_regex.error


class TextDetokenizer:
    """A detokenizer with a text for each token."""

    skipped_tokens: frozenset[int] = frozenset()

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def push(self, token: int) -> str:
        return self._words[token]

    def flush(self) -> str:
        return ""


def text_of(delta: Delta | None) -> str:
    return "" if delta is None else delta.text
