"""instructor: objects out of text, by tools and by schemas, whole and in parts."""

from __future__ import annotations

from typing import Any

import instructor
import openai
import pytest
from pydantic import BaseModel
from subject import Server


class City(BaseModel):
    """What structured answers are made of."""

    name: str


MODES = [instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA]


def _client(server: Server, mode: instructor.Mode) -> Any:
    return instructor.from_openai(
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0, timeout=60), mode=mode
    )


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_structured(server: Server, mode: instructor.Mode) -> None:
    """An object of the class that was asked for."""
    city = _client(server, mode).chat.completions.create(
        model=server.model,
        response_model=City,
        messages=[{"role": "user", "content": "Tell me of a city."}],
        temperature=0,
        max_tokens=200,
    )

    assert isinstance(city, City)


def test_stream(server: Server) -> None:
    """Parts of an object, the last of them whole."""
    parts = list(
        _client(server, instructor.Mode.TOOLS).chat.completions.create_partial(
            model=server.model,
            response_model=City,
            messages=[{"role": "user", "content": "Tell me of a city."}],
            temperature=0,
            max_tokens=200,
        )
    )

    assert isinstance(parts[-1].name, str)
