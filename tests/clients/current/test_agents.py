"""openai-agents: loops over tools on Responses and on chat completions, streams, typed results."""

from __future__ import annotations

import asyncio

import pytest
from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from subject import Server

set_tracing_disabled(True)
SETTINGS = ModelSettings(temperature=0, max_tokens=200)


class City(BaseModel):
    """What structured answers are made of."""

    name: str


@pytest.fixture(params=["responses", "chat"])
def model(request: pytest.FixtureRequest, server: Server) -> Model:
    client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0, timeout=60)
    kind = OpenAIResponsesModel if request.param == "responses" else OpenAIChatCompletionsModel
    return kind(server.model, client)


def test_chat(model: Model, server: Server) -> None:
    """One turn."""
    reply = asyncio.run(Runner.run(Agent("a", model=model, model_settings=SETTINGS), server.question))

    assert reply.final_output


def test_stream(model: Model, server: Server) -> None:
    """A streamed turn adds up to what one piece says."""
    agent = Agent("a", model=model, model_settings=SETTINGS)

    async def both() -> tuple[str, str]:
        whole = await Runner.run(agent, server.question)
        streamed = Runner.run_streamed(agent, server.question)
        async for _ in streamed.stream_events():
            pass
        return whole.final_output, streamed.final_output

    whole, streamed = asyncio.run(both())

    assert whole == streamed


def test_tools(model: Model, server: Server) -> None:
    """The agent calls its tool, and its answer has the result."""
    asked: list[str] = []

    @function_tool
    def get_weather(city: str) -> str:
        """Get the weather in a city."""
        asked.append(city)
        return '{"temperature": 21}'

    agent = Agent("a", model=model, model_settings=SETTINGS, tools=[get_weather])
    reply = asyncio.run(Runner.run(agent, server.weather))

    assert asked
    assert reply.final_output


def test_structured(model: Model) -> None:
    """A typed result."""
    agent = Agent("a", model=model, model_settings=SETTINGS, output_type=City)
    reply = asyncio.run(Runner.run(agent, "Tell me of a city."))

    assert isinstance(reply.final_output, City)
