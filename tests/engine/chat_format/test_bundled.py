"""The bundled model was trained on tools: its answers, through the engine, are calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from engine.chat_format.message import AnswerDelta, TextDelta, Tool
from engine.load.load import LoadedModel
from engine.types.request import Request
from tests.engine.chat_format.speakers import calls_of, read
from tests.engine.models import core, load_model
from tests.engine.play import GREEDY, Job, play

FOLDER = Path(__file__).parents[3] / "models" / "target"
CONTEXT = 1024


def tool(name: str, about: str, **fields: str) -> Tool:
    """A tool of required arguments, given by their types."""
    properties = {key: {"type": kind} for key, kind in fields.items()}
    return Tool(name, about, json.dumps({"type": "object", "properties": properties, "required": list(fields)}))


WEATHER = tool("get_weather", "Get the weather of a city", city="string")
MESSAGE = tool("send_message", "Send a message to a person", to="string", text="string")


@cache
def bundled() -> LoadedModel:
    """The bundled model as the engine loads it."""
    return load_model(FOLDER, "float32", context=CONTEXT)


def answer(messages: Sequence[dict[str, object]], tools: Sequence[Tool]) -> list[AnswerDelta]:
    """What the model's likeliest answer says."""
    loaded = bundled()
    rendering = loaded.tokenizer.render_chat(messages, tools=tools)
    request = Request(
        "1", rendering.tokens, GREEDY, max_tokens=80, include_special_tokens=loaded.tokenizer.chat_format.special
    )
    text = play(core(loaded, slots=1, context=CONTEXT), [Job(request)])["1"].text
    return read(loaded.tokenizer.chat_format, [text], tools, rendering.generation_prompt)


@pytest.mark.parametrize(
    ("question", "name", "arguments"),
    [
        ("What is the weather in Paris?", "get_weather", {"city": "Paris"}),
        ("Send Anna the message: blue house", "send_message", {"to": "Anna", "text": "blue house"}),
    ],
)
def test_a_question_for_a_tool_is_answered_by_a_call(question: str, name: str, arguments: dict[str, object]) -> None:
    """The right tool with the right arguments, and no text around it."""
    pieces = answer([{"role": "user", "content": question}], [WEATHER, MESSAGE])

    assert [(name, arguments)] == [(called, json.loads(given)) for called, given in calls_of(pieces)]
    assert not [piece for piece in pieces if isinstance(piece, TextDelta)]


def test_what_a_tool_returned_is_told_in_words() -> None:
    """The second turn of a round trip: the call and its result are in the history, the answer is text."""
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": '{"sky": "sunny"}'},
    ]
    pieces = answer(messages, [WEATHER])

    assert [True] == ["sunny" in piece.text for piece in pieces if isinstance(piece, TextDelta)]
