"""A model's dialect is found by the markers in its template and vocabulary, or in its response template."""

from __future__ import annotations

import pytest

from engine.chat_format.chat_format import ChatFormat
from engine.chat_format.detection import Vocabulary, detect_chat_format
from engine.chat_format.message import ReasoningDelta, TextDelta, Tool, ToolCallDelta, ToolCallStart
from engine.types.request import ReasoningLimit
from tests.engine.chat_format.speakers import SPEAKERS, read

WEATHER = [Tool("weather")]
RESPONSE = {
    "fields": {
        "reasoning_content": {"open": "<muse>", "close": "</muse>", "content": "text"},
        "tool_calls": {"open_pattern": r"\s*<use\|>", "close": "<|use>", "content": "json", "repeats": True},
    }
}


def found(template: str, *tokens: str, response: dict[str, object] | None = None) -> ChatFormat:
    """The dialect of a template, where these are special tokens."""
    added = {token: number for number, token in enumerate(tokens)}
    lexicon = Vocabulary(added, frozenset(tokens), lambda text: [added[text]] if text in added else list(text.encode()))
    return detect_chat_format(template, lexicon, response)


@pytest.mark.parametrize("name", SPEAKERS)
def test_no_two_formats_are_taken_for_each_other(name: str) -> None:
    """Whatever the format, its own way to write a call is read as one."""
    speaker = SPEAKERS[name]
    pieces = read(speaker.dialect, [speaker.write([("ring-2", {})])], opened=speaker.opened)

    assert [ToolCallStart(0, "ring-2"), ToolCallDelta(0, "{}")] == pieces


def test_a_plain_template_knows_neither_calls_nor_reasoning() -> None:
    """Then everything is text."""
    dialect = found("{{ messages }}")
    text = '<think>\n<tool_call>{"name": "weather"}</tool_call> '

    assert (False, False, False) == (dialect.supports_tool_calls, dialect.supports_reasoning, dialect.special)
    assert [TextDelta(text)] == read(dialect, [text], WEATHER)


def test_reasoning_is_known_by_the_vocabulary_too() -> None:
    """Some templates leave it to the model."""
    dialect = found("{{ messages }}", "<think>", "</think>")

    assert dialect.special
    assert [ReasoningDelta("hm"), TextDelta("yes")] == read(dialect, ["<think>hm</think>yes"], [])


def test_a_response_template_tells_its_markers() -> None:
    """Where no format of ours is there, calls are JSON between the literals that it names."""
    dialect = found("{{ messages }}", response=RESPONSE)
    text = '<muse>hm</muse>\n<use|>{"name": "weather", "arguments": {}}<|use>'

    assert [ReasoningDelta("hm"), ToolCallStart(0, "weather"), ToolCallDelta(0, "{}")] == read(dialect, [text], WEATHER)


def test_a_budget_names_the_tokens_around_reasoning() -> None:
    """From the token that opens it, or from the beginning where the prompt has opened it; none where it is over."""
    dialect = found("<think></think>", "<think>", "</think>")

    assert ReasoningLimit(0, (1,), 9) == dialect.reasoning_limit(9, "<|im_start|>assistant\n")
    assert ReasoningLimit(None, (1,), 9) == dialect.reasoning_limit(9, "<|im_start|>assistant\n<think>\n")
    assert dialect.reasoning_limit(9, "<|im_start|>assistant\n<think>\n\n</think>\n\n") is None
    assert found("").reasoning_limit(9, "") is None


def test_a_budget_in_channels_names_the_channel() -> None:
    """Reasoning is a message of its own, which a token names and another one ends."""
    dialect = SPEAKERS["harmony"].dialect
    end, named = SPEAKERS["harmony"].tokens.index("<|end|>"), SPEAKERS["harmony"].tokens.index("analysis")

    assert ReasoningLimit(named, (end,), 9) == dialect.reasoning_limit(9, "<|start|>assistant")
    assert ReasoningLimit(None, (end,), 9) == dialect.reasoning_limit(
        9, "<|start|>assistant<|channel|>analysis<|message|>hm"
    )
    assert dialect.reasoning_limit(9, "<|start|>assistant<|channel|>final<|message|>Oh") is None
