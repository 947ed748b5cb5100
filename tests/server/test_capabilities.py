"""GET /v1/capabilities says what the server does: each claim is tried."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from engine.types.status import DraftingInfo
from server.app import create_app
from server.generation.reasoning import REASONING_BUDGETS
from server.schemas import policy
from server.schemas.capabilities import Capabilities
from server.schemas.chat import ChatRequest
from server.schemas.completions import CompletionRequest
from tests.server.fakes import HERMES, FakeEngine, FakeTokenizer, ask, settings

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": [{"role": "user", "content": "hi"}]}, TEXT: {"prompt": "hi"}}


@pytest.fixture(scope="module")
def app() -> Any:
    return create_app(FakeEngine(), settings())  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def listed(app: Any) -> dict[str, Any]:
    answer = ask(app, "GET", "/v1/capabilities")
    assert answer.status == 200, answer.body
    TypeAdapter(Capabilities).validate_python(answer.json, strict=True, extra="forbid")
    return dict(answer.json)


@pytest.mark.parametrize(("path", "shape"), [(CHAT, ChatRequest), (TEXT, CompletionRequest)])
def test_every_field_has_its_support(listed: dict[str, Any], path: str, shape: Any) -> None:
    """Supported and unsupported fields, and no others."""
    parameters = listed["endpoints"][path]["parameters"]

    assert {*shape.model_fields, *shape.documented} == parameters.keys()
    # What this model, without reasoning, takes no notice of.
    reasoning = {"reasoning_effort", "enable_thinking", "thinking", "reasoning", *REASONING_BUDGETS}
    unheeded = {"verbosity", *reasoning} if path == CHAT else set()
    assert {*policy.NOTED, *shape.hints, *unheeded} == {
        name for name, one in parameters.items() if one["support"] == "noted"
    }


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_refused_parameters_are_refused(app: Any, listed: dict[str, Any], path: str) -> None:
    """And the values that are said to ask for nothing are accepted."""
    for name, one in listed["endpoints"][path]["parameters"].items():
        if one["support"] != "refused" or "reason" in one:
            continue
        answer = ask(app, "POST", path, json_body={**BODIES[path], name: {"something": "else"}})
        assert (400, name, "unsupported_parameter") == (
            answer.status,
            answer.json["error"]["param"],
            answer.json["error"]["code"],
        )
        for value in one["accepted"]:
            assert 200 == ask(app, "POST", path, json_body={**BODIES[path], name: value}).status


def test_every_endpoint_with_a_body_is_listed(listed: dict[str, Any], app: Any) -> None:
    """The endpoints with a body in the OpenAPI document."""
    document = ask(app, "GET", "/openapi.json").json

    assert {CHAT, TEXT} <= listed["endpoints"].keys() <= document["paths"].keys()


def test_support_depends_on_the_model() -> None:
    """A model that calls, thinks and reads efforts is told as one, and its parameters as honoured."""
    engine = FakeEngine(tokenizer=FakeTokenizer(HERMES), drafting=DraftingInfo(("lookup",)))
    app = create_app(engine, settings(lenient=True, model="someone/model"))  # type: ignore[arg-type]

    listed = ask(app, "GET", "/v1/capabilities").json

    assert listed["lenient"]
    assert {
        "id": "fake",
        "context": 64,
        "vocabulary": 256,
        "chat": True,
        "tools": True,
        "reasoning": True,
        "input_modalities": ["text"],
        "template_arguments": ["enable_thinking", "reasoning_effort", "verbosity"],
        "adapters": [],
        "drafters": ["lookup"],
        "batch_invariant": True,
        "default_max_tokens": None,
    } == listed["model"]
    parameters = listed["endpoints"][CHAT]["parameters"]
    for name in ("tools", "functions", "reasoning_effort", "verbosity", "thinking_token_budget"):
        assert "honoured" == parameters[name]["support"]


def test_the_bundled_model_is_a_demonstration(listed: dict[str, Any]) -> None:
    """Its clients can say so, and offer others that fit the memory, with the command to copy: here 1 GiB."""
    shown = listed["model"]["demonstration"]

    assert "a demonstration: it knows Cellar, tools and JSON" in shown["text"]
    assert [{"name": "smollm2", "text": "98 MB, a small real model", "command": "cellar serve smollm2"}] == shown[
        "models"
    ]


def test_capabilities_need_a_loaded_model() -> None:
    """During the load they are unknown."""
    app = create_app(FakeEngine(phase="loading"), settings())  # type: ignore[arg-type]

    assert 503 == ask(app, "GET", "/v1/capabilities").status
