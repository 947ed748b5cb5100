"""POST /tokenize, /detokenize, /apply-template and token counts: the model does not run."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ContextTooLong
from server.app import create_app
from tests.server.fakes import Answer, FakeEngine, ask, settings

MESSAGES = [{"role": "user", "content": "hi"}]


# For tests that do not look into the engine: to make an app takes longer than to ask it.
APP = create_app(FakeEngine(), settings())  # type: ignore[arg-type]


def post(path: str, engine: FakeEngine | None = None, **fields: Any) -> Answer:
    app = create_app(engine, settings()) if engine else APP  # type: ignore[arg-type]
    return ask(app, "POST", path, json_body=fields)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
@pytest.mark.parametrize("name", ["prompt", "content"])
def test_text_becomes_tokens(path: str, name: str) -> None:
    """By vLLM's and llama.cpp's field names."""
    answer = post(path, **{name: "abc"})

    assert {"tokens": [97, 98, 99], "count": 3, "max_model_len": 64} == answer.json


@pytest.mark.parametrize(
    ("fields", "special"),
    [
        ({"prompt": "a"}, True),
        ({"prompt": "a", "add_special_tokens": False}, False),
        ({"content": "a"}, False),
        ({"content": "a", "add_special": True}, True),
    ],
)
def test_add_special_tokens(fields: dict[str, Any], special: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Default: yes for `prompt` as in vLLM, no for `content` as in llama.cpp."""
    engine, added = FakeEngine(), []
    monkeypatch.setattr(engine.tokenizer, "encode", lambda text, *, add_special: added.append(add_special) or [1])
    post("/tokenize", engine, **fields)

    assert [special] == added


def test_token_pieces_are_texts_or_bytes() -> None:
    """Bytes for tokens with a part of a character."""
    answer = post("/tokenize", content="aé", with_pieces=True, return_token_strs=True).json

    assert [{"id": 97, "piece": "a"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}] == answer["tokens"]
    assert 3 == answer["count"] == len(answer["token_strs"])


def test_messages_become_prompt_tokens() -> None:
    """With the template's arguments, as in a chat request."""
    engine = FakeEngine()
    answer = post("/tokenize", engine, messages=MESSAGES, add_generation_prompt=False).json

    assert list(b"hi\n") == answer["tokens"]
    assert engine.tokenizer.rendered[0]["add_generation_prompt"] is False
    assert [] == engine.requests


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
def test_tokens_become_text(path: str) -> None:
    """By both field names."""
    assert {"prompt": "abc", "content": "abc"} == post(path, tokens=[97, 98, 99]).json


@pytest.mark.parametrize("path", ["/apply-template", "/v1/apply-template"])
def test_apply_template_returns_the_prompt(path: str) -> None:
    """Other fields of a chat request are accepted."""
    assert {"prompt": "hi\n", "tokens": list(b"hi\n"), "count": 3} == post(path, messages=MESSAGES, max_tokens=5).json


def test_the_tokens_of_a_chat_are_counted() -> None:
    """Also beyond the context."""
    for text in ("hi", "x" * 500):
        answer = post("/v1/chat/completions/input_tokens", messages=[{"role": "user", "content": text}])

        assert {"object": "response.input_tokens", "input_tokens": len(text) + 1} == answer.json


@pytest.mark.parametrize(
    ("path", "fields", "code", "param"),
    [
        ("/tokenize", {}, "invalid_value", "prompt"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "invalid_value", "content"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "invalid_value", "add_generation_prompt"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "invalid_value", "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "parse_special": False}, "unsupported_parameter", "parse_special"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model_not_found", "model"),
        ("/tokenize", {"messages": [{"role": "user", "content": "refuse me"}]}, "invalid_value", "messages"),
        ("/detokenize", {}, "invalid_value", "tokens"),
        ("/detokenize", {"tokens": [-1]}, "invalid_value", "tokens[0]"),
        ("/apply-template", {"messages": []}, "invalid_value", "messages"),
    ],
)
def test_errors_name_the_field(path: str, fields: dict[str, Any], code: str, param: str) -> None:
    answer = post(path, **fields)

    assert (code, param) == (answer.json["error"]["code"], answer.json["error"]["param"])


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/tokenize", "prompt", "x"),
        ("/tokenize", "content", "x"),
        ("/tokenize", "messages", MESSAGES),
        ("/apply-template", "messages", MESSAGES),
        ("/v1/chat/completions/input_tokens", "messages", MESSAGES),
        ("/v1/chat/completions/render", "messages", MESSAGES),
    ],
)
def test_a_text_that_is_too_long_is_named_as_it_was_sent(
    path: str, field: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()

    def refuse(*_: object, **options: object) -> None:
        raise ContextTooLong(99, 64)

    for method in ("encode", "render_chat"):
        monkeypatch.setattr(engine.tokenizer, method, refuse)
    answer = post(path, engine, **{field: value})

    assert (400, field) == (answer.status, answer.json["error"]["param"])
