"""ollama-python on /api: chat, streams, tools, structured output, embeddings, the model's card, errors."""

from __future__ import annotations

import json
from typing import Any

import ollama
import pytest
from subject import Server


@pytest.fixture(scope="module")
def client(server: Server) -> ollama.Client:
    return ollama.Client(host=server.url, headers={"Authorization": f"Bearer {server.key}"}, timeout=60)


def test_chat(client: ollama.Client, server: Server) -> None:
    """A message and a plain prompt, with counts."""
    reply = client.chat(
        server.model, messages=[{"role": "user", "content": server.question}], options={"temperature": 0}
    )
    generated = client.generate(server.model, prompt=server.question, options={"temperature": 0, "num_predict": 8})

    assert reply.message.content
    assert reply.done
    assert reply.eval_count
    assert generated.response


def test_stream(client: ollama.Client, server: Server) -> None:
    """Lines add up to what one piece says."""
    asking: dict[str, Any] = {
        "model": server.model,
        "messages": [{"role": "user", "content": server.question}],
        "options": {"temperature": 0},
    }
    whole = client.chat(**asking).message.content
    lines = list(client.chat(**asking, stream=True))

    assert whole == "".join(line.message.content or "" for line in lines)
    assert lines[-1].done


def test_tools(client: ollama.Client, server: Server, weather_schema: dict[str, Any]) -> None:
    """A call, its result in the history, and an answer."""
    function = {"name": "get_weather", "description": "Get the weather in a city", "parameters": weather_schema}
    tools: list[Any] = [{"type": "function", "function": function}]
    messages: list[Any] = [{"role": "user", "content": server.weather}]
    asked = client.chat(server.model, messages=messages, tools=tools, options={"temperature": 0})
    assert asked.message.tool_calls
    messages += [asked.message, {"role": "tool", "tool_name": "get_weather", "content": '{"temperature": 21}'}]
    reply = client.chat(server.model, messages=messages, tools=tools, options={"temperature": 0})

    assert {"city"} == set(asked.message.tool_calls[0].function.arguments)
    assert reply.message.content


def test_structured(client: ollama.Client, server: Server) -> None:
    """`format` takes a schema."""
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}, "required": ["name"]}
    reply = client.chat(
        server.model,
        messages=[{"role": "user", "content": "Tell me of a city."}],
        format=schema,
        options={"temperature": 0},
    )

    assert isinstance(json.loads(reply.message.content or "")["name"], str)


def test_embeddings(client: ollama.Client, server: Server) -> None:
    """One vector an input."""
    embedded = client.embed(server.model, input=["one", "two"])

    assert 2 == len(embedded.embeddings)


def test_card(client: ollama.Client, server: Server) -> None:
    """The model is listed, runs, and has a card."""
    listed, running, shown = client.list(), client.ps(), client.show(server.model)

    assert server.model in [model.model for model in listed.models]
    assert server.model in [model.model for model in running.models]
    assert "tools" in (shown.capabilities or [])


def test_errors(client: ollama.Client) -> None:
    """Errors come as the client's own class."""
    with pytest.raises(ollama.ResponseError) as unknown:
        client.chat("no-such-model", messages=[{"role": "user", "content": "x"}])

    assert 404 == unknown.value.status_code
