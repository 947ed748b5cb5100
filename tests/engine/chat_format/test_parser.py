"""Answers are parsed into text, reasoning and tool calls, in every chat format and however the text is chunked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.chat_format.message import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from tests.engine.chat_format.examples import (
    EXAMPLES,
    TOOLS,
    Arguments,
    FormatExample,
    calls_of,
    every_format,
    joined,
    read,
)

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

# Parts of calls and text, in addition to the format's markers.
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
    """The parts of a text cut at `places`, in thousandths of its length."""
    ends = [0, *sorted(place * len(text) // 1000 for place in places), len(text)]
    return [text[start:stop] for start, stop in zip(ends, ends[1:], strict=False)]


def markers(example: FormatExample) -> list[str]:
    """A format's special tokens, and the markers of its calls."""
    sample = example.write([("ring-2", {"text": "t", "count": 1})])
    found = [part for part in sample.replace(">", ">\0").replace("<", "\0<").split("\0") if part]
    return [*example.tokens, *found, *filter(None, example.reasoning)]


def check_cuts(name: str, data: st.DataObject) -> None:
    """A random text in one chunk, and in random chunks or single characters."""
    example = EXAMPLES[name]
    parts = st.sampled_from([*markers(example), *PARTS])
    calls = st.builds(example.write, CALLS)
    text = "".join(data.draw(st.lists(parts | calls, max_size=8)))
    generation_prompt = data.draw(st.sampled_from(["", example.generation_prompt, example.reasoning[0]]))
    places = data.draw(st.lists(st.integers(0, 1000), max_size=8) | st.just(range(1, 1000)))

    assert read(example.chat_format, [text], generation_prompt=generation_prompt) == read(
        example.chat_format, cuts(text, places), generation_prompt=generation_prompt
    )


def check_calls(name: str, data: st.DataObject) -> None:
    """Random calls after reasoning are parsed without loss."""
    example = EXAMPLES[name]
    calls = data.draw(CALLS)
    reasoning_text = data.draw(st.sampled_from(["", "hm", "1\n\n2"])) if example.reasoning[0] else ""
    opens, closes = example.reasoning
    text = (
        f"{opens}\n{reasoning_text}\n{closes}\n\n" if reasoning_text and not example.generation_prompt else ""
    ) + example.write(calls)
    text = f"{opens}{reasoning_text}{closes}{text}" if reasoning_text and example.generation_prompt else text
    deltas = read(
        example.chat_format,
        cuts(text, data.draw(st.lists(st.integers(0, 1000), max_size=8))),
        generation_prompt=example.generation_prompt,
    )
    reasoning = [ReasoningDelta(reasoning_text)] if reasoning_text else []

    assert [*reasoning] == [delta for delta in deltas if isinstance(delta, TextDelta | ReasoningDelta)]
    assert calls == [(name, json.loads(arguments)) for name, arguments in calls_of(deltas)]


@every_format
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_deltas_do_not_depend_on_chunking(name: str, data: st.DataObject) -> None:
    """Valid and invalid calls, with anything between them."""
    check_cuts(name, data)


@every_format
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_calls_are_parsed_without_loss(name: str, data: st.DataObject) -> None:
    check_calls(name, data)


@pytest.mark.slow
@every_format
def test_deltas_do_not_depend_on_chunking_at_length(name: str) -> None:
    """Ten thousand random texts of each format; hypothesis would take hours."""
    example, random = EXAMPLES[name], Random(name)
    parts = [*markers(example), *PARTS, *(example.write(calls) for calls in SAMPLES)]
    for _ in range(10_000):
        text = "".join(random.choices(parts, k=random.randint(1, 10)))
        generation_prompt = random.choice(("", example.generation_prompt, example.reasoning[0]))
        places = random.choices(range(1000), k=random.choice((1, 3, 9, 99)))

        assert read(example.chat_format, [text], generation_prompt=generation_prompt) == read(
            example.chat_format, cuts(text, places), generation_prompt=generation_prompt
        )


def test_text_that_looks_like_a_call_is_text() -> None:
    """A marker without call, an unmarked object that calls no known tool, half a marker."""
    hermes, llama = EXAMPLES["hermes"].chat_format, EXAMPLES["llama"].chat_format

    for text in ("<tool_call> is a marker", '<tool_call>{"name": 1}</tool_call>', "<tool_cal", '<tool_call>{"na'):
        assert [TextDelta(text)] == read(hermes, text)
    for text in ('{"name": "unknown", "parameters": {}}', '{"answer": 42}', '{"name": "ring-2", "other": 1'):
        assert [TextDelta(text)] == read(llama, text)


@pytest.mark.parametrize("name", ["hermes", "llama", "harmony"])
def test_lookahead_is_bounded(name: str) -> None:
    """Endless whitespace and repeated opening markers are parsed once."""
    chat_format, space = EXAMPLES[name].chat_format, " " * 5000
    call = EXAMPLES["hermes"].write([("ring-2", {})])

    assert [TextDelta(f"{space}a")] == read(EXAMPLES["hermes"].chat_format, [f"{space}a"])
    assert [TextDelta(f"<tool_call>{space}{{")] == read(EXAMPLES["hermes"].chat_format, [f"<tool_call>{space}{{"])
    assert calls_of(read(EXAMPLES["hermes"].chat_format, [f"{'<tool_call>' * 500}{space}{call}"]))
    assert read(chat_format, [space * 3]) == read(chat_format, [space, space, space])


def test_without_tools_calls_are_text() -> None:
    text = EXAMPLES["hermes"].write([("ring-2", {})])

    assert [TextDelta(text)] == read(EXAMPLES["hermes"].chat_format, text, tools=[])


def test_whitespace_between_parts_is_dropped() -> None:
    """Around reasoning, calls and the text between them; text alone keeps its whitespace."""
    call = EXAMPLES["hermes"].write([("ring-2", {})])
    chat_format = EXAMPLES["hermes"].chat_format
    called = [ToolCallStart(0, "ring-2"), ToolCallDelta(0, "{}")]

    assert [TextDelta(" \n so \n")] == read(chat_format, " \n so \n")
    assert [ReasoningDelta("a\n b"), TextDelta("so"), *called] == read(
        chat_format, f" <think>\n a\n b \n</think>\n\nso\n\n{call}\n"
    )
    assert [*called, TextDelta("so\n")] == read(chat_format, f"\n{call}\n so\n")
    assert [TextDelta("a"), *called, TextDelta("\n\nb")] == read(chat_format, f"a\n{call}\nb")


def test_calls_inside_reasoning_are_reasoning() -> None:
    call = EXAMPLES["hermes"].write([("ring-2", {})])

    assert [ReasoningDelta(call), TextDelta("so")] == read(
        EXAMPLES["hermes"].chat_format, f"{call}</think>so", generation_prompt="<think>\n"
    )


@every_format
def test_unfinished_call_emits_its_arguments_so_far(name: str) -> None:
    """The arguments are valid JSON only if the call is complete."""
    example = EXAMPLES[name]
    text = example.write([("get_weather", {"text": "abc", "count": 12, "list": ["x"]})])
    whole = calls_of(read(example.chat_format, [text], generation_prompt=example.generation_prompt))
    for stop in range(len(text)):
        calls = calls_of(read(example.chat_format, [text[:stop]], generation_prompt=example.generation_prompt))

        assert whole == calls or not [arguments for _, arguments in calls if is_json(arguments)]
        assert all(name == "get_weather" for name, _ in calls)


@every_format
def test_truncated_call_is_not_text(name: str) -> None:
    """After an opening marker nothing is text, wherever the answer is truncated; half a marker is text."""
    example = EXAMPLES[name]
    text = example.write([("get_weather", {"text": "abc"}), ("ring-2", {"count": 1})])
    opening = next((marker for marker in sorted(markers(example), key=len) if text.startswith(marker)), "")
    begun = len(opening) if name != "llama" else text.index("}") + 2
    for stop in range(begun, len(text)):
        parser = example.chat_format.parser(TOOLS, example.generation_prompt)
        slow = [delta for letter in text[:stop] for delta in parser.push(letter)]
        deltas = joined([*slow, *parser.cut()])
        at_once = example.chat_format.parser(TOOLS, example.generation_prompt)

        text_deltas = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
        assert any(marker != text_deltas and marker.startswith(text_deltas) for marker in markers(example)), text[:stop]
        assert deltas == joined([*at_once.push(text[:stop]), *at_once.cut()])


def test_truncated_text_without_marker_is_text() -> None:
    """Half a marker, an unmarked object, and a call that the model itself leaves unfinished."""
    for name, text in (("hermes", "if a <tool"), ("llama", '{"name": "get_w')):
        parser = EXAMPLES[name].chat_format.parser(TOOLS, "")

        assert [TextDelta(text)] == joined([*parser.push(text), *parser.cut()])
    left = '<tool_call>{"name": "get_w'
    assert [TextDelta(left)] == read(EXAMPLES["hermes"].chat_format, [left])


def test_invalid_arguments_are_emitted_unchanged() -> None:
    """Up to the end of the call; the answer continues after it."""
    text = '<tool_call>{"name": "ring-2", "arguments": {"a": tru, b}}</tool_call>\nso'
    expected = [ToolCallStart(0, "ring-2"), ToolCallDelta(0, '{"a": tru, b}}'), TextDelta("so")]

    assert expected == read(EXAMPLES["hermes"].chat_format, text)


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
def test_variants_of_json_calls(body: str, arguments: str) -> None:
    """No arguments, arguments first, inside a string, under another key, with line breaks or markers in strings."""
    text = f"<tool_call>\n{body}\n</tool_call>"

    assert [ToolCallStart(0, "ring-2"), ToolCallDelta(0, arguments)] == read(EXAMPLES["hermes"].chat_format, text)


def test_unquoted_value_has_the_type_of_the_schema() -> None:
    """XML-like formats have no types: a string of the schema stays a string."""
    values = {"text": "12", "count": "12", "sure": "True", "list": '["a"]', "maybe": "null", "other": "hm", "deep": "x"}
    lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    text = f"<tool_call>\n<function=get_weather>\n{lines}</function>\n</tool_call>"
    expected = {"text": "12", "count": 12, "sure": True, "list": ["a"], "maybe": None, "other": "hm", "deep": "x"}

    assert [expected] == [json.loads(given) for _, given in calls_of(read(EXAMPLES["qwen xml"].chat_format, text))]


def test_arguments_are_streamed() -> None:
    parser = EXAMPLES["hermes"].chat_format.parser(TOOLS, "")
    parser.push('<tool_call>\n{"name": "get_weather", "arguments": ')

    assert [ToolCallStart(0, "get_weather"), ToolCallDelta(0, '{"text"')] == parser.push('{"text"')
    assert [ToolCallDelta(0, ': "a lon')] == parser.push(': "a lon')
    assert [ToolCallDelta(0, 'g one"}')] == parser.push('g one"}}\n</tool')


def test_harmony_messages_without_user_as_recipient_are_reasoning() -> None:
    """Analysis, a built-in tool, a preamble for the user, a call, in that order."""
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=python<|message|>1+1<|call|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant to=functions.ring-2<|channel|>commentary json<|message|><|call|>"
    )
    text_deltas = read(EXAMPLES["harmony"].chat_format, text, generation_prompt="<|start|>assistant")

    assert [
        ReasoningDelta("hm\n\n1+1"),
        TextDelta("I look."),
        ToolCallStart(0, "ring-2"),
        ToolCallDelta(0, "{}"),
    ] == text_deltas


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
