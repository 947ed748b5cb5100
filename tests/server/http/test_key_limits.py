"""Limits of API keys: requests and tokens a minute, and requests at the same time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from server.app import create_app
from server.configuration.key_file import KeyEntry
from server.http.key_limits import KeyLimitReached, KeyLimits, hold_open
from tests.server.fakes import Answer, FakeEngine, Gate, ask, call, finished, settings

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
HEADERS = {"authorization": "Bearer k"}


class Clock:
    """Seconds that pass only if they are added."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def limits(clock: Clock, **values: int) -> KeyLimits:
    return KeyLimits(KeyEntry(key="k", **values), clock)


def admit(subject: KeyLimits) -> str:
    """Retry-After of a request; "": it is admitted."""
    try:
        with subject.admitted():
            return ""
    except KeyLimitReached as error:
        return str((error.headers or {})["Retry-After"])


def test_requests_are_refused_until_the_time_of_retry_after() -> None:
    clock = Clock()
    subject = limits(clock, requests_per_minute=3)

    assert [admit(subject) for _ in range(4)] == ["", "", "", "20"]
    clock.now += 19.5
    assert admit(subject) == "1"
    clock.now += 0.5
    assert [admit(subject), admit(subject)] == ["", "20"]


def test_a_debt_of_tokens_is_waited_for() -> None:
    clock = Clock()
    subject = limits(clock, tokens_per_minute=60)
    subject.charge(100)

    assert admit(subject) == "41"
    clock.now += 41
    assert admit(subject) == ""
    clock.now += 1000
    assert subject.headers()["x-ratelimit-remaining-tokens"] == "60"


def test_open_requests_are_limited_until_they_end() -> None:
    subject = limits(Clock(), streams=1)

    with subject.admitted():
        assert admit(subject) == "1"
    assert admit(subject) == ""


def test_the_headers_have_limit_remainder_and_reset() -> None:
    subject = limits(Clock(), requests_per_minute=60, tokens_per_minute=120)
    with subject.admitted():
        subject.charge(30)

    assert subject.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1.000s",
        "x-ratelimit-limit-tokens": "120",
        "x-ratelimit-remaining-tokens": "90",
        "x-ratelimit-reset-tokens": "15.000s",
    }
    assert limits(Clock(), streams=1).headers() == {}


def limited_app(folder: Path, limit: str, engine: FakeEngine | None = None) -> Any:
    path = folder / "keys.toml"
    path.write_text(f'[[key]]\nkey = "k"\n{limit}\n[[key]]\nkey = "free"\n')
    return create_app(engine or FakeEngine(), settings(key_file=str(path)))  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_a_request_over_the_limit_is_refused_before_it_is_rendered(tmp_path: Path, path: str) -> None:
    engine = FakeEngine()
    app = limited_app(tmp_path, "requests_per_minute = 1", engine)
    body = {**CHAT, "model": "fake", "stream": False} | ({"max_tokens": 9} if path == "/v1/messages" else {})

    first = ask(app, "POST", path, json_body=body, headers=HEADERS)
    second = ask(app, "POST", path, json_body=body, headers=HEADERS)

    assert (first.status, second.status) == (200, 429)
    assert first.headers["x-ratelimit-remaining-requests"] == "0"
    assert second.headers["x-ratelimit-limit-requests"] == "1"
    assert 55 <= int(second.headers["retry-after"]) <= 60
    message = "This API key is limited to 1 requests per minute."
    error = second.json["error"]
    assert (error if isinstance(error, str) else error["message"]) == message
    assert len(engine.tokenizer.rendered) == 1
    assert ask(app, "POST", path, json_body=body, headers={"x-api-key": "free"}).status == 200
    assert ask(app, "GET", "/v1/models", headers=HEADERS).status == 200


def test_a_spent_minute_of_tokens_refuses(tmp_path: Path) -> None:
    app = limited_app(tmp_path, "tokens_per_minute = 2")

    answers = [ask(app, "POST", "/v1/chat/completions", json_body=CHAT, headers=HEADERS) for _ in range(2)]
    tokens = answers[0].json["usage"]["total_tokens"]

    assert [answer.status for answer in answers] == [200, 429]
    # 30 seconds a token: the debt, and one more.
    assert answers[1].headers["retry-after"] in {str(30 * (tokens - 1)), str(30 * (tokens - 1) - 1)}


def test_a_request_is_open_until_its_background_response_ends() -> None:
    subject = limits(Clock(), streams=1)

    with subject.admitted():
        release = hold_open()
        assert subject.open_requests == 1
    assert admit(subject) == "1"
    release()
    assert admit(subject) == ""
    hold_open()()
    assert subject.open_requests == 0


def test_a_response_in_the_background_counts_until_it_ends(tmp_path: Path) -> None:
    """It can be cancelled although its key has no stream left."""
    app = limited_app(tmp_path, "streams = 1", FakeEngine(lambda request: [Gate(), finished(request)]))
    body = {"input": "a", "background": True}

    async def scenario() -> list[int]:
        async def post(path: str) -> Answer:
            return await call(app, "POST", f"/v1/responses{path}", json_body=body, headers=HEADERS)

        made, refused = await post(""), await post("")
        cancelled = await post(f"/{made.json['id']}/cancel")
        again = await post("")
        await post(f"/{again.json['id']}/cancel")
        return [made.status, refused.status, cancelled.status, again.status]

    assert asyncio.run(scenario()) == [200, 429, 200, 200]
