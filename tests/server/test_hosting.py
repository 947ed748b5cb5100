"""`hosted`: the app of an engine inside any process."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from engine.errors import ModelMissing
from server.hosting import hosted
from tests.server.fakes import FakeEngine, call, settings

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}


class ClosingEngine(FakeEngine):
    """Counts its starts and ends."""

    started = closed = 0

    def start(self) -> None:
        self.started += 1

    def close(self) -> None:
        self.closed += 1


def test_the_app_answers_inside_the_block() -> None:
    """The engine is drained and closed after it, and no signal handler changes."""
    engine = ClosingEngine()

    async def scene() -> list[int]:
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        async with hosted(settings(), engine) as app:  # type: ignore[arg-type]
            assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
            answers = [await call(app, "GET", "/ready"), await call(app, "POST", CHAT, json_body=BODY)]
            assert 0 == engine.closed
        answers.append(await call(app, "POST", CHAT, json_body=BODY))
        return [answer.status for answer in answers]

    assert [200, 200, 503] == asyncio.run(scene())
    assert (1, 1) == (engine.started, engine.closed)


def test_a_failed_load_is_raised_and_the_engine_closed() -> None:
    engine = ClosingEngine(failure=ModelMissing("nowhere", "no such folder"))

    async def scene() -> None:
        async with hosted(settings(), engine):  # type: ignore[arg-type]
            raise AssertionError("the model is missing")

    with pytest.raises(ModelMissing):
        asyncio.run(scene())
    assert 1 == engine.closed


def test_an_exception_of_the_block_closes_the_engine() -> None:
    engine = ClosingEngine()

    async def scene() -> Any:
        async with hosted(settings(), engine):  # type: ignore[arg-type]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(scene())
    assert 1 == engine.closed
