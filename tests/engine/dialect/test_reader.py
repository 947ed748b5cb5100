"""What a model writes becomes text, reasoning and calls, in every format and however the text is cut."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.message import Reasoning, Text
from tests.engine.dialect.speakers import SPEAKERS, TOOLS, Arguments, Speaker, calls_of, read

everyone = pytest.mark.parametrize("name", SPEAKERS)

WORDS = st.text('ab \n"\\é😀{}[]:,<|', max_size=8).filter(lambda text: '<|"|>' not in text)
NUMBERS = st.integers(-99, 99) | st.sampled_from([0.5, -1e300])
ARGUMENTS: st.SearchStrategy[Arguments] = st.fixed_dictionaries(
    {},
    optional={
        "text": WORDS,
        "count": st.integers(-(10**12), 10**12),
        "sure": st.booleans(),
        "list": st.lists(WORDS, max_size=3),
        "deep": st.fixed_dictionaries({}, optional={"a": NUMBERS, "b": WORDS}),
        "maybe": st.none(),
    },
)
CALLS = st.lists(st.tuples(st.sampled_from([tool.name for tool in TOOLS]), ARGUMENTS), min_size=1, max_size=3)

# Beside a format's own markers, what calls and text are made of.
PARTS = [
    *('{"name": "get_weather", "arguments": ', '{"name": "ring-2", "parameters": ', '{"a": 1}', '{"text": "x'),
    *("functions.ring-2:0", "get_weather", "call:ring-2", "json", "function", "```json", "```", "=text>", "text"),
    *(" ", "\n", "\n\n", "{", "}", "[", "]", '"', ":", ",", ";", "a", "</", "<", "|>", "[/", "\\", "é", "1", "tru"),
]


def cuts(text: str, places: Sequence[int]) -> list[str]:
    """A text cut at these places, in thousandths of its length."""
    ends = [0, *sorted(place * len(text) // 1000 for place in places), len(text)]
    return [text[start:stop] for start, stop in zip(ends, ends[1:], strict=False)]


def markers(speaker: Speaker) -> list[str]:
    """A format's markers: its tokens, and those of the calls that it writes."""
    sample = speaker.write([("ring-2", {"text": "t", "count": 1})])
    found = [part for part in sample.replace(">", ">\0").replace("<", "\0<").split("\0") if part]
    return [*speaker.tokens, *found, *filter(None, speaker.reasoning)]


def check_cuts(name: str, data: st.DataObject) -> None:
    """One random text in one piece, and cut: here and there, or everywhere."""
    speaker = SPEAKERS[name]
    parts = st.sampled_from([*markers(speaker), *PARTS])
    calls = st.builds(speaker.write, CALLS)
    text = "".join(data.draw(st.lists(parts | calls, max_size=8)))
    opened = data.draw(st.sampled_from(["", speaker.opened, speaker.reasoning[0]]))
    places = data.draw(st.lists(st.integers(0, 1000), max_size=8) | st.just(range(1, 1000)))

    assert read(speaker.dialect, [text], opened=opened) == read(speaker.dialect, cuts(text, places), opened=opened)


def check_calls(name: str, data: st.DataObject) -> None:
    """Random calls behind reasoning come out as they went in."""
    speaker = SPEAKERS[name]
    calls = data.draw(CALLS)
    thought = data.draw(st.sampled_from(["", "hm", "1\n\n2"])) if speaker.reasoning[0] else ""
    opens, closes = speaker.reasoning
    text = (f"{opens}\n{thought}\n{closes}\n\n" if thought and not speaker.opened else "") + speaker.write(calls)
    text = f"{opens}{thought}{closes}{text}" if thought and speaker.opened else text
    pieces = read(
        speaker.dialect, cuts(text, data.draw(st.lists(st.integers(0, 1000), max_size=8))), opened=speaker.opened
    )
    reasoning = [Reasoning(thought)] if thought else []

    assert [*reasoning] == [piece for piece in pieces if isinstance(piece, Text | Reasoning)]
    assert calls == [(name, json.loads(arguments)) for name, arguments in calls_of(pieces)]


@everyone
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_pieces_do_not_depend_on_how_a_text_is_cut(name: str, data: st.DataObject) -> None:
    """Valid calls, broken ones and anything between: together the pieces say the same."""
    check_cuts(name, data)


@everyone
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_calls_come_out_as_they_went_in(name: str, data: st.DataObject) -> None:
    """Names and arguments of any calls that a model may write, with nothing between them."""
    check_calls(name, data)


@pytest.mark.slow
@everyone
@given(data=st.data())
@settings(max_examples=10_000, deadline=None)
def test_pieces_do_not_depend_on_cuts_at_length(name: str, data: st.DataObject) -> None:
    """The same with ten thousand texts of each format."""
    check_cuts(name, data)


@pytest.mark.slow
@everyone
@given(data=st.data())
@settings(max_examples=10_000, deadline=None)
def test_calls_come_out_at_length(name: str, data: st.DataObject) -> None:
    """The same with ten thousand answers of each format."""
    check_calls(name, data)
