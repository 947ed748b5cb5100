"""Text that may be sent: whole characters, cut at the earliest stop, the same however it comes in pieces."""

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
from tests.engine.models import CONTEXT, VOCABULARY

LETTERS = st.text("ab<|é😀", max_size=24)
STOPS = st.lists(st.text("ab<|é😀", min_size=1, max_size=4), max_size=3)


class Bytes:
    """A decoder (engine/output/text.py) for tokens that are bytes: whole characters only, U+FFFD for a broken end."""

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
        """The broken end."""
        return self._bytes[self._sent :].decode(errors="replace")


def cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The law, by trying every length: the stop that is complete first ends the text; of those, the longest."""
    for length in range(len(text) + 1):
        ends = [stop for stop in stops if stop and text[:length].endswith(stop)]
        if ends:
            stop = max(ends, key=len)
            return text[: length - len(stop)], stop
    return text, None


def stream(tokens: Sequence[int], stops: Sequence[str]) -> tuple[list[Delta], str | None]:
    """What a client gets for tokens that are bytes, and the stop that ended it."""
    text = TextStream(Bytes(), stops)
    deltas = []
    for token in tokens:
        deltas.append(text.push(token))
        if text.stop is not None:
            return [delta for delta in deltas if delta], text.stop
    deltas.append(text.flush())
    return [delta for delta in deltas if delta], text.stop


@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 24), max_size=8))
@settings(max_examples=1500, deadline=None, database=None, derandomize=True)
def test_stops_do_not_depend_on_the_pieces(text: str, stops: list[str], cuts: list[int]) -> None:
    """For any chunking the released text is the whole, cut at the earliest stop."""
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
@settings(max_examples=500, deadline=None, database=None, derandomize=True)
def test_only_a_possible_stop_is_held_back(text: str, stops: list[str]) -> None:
    """Before the end, what is held is the longest end of the text that a stop could begin with, and no more."""
    matcher, released = StopStringMatcher(stops), ""
    for at, letter in enumerate(text, start=1):
        piece, found = matcher.push(letter)
        released += piece
        if found is not None:
            return
        begins = [length for stop in stops for length in range(1, len(stop)) if text[:at].endswith(stop[:length])]
        assert text[: at - max(begins, default=0)] == released


@given(text=LETTERS, stops=STOPS)
@settings(max_examples=500, deadline=None, database=None, derandomize=True)
def test_bytes_become_whole_characters(text: str, stops: list[str]) -> None:
    """Byte by byte, no delta splits a character, and all together are the text up to its stop."""
    deltas, found = stream(text.encode(), stops)

    assert cut(text, stops) == ("".join(delta.text for delta in deltas), found)
    assert not any("\ufffd" in delta.text for delta in deltas)


@given(text=LETTERS)
@settings(max_examples=300, deadline=None, database=None, derandomize=True)
def test_every_token_is_told_once_and_in_order(text: str) -> None:
    """Without a stop, the tokens of all deltas are all tokens, each with the text that it completes or later."""
    tokens = list(text.encode())
    deltas, _ = stream(tokens, ["<|zz"])

    assert tokens == [token for delta in deltas for token in delta.tokens]


@given(text=LETTERS, stops=STOPS, least=st.integers(0, 12))
@settings(max_examples=500, deadline=None, database=None, derandomize=True)
def test_no_stop_counts_that_is_complete_too_early(text: str, stops: list[str], least: int) -> None:
    """Before so many tokens stops are text, and may be part of a later one; held text is released as ever."""
    early = len(text.encode()[: max(least - 1, 0)].decode(errors="ignore"))
    whole = TextStream(Bytes(), stops, min_tokens=least)
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
    """A stop string may begin in one token and end in a third."""
    assert ("say ", "<|end|>") == joined(b"say <|end|> more", ["<|end|>"])


def test_a_false_start_is_released() -> None:
    """Text that began like a stop and went on differently comes out whole."""
    assert ("a <|en b", None) == joined(b"a <|en b", ["<|end|>"])


def test_the_stop_that_is_complete_first_wins() -> None:
    """A shorter stop inside the beginning of a longer one ends the text."""
    assert ("x", "bc") == joined(b"xbcd", ["abcd", "bc"])


def test_a_held_beginning_at_the_end_is_text() -> None:
    """When a sequence ends in the middle of a stop string, that is text."""
    assert ("hello <|e", None) == joined(b"hello <|e", ["<|end|>"])


def test_an_unfinished_character_shows_at_the_end_only() -> None:
    """Half a character is held back until nothing more can come, and then is U+FFFD."""
    deltas, _ = stream("é".encode()[:1], [])

    assert ["\ufffd"] == [delta.text for delta in deltas]


def test_a_stop_in_the_flushed_rest_counts() -> None:
    """The last characters may complete a stop, too."""
    deltas, found = stream(b"ab\xc3", ["b\ufffd"])

    assert ("a", "b\ufffd") == ("".join(delta.text for delta in deltas), found)


def joined(tokens: bytes, stops: list[str]) -> tuple[str, str | None]:
    """The text of a whole stream and its stop."""
    deltas, found = stream(tokens, stops)
    return "".join(delta.text for delta in deltas), found


def test_logprobs_come_with_their_text() -> None:
    """A held-back token's log-probability is told with the token; after a stop, those behind it are not told."""
    text = TextStream(Bytes(), ["<end>"])
    chosen = [Logprob(token, chr(token), bytes([token]), -float(token)) for token in b"ab<end>"]
    entries = [TokenLogprob(alternative, ()) for alternative in chosen]
    deltas = [text.push(entry.chosen.token, entry) for entry in entries]
    told = [(delta.tokens, tuple(entry.chosen.token for entry in delta.logprobs)) for delta in deltas if delta]

    assert [((97,), (97,)), ((98,), (98,))] == told
    assert "<end>" == text.stop


@pytest.fixture(scope="module")
def tokenizer(folder: Callable[[str], Path]) -> Tokenizer:
    """The byte-level tokenizer of the tiny models."""
    return Tokenizer(AutoTokenizer.from_pretrained(folder("llama")), vocabulary_size=VOCABULARY, context=CONTEXT)


@given(text=st.text(max_size=30), prompt=st.text(max_size=10))
@settings(max_examples=300, deadline=None, database=None, derandomize=True)
def test_decoding_token_by_token_gives_the_text(tokenizer: Tokenizer, text: str, prompt: str) -> None:
    """Whatever stands before it, any text comes back whole from its tokens, one by one."""
    decoder = tokenizer.detokenizer(tokenizer.encode(prompt))
    pieces = [decoder.push(token) for token in tokenizer.encode(text)]

    assert text == "".join((*pieces, decoder.flush()))


@given(tokens=st.lists(st.integers(0, 255), max_size=30))
@settings(max_examples=300, deadline=None, database=None, derandomize=True)
def test_any_tokens_decode_as_all_at_once(tokenizer: Tokenizer, tokens: list[int]) -> None:
    """Random bytes, which are rarely text, give what decoding them at once gives."""
    decoder = tokenizer.detokenizer([])
    pieces = [decoder.push(token) for token in tokens]
    whole = tokenizer._engine_tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    assert whole == "".join((*pieces, decoder.flush()))


def test_text_that_cannot_fit_is_refused_unread(tokenizer: Tokenizer) -> None:
    """Megabytes of text are too long however they are cut; nobody waits while they are tokenised."""
    with pytest.raises(ContextTooLong) as raised:
        tokenizer.encode("the " * 10**6)

    assert not raised.value.exact
    assert CONTEXT == raised.value.capacity


@pytest.mark.parametrize(
    ("patterns", "pieces", "text", "stop"),
    [
        ((r"\d{3}-\d{2}",), ["call 555", "-1", "23 now"], "call 555-12", r"\d{3}-\d{2}"),
        ((r"é+!", "b"), ["aé", "éé! b"], "aééé!", "é+!|b"),
        ((r"(a+)+c",), ["a" * 500, "b"], "a" * 500 + "b", None),
        (("b.",), ["ab\nbc", "d"], "ab\nbc", "b."),
    ],
)
def test_a_text_ends_behind_a_match(
    patterns: Sequence[str], pieces: Sequence[str], text: str, stop: str | None
) -> None:
    """The first match that is complete, which stays in the text; however the text comes."""
    for parts in (pieces, ["".join(pieces)], list("".join(pieces))):
        stream = TextStream(Words(parts), (), patterns)
        said = [delta.text for number in range(len(parts)) if stream.stop is None and (delta := stream.push(number))]

        assert text == "".join(said)
        assert stop == stream.stop


def test_strings_and_patterns_end_a_text_together() -> None:
    """Of a string and a pattern that are complete at once it is the string; what no stop may end yet goes on."""
    first, second = TextStream(Words(["abc"]), ("c",), ("b",)), TextStream(Words(["abc"]), ("b",), ("b",))
    late = TextStream(Words(["ab", "ab"]), (), ("b",), min_tokens=2)

    assert ("ab", "b") == (text_of(first.push(0)), first.stop)
    assert ("a", "b") == (text_of(second.push(0)), second.stop)
    assert ("ab", None) == (text_of(late.push(0)), late.stop)
    assert ("ab", "b") == (text_of(late.push(1)), late.stop)


@pytest.mark.parametrize("pattern", ["(", "(?=a)", "a*", r"\bx"])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    """What cannot be read, what looks around, and what is everywhere."""
    with pytest.raises(InvalidRequest) as refused:
        StopRegex([pattern])

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
    """The one that is wrong, as far as it is short, and nothing of what is built around it."""
    with pytest.raises(InvalidRequest, match=re.escape(words)) as refused:
        check_stop_regex(expressions)

    assert "(?s:.)" not in refused.value.reason


def test_a_pattern_with_too_many_states_says_so() -> None:
    """Within bounded work; from then on it ends nothing."""
    pattern, random = StopRegex(["(a.{300}b)"]), Random(0)
    text = "".join(random.choice("ac") for _ in range(6000))

    assert pattern.push(text) is None
    assert "too many states" in pattern.error


class Words:
    """Each token is one of these texts."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def push(self, token: int) -> str:
        return self._words[token]

    def flush(self) -> str:
        return ""


def text_of(delta: Delta | None) -> str:
    return "" if delta is None else delta.text
