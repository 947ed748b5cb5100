"""Bodies of megabytes: one validation error, named limits, and no work on the event loop."""

from __future__ import annotations

import importlib
import json
import pkgutil
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

import server.schemas
from benchmarks.serving.bodies import known
from engine.errors import ContextTooLong
from server.app import create_app
from server.configuration.settings import ClientLimits
from server.generation import chat_turn
from server.http import json_limits
from server.http.encoding import NESTED_SLICE, SCALAR_SLICE, dumps, dumps_sliced
from server.http.errors import ApiError
from server.http.json_limits import MAX_DEPTH, MAX_NODES, MAX_VALUES, SCAN_WINDOW, exceeded_limit
from server.http.lenient import WarningRequest
from server.http.parsing import LARGE_BODY_BYTES, loads
from server.schemas.anthropic import MessagesRequest
from server.schemas.chat import ChatRequest
from server.schemas.content import MAX_KEYS, MAX_PARTS, MAX_TOKENS, Strict
from server.schemas.responses import ResponseRequest
from server.schemas.tokens import DetokenizeRequest
from server.scoring.questions import MAX_QUESTION_TOKENS as MOST_PROMPT_TOKENS
from server.scoring.questions import QuestionEncoder
from tests.server.fakes import FakeEngine, FakeTokenizer, ask, settings

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PART, INPUT_PART = {"type": "text", "text": ""}, {"type": "input_text", "text": ""}
MESSAGE = {"role": "user", "content": "a"}
QUESTION = {"type": "predicate", "instructions": "a"}
USE = {"type": "tool_use", "id": "1", "name": "f"}
WIDE = {f"k{number}": 1 for number in range(MAX_KEYS + 1)}


@pytest.fixture(scope="module")
def app() -> Any:
    return create_app(FakeEngine(), settings())  # type: ignore[arg-type]


def models(base: type[BaseModel] = Strict) -> Iterator[type[BaseModel]]:
    """All nested models of a request."""
    for module in pkgutil.iter_modules(server.schemas.__path__):
        importlib.import_module(f"server.schemas.{module.name}")
    for model in base.__subclasses__():
        yield model
        yield from models(model)


def containers(schema: Any, model: type[BaseModel], around: str = "") -> Iterator[tuple[dict[str, Any], str]]:
    """The lists and objects of a model with the type of their parent."""
    if isinstance(schema, dict):
        if schema.get("type") == "model" and schema.get("cls") is not model:
            return
        if schema.get("type") in ("list", "dict"):
            yield schema, around
        for name, inner in schema.items():
            if name not in ("metadata", "serialization", "json_schema_input_schema"):
                yield from containers(inner, model, str(schema.get("type", around)))
    elif isinstance(schema, list | tuple):
        for inner in schema:
            yield from containers(inner, model, around)


@pytest.mark.parametrize("model", sorted({*models()}, key=repr), ids=lambda model: model.__name__)
def test_every_list_and_object_of_a_request_has_a_limit(model: type[BaseModel]) -> None:
    """Validation ends at the first error: lists fail fast, an object's size is checked before its values."""
    for schema, around in containers(model.__pydantic_core_schema__, model):
        assert schema.get("max_length") is not None, schema
        assert schema.get("fail_fast") if schema["type"] == "list" else around == "function-before"


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [MESSAGE], **fields}


def list_of(most: int) -> str:
    return f"List should have at most {most} items, not {most + 1}"


OBJECT = f"Object should have at most {MAX_KEYS} items, not more"
# Path, body, parameter, and the words for the limit.
CAPPED: list[tuple[str, dict[str, Any], str, str]] = [
    (
        CHAT,
        {"messages": [{"role": "user", "content": [PART] * (MAX_PARTS + 1)}]},
        "messages[0].content",
        list_of(2048),
    ),
    (CHAT, {"messages": [MESSAGE] * 2049}, "messages", list_of(2048)),
    (
        CHAT,
        chat(logit_bias={str(at): "x" for at in range(1025)}),
        "logit_bias",
        "Object should have at most 1024 items",
    ),
    (CHAT, chat(metadata={str(at): 1 for at in range(17)}), "metadata", "at most 16 items"),
    (CHAT, chat(chat_template_kwargs=dict.fromkeys(WIDE, [])), "chat_template_kwargs", "at most 16 items"),
    (CHAT, chat(guided_json=WIDE), "guided_json", OBJECT),
    (CHAT, chat(tools=[{}] * 257), "tools[0].type", "Missing required parameter"),
    (CHAT, chat(stop=["a"] * 17), "stop", list_of(16)),
    (TEXT, {"prompt": [1] * (MAX_TOKENS + 1)}, "prompt", f"it may hold {MAX_TOKENS} tokens at most"),
    (TEXT, {"prompt": ["a"] * 65}, "prompt", "it may hold 64 prompts at most"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "input", "it may hold 2048 prompts at most"),
    ("/detokenize", {"tokens": [1] * (MAX_TOKENS + 1)}, "tokens", list_of(MAX_TOKENS)),
    ("/v1/responses", {"input": [MESSAGE] * 2049}, "input", list_of(2048)),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [INPUT_PART] * (MAX_PARTS + 1)}]},
        "input[0].content",
        list_of(2048),
    ),
    ("/rerank", {"query": "a", "documents": ["a"] * 2049}, "documents", list_of(2048)),
    ("/v1/score", {"text_1": "a", "text_2": ["a"] * 2049}, "text_2", list_of(2048)),
    ("/v1/decisions", {"input": "a", "questions": [QUESTION] * 401}, "questions", list_of(400)),
    (
        "/v1/messages",
        {"model": "fake", "max_tokens": 1, "messages": [{"role": "user", "content": [PART] * 2049}]},
        "messages[0].content",
        list_of(2048),
    ),
    (
        "/v1/messages",
        {"model": "fake", "max_tokens": 1, "messages": [{"role": "assistant", "content": [{**USE, "input": WIDE}]}]},
        "messages[0].content[0].input",
        OBJECT,
    ),
    ("/api/chat", {"model": "fake", "messages": [MESSAGE] * 2049}, "messages", list_of(2048)),
    ("/api/chat", {"model": "fake", "messages": [MESSAGE], "format": WIDE}, "format", OBJECT),
]


@pytest.mark.parametrize(("path", "body", "param", "reason"), CAPPED, ids=lambda value: str(value)[:32])
def test_an_exceeded_limit_names_its_parameter(
    app: Any, path: str, body: dict[str, Any], param: str, reason: str
) -> None:
    """In the error format of each API."""
    answer = ask(app, "POST", path, json_body=body)
    reply = answer.json["error"]
    message = reply if isinstance(reply, str) else reply["message"]

    assert 400 == answer.status
    assert f"'{param}'" in message
    assert reason in message
    assert len(answer.body) < 400


MANY = 20_000
WRONG: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (ChatRequest, {"messages": [{"role": "user", "content": [1] * MANY}]}),
    (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "x"}] * MANY}]}),
    (ChatRequest, {"messages": [1] * MANY}),
    (ChatRequest, chat(**{f"k{at}": 1 for at in range(MANY)})),
    (ChatRequest, chat(logit_bias={str(at): "x" for at in range(MANY)})),
    (ChatRequest, chat(metadata={str(at): 1 for at in range(MANY)})),
    (DetokenizeRequest, {"tokens": [-1] * MANY}),
    (ResponseRequest, {"input": [{"role": "user", "content": [{"type": "input_text"}] * MANY}]}),
    (MessagesRequest, {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [{}] * MANY}]}),
]


@pytest.mark.parametrize(("model", "body"), WRONG, ids=lambda value: str(value)[:40])
def test_one_validation_error_is_collected_for_any_size(model: type[BaseModel], body: dict[str, Any]) -> None:
    """Not one for each value (8 s for 600 KB). An object of a list has one for each field."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)

    assert 1 == len({fault["loc"][:5] for fault in caught.value.errors()})
    assert caught.value.error_count() <= 2


def test_values_of_a_body_are_counted_before_it_is_parsed(app: Any) -> None:
    """The error names both limits; numbers have a higher one, for prompts of token ids."""
    nodes = b'{"prompt":[' + b",".join([b"[]"] * MAX_NODES) + b"]}"
    values = b'{"prompt":[' + b",".join([b"1"] * (MAX_VALUES + 1)) + b"]}"

    assert (
        "more than 131072 strings, arrays and objects." in ask(app, "POST", TEXT, body=nodes).json["error"]["message"]
    )
    assert "more than 524288 values." in ask(app, "POST", TEXT, body=values).json["error"]["message"]


def test_the_scan_stops_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its work is bounded by the limit, not by the body."""
    plain, calls = json_limits._next_structural, []
    monkeypatch.setattr(json_limits, "_next_structural", lambda *at: calls.append(at) or plain(*at))

    assert exceeded_limit("[" + "[]," * (8 * MAX_NODES) + "]") is not None
    assert len(calls) <= 2 * MAX_NODES


def test_the_limits_are_exact() -> None:
    """The last allowed value passes."""
    assert exceeded_limit("[" + ",".join(["[]"] * (MAX_NODES - 1)) + "]") is None
    assert exceeded_limit("[" + ",".join(["[]"] * MAX_NODES) + "]") is not None
    assert exceeded_limit("[" + ",".join(["1"] * MAX_VALUES) + "]") is None
    assert exceeded_limit("[" + ",".join(["1"] * (MAX_VALUES + 1)) + "]") is not None
    assert exceeded_limit("[" * MAX_DEPTH + "]" * MAX_DEPTH) is None
    assert exceeded_limit("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)) is not None


@pytest.mark.parametrize("text", [",", "[", '"', "\\", '\\"', "a\\", "{[,"])
@pytest.mark.parametrize("shift", [0, 1, 2])
def test_brackets_in_text_do_not_count(text: str, shift: int) -> None:
    """For any length and any position of escapes in a window of the scan."""
    value = {"a": "x" * shift + text * (8 * SCAN_WINDOW), "b": [[]] * 80}

    assert exceeded_limit(json.dumps(value)) is None
    assert value == loads(json.dumps(value).encode())


@given(st.text(alphabet='[]{}",:\\a1 \n', max_size=60))
def test_any_text_is_scanned_to_its_end(text: str) -> None:
    """Also invalid JSON: an unterminated string, a lone escape."""
    exceeded_limit("[" * 60 + text + "[]" * 40)


def test_large_bodies_are_read_off_the_loop_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones are parsed on the event loop."""
    threads: list[int] = []
    plain = WarningRequest.parse_body
    monkeypatch.setattr(
        WarningRequest, "parse_body", lambda self, body: threads.append(threading.get_ident()) or plain(self, body)
    )
    app = create_app(FakeEngine(), settings())  # type: ignore[arg-type]
    for length in (10, LARGE_BODY_BYTES):
        ask(app, "POST", TEXT, json_body={"prompt": "x" * length})

    assert [True, False] == [thread == threading.get_ident() for thread in threads]
    assert 1 == app.state.large_bodies.total_tokens


def test_a_conversation_is_translated_and_rendered_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments of calls and schemas of tools are JSON of any length."""
    threads: list[int] = []
    plain = chat_turn.prepare_messages
    monkeypatch.setattr(
        chat_turn, "prepare_messages", lambda *arguments: threads.append(threading.get_ident()) or plain(*arguments)
    )
    app = create_app(FakeEngine(), settings())  # type: ignore[arg-type]

    assert 200 == ask(app, "POST", CHAT, json_body=chat()).status
    assert threads != [threading.get_ident()]


SHORT = st.text(max_size=3)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | SHORT,
        lambda inner: st.lists(inner, max_size=2 * NESTED_SLICE + 1) | st.dictionaries(SHORT, inner, max_size=4),
        max_leaves=20,
    )
)
def test_an_answer_in_slices_is_the_same_text(value: object) -> None:
    assert dumps(value) == dumps_sliced(value)


@pytest.mark.parametrize("length", [0, 1, SCALAR_SLICE, SCALAR_SLICE + 1, 3 * SCALAR_SLICE])
def test_a_long_list_in_slices_is_the_same_text(length: int) -> None:
    """Also at the boundaries of slices."""
    value = {"data": [*range(length)], "rows": [[1.5] * 3] * length}

    assert dumps(value) == dumps_sliced(value)


def test_the_arguments_of_all_calls_share_a_limit(app: Any) -> None:
    """They are JSON inside strings, outside the limits of the body; above the limit they stay text."""
    engine = FakeEngine()
    arguments = json.dumps({"a": [[]] * 10_000})
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}] * 20
    body = {"messages": [MESSAGE, {"role": "assistant", "content": "", "tool_calls": calls}, MESSAGE]}
    ask(create_app(engine, settings()), "POST", CHAT, json_body=body)  # type: ignore[arg-type]
    reply = engine.tokenizer.rendered[0]["messages"][1]["tool_calls"]

    kept = [call["function"]["arguments"] for call in reply]
    assert [dict] * 10 + [str] * 10 == [*map(type, kept)]


def test_token_pieces_are_limited(app: Any) -> None:
    answer = ask(app, "POST", "/tokenize", json_body={"prompt": "x" * (2**17 + 1), "with_pieces": True})

    assert (400, "with_pieces") == (answer.status, answer.json["error"]["param"])
    assert "131072" in answer.json["error"]["message"]


class StrictTokenizer(FakeTokenizer):
    """Rejects text above the context, like a real tokenizer."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        if len(text) > 2**18:
            raise ContextTooLong(len(text), 2**18, exact=False)
        return super().encode(text)


class CountingTokenizer(FakeTokenizer):
    """Counts its renderings."""

    calls = 0

    def render_chat(self, messages: Any, **options: Any) -> Any:
        self.calls += 1
        return super().render_chat(messages, **options)


def test_a_question_above_the_context_stops_tokenization() -> None:
    """Otherwise 2,048 documents with a query of megabytes would all be tokenized."""
    tokenizer = CountingTokenizer()
    asker = QuestionEncoder(tokenizer, 64, "documents")  # type: ignore[arg-type]
    with pytest.raises(ContextTooLong):
        [asker.label_scorer("x" * 100, ("a", "b")) for _ in range(2048)]

    assert 1 == tokenizer.calls


def test_all_tokens_of_questions_share_a_limit() -> None:
    """It bounds the memory, also for a common prefix."""
    length = MOST_PROMPT_TOKENS // 8
    asker = QuestionEncoder(FakeTokenizer(), 2 * length, "documents")  # type: ignore[arg-type]
    with pytest.raises(ApiError) as caught:
        [asker.label_scorer("x" * length, ("a", "b")) for _ in range(9)]

    assert "documents" == caught.value.param
    assert str(MOST_PROMPT_TOKENS) in caught.value.message


LARGEST = ClientLimits().body_bytes


@pytest.mark.slow
def test_a_body_takes_at_most_eight_times_the_largest() -> None:
    """Peak of its text, values and models together."""
    app = create_app(FakeEngine(tokenizer=StrictTokenizer()), settings())  # type: ignore[arg-type]
    taken: dict[str, float] = {}
    for body in known(LARGEST):
        tracemalloc.start()
        ask(app, "POST", body.path, body=body.content)
        taken[f"{body.path} {body.name}"] = tracemalloc.get_traced_memory()[1] / LARGEST
        tracemalloc.stop()

    assert {} == {name: times for name, times in taken.items() if times > 8}
