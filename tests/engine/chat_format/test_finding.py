"""A model's dialect is found by the markers in its template and vocabulary, or in its response template."""

from __future__ import annotations

import pytest

from engine.chat_format.chat_format import Dialect
from engine.chat_format.detection import Lexicon, find_dialect
from engine.chat_format.message import CallArguments, CallOpened, Reasoning, Text, Tool
from engine.types.request import Thinking
from tests.engine.chat_format.speakers import SPEAKERS, read

WEATHER = [Tool("weather")]
RESPONSE = {
    "fields": {
        "reasoning_content": {"open": "<muse>", "close": "</muse>", "content": "text"},
        "tool_calls": {"open_pattern": r"\s*<use\|>", "close": "<|use>", "content": "json", "repeats": True},
    }
}


def found(template: str, *tokens: str, response: dict[str, object] | None = None) -> Dialect:
    """The dialect of a template, where these are special tokens."""
    added = {token: number for number, token in enumerate(tokens)}
    lexicon = Lexicon(added, frozenset(tokens), lambda text: [added[text]] if text in added else list(text.encode()))
    return find_dialect(template, lexicon, response)


@pytest.mark.parametrize("name", SPEAKERS)
def test_no_two_formats_are_taken_for_each_other(name: str) -> None:
    """Whatever the format, its own way to write a call is read as one."""
    speaker = SPEAKERS[name]
    pieces = read(speaker.dialect, [speaker.write([("ring-2", {})])], opened=speaker.opened)

    assert [CallOpened(0, "ring-2"), CallArguments(0, "{}")] == pieces


def test_a_plain_template_knows_neither_calls_nor_reasoning() -> None:
    """Then everything is text."""
    dialect = found("{{ messages }}")
    text = '<think>\n<tool_call>{"name": "weather"}</tool_call> '

    assert (False, False, False) == (dialect.calls, dialect.reasons, dialect.special)
    assert [Text(text)] == read(dialect, [text], WEATHER)


def test_reasoning_is_known_by_the_vocabulary_too() -> None:
    """Some templates leave it to the model."""
    dialect = found("{{ messages }}", "<think>", "</think>")

    assert dialect.special
    assert [Reasoning("hm"), Text("yes")] == read(dialect, ["<think>hm</think>yes"], [])


def test_a_response_template_tells_its_markers() -> None:
    """Where no format of ours is there, calls are JSON between the literals that it names."""
    dialect = found("{{ messages }}", response=RESPONSE)
    text = '<muse>hm</muse>\n<use|>{"name": "weather", "arguments": {}}<|use>'

    assert [Reasoning("hm"), CallOpened(0, "weather"), CallArguments(0, "{}")] == read(dialect, [text], WEATHER)


def test_a_budget_names_the_tokens_around_reasoning() -> None:
    """From the token that opens it, or from the beginning where the prompt has opened it; none where it is over."""
    dialect = found("<think></think>", "<think>", "</think>")

    assert Thinking(0, (1,), 9) == dialect.thinking(9, "<|im_start|>assistant\n")
    assert Thinking(None, (1,), 9) == dialect.thinking(9, "<|im_start|>assistant\n<think>\n")
    assert dialect.thinking(9, "<|im_start|>assistant\n<think>\n\n</think>\n\n") is None
    assert found("").thinking(9, "") is None


def test_a_budget_in_channels_names_the_channel() -> None:
    """Reasoning is a message of its own, which a token names and another one ends."""
    dialect = SPEAKERS["harmony"].dialect
    end, named = SPEAKERS["harmony"].tokens.index("<|end|>"), SPEAKERS["harmony"].tokens.index("analysis")

    assert Thinking(named, (end,), 9) == dialect.thinking(9, "<|start|>assistant")
    assert Thinking(None, (end,), 9) == dialect.thinking(9, "<|start|>assistant<|channel|>analysis<|message|>hm")
    assert dialect.thinking(9, "<|start|>assistant<|channel|>final<|message|>Oh") is None
