"""A server of its own for a sequence of requests, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from engine.engine import Engine
from server.app import create_app
from server.configuration.settings import Settings
from tests.server.fakes import call

CONTEXT = 96
TURNS = [
    {"role": "system", "content": "You are a cellar."},
    {"role": "user", "content": "What do you hold?"},
    {"role": "assistant", "content": "Wine."},
    {"role": "user", "content": "Since when?"},
]

Chat = Callable[..., Awaitable[Any]]


def serve(folder: Path, story: Callable[[Chat], Awaitable[None]], **changes: Any) -> None:
    """Run a story against a server that starts with it and drains behind it."""
    settings = Settings(model=str(folder), context=CONTEXT, dtype="float64", slots=2, served_names=("tiny",), **changes)

    async def scene() -> None:
        engine = Engine(settings.engine_config())
        app = create_app(engine, settings)

        async def chat(messages: list[dict[str, str]], **fields: Any) -> Any:
            body = {"messages": messages, "temperature": 0, "max_tokens": 8, "ignore_eos": True, **fields}
            answer = await call(app, "POST", "/v1/chat/completions", json_body=body)
            assert answer.status == 200, answer.body
            return answer.json

        engine.start()
        try:
            await engine.wait_ready()
            await story(chat)
            await engine.drain(10)
        finally:
            await asyncio.to_thread(engine.close)

    asyncio.run(scene())
