"""pydantic-ai: an agent, its stream, a loop over a tool, a typed result."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIChatModelSettings
from pydantic_ai.providers.openai import OpenAIProvider
from subject import Server

SETTINGS = OpenAIChatModelSettings(temperature=0, max_tokens=200)


class City(BaseModel):
    """What structured answers are made of."""

    name: str


@pytest.fixture
def model(server: Server) -> OpenAIChatModel:
    return OpenAIChatModel(server.model, provider=OpenAIProvider(base_url=f"{server.url}/v1", api_key=server.key))


def test_chat(model: OpenAIChatModel, server: Server) -> None:
    """One turn."""
    reply = Agent(model, model_settings=SETTINGS).run_sync(server.question)

    assert reply.output


def test_stream(model: OpenAIChatModel, server: Server) -> None:
    """A streamed turn adds up to what one piece says."""

    async def stream() -> str:
        async with Agent(model, model_settings=SETTINGS).run_stream(server.question) as reply:
            return await reply.get_output()

    assert Agent(model, model_settings=SETTINGS).run_sync(server.question).output == asyncio.run(stream())


def test_tools(model: OpenAIChatModel, server: Server) -> None:
    """The agent calls its tool, and its answer has the result."""
    asked: list[str] = []
    agent = Agent(model, model_settings=SETTINGS)

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Get the weather in a city."""
        asked.append(city)
        return '{"temperature": 21}'

    reply = agent.run_sync(server.weather)

    assert asked
    assert reply.output


def test_structured(model: OpenAIChatModel) -> None:
    """A typed result, which the agent asks for as a tool that must be called."""
    reply = Agent(model, output_type=City, model_settings=SETTINGS).run_sync("Tell me of a city.")

    assert isinstance(reply.output, City)


def test_errors(server: Server) -> None:
    """Errors keep their status."""
    provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key=server.key)
    with pytest.raises(ModelHTTPError) as unknown:
        Agent(OpenAIChatModel("no-such-model", provider=provider)).run_sync("x")

    assert 404 == unknown.value.status_code
