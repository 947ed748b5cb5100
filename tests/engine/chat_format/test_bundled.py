"""The bundled model was trained on tools: its greedy answers are tool calls in the detected chat format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from engine.chat_format.message import AnswerDelta, TextDelta, Tool
from engine.load.load import LoadedModel
from engine.types.request import Request
from tests.engine.chat_format.examples import calls_of, read
from tests.engine.kit.models import core, load_model
from tests.engine.kit.play import GREEDY, Job, play

FOLDER = Path(__file__).parents[3] / "models" / "target"
CONTEXT = 1024


def tool(name: str, about: str, **fields: str) -> Tool:
    """A tool with required parameters, given by their types."""
    properties = {key: {"type": kind} for key, kind in fields.items()}
    return Tool(name, about, json.dumps({"type": "object", "properties": properties, "required": list(fields)}))


WEATHER = tool("get_weather", "Get the weather of a city", city="string")
MESSAGE = tool("send_message", "Send a message to a person", to="string", text="string")


@cache
def bundled() -> LoadedModel:
    return load_model(FOLDER, "float32", context=CONTEXT)


def answer(messages: Sequence[dict[str, object]], tools: Sequence[Tool]) -> list[AnswerDelta]:
    """The deltas of the model's greedy answer."""
    loaded = bundled()
    rendering = loaded.tokenizer.render_chat(messages, tools=tools)
    request = Request(
        "1", rendering.tokens, GREEDY, max_tokens=80, include_special_tokens=loaded.tokenizer.chat_format.special
    )
    text = play(core(loaded, slots=1, context=CONTEXT), [Job(request)])["1"].text
    return read(loaded.tokenizer.chat_format, [text], tools, rendering.generation_prompt)


def test_answers_are_limited_unless_the_request_is() -> None:
    """By max_new_tokens of the generation configuration: a schema does not run to the end of the context."""
    assert bundled().info.default_max_tokens == 256


@pytest.mark.parametrize(
    ("question", "name", "arguments"),
    [
        ("What is the weather in Paris?", "get_weather", {"city": "Paris"}),
        ("Send Anna the message: blue house", "send_message", {"to": "Anna", "text": "blue house"}),
    ],
)
def test_question_for_a_tool_is_answered_by_a_call(question: str, name: str, arguments: dict[str, object]) -> None:
    """The right tool with the right arguments, and no text."""
    deltas = answer([{"role": "user", "content": question}], [WEATHER, MESSAGE])

    assert [(name, arguments)] == [(called, json.loads(given)) for called, given in calls_of(deltas)]
    assert not [delta for delta in deltas if isinstance(delta, TextDelta)]


def test_tool_result_is_answered_in_text() -> None:
    """The second turn of a round trip: call and result are in the history."""
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": '{"sky": "sunny"}'},
    ]
    deltas = answer(messages, [WEATHER])

    assert [True] == ["sunny" in delta.text for delta in deltas if isinstance(delta, TextDelta)]
