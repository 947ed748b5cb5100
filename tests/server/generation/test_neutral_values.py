"""Values without effect, and limits above the context: clients of other servers send them with every request."""

from __future__ import annotations

from typing import Any

import pytest

from server.app import create_app
from tests.server.fakes import FakeEngine, ask, settings

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    TEXT: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
}
both = pytest.mark.parametrize("path", [CHAT, TEXT])


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mirostat", 0),
        ("tfs_z", 1),
        ("tfs_z", 1.0),
        ("dynatemp_range", 0),
        ("dynatemp_range", 0.0),
        ("id_slot", -1),
        ("n_probs", 0),
        ("length_penalty", 1),
        ("length_penalty", 1.0),
        ("vllm_xargs", {}),
        ("mm_processor_kwargs", {}),
        ("max_tokens", -1),
    ],
)
def test_a_value_without_effect_is_accepted(path: str, name: str, value: object) -> None:
    engine = FakeEngine()
    app = create_app(engine, settings())  # type: ignore[arg-type]
    name = "max_output_tokens" if (path, name) == (RESPONSES, "max_tokens") else name
    answer = ask(app, "POST", path, json_body={**BODIES[path], name: value})

    assert (answer.status, answer.json.get("warnings")) == (200, None)
    assert engine.requests[-1].max_tokens is None


@both
@pytest.mark.parametrize("name", ["top_p", "typical_p"])
def test_a_mass_of_0_leaves_the_likeliest_token(path: str, name: str) -> None:
    """As in llama.cpp."""
    engine = FakeEngine()
    app = create_app(engine, settings())  # type: ignore[arg-type]

    assert ask(app, "POST", path, json_body={**BODIES[path], name: 0}).status == 200
    assert 0 < getattr(engine.requests[-1].sampling, name) < 1e-5


@both
@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_above_the_context_is_a_warning(path: str, stream: bool) -> None:
    """The prompt still has to fit."""
    engine = FakeEngine()
    app = create_app(engine, settings())  # type: ignore[arg-type]
    answer = ask(app, "POST", path, json_body={**BODIES[path], "max_tokens": 4096, "stream": stream})
    warnings = (answer.events[0] if stream else answer.json)["warnings"]

    assert answer.status == 200
    assert warnings == ["'max_tokens' is 4096: the answer ends at the context of 64 tokens."]
    assert engine.requests[-1].max_tokens == 64
