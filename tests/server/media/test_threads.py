"""Threads of requests with images or sounds: their number and the wait for one are limited."""

from __future__ import annotations

import asyncio
import json
import threading
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import pytest

from engine.errors import Overloaded
from engine.types.request import RenderedPrompt
from server.app import create_app
from server.http.auth import Caller
from server.media import threads as threads_module
from server.media.threads import MAX_OWNER_THREADS, MediaThreads
from tests.server.fakes import Answer, call, settings
from tests.server.media.requests import PNG, MediaTokenizer, data_url, media_engine


def test_a_full_set_of_threads_refuses_after_a_wait() -> None:
    asyncio.run(_check_wait())


async def _check_wait() -> None:
    threads, release = MediaThreads(count=1, max_wait_seconds=0.1), threading.Event()
    first = asyncio.create_task(threads.run(release.wait))
    await asyncio.sleep(0)

    with pytest.raises(Overloaded):
        await threads.run(lambda: True)
    release.set()

    assert await first
    assert await threads.run(lambda: 7) == 7


def test_owners_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests of a second owner pass the queue of the first one."""
    first, order = asyncio.run(_started(MediaThreads(1, owner_count=2), monkeypatch))

    assert first == ["a0"]
    assert order == ["a0", "a1", "b0", "a2", "b1", "a3"]


def test_an_owner_leaves_threads_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = asyncio.run(_started(MediaThreads(2, owner_count=1), monkeypatch))

    assert first == ["a0", "b0"]


async def _started(threads: MediaThreads, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """Four requests of the owner "a", then two of "b": those that start while none ends, and all in order."""
    owner: ContextVar[str] = ContextVar("owner")
    monkeypatch.setattr(threads_module, "caller", lambda: Caller(owner.get()))
    order: list[str] = []
    release = threading.Event()

    async def run(name: str) -> None:
        owner.set(name[0])

        def work() -> None:
            order.append(name)
            assert release.wait(30)

        await threads.run(work)

    tasks = [asyncio.create_task(run(name)) for name in ("a0", "a1", "a2", "a3", "b0", "b1")]
    await asyncio.sleep(0)
    while len(order) < threads.running:
        await asyncio.sleep(0.01)
    first = sorted(order)
    release.set()
    await asyncio.gather(*tasks)
    return first, order


class WaitingTokenizer(MediaTokenizer):
    """Renders prompts with images once `release` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()
        self.waiting = 0

    def render_chat(self, *arguments: Any, **options: Any) -> RenderedPrompt:
        if options.get("uploads"):
            self.waiting += 1
            assert self.release.wait(30)
        return super().render_chat(*arguments, **options)


def test_slow_images_leave_threads_to_text() -> None:
    """With more requests than all threads, a request of text is answered while no image is ready."""
    asyncio.run(_check_text())


async def _check_text() -> None:
    tokenizer = WaitingTokenizer()
    app = create_app(replace(media_engine(), tokenizer=tokenizer), settings())
    image = {"type": "image_url", "image_url": {"url": data_url(PNG)}}

    async def ask(content: object) -> Answer:
        body = json.dumps({"model": "fake", "messages": [{"role": "user", "content": content}]}).encode()
        return await call(app, "POST", "/v1/chat/completions", body=body, headers={"content-length": str(len(body))})

    images = [asyncio.create_task(ask([image])) for _ in range(45)]
    while tokenizer.waiting < MAX_OWNER_THREADS:
        await asyncio.sleep(0.01)
    try:
        text = await asyncio.wait_for(ask("hi"), 10)
    finally:
        tokenizer.release.set()
    answers = await asyncio.gather(*images)

    assert text.status == 200, text.body
    assert {answer.status for answer in answers} == {200}
