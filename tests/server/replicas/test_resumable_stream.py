"""Streams that go on at another replica, over replicas that play their tokens. tests/benchmarks has real ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from server.replicas.resumable_stream import ResumableStream

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WORDS = ["I", " am", "", " a", " caf\u00e9", "", "."]
USAGE = {"prompt_tokens": 3, "completion_tokens": len(WORDS)}
numbers = count(1)


def event(value: object) -> bytes:
    return b"data: %b\n\n" % json.dumps(value).encode()


def replica(path: str, asked: bytes) -> Iterator[bytes]:
    """The events of a replica: a token of each word, the end, the usage. Its id and time differ from all others."""
    body, number = json.loads(asked), next(numbers)
    assert body["return_token_ids"]
    start = len(body.get("continue_from", {"tokens": []})["tokens"])
    common = {"id": f"id-{number}", "created": number, "model": "m"}
    first = {"seed": body.get("seed", 7), "prompt_token_ids": [1, 2, 3], "warnings": ["w"]}

    def chunk(delta: dict[str, Any], **fields: Any) -> bytes:
        nonlocal first
        content = {"delta": delta} if path == CHAT else {"text": delta.get("content", "")}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": None, **fields}
        value, first = {**common, "choices": [choice], **first}, {}
        return event(value)

    yield b": keep-alive\n\n"
    if path == CHAT and not start:
        yield chunk({"role": "assistant", "content": ""})
    for token, word in enumerate(WORDS[start:], start):
        yield chunk({"content": word} if word else {}, token_ids=[token])
    yield chunk({}, finish_reason="stop", token_ids=[])
    yield event({**common, "choices": [], "usage": USAGE, **first})
    yield event("[DONE]").replace(b'"', b"")


def request(**fields: Any) -> bytes:
    return json.dumps({"stream": True, "prompt": "a", **fields}).encode()


def relayed(path: str, asked: bytes, cuts: list[int]) -> list[Any]:
    """The events for the client: each attempt but the last breaks off after a number of bytes."""
    stream = ResumableStream.of_request(path, asked)
    assert stream is not None
    received = b""
    for cut in [*cuts, None]:
        assert stream.can_continue
        received += stream.relay(b"".join(replica(path, stream.request_body()))[:cut])
        if stream.complete:
            break
    assert stream.complete
    lines = [line for line in received.decode().split("\n\n") if line and not line.startswith(":")]
    assert "data: [DONE]" == lines.pop()
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def without_identity(events: list[Any]) -> list[Any]:
    """The events without their id and time, which all have to share."""
    assert 1 == len({(event.pop("id"), event.pop("created")) for event in events})
    return events


@pytest.mark.parametrize("shows_tokens", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_stream_is_whole_wherever_it_breaks_off(path: str, shows_tokens: bool) -> None:
    """Anywhere in the bytes of the first attempt: no gap, nothing twice, one id."""
    asked = request(return_token_ids=True) if shows_tokens else request()
    expected = without_identity(relayed(path, asked, []))
    size = len(b"".join(replica(path, b'{"return_token_ids":true}')))

    for cut in range(0, size, 5):
        assert expected == without_identity(relayed(path, asked, [cut])), cut


def test_a_stream_may_break_off_several_times() -> None:
    asked = request()
    expected = without_identity(relayed(CHAT, asked, []))

    assert expected == without_identity(relayed(CHAT, asked, [900, 400, 0, 300]))


def test_tokens_and_seed_are_only_for_clients_that_ask() -> None:
    plain, asked = relayed(CHAT, request(), []), relayed(CHAT, request(return_token_ids=True), [])

    assert not any(name in json.dumps(plain) for name in ("token_ids", "seed"))
    assert (7, [1, 2, 3]) == (asked[0]["seed"], asked[0]["prompt_token_ids"])
    assert [*range(len(WORDS))] == [
        token for event in asked for choice in event["choices"] for token in choice.get("token_ids", ())
    ]
    words = [choice["delta"].get("content") for event in plain for choice in event["choices"]]
    assert ["", *filter(None, WORDS), None] == words


def test_a_continued_request_has_the_seed_and_all_tokens() -> None:
    """Also those that the client had before."""
    stream = ResumableStream.of_request(TEXT, request(continue_from={"tokens": [0, 1]}, top_k=5))
    assert stream is not None
    events = [*replica(TEXT, stream.request_body())]
    stream.relay(b"".join(events[:3]))
    again = json.loads(stream.request_body())

    assert {"tokens": [0, 1, 2, 3]} == again["continue_from"]
    assert (7, 5, "a") == (again["seed"], again["top_k"], again["prompt"])


@pytest.mark.parametrize(
    ("code", "continues"),
    [("engine_dead", True), ("server_draining", True), ("threads_exhausted", True), ("invalid_value", False)],
)
def test_errors_of_a_replica_are_not_relayed(code: str, continues: bool) -> None:
    """Those that another replica would send too are the end."""
    stream = ResumableStream.of_request(TEXT, request())
    assert stream is not None
    events = [*replica(TEXT, stream.request_body())]
    failure = event({"error": {"code": code, "message": "m"}})
    received = stream.relay(b"".join(events[:3]) + failure + b"data: late\n\n")

    assert continues == stream.interrupted == stream.can_continue
    assert continues != stream.complete
    assert continues != received.endswith(failure)


def test_a_replica_without_seed_cannot_be_continued() -> None:
    """It is another server, which may ignore `return_token_ids`."""
    stream = ResumableStream.of_request(TEXT, request())
    assert stream is not None
    assert stream.can_continue
    chunk = {"id": "a", "created": 1, "model": "m", "choices": [{"text": "x", "finish_reason": None}]}

    assert event(chunk).replace(b" ", b"") == stream.relay(event(chunk)).replace(b" ", b"")
    assert not stream.can_continue


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": False},
        {"n": 2},
        {"best_of": 3},
        {"echo": True},
        {"prompt_logprobs": 0},
        {"return_progress": True},
        {"return_cache_diagnostics": True},
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]]},
        {"return_token_ids": "yes"},
        {"continue_from": {"tokens": ["a"]}},
        {"continue_from": 3},
        {"temperature": float("nan")},
    ],
)
def test_other_requests_are_passed_on_unchanged(fields: dict[str, Any]) -> None:
    assert ResumableStream.of_request(CHAT, request(**fields)) is None


@pytest.mark.parametrize("body", [b"", b"{", b'["stream"]', b'{"stream": true', b'{"stream":' + b"[" * 100_000])
def test_damaged_bodies_are_left_to_the_replica(body: bytes) -> None:
    assert ResumableStream.of_request(CHAT, body) is None


def test_only_chats_and_completions_are_resumed() -> None:
    assert ResumableStream.of_request("/v1/responses", request()) is None


@pytest.mark.parametrize("fields", [{"n": 1, "best_of": 1, "echo": False}, {"prompt": ["a"]}, {"prompt": [1, 2, 3]}])
def test_fields_without_effect_do_not_matter(fields: dict[str, Any]) -> None:
    assert ResumableStream.of_request(TEXT, request(**fields)) is not None
