"""litellm as a proxy would call us."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest
from subject import Server


@pytest.fixture
def options(server: Server) -> dict[str, Any]:
    return {
        "model": f"openai/{server.model}",
        "api_base": f"{server.url}/v1",
        "api_key": server.key,
        "temperature": 0,
        "num_retries": 0,
    }


def test_chat(options: dict[str, Any], server: Server) -> None:
    """An answer with its usage."""
    reply = litellm.completion(messages=[{"role": "user", "content": server.question}], **options)

    assert reply.choices[0].message.content
    assert reply.usage.total_tokens > 0


def test_stream(options: dict[str, Any], server: Server) -> None:
    """Chunks add up to what one piece says."""
    messages = [{"role": "user", "content": server.question}]
    whole = litellm.completion(messages=messages, **options).choices[0].message.content
    chunks = litellm.completion(messages=messages, stream=True, **options)

    assert whole == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_tools(options: dict[str, Any], server: Server, weather_schema: dict[str, Any]) -> None:
    """A call that must be made."""
    function = {"name": "get_weather", "description": "Get the weather in a city", "parameters": weather_schema}
    reply = litellm.completion(
        messages=[{"role": "user", "content": server.weather}],
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
        **options,
    )

    assert {"city"} == set(json.loads(reply.choices[0].message.tool_calls[0].function.arguments))


def test_embeddings(options: dict[str, Any]) -> None:
    """One vector an input."""
    asking = {key: value for key, value in options.items() if key != "temperature"}
    assert 2 == len(litellm.embedding(input=["one", "two"], **asking).data)


def test_errors(options: dict[str, Any]) -> None:
    """Errors come as the library's own classes."""
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=[{"role": "user", "content": "x"}], **{**options, "model": "openai/no-such-model"})
