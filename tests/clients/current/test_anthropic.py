"""anthropic-python on /v1/messages: chat, streams, tools, counts, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from subject import Server

# The client has no name for it any more, the API still has.
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key=server.key, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def tools(weather_schema: dict[str, Any]) -> list[Any]:
    return [{"name": "get_weather", "description": "Get the weather in a city", "input_schema": weather_schema}]


def test_chat(client: anthropic.Anthropic, server: Server) -> None:
    """A message with its usage."""
    answer = client.messages.create(
        model=server.model,
        max_tokens=64,
        extra_body=GREEDY,
        system="You are a helpful assistant.",
        messages=[{"role": "user", "content": server.question}],
    )

    assert answer.content[0].text  # type: ignore[union-attr]
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.output_tokens > 0


def test_stream(client: anthropic.Anthropic, server: Server) -> None:
    """The helper of streams adds up to what one piece says."""
    asking: dict[str, Any] = {
        "model": server.model,
        "max_tokens": 64,
        "extra_body": GREEDY,
        "messages": [{"role": "user", "content": server.question}],
    }
    whole = client.messages.create(**asking)
    with client.messages.stream(**asking) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()

    assert whole.content[0].text == text  # type: ignore[union-attr]
    assert whole.stop_reason == final.stop_reason


def test_tools(client: anthropic.Anthropic, server: Server, tools: list[Any]) -> None:
    """A call, its result in the history, and an answer."""
    messages: list[Any] = [{"role": "user", "content": server.weather}]
    asked = client.messages.create(
        model=server.model,
        max_tokens=200,
        extra_body=GREEDY,
        tools=tools,
        tool_choice={"type": "any"},
        messages=messages,
    )
    call = next(block for block in asked.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"temperature": 21}'}
    messages += [{"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
    reply = client.messages.create(
        model=server.model, max_tokens=200, extra_body=GREEDY, tools=tools, messages=messages
    )

    assert "tool_use" == asked.stop_reason
    assert {"city"} == set(call.input)
    assert reply.content


def test_count(client: anthropic.Anthropic, server: Server) -> None:
    """The count equals the input tokens of the usage."""
    messages: list[Any] = [{"role": "user", "content": server.question}]
    counted = client.messages.count_tokens(model=server.model, messages=messages)
    output = client.messages.create(model=server.model, max_tokens=1, messages=messages).usage

    cached = (output.cache_read_input_tokens or 0) + (output.cache_creation_input_tokens or 0)
    assert counted.input_tokens == output.input_tokens + cached


def test_errors(client: anthropic.Anthropic, server: Server) -> None:
    """Errors come as the client's own classes."""
    messages: list[Any] = [{"role": "user", "content": "x"}]
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="no-such-model", max_tokens=1, messages=messages)
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(model=server.model, max_tokens=1, messages=messages)

    assert "not_found_error" == unknown.value.body["error"]["type"]  # type: ignore[index,call-overload]
