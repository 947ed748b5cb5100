"""langchain-openai: a chat model, its stream, bound tools, structured output."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, SecretStr
from subject import Server


class City(BaseModel):
    """What structured answers are made of."""

    name: str


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city"""
    return '{"temperature": 21}'


@pytest.fixture
def model(server: Server) -> ChatOpenAI:
    return _model(server, server.model)


def _model(server: Server, name: str) -> ChatOpenAI:
    options: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": SecretStr(server.key), "max_retries": 0}
    return ChatOpenAI(model=name, temperature=0, max_tokens=200, **options)


def test_chat(model: ChatOpenAI, server: Server) -> None:
    """One turn."""
    assert model.invoke(server.question).content


def test_stream(model: ChatOpenAI, server: Server) -> None:
    """Chunks add up to what one piece says."""
    whole = model.invoke(server.question).content

    assert whole == "".join(str(chunk.content) for chunk in model.stream(server.question))


def test_tools(model: ChatOpenAI, server: Server) -> None:
    """A call, its result in the history, and an answer."""
    bound = model.bind_tools([get_weather], tool_choice="any")
    asked = bound.invoke(server.weather)
    call = asked.tool_calls[0]
    reply = model.bind_tools([get_weather]).invoke(
        [HumanMessage(server.weather), asked, ToolMessage('{"temperature": 21}', tool_call_id=call["id"])]
    )

    assert ("get_weather", {"city"}) == (call["name"], set(call["args"]))
    assert reply.content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured(model: ChatOpenAI, method: Any) -> None:
    """An object of the class that was asked for."""
    assert isinstance(model.with_structured_output(City, method=method).invoke("Tell me of a city."), City)


def test_embeddings(server: Server) -> None:
    """One vector an input; it sends tokens of its own tokenizer unless told not to."""
    embedder = OpenAIEmbeddings(
        model=server.model,
        base_url=f"{server.url}/v1",
        api_key=SecretStr(server.key),
        check_embedding_ctx_length=False,
    )

    assert 2 == len(embedder.embed_documents(["one", "two"]))


def test_errors(server: Server) -> None:
    """Errors come as the client's own classes."""
    with pytest.raises(openai.NotFoundError):
        _model(server, "no-such-model").invoke("x")
