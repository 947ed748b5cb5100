"""Threads of requests with images or sounds: their number and the wait for one are limited."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from typing import Any

import pytest

from engine.errors import Overloaded
from engine.types.request import RenderedPrompt
from server.app import create_app
from server.media.threads import MAX_MEDIA_THREADS, MediaThreads
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
    while tokenizer.waiting < MAX_MEDIA_THREADS:
        await asyncio.sleep(0.01)
    try:
        text = await asyncio.wait_for(ask("hi"), 10)
    finally:
        tokenizer.release.set()
    answers = await asyncio.gather(*images)

    assert text.status == 200, text.body
    assert {answer.status for answer in answers} == {200}
