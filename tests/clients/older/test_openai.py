"""openai-python 2, which many libraries still build on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from subject import Server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0, timeout=60) as client:
        yield client


def test_chat(client: openai.OpenAI, server: Server) -> None:
    """An answer, and a completion of a plain prompt with log-probabilities."""
    reply = client.chat.completions.create(
        model=server.model, messages=[{"role": "user", "content": server.question}], temperature=0
    )
    text = client.completions.create(model=server.model, prompt="Hello", max_tokens=4, logprobs=2, echo=True)

    assert reply.choices[0].message.content
    assert text.choices[0].text.startswith("Hello")
    assert text.choices[0].logprobs is not None


def test_stream(client: openai.OpenAI, server: Server) -> None:
    """Chunks add up, the usage comes last."""
    chunks = list(
        client.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": server.question}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )

    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage is not None


def test_tools(client: openai.OpenAI, server: Server, weather_schema: dict[str, Any]) -> None:
    """A named function must be called."""
    function: Any = {"name": "get_weather", "description": "Get the weather in a city", "parameters": weather_schema}
    reply = client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": server.weather}],
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        temperature=0,
    )

    assert {"city"} == set(json.loads(reply.choices[0].message.tool_calls[0].function.arguments))  # type: ignore


def test_embeddings(client: openai.OpenAI, server: Server) -> None:
    """One vector an input."""
    assert 2 == len(client.embeddings.create(model=server.model, input=["one", "two"]).data)


def test_errors(client: openai.OpenAI) -> None:
    """Errors come as the client's own classes."""
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="no-such-model", messages=[{"role": "user", "content": "x"}])
