"""Long answers that are continued, and scores of long prompts, are parsed and encoded in a worker thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from engine.types.events import Delta, Event, PromptScored, Started
from engine.types.request import Request
from server.app import create_app
from server.generation.chat_turn import ChoiceParser
from server.http.events import MAX_INLINE_DELTAS, MAX_INLINE_SCORES
from server.openai.completion_chunks import CompletionChunkEncoder
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


@pytest.mark.parametrize("is_long", [False, True])
def test_scores_of_a_long_prompt_are_encoded_in_a_thread(monkeypatch: pytest.MonkeyPatch, is_long: bool) -> None:
    threads, plain = [], CompletionChunkEncoder.encode
    count = MAX_INLINE_SCORES + is_long

    def events(request: Request) -> Iterator[Event]:
        yield Started(len(request.prompt), 0, 7)
        yield PromptScored((97,) * count, (None,) * count)
        yield finished(request)

    def encode(self: CompletionChunkEncoder, choice: int, event: Event) -> bytes:
        if isinstance(event, PromptScored):
            threads.append(threading.current_thread() is threading.main_thread())
        return plain(self, choice, event)

    monkeypatch.setattr(CompletionChunkEncoder, "encode", encode)
    app = create_app(FakeEngine(events), settings())  # type: ignore[arg-type]
    body = {"prompt": [97], "max_tokens": 1, "prompt_logprobs": 1, "stream": True}
    answer = ask(app, "POST", "/v1/completions", json_body=body)

    assert answer.status == 200
    assert threads == [not is_long]
