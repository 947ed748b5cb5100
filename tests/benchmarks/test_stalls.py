"""The fuzzer of stalls at a small size: no body holds the event loop for long, and it finds one that does."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from benchmarks.serving.bodies import COMPOSED, SEEDS, Body, composed_body, form_body, random_body
from benchmarks.serving.stalls import CallbackTimer
from server.app import create_app
from tests.server.fakes import FakeEngine, settings

# Processor time of a callback: twenty times the usual maximum, so that a busy machine does not exceed it.
MAX_CALLBACK_MS = 250.0
LARGEST_BYTES, COUNT = 2**17, 60


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """A test process has imported everything: a full collection takes longer than the work that is measured."""
    gc.disable()
    yield
    gc.enable()


def longest(app: ASGIApp, bodies: list[Body]) -> list[tuple[float, Body]]:
    """Send the bodies; the longest callback of each, in milliseconds of processor time."""

    async def send() -> list[tuple[float, Body]]:
        figures = []
        with CallbackTimer().installed() as timer:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
                for body in bodies:
                    await asyncio.sleep(0)
                    timer.reset()
                    headers = {"content-type": body.content_type}
                    answer = await client.post(body.path, content=body.content, headers=headers)
                    assert answer.status_code < 500, (body.path, body.name, answer.text)
                    await asyncio.sleep(0)
                    figures.append((timer.reset(), body))
        return figures

    return asyncio.run(send())


def application() -> Any:
    return create_app(FakeEngine(), settings())  # type: ignore[arg-type]


def test_no_random_body_holds_the_event_loop() -> None:
    chance = random.Random(45)
    bodies = [random_body(chance, LARGEST_BYTES) for _ in range(COUNT)]
    bodies += [composed_body(chance) for _ in COMPOSED] + [form_body(chance, LARGEST_BYTES) for _ in range(2)]
    figures = longest(application(), bodies)

    assert [(ms, body.path, body.name) for ms, body in figures if ms > MAX_CALLBACK_MS] == []


def test_a_body_that_holds_the_event_loop_is_found() -> None:
    """A middleware that computes for long on one path."""
    app = application()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        until = time.thread_time() + 1.2 * MAX_CALLBACK_MS / 1000
        while scope["path"] == "/detokenize" and time.thread_time() < until:
            pass
        await app(scope, receive, send)

    bodies = [Body(path, path, b"{}") for path in list(SEEDS)[:12]]
    figures = longest(slow, bodies)

    assert [body.path for ms, body in figures if ms > MAX_CALLBACK_MS] == ["/detokenize"]
