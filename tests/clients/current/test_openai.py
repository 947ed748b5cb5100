"""openai-python 3: chat, streams, tools, structured output, Responses, embeddings, decisions, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from subject import Server


class City(BaseModel):
    """What structured answers are made of."""

    name: str
    population: int


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def tools(weather_schema: dict[str, Any]) -> list[Any]:
    function = {"name": "get_weather", "description": "Get the weather in a city", "parameters": weather_schema}
    return [{"type": "function", "function": {**function, "strict": True}}]


def test_chat(client: openai.OpenAI, server: Server) -> None:
    """An answer, its usage, and several answers at once."""
    answer = client.chat.completions.create(
        model=server.model, messages=[{"role": "user", "content": server.question}], n=2, temperature=0
    )

    assert [0, 1] == [choice.index for choice in answer.choices]
    assert answer.choices[0].message.content == answer.choices[1].message.content != ""
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream(client: openai.OpenAI, server: Server) -> None:
    """The helper of streams adds up to what one piece says."""
    asking: dict[str, Any] = {
        "model": server.model,
        "messages": [{"role": "user", "content": server.question}],
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asking).choices[0].message.content
    with client.chat.completions.stream(**asking) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0].message.content

    assert whole == streamed


def test_tools(client: openai.OpenAI, server: Server, tools: list[Any]) -> None:
    """A call, its result in the history, and an answer."""
    messages: list[Any] = [{"role": "user", "content": server.weather}]
    asked = client.chat.completions.create(
        model=server.model, messages=messages, tools=tools, tool_choice="required", temperature=0
    )
    call = asked.choices[0].message.tool_calls[0]  # type: ignore[index]
    messages += [asked.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'}]
    reply = client.chat.completions.create(model=server.model, messages=messages, tools=tools, temperature=0)

    assert "tool_calls" == asked.choices[0].finish_reason
    assert {"city"} == set(json.loads(call.function.arguments))  # type: ignore[union-attr]
    assert reply.choices[0].message.content


def test_streamed_tools(client: openai.OpenAI, server: Server, tools: list[Any]) -> None:
    """The helper of streams puts a call together from its fragments."""
    with client.chat.completions.stream(
        model=server.model,
        messages=[{"role": "user", "content": server.weather}],
        tools=tools,
        tool_choice="required",
        temperature=0,
    ) as stream:
        message = stream.get_final_completion().choices[0].message

    assert "get_weather" == message.tool_calls[0].function.name  # type: ignore[index]
    assert {"city"} == set(json.loads(message.tool_calls[0].function.arguments))  # type: ignore[index]


def test_structured(client: openai.OpenAI, server: Server) -> None:
    """`parse` gives an object of the class that was asked for."""
    answer = client.chat.completions.parse(
        model=server.model,
        messages=[{"role": "user", "content": "Tell me of a city."}],
        response_format=City,
        temperature=0,
        max_tokens=200,
    )

    assert isinstance(answer.choices[0].message.parsed, City)


def test_responses(client: openai.OpenAI, server: Server, tools: list[Any]) -> None:
    """Create, stream, go on from an earlier answer, get and delete."""
    first = client.responses.create(model=server.model, input=server.question, temperature=0)
    with client.responses.stream(model=server.model, input=server.question, temperature=0) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_response()
    second = client.responses.create(
        model=server.model, input="And you?", previous_response_id=first.id, temperature=0, max_output_tokens=16
    )
    again = client.responses.retrieve(first.id)
    client.responses.delete(first.id)

    assert first.output_text == streamed.output_text == again.output_text != ""
    assert first.id == second.previous_response_id
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_responses_tools(client: openai.OpenAI, server: Server, weather_schema: dict[str, Any]) -> None:
    """A call through Responses, and its output on the way back."""
    tool: Any = {"type": "function", "name": "get_weather", "parameters": weather_schema, "strict": True}
    asked = client.responses.create(
        model=server.model, input=server.weather, tools=[tool], tool_choice="required", temperature=0
    )
    call = next(item for item in asked.output if item.type == "function_call")
    reply = client.responses.create(
        model=server.model,
        previous_response_id=asked.id,
        tools=[tool],
        temperature=0,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature": 21}'}],
    )

    assert {"city"} == set(json.loads(call.arguments))
    assert reply.output_text


def test_responses_structured(client: openai.OpenAI, server: Server) -> None:
    """`responses.parse` gives an object of the class that was asked for."""
    answer = client.responses.parse(
        model=server.model, input="Tell me of a city.", text_format=City, temperature=0, max_output_tokens=200
    )

    assert isinstance(answer.output_parsed, City)


def test_embeddings(client: openai.OpenAI, server: Server) -> None:
    """Base64 (the client's default) and floats say the same, at length one."""
    packed = client.embeddings.create(model=server.model, input=["one", "two"])
    plain = client.embeddings.create(model=server.model, input=["one", "two"], encoding_format="float")

    assert [pytest.approx(item.embedding, abs=1e-6) for item in packed.data] == [item.embedding for item in plain.data]
    assert 1.0 == pytest.approx(sum(value * value for value in plain.data[0].embedding))


def test_decisions(client: openai.OpenAI, server: Server) -> None:
    """Probabilities of typed questions about one input."""
    decided = client.decisions.create(
        model=server.model,
        input="The sky is blue today.",
        questions=[
            {"type": "predicate", "instructions": "Is this about the weather?"},
            {
                "type": "choice",
                "instructions": "Which colour is named?",
                "choices": [{"value": "red", "description": "red"}, {"value": "blue", "description": "blue"}],
            },
        ],
    )

    assert 0 <= decided.answers[0].probability <= 1  # type: ignore[union-attr]
    assert decided.answers[1].choice in ("red", "blue")  # type: ignore[union-attr]


def test_errors(client: openai.OpenAI, server: Server) -> None:
    """Errors come as the client's own classes, with code and parameter."""
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="no-such-model", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model=server.model, messages=[{"role": "user", "content": "x"}], web_search_options={}
        )
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()

    assert "model_not_found" == unknown.value.code
    assert ("unsupported_parameter", "web_search_options") == (refused.value.code, refused.value.param)
