"""The chat format is detected by markers in the template and the vocabulary, or by the response template."""

from __future__ import annotations

import pytest

from engine.chat_format.chat_format import ChatFormat
from engine.chat_format.detection import AddedVocabulary, detect_chat_format
from engine.chat_format.message import ReasoningDelta, TextDelta, Tool, ToolCallDelta, ToolCallStart
from engine.types.request import ReasoningLimit
from tests.engine.chat_format.examples import EXAMPLES, read

WEATHER = [Tool("weather")]
RESPONSE = {
    "fields": {
        "reasoning_content": {"open": "<muse>", "close": "</muse>", "content": "text"},
        "tool_calls": {"open_pattern": r"\s*<use\|>", "close": "<|use>", "content": "json", "repeats": True},
    }
}


def found(template: str, *tokens: str, response: dict[str, object] | None = None) -> ChatFormat:
    """The chat format of a template and its special tokens."""
    added = {token: number for number, token in enumerate(tokens)}
    vocabulary = AddedVocabulary(
        added, frozenset(tokens), lambda text: [added[text]] if text in added else list(text.encode())
    )
    return detect_chat_format(template, vocabulary, response)


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_format_is_detected_as_itself(name: str) -> None:
    """The detected format parses a call in its own notation."""
    example = EXAMPLES[name]
    deltas = read(example.chat_format, [example.write([("ring-2", {})])], generation_prompt=example.generation_prompt)

    assert [ToolCallStart(0, "ring-2"), ToolCallDelta(0, "{}")] == deltas


def test_template_without_markers_has_text_only() -> None:
    chat_format = found("{{ messages }}")
    text = '<think>\n<tool_call>{"name": "weather"}</tool_call> '

    assert (False, False, False) == (
        chat_format.supports_tool_calls,
        chat_format.supports_reasoning,
        chat_format.special,
    )
    assert [TextDelta(text)] == read(chat_format, [text], WEATHER)


def test_reasoning_markers_are_found_in_the_vocabulary() -> None:
    """Some templates leave the markers to the model."""
    chat_format = found("{{ messages }}", "<think>", "</think>")

    assert chat_format.special
    assert [ReasoningDelta("hm"), TextDelta("yes")] == read(chat_format, ["<think>hm</think>yes"], [])


def test_response_template_declares_markers() -> None:
    """Without a known format, calls are JSON between the declared literals."""
    chat_format = found("{{ messages }}", response=RESPONSE)
    text = '<muse>hm</muse>\n<use|>{"name": "weather", "arguments": {}}<|use>'

    assert [ReasoningDelta("hm"), ToolCallStart(0, "weather"), ToolCallDelta(0, "{}")] == read(
        chat_format, [text], WEATHER
    )


def test_reasoning_limit_has_the_tokens_of_the_markers() -> None:
    """No start token if the prompt opens the reasoning; no limit if the prompt closes it."""
    chat_format = found("<think></think>", "<think>", "</think>")

    assert ReasoningLimit(0, (1,), 9) == chat_format.reasoning_limit(9, "<|im_start|>assistant\n")
    assert ReasoningLimit(None, (1,), 9) == chat_format.reasoning_limit(9, "<|im_start|>assistant\n<think>\n")
    assert chat_format.reasoning_limit(9, "<|im_start|>assistant\n<think>\n\n</think>\n\n") is None
    assert found("").reasoning_limit(9, "") is None


def test_reasoning_limit_of_harmony_starts_at_the_channel() -> None:
    chat_format = EXAMPLES["harmony"].chat_format
    end, named = EXAMPLES["harmony"].tokens.index("<|end|>"), EXAMPLES["harmony"].tokens.index("analysis")

    assert ReasoningLimit(named, (end,), 9) == chat_format.reasoning_limit(9, "<|start|>assistant")
    assert ReasoningLimit(None, (end,), 9) == chat_format.reasoning_limit(
        9, "<|start|>assistant<|channel|>analysis<|message|>hm"
    )
    assert chat_format.reasoning_limit(9, "<|start|>assistant<|channel|>final<|message|>Oh") is None
