"""What a model writes becomes text, reasoning and calls, in every format and however the text is cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.chat_format.message import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from tests.engine.chat_format.speakers import SPEAKERS, TOOLS, Arguments, Speaker, calls_of, joined, read

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


SAMPLES = [
    [("get_weather", {"text": 'a "b"\n', "count": -3, "sure": True, "list": ["x", ""], "deep": {"a": 0.5, "b": "é"}})],
    [("ring-2", {}), ("get_weather", {"maybe": None, "text": ""})],
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
    reasoning = [ReasoningDelta(thought)] if thought else []

    assert [*reasoning] == [piece for piece in pieces if isinstance(piece, TextDelta | ReasoningDelta)]
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
def test_pieces_do_not_depend_on_cuts_at_length(name: str) -> None:
    """Ten thousand random texts of each format, each cut at random; hypothesis would take hours for them."""
    speaker, random = SPEAKERS[name], Random(name)
    parts = [*markers(speaker), *PARTS, *(speaker.write(calls) for calls in SAMPLES)]
    for _ in range(10_000):
        text = "".join(random.choices(parts, k=random.randint(1, 10)))
        opened = random.choice(("", speaker.opened, speaker.reasoning[0]))
        places = random.choices(range(1000), k=random.choice((1, 3, 9, 99)))

        assert read(speaker.dialect, [text], opened=opened) == read(speaker.dialect, cuts(text, places), opened=opened)


def test_text_that_looks_like_a_call_is_text() -> None:
    """A marker with no call behind it, another function's object where nothing else marks a call, half a marker."""
    hermes, llama = SPEAKERS["hermes"].dialect, SPEAKERS["llama"].dialect

    for text in ("<tool_call> is a marker", '<tool_call>{"name": 1}</tool_call>', "<tool_cal", '<tool_call>{"na'):
        assert [TextDelta(text)] == read(hermes, text)
    for text in ('{"name": "unknown", "parameters": {}}', '{"answer": 42}', '{"name": "ring-2", "other": 1'):
        assert [TextDelta(text)] == read(llama, text)


@pytest.mark.parametrize("name", ["hermes", "llama", "harmony"])
def test_what_is_read_on_trial_has_an_end(name: str) -> None:
    """Space without end, and an opening behind an opening, are read once, not again and again."""
    dialect, space = SPEAKERS[name].dialect, " " * 5000
    call = SPEAKERS["hermes"].write([("ring-2", {})])

    assert [TextDelta(f"{space}a")] == read(SPEAKERS["hermes"].dialect, [f"{space}a"])
    assert [TextDelta(f"<tool_call>{space}{{")] == read(SPEAKERS["hermes"].dialect, [f"<tool_call>{space}{{"])
    assert calls_of(read(SPEAKERS["hermes"].dialect, [f"{'<tool_call>' * 500}{space}{call}"]))
    assert read(dialect, [space * 3]) == read(dialect, [space, space, space])


def test_without_tools_calls_are_text() -> None:
    """Nobody asked for calls, so there are none."""
    text = SPEAKERS["hermes"].write([("ring-2", {})])

    assert [TextDelta(text)] == read(SPEAKERS["hermes"].dialect, text, tools=[])


def test_whitespace_between_parts_is_nobodys() -> None:
    """Around reasoning, calls and the text between them; a text that stands alone keeps all of its own."""
    call = SPEAKERS["hermes"].write([("ring-2", {})])
    dialect = SPEAKERS["hermes"].dialect
    called = [ToolCallStart(0, "ring-2"), ToolCallDelta(0, "{}")]

    assert [TextDelta(" \n so \n")] == read(dialect, " \n so \n")
    assert [ReasoningDelta("a\n b"), TextDelta("so"), *called] == read(
        dialect, f" <think>\n a\n b \n</think>\n\nso\n\n{call}\n"
    )
    assert [*called, TextDelta("so\n")] == read(dialect, f"\n{call}\n so\n")
    assert [TextDelta("a"), *called, TextDelta("\n\nb")] == read(dialect, f"a\n{call}\nb")


def test_calls_inside_reasoning_are_reasoning() -> None:
    """What a model only thinks of it does not do."""
    call = SPEAKERS["hermes"].write([("ring-2", {})])

    assert [ReasoningDelta(call), TextDelta("so")] == read(
        SPEAKERS["hermes"].dialect, f"{call}</think>so", opened="<think>\n"
    )


@everyone
def test_an_unfinished_call_gives_what_came(name: str) -> None:
    """A prefix of the arguments, which is no JSON; and arguments that are JSON only once the call is whole."""
    speaker = SPEAKERS[name]
    text = speaker.write([("get_weather", {"text": "abc", "count": 12, "list": ["x"]})])
    whole = calls_of(read(speaker.dialect, [text], opened=speaker.opened))
    for stop in range(len(text)):
        calls = calls_of(read(speaker.dialect, [text[:stop]], opened=speaker.opened))

        assert whole == calls or not [arguments for _, arguments in calls if is_json(arguments)]
        assert all(name == "get_weather" for name, _ in calls)


@everyone
def test_a_call_that_is_cut_is_no_text(name: str) -> None:
    """Behind a marker that opens it nothing is text, wherever the tokens end; half a marker may be something else."""
    speaker = SPEAKERS[name]
    text = speaker.write([("get_weather", {"text": "abc"}), ("ring-2", {"count": 1})])
    opening = next((marker for marker in sorted(markers(speaker), key=len) if text.startswith(marker)), "")
    begun = len(opening) if name != "llama" else text.index("}") + 2
    for stop in range(begun, len(text)):
        reader = speaker.dialect.parser(TOOLS, speaker.opened)
        slow = [piece for letter in text[:stop] for piece in reader.push(letter)]
        pieces = joined([*slow, *reader.cut()])
        at_once = speaker.dialect.parser(TOOLS, speaker.opened)

        said = "".join(piece.text for piece in pieces if isinstance(piece, TextDelta))
        assert any(marker != said and marker.startswith(said) for marker in markers(speaker)), text[:stop]
        assert pieces == joined([*at_once.push(text[:stop]), *at_once.cut()])


def test_what_may_be_text_stays_text_where_it_is_cut() -> None:
    """Half a marker, an object that nothing opens, and a call that the model itself leaves unfinished."""
    for name, text in (("hermes", "if a <tool"), ("llama", '{"name": "get_w')):
        reader = SPEAKERS[name].dialect.parser(TOOLS, "")

        assert [TextDelta(text)] == joined([*reader.push(text), *reader.cut()])
    left = '<tool_call>{"name": "get_w'
    assert [TextDelta(left)] == read(SPEAKERS["hermes"].dialect, [left])


def test_broken_arguments_go_out_as_they_are() -> None:
    """What is no JSON is passed on up to the end of the call, so that the client sees it, and the answer goes on."""
    text = '<tool_call>{"name": "ring-2", "arguments": {"a": tru, b}}</tool_call>\nso'
    expected = [ToolCallStart(0, "ring-2"), ToolCallDelta(0, '{"a": tru, b}}'), TextDelta("so")]

    assert expected == read(SPEAKERS["hermes"].dialect, text)


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "ring-2"}', "{}"),
        ('{"name": "ring-2", "arguments": null}', "{}"),
        ('{"arguments": {"a": 1}, "name": "ring-2"}', '{"a": 1}'),
        ('{"name": "ring-2", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"id": "x", "name": "ring-2", "parameters": {"a": 1}, "more": [1]}', '{"a": 1}'),
        ('{"name": "ring-2", "arguments": {"a": "x\ny"}}', '{"a": "x\\ny"}'),
        ('{"name": "ring-2", "arguments": {"a": "</tool_call>"}}', '{"a": "</tool_call>"}'),
    ],
)
def test_what_models_write_beside_the_rule(body: str, arguments: str) -> None:
    """No arguments, arguments first, inside a string, by another name, with line breaks or markers in strings."""
    text = f"<tool_call>\n{body}\n</tool_call>"

    assert [ToolCallStart(0, "ring-2"), ToolCallDelta(0, arguments)] == read(SPEAKERS["hermes"].dialect, text)


def test_a_bare_value_becomes_what_the_schema_says() -> None:
    """XML-like formats write no types: a string stays one, whatever it looks like."""
    values = {"text": "12", "count": "12", "sure": "True", "list": '["a"]', "maybe": "null", "other": "hm", "deep": "x"}
    lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    text = f"<tool_call>\n<function=get_weather>\n{lines}</function>\n</tool_call>"
    expected = {"text": "12", "count": 12, "sure": True, "list": ["a"], "maybe": None, "other": "hm", "deep": "x"}

    assert [expected] == [json.loads(given) for _, given in calls_of(read(SPEAKERS["qwen xml"].dialect, text))]


def test_arguments_come_as_they_are_written() -> None:
    """Each piece of text that belongs to arguments goes out at once."""
    reader = SPEAKERS["hermes"].dialect.parser(TOOLS, "")
    reader.push('<tool_call>\n{"name": "get_weather", "arguments": ')

    assert [ToolCallStart(0, "get_weather"), ToolCallDelta(0, '{"text"')] == reader.push('{"text"')
    assert [ToolCallDelta(0, ': "a lon')] == reader.push(': "a lon')
    assert [ToolCallDelta(0, 'g one"}')] == reader.push('g one"}}\n</tool')


def test_messages_to_oneself_are_reasoning_and_a_preamble_is_text() -> None:
    """Harmony: analysis, built-in tools, a commentary for the user, a call, in that order."""
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=python<|message|>1+1<|call|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant to=functions.ring-2<|channel|>commentary json<|message|><|call|>"
    )
    said = read(SPEAKERS["harmony"].dialect, text, opened="<|start|>assistant")

    assert [
        ReasoningDelta("hm\n\n1+1"),
        TextDelta("I look."),
        ToolCallStart(0, "ring-2"),
        ToolCallDelta(0, "{}"),
    ] == said


def is_json(text: str) -> bool:
    """Whether a text is JSON as the standard has it."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
