"""JSON is streamed up to its first invalid character."""

from __future__ import annotations

import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.chat_format.json_text import json_escaped, stream_json
from engine.chat_format.source import Parser, TextSource

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


def stream(parts: list[str]) -> tuple[bool, str, str]:
    """Whether a value was complete, the emitted text, and the text after it."""
    source, emitted, rest = TextSource(), list[str](), list[str]()

    def parser() -> Parser[bool]:
        whole = yield from stream_json(source, emitted.append)
        while character := (yield from source.take(1)):
            rest.append(character)
        return whole

    running = parser()
    try:
        for part in parts:
            source.push(part)
            next(running)
        source.end()
        next(running)
    except StopIteration as end:
        return bool(end.value), "".join(emitted), "".join(rest)
    raise AssertionError("a parser that waits for text after the end")


def refuse(name: str) -> object:
    """NaN and similar constants, which Python's parser accepts."""
    raise ValueError(name)


@given(value=VALUES, indent=st.none() | st.just(1), per_character=st.booleans())
@settings(max_examples=100, deadline=None)
def test_value_is_emitted_unchanged(value: object, indent: int | None, *, per_character: bool) -> None:
    """Any value, compact or indented, in any chunks; the text after it is not consumed."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)

    assert (True, text, " tail") == stream([*text, " tail"] if per_character else [f"{text} tail"])


@given(parts=st.lists(st.sampled_from(PARTS), max_size=8))
@example(parts=["[1,]"])
@example(parts=['{"a":1,}'])
@example(parts=["01"])
@settings(max_examples=300, deadline=None)
def test_only_valid_json_is_complete(parts: list[str]) -> None:
    """Python's parser accepts a text if and only if it is complete without a rest."""
    text = "".join(parts)
    whole, emitted, rest = stream(parts)
    try:
        json.loads(text, parse_constant=refuse)
        valid = True
    except ValueError:
        valid = False

    assert valid == (whole and not rest)
    assert text == emitted + rest


def test_control_characters_become_escapes() -> None:
    """Models write line breaks in strings, which JSON forbids."""
    assert (True, '"a\\nb\\u0001"', "") == stream(['"a\nb\x01"'])


@given(left=st.text(max_size=5), right=st.text(max_size=5))
@settings(max_examples=100, deadline=None)
def test_escaped_parts_can_be_concatenated(left: str, right: str) -> None:
    assert left + right == json.loads(f'"{json_escaped(left)}{json_escaped(right)}"')
