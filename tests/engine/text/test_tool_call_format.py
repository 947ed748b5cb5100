"""The tool call formats of chat templates: each mechanism that refused a tool loop, in a small template."""

from __future__ import annotations

import json

import pytest

from engine.chat_format.message import Tool
from engine.text.tokenizer import Tokenizer
from engine.text.tool_call_format import ToolCallFormat
from tests.engine.text.test_tokenizer import bundled

TOOL = Tool("get_weather", "", json.dumps({"type": "object", "properties": {"city": {"type": "string"}}}))
USER = {"role": "user", "content": "Well?"}
FINAL = [{"role": "assistant", "content": "Sunny."}, USER]

CALL = "{{ call.function.name }} {{ call.function.arguments | tojson }}"
# Parts of templates: the text before the messages, tool calls and results.
EACH = "{% for call in message.tool_calls or () %}"
PLAIN = EACH + "[" + CALL + "]{% endfor %}"
NINE = "{% if value | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
TEMPLATES: dict[str, tuple[ToolCallFormat, str, str]] = {
    "as it is": (ToolCallFormat(), "{{ tools | tojson }}", PLAIN),
    "ids of nine letters": (
        ToolCallFormat(short_ids=True),
        "",
        "{% for call in message.tool_calls or () %}{% set value = call.id %}"
        + NINE
        + "["
        + CALL
        + " {{ value }}]{% endfor %}"
        "{% if message.role == 'tool' %}{% set value = message.tool_call_id %}" + NINE + "{{ value }}{% endif %}",
    ),
    "arguments as text": (
        ToolCallFormat(json_arguments=True),
        "",
        "{% for call in message.tool_calls or () %}{{ '[' + call.function.name + ' ' + call.function.arguments + ']' }}"
        "{% endfor %}",
    ),
    "arguments printed": (
        ToolCallFormat(json_arguments=True),
        "",
        EACH + "[{{ call.function.name }} {{ call.function.arguments }}]{% endfor %}",
    ),
    "arguments one by one": (
        ToolCallFormat(object_arguments=True),
        "",
        "{% for call in message.tool_calls or () %}[{{ call.function.name }} "
        "{% for key, value in call.function.arguments.items() %}{{ {key: value} | tojson }}{% endfor %}]{% endfor %}",
    ),
    "one call a message": (
        ToolCallFormat(one_call_each=True),
        "",
        "{% if message.tool_calls and message.tool_calls | length > 1 %}{{ raise_exception('one at once') }}{% endif %}"
        + PLAIN,
    ),
    "content that is none": (
        ToolCallFormat(no_content=True),
        "",
        "{% if message['content'] is none %}" + PLAIN + "{% endif %}",
    ),
    "no content beside": (
        ToolCallFormat(no_content=True),
        "",
        "{% if not message.content %}" + PLAIN + "{% endif %}",
    ),
    "descriptions": (
        ToolCallFormat(with_descriptions=True),
        "{% for tool in tools or () %}{{ 'd' + tool.function.description }}"
        "{% for key, value in tool.function.parameters.properties.items() %}{{ key + value.description }}{% endfor %}"
        "{% endfor %}",
        PLAIN,
    ),
    "a list that grows": (
        ToolCallFormat(),
        "{% set names = namespace(list=[]) %}",
        "{% for call in message.tool_calls or () %}{% set _ = names.list.append(call.function.name) %}[" + CALL + "]"
        "{% endfor %}{% if message.role == 'tool' %}{{ names.list.pop(0) }}{% endif %}",
    ),
    "tools step by step": (ToolCallFormat(), "{{ tools | map(attribute='function') | tojson }}", PLAIN),
    "functions": (ToolCallFormat(), "{{ 'functions: ' + functions }} {{ datetime[:2] }}", PLAIN),
    "JSON that is read": (
        ToolCallFormat(object_arguments=True),
        "",
        "{% for call in message.tool_calls or () %}{% set given = call.function.arguments %}"
        "[{{ call.function.name }} {{ (given if given is mapping else given | from_json) | tojson }}]{% endfor %}",
    ),
}


def tokenizer_of(kind: str) -> Tokenizer:
    """The bundled tokenizer with one of the templates."""
    _, before, calls = TEMPLATES[kind]
    return bundled(
        before
        + "{% for message in messages %}<{{ message.role }}>"
        + calls
        + "{{ message.content or '' }}\n{% endfor %}"
    )


def called(*numbers: int, content: str = "", arguments: object = None) -> list[dict[str, object]]:
    """A message with tool calls, and their results in another order."""
    given = {"city": "Linz"} if arguments is None else arguments
    ids = [f"toolu_01-{number}" for number in numbers]
    calls = [{"id": id, "type": "function", "function": {"name": "get_weather", "arguments": given}} for id in ids]
    results = [{"role": "tool", "tool_call_id": id, "content": f"result {id[-1]}"} for id in reversed(ids)]
    return [{"role": "assistant", "content": content, "tool_calls": calls}, *results]


def rendered(kind: str, *messages: dict[str, object]) -> str:
    """The prompt of a conversation."""
    tokenizer = tokenizer_of(kind)
    return tokenizer.decode(tokenizer.render_chat([USER, *messages], tools=[TOOL]).tokens)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_calls_are_converted_to_the_template_s_format(kind: str) -> None:
    """Single and parallel calls, and the content beside them, are all rendered."""
    one, two = rendered(kind, *called(1), *FINAL), rendered(kind, *called(1, 2, content="I look."), *FINAL)

    assert TEMPLATES[kind][0] == tokenizer_of(kind)._call_format
    assert (1, 1) == (one.count('[get_weather {"city": "Linz"}'), one.count("result 1"))
    assert (2, 1, 1) == (two.count('[get_weather {"city": "Linz"}'), two.count("result 1"), two.count("result 2"))
    assert "Sunny." in two


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("arguments", ["", "not JSON", [3]])
def test_arguments_that_are_no_object_are_rendered(kind: str, arguments: object) -> None:
    """Of a model, or an empty text of a client."""
    assert "result 1" in rendered(kind, *called(1, arguments=arguments), *FINAL)


def test_short_ids_match_between_call_and_result() -> None:
    """They are stable; an id in the right format is unchanged."""
    text = rendered("ids of nine letters", *called(1))
    found, fitting = ToolCallFormat(short_ids=True), "abcDEF123"
    kept, _ = found.convert_messages([{"role": "tool", "tool_call_id": fitting, "content": ""}])

    assert 2 == text.count(found.convert_messages(called(1))[0][1]["tool_call_id"])  # type: ignore[arg-type]
    assert fitting == kept[0]["tool_call_id"]


def test_split_calls_precede_their_results() -> None:
    """In the order of the calls, for any order of the results."""
    text = rendered("one call a message", *called(1, 2))

    assert text.index("result 1") < text.rindex("[get_weather") < text.index("result 2")


@pytest.mark.parametrize("kind", ["one call a message", "no content beside", "as it is"])
def test_breakpoints_follow_converted_messages(kind: str) -> None:
    """Also if earlier messages are split."""
    tokenizer = tokenizer_of(kind)
    messages = [USER, *called(1, 2, content="I look."), {"role": "user", "content": "Here and there"}]
    rendering = tokenizer.render_chat(messages, tools=[TOOL], breakpoints=[(4, 4)])

    assert any(tokenizer.decode(rendering.tokens[:mark]).endswith("Here") for mark in rendering.checkpoints)
