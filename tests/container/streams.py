"""Streamed chats of many clients at once."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

CLIENT_SECONDS = 240


@dataclass
class Stream:
    """One streamed chat, as its client sees it.

    status  HTTP status
    finish  finish reason; "": none came
    error   code or message of an error event or an error body; "": none came
    done    whether [DONE] came
    cut     whether the connection ended before the end of the body
    """

    status: int = 0
    chunks: int = 0
    finish: str = ""
    error: str = ""
    done: bool = False
    cut: bool = False
    started: threading.Event = field(default_factory=threading.Event)


class Streams:
    """`count` chats of one body, sent at once, each by a thread."""

    def __init__(self, url: str, count: int, body: Mapping[str, Any], key: str = "") -> None:
        self.streams = [Stream() for _ in range(count)]
        self._client = httpx.Client(timeout=CLIENT_SECONDS, trust_env=False, limits=httpx.Limits(max_connections=count))
        self._url, self._body = f"{url}/v1/chat/completions", {**body, "stream": True}
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._threads = ThreadPoolExecutor(count)
        self._futures: list[Future[None]] = [self._threads.submit(self._read, stream) for stream in self.streams]

    def wait_until_started(self, count: int, seconds: float = 120) -> None:
        """Return when `count` streams have a token."""
        pause, running = threading.Event(), 0
        for _ in range(int(seconds * 20)):
            running = sum(stream.started.is_set() for stream in self.streams)
            if running >= count:
                return
            pause.wait(0.05)
        raise AssertionError(f"{running} of {count} streams started in {seconds:g} s")

    def results(self) -> list[Stream]:
        """All streams after their ends."""
        for future in self._futures:
            future.result()
        self._threads.shutdown()
        self._client.close()
        return self.streams

    def _read(self, stream: Stream) -> None:
        try:
            with self._client.stream("POST", self._url, json=self._body, headers=self._headers) as answer:
                stream.status = answer.status_code
                for line in answer.iter_lines():
                    _add_line(stream, line)
        except httpx.TransportError:
            stream.cut = True


def _add_line(stream: Stream, line: str) -> None:
    text = line.removeprefix("data: ")
    if text == "[DONE]":
        stream.done = True
    elif text.startswith("{"):
        event = json.loads(text)
        if "error" in event:
            stream.error = event["error"].get("code") or event["error"]["message"]
        for choice in event.get("choices", []):
            stream.chunks += 1
            stream.finish = choice.get("finish_reason") or stream.finish
            stream.started.set()
