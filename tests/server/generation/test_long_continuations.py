"""The tokens of a long answer that is continued are parsed in a worker thread, with and without a stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from engine.types.events import Delta, Event, Started
from engine.types.request import Request
from server.app import create_app
from server.generation.chat_turn import ChoiceParser
from server.http.events import MAX_INLINE_DELTAS
from tests.server.fakes import FakeEngine, ask, finished, settings


def script(count: int) -> Any:
    def events(request: Request) -> Iterator[Event]:
        yield Started(len(request.prompt), 0, 7, tuple(Delta("a", (97,)) for _ in range(count)))
        yield Delta("b", (98,))
        yield finished(request)

    return events


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_long", [False, True])
def test_a_long_answer_is_parsed_in_a_thread(monkeypatch: pytest.MonkeyPatch, stream: bool, is_long: bool) -> None:
    threads, plain = [], ChoiceParser.parse

    def parse(self: ChoiceParser, event: Event) -> Any:
        if isinstance(event, Started):
            threads.append(threading.current_thread() is threading.main_thread())
        return plain(self, event)

    monkeypatch.setattr(ChoiceParser, "parse", parse)
    count = MAX_INLINE_DELTAS + is_long
    app = create_app(FakeEngine(script(count)), settings())  # type: ignore[arg-type]
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "continue_from": {"tokens": [97] * count},
        "max_tokens": count + 1,
        "temperature": 0,
        "overflow": "shift",
        "stream": stream,
    }
    answer = ask(app, "POST", "/v1/chat/completions", json_body=body)

    assert answer.status == 200
    assert threads == [not is_long]
    if not stream:
        assert answer.json["choices"][0]["message"]["content"] == "a" * count + "b"
