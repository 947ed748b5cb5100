"""LlamaIndex: a chat model, its stream, tools, structured output, an embedding."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from subject import Server


class City(BaseModel):
    """What structured answers are made of."""

    name: str


def get_weather(city: str) -> str:
    """Get the weather in a city"""
    return '{"temperature": 21}'


@pytest.fixture
def model(server: Server) -> OpenAILike:
    return _model(server, server.model)


def _model(server: Server, name: str) -> OpenAILike:
    options: dict[str, Any] = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 4096}
    return OpenAILike(
        model=name,
        api_base=f"{server.url}/v1",
        api_key=server.key,
        temperature=0,
        max_tokens=200,
        max_retries=0,
        **options,
    )


def test_chat(model: OpenAILike, server: Server) -> None:
    """One turn, and a completion."""
    assert model.chat([ChatMessage(role="user", content=server.question)]).message.content
    assert model.complete(server.question).text


def test_stream(model: OpenAILike, server: Server) -> None:
    """The parts together are the whole."""
    asked = [ChatMessage(role="user", content=server.question)]
    whole = model.chat(asked).message.content

    assert whole == "".join(part.delta or "" for part in model.stream_chat(asked))


def test_tools(model: OpenAILike, server: Server) -> None:
    """A call with arguments."""
    tools = [FunctionTool.from_defaults(get_weather)]
    answer = model.chat_with_tools(tools, user_msg=server.weather, tool_required=True)
    [call] = model.get_tool_calls_from_response(answer)

    assert ("get_weather", {"city"}) == (call.tool_name, call.tool_kwargs.keys())


def test_structured(model: OpenAILike) -> None:
    """By a schema."""
    answer = model.as_structured_llm(City).complete("Name a city")

    assert isinstance(answer.raw, City)


def test_errors(server: Server) -> None:
    """The client's own exception."""
    with pytest.raises(openai.NotFoundError):
        _model(server, "other").complete(server.question)


def test_embeddings(server: Server) -> None:
    """Of texts and of a query."""
    embedder = OpenAILikeEmbedding(model_name=server.model, api_base=f"{server.url}/v1", api_key=server.key)

    assert len(embedder.get_text_embedding("a")) == len(embedder.get_query_embedding("b")) > 0
