"""The routes that routers read, and the fields that they add to bodies."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from engine.types.status import Stats
from server.app import create_app
from server.schemas.worker import RenderedRequest, WorkerInfo, WorkerModel
from tests.server.fakes import FakeEngine, ask, settings
from tests.server.test_metrics import scrape

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
# As sglang-router 0.3.2 and vllm-router 0.1.17 write them into every body.
CHAT_FIELDS = {
    "logprobs": False,
    "n": 1,
    "stream": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "continue_final_message": False,
    "skip_special_tokens": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
}
COMPLETION_FIELDS = {
    "stream": False,
    "echo": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
}
RESPONSE_FIELDS = {
    "store": True,
    "stream": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "priority": 0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


@pytest.fixture
def app() -> Any:
    return create_app(FakeEngine(), settings())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        ("/v1/chat/completions", CHAT, CHAT_FIELDS),
        ("/v1/completions", {"prompt": "hi"}, COMPLETION_FIELDS),
        ("/v1/responses", {"input": "hi"}, RESPONSE_FIELDS),
    ],
)
def test_bodies_of_routers_are_served(app: Any, path: str, body: dict[str, Any], fields: dict[str, Any]) -> None:
    """At the default values of the fields that routers add."""
    assert 200 == ask(app, "POST", path, json_body={**body, **fields}).status


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("no_stop_trim", True),
        ("separate_reasoning", False),
        ("stream_reasoning", False),
        ("return_hidden_states", True),
    ],
)
def test_other_values_are_refused_by_name(app: Any, name: str, value: bool) -> None:
    answer = ask(app, "POST", "/v1/chat/completions", json_body={**CHAT, name: value})

    assert (400, name, "unsupported_parameter") == (
        answer.status,
        answer.json["error"]["param"],
        answer.json["error"]["code"],
    )


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_a_worker_describes_itself(app: Any, path: str) -> None:
    """By the names that sglang-router and vllm-router read."""
    answer = ask(app, "GET", path).json

    TypeAdapter(WorkerInfo).validate_python(answer, strict=True, extra="forbid")
    sizes = ("max_total_num_tokens", "max_running_requests", "max_req_input_len")
    assert ("fake", 256, 4, 64) == (answer["served_model_name"], *(answer[name] for name in sizes))
    assert {
        "model_config": {"model": "fake", "max_model_len": 64},
        "cache_config": {"block_size": 16, "num_gpu_blocks": 16},
    } == answer["vllm_config"]


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_a_worker_describes_its_model(app: Any, path: str) -> None:
    answer = ask(app, "GET", path).json

    TypeAdapter(WorkerModel).validate_python(answer, strict=True, extra="forbid")
    assert ("fake", True, ["FakeForCausalLM"]) == tuple(
        answer[name] for name in ("model_path", "is_generation", "architectures")
    )


@pytest.mark.parametrize("path", ["/server_info", "/model_info"])
def test_a_loading_worker_is_not_described(path: str) -> None:
    """503, so that a router asks again."""
    answer = ask(create_app(FakeEngine(phase="loading"), settings()), "GET", path)  # type: ignore[arg-type]

    assert 503 == answer.status


def test_a_chat_is_rendered_without_generation(app: Any) -> None:
    """The tokens are those of /apply-template."""
    body = {**CHAT, "cache_salt": "s"}
    answer = ask(app, "POST", "/v1/chat/completions/render", json_body=body).json

    TypeAdapter(RenderedRequest).validate_python(answer, strict=True, extra="forbid")
    assert ask(app, "POST", "/apply-template", json_body=body).json["tokens"] == answer["token_ids"]
    assert ("fake", "s") == (answer["model"], answer["cache_salt"])


def test_each_prompt_of_a_completion_is_rendered(app: Any) -> None:
    answer = ask(app, "POST", "/v1/completions/render", json_body={"prompt": ["ab", "c"], "n": 2}).json

    TypeAdapter(list[RenderedRequest]).validate_python(answer, strict=True, extra="forbid")
    assert [[97, 98], [99]] == [each["token_ids"] for each in answer]


def test_routers_read_the_load_by_the_names_of_vllm() -> None:
    """Queued, running, and the share of cells that are no evictable prefixes; blocks of 16 tokens."""
    stats = Stats(running=2, waiting=3, cells_used=64, cells_cached=128, cells_total=256, cached_tokens_total=5)
    samples = scrape(create_app(FakeEngine(numbers=stats), settings()))  # type: ignore[arg-type]

    labels = (("engine", "0"),)
    assert 2 == samples["vllm:num_requests_running", labels]
    assert 3 == samples["vllm:num_requests_waiting", labels]
    assert 0.25 == samples["vllm:kv_cache_usage_perc", labels]
    assert 5 == samples["vllm:prefix_cache_hits_total", labels]
    blocks = (("block_size", "16"), ("engine", "0"), ("num_gpu_blocks", "16"))
    assert 1 == samples["vllm:cache_config_info", blocks]
