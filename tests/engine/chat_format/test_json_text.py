"""JSON is streamed up to its first invalid character."""

from __future__ import annotations

import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.chat_format.json_text import json_escaped, stream_json
from engine.chat_format.source import Steps, TextSource

PARTS = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"',
    '"a"',
    "\\",
    '\\"',
    "\\u00e9",
    "\\u00",
    "1",
    "-",
    "0",
    ".5",
    "e9",
    "true",
    "nul",
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def passed(parts: list[str]) -> tuple[bool, str, str]:
    """Whether a value was whole, what was passed on, and what stands behind it."""
    source, said, rest = TextSource(), list[str](), list[str]()

    def steps() -> Steps[bool]:
        whole = yield from stream_json(source, said.append)
        while letter := (yield from source.take(1)):
            rest.append(letter)
        return whole

    running = steps()
    try:
        for part in parts:
            source.push(part)
            next(running)
        source.end()
        next(running)
    except StopIteration as end:
        return bool(end.value), "".join(said), "".join(rest)
    raise AssertionError("a reader that waits for more behind the end")


def refuse(name: str) -> object:
    """NaN and its like, which Python's parser takes for numbers."""
    raise ValueError(name)


@given(value=VALUES, indent=st.none() | st.just(1), letters=st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_value_is_passed_on_as_it_is(value: object, indent: int | None, *, letters: bool) -> None:
    """Any value, compact or not, in deltas or whole; what follows is left alone."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)

    assert (True, text, " tail") == passed([*text, " tail"] if letters else [f"{text} tail"])


@given(parts=st.lists(st.sampled_from(PARTS), max_size=8))
@example(parts=["[1,]"])
@example(parts=['{"a":1,}'])
@example(parts=["01"])
@settings(max_examples=300, deadline=None)
def test_only_json_is_whole(parts: list[str]) -> None:
    """A whole value is one for Python's parser, and what is not whole is none with nothing behind it."""
    text = "".join(parts)
    whole, said, rest = passed(parts)
    try:
        json.loads(text, parse_constant=refuse)
        valid = True
    except ValueError:
        valid = False

    assert valid == (whole and not rest)
    assert text == said + rest


def test_control_characters_become_escapes() -> None:
    """Models write line breaks in strings, which JSON forbids."""
    assert (True, '"a\\nb\\u0001"', "") == passed(['"a\nb\x01"'])


@given(left=st.text(max_size=5), right=st.text(max_size=5))
@settings(max_examples=100, deadline=None)
def test_quoted_pieces_join(left: str, right: str) -> None:
    """A string may be quoted delta by delta."""
    assert left + right == json.loads(f'"{json_escaped(left)}{json_escaped(right)}"')
