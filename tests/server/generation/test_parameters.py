"""Every parameter has its effect: one row each, tested by a request with it and one without.

A row looks at the engine's request or the response by a path such as `request.sampling.top_k` or
`answer.choices.0.index`; `rendered` are the arguments of the template, `events` the events of a stream.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from openai.types import completion_create_params as openai_completions
from openai.types.chat import completion_create_params as openai_chat

from engine.text.fill_in_middle import FillInMiddle
from engine.types.events import Delta, Event, PrefillProgress, PromptScored, Started
from engine.types.request import Dry, ReasoningLimit, Request, Xtc
from server.app import create_app
from server.schemas import policy
from server.schemas.chat import ChatRequest
from server.schemas.completions import CompletionRequest
from tests.server.fakes import HERMES, INFO, Answer, FakeEngine, FakeTokenizer, ask, entry, finished, settings

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": [{"role": "user", "content": "hi"}]}, TEXT: {"prompt": "hi"}}
FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
TOOL = {"type": "function", "function": FUNCTION}
OTHER = {"type": "function", "function": {"name": "listen"}}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}


@dataclass(frozen=True)
class Row:
    """`name` is set to `value` in a body with `base`: then `look` finds `expected`, and something else without it."""

    name: str
    value: Any
    look: str
    expected: Any
    base: dict[str, Any] = field(default_factory=dict)


LOGPROBS = {CHAT: {"logprobs": True}, TEXT: {"logprobs": 0}}
STREAM = {"stream": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}

BOTH = [
    Row("model", "org/alias", "answer.model", "org/alias"),
    Row("temperature", 0.5, "request.sampling.temperature", 0.5),
    Row("top_p", 0.5, "request.sampling.top_p", 0.5),
    Row("top_k", 5, "request.sampling.top_k", 5),
    Row("min_p", 0.5, "request.sampling.min_p", 0.5),
    Row("typical_p", 0.5, "request.sampling.typical_p", 0.5),
    Row("top_n_sigma", 1.5, "request.sampling.top_n_sigma", 1.5),
    Row("frequency_penalty", 0.5, "request.sampling.frequency_penalty", 0.5),
    Row("presence_penalty", 0.5, "request.sampling.presence_penalty", 0.5),
    Row("repetition_penalty", 1.5, "request.sampling.repetition_penalty", 1.5),
    Row("repeat_penalty", 1.5, "request.sampling.repetition_penalty", 1.5),
    Row("repeat_last_n", 9, "request.sampling.penalty_lookback", 9),
    Row("dry_multiplier", 0.8, "request.sampling.dry", Dry(0.8, 1.75, 2, -1, (10, 58, 34, 42))),
    Row("dry_base", 2, "request.sampling.dry.base", 2, {"dry_multiplier": 1}),
    Row("dry_allowed_length", 3, "request.sampling.dry.allowed_length", 3, {"dry_multiplier": 1}),
    Row("dry_penalty_last_n", 9, "request.sampling.dry.lookback", 9, {"dry_multiplier": 1}),
    Row("dry_sequence_breakers", ["b", "xb"], "request.sampling.dry.breakers", (98,), {"dry_multiplier": 1}),
    Row("xtc_probability", 0.5, "request.sampling.xtc", Xtc(0.5, 0.1)),
    Row("xtc_threshold", 0.2, "request.sampling.xtc.threshold", 0.2, {"xtc_probability": 1}),
    Row("logit_bias", {"5": -100}, "request.sampling.logit_bias", ((5, -100.0),)),
    Row("allowed_token_ids", [5, 6], "request.sampling.allowed_tokens", (5, 6)),
    Row("bad_words", ["a", " b"], "request.sampling.bad_words", ((97,), (32, 97), (32, 98))),
    Row("seed", 7, "request.sampling.seed", 7),
    Row("n", 3, "answer.choices.2.index", 2),
    Row("max_tokens", 5, "request.max_tokens", 5),
    Row("min_tokens", 5, "request.min_tokens", 5),
    Row("stop", "END", "request.stop", ("END",)),
    Row("stop_regex", "E+", "request.stop_regex", ("E+",)),
    Row("stop_token_ids", [5], "request.stop_token_ids", (5,)),
    Row("truncate_prompt_tokens", 1, "answer.usage.prompt_tokens", 1),
    Row("stream_interval", 3, "pieces", ["Hello", " world"], STREAM),
    Row("request_id", "r.1", "named", True),
    Row("ignore_eos", True, "request.ignore_eos", True),
    Row("include_stop_str_in_output", True, "said", "Hello worldEND", {"stop": "END"}),
    Row("skip_special_tokens", False, "request.include_special_tokens", True),
    Row("response_format", {"type": "json_object"}, "followed", True),
    Row("structured_outputs", {"choice": ["a", "b"]}, "followed", True),
    Row("guided_json", SCHEMA, "followed", True),
    Row("guided_regex", "[ab]+", "followed", True),
    Row("guided_choice", ["a", "b"], "followed", True),
    Row("guided_grammar", 'start: "a"', "followed", True),
    Row("json_schema", SCHEMA, "followed", True),
    Row("regex", "[ab]+", "followed", True),
    Row("grammar", 'root ::= "a"', "followed", True),
    Row("ebnf", 'root ::= "a"', "followed", True),
    Row("prompt_logprobs", 1, "request.score_from", 0),
    Row("return_token_ids", True, "answer.choices.0.token_ids", [0, 1, 2]),
    Row("continue_from", {"tokens": [5, 6]}, "request.emitted", (5, 6), {"seed": 1}),
    Row("stream", True, "type", "text/event-stream; charset=utf-8"),
    Row("metadata", {"a": "b"}, "answer.metadata", {"a": "b"}),
    Row("service_tier", "flex", "request.tier", "flex"),
    Row("service_tier", "fast", "answer.service_tier", "priority"),
    Row("priority", -1, "request.tier", "priority"),
    Row("priority", 1, "request.tier", "flex"),
    Row("timeout", 2.5, "request.timeout_seconds", 2.5),
    Row("return_progress", True, "request.progress", True, STREAM),
    Row("return_progress", True, "events.0.prompt_progress.processed", 1, STREAM),
    Row("timings_per_token", True, "events.-2.timings.predicted_n", 3, STREAM),
    Row("stream_options", {"include_usage": True}, "events.-1.usage.completion_tokens", 3, STREAM),
    Row(
        "stream_options",
        {"include_usage": True, "continuous_usage_stats": True},
        "events.-2.usage.completion_tokens",
        3,
        USAGE,
    ),
    Row("overflow", "shift", "request.overflow", "shift"),
    Row("keep", 4, "request.keep", 4),
    Row("n_keep", 4, "request.keep", 4),
    Row("recurrent_shift", "carry", "request.recurrent_shift", "carry"),
    Row("cache_salt", "x", "request.salt", hashlib.sha256(b"x").digest()),
    Row("cache_prompt", False, "salted", True),
    Row("prediction", {"type": "content", "content": "x"}, "request.prediction", (120,)),
    Row("speculation", {"drafter": "none"}, "request.speculation.drafter", "none"),
]
CHATS = [
    *BOTH,
    Row("messages", [{"role": "user", "content": "x"}], "request.prompt", (120, 10)),
    Row("max_completion_tokens", 5, "request.max_tokens", 5),
    Row("logprobs", True, "answer.choices.0.logprobs.content.0.token", "Hello"),
    Row("top_logprobs", 2, "request.logprobs", 2, {"logprobs": True}),
    Row("return_cache_diagnostics", True, "answer.prompt_cache_diagnostics.reason", "unknown"),
    Row("logprob_token_ids", [7], "request.label_tokens", (7,), {"logprobs": True}),
    Row(
        "return_tokens_as_token_ids",
        True,
        "answer.choices.0.logprobs.content.1.token",
        "token_id:1",
        {"logprobs": True},
    ),
    Row("tools", [TOOL], "tools", ["look"]),
    Row("tool_choice", "required", "followed", True, {"tools": [TOOL]}),
    Row("tool_choice", "none", "tools", [], {"tools": [TOOL]}),
    Row("parallel_tool_calls", False, "followed", True, {"tools": [TOOL]}),
    Row("functions", [FUNCTION], "tools", ["look"]),
    Row("function_call", "none", "tools", [], {"functions": [FUNCTION]}),
    Row("reasoning_effort", "low", "rendered.arguments", {"enable_thinking": True, "reasoning_effort": "low"}),
    Row("reasoning_effort", "none", "rendered.arguments", {"enable_thinking": False}),
    Row("include_reasoning", False, "answer.choices.0.message.content", "Hello world"),
    Row("thinking_token_budget", 9, "budget", 9),
    Row("thinking_budget_tokens", 9, "budget", 9),
    Row("thinking_budget", 9, "budget", 9),
    Row("thinking", {"type": "enabled", "budget_tokens": 9}, "budget", 9),
    Row("enable_thinking", False, "rendered.arguments", {"enable_thinking": False}),
    Row("reasoning", {"effort": "none"}, "rendered.arguments", {"enable_thinking": False}),
    Row("verbosity", "low", "rendered.arguments", {"verbosity": "low"}),
    Row("prompt_cache_options", {"mode": "explicit"}, "salted", True),
    Row("chat_template_kwargs", {"x": 1}, "rendered.arguments", {"x": 1}),
    Row("add_generation_prompt", False, "rendered.add_generation_prompt", False),
    Row(
        "continue_final_message",
        True,
        "rendered.continue_final_message",
        True,
        {"messages": [{"role": "assistant", "content": "x"}]},
    ),
]
TEXTS = [
    *BOTH,
    Row("suffix", "x", "request.prompt", (1, *b"hi", 2, *b"x", 3)),
    Row("prompt", "x", "request.prompt", (120,)),
    Row("logprobs", 1, "request.logprobs", 1),
    Row("logprob_token_ids", [7], "request.label_tokens", (7,), {"logprobs": 0}),
    Row("return_tokens_as_token_ids", True, "answer.choices.0.logprobs.tokens.1", "token_id:1", {"logprobs": 0}),
    Row("echo", True, "said", "hiHello world"),
    Row("best_of", 2, "requests", 2),
]
# Parameters with a test of their own.
ELSEWHERE = {"include_reasoning": "test_include_reasoning_false_omits_reasoning"}


def script(request: Request) -> list[Event]:
    """Three words, ended by a stop string if the request has one, after scores of the prompt if requested."""
    entries = [
        () if request.logprobs is None else (entry(at, text, request.logprobs),) for at, text in enumerate(WORDS)
    ]
    scored = PromptScored(request.prompt, (None, *(entry(token, chr(token), 1) for token in request.prompt[1:])))
    return [
        Started(len(request.prompt), 0, 7),
        *([PrefillProgress(1, len(request.prompt))] if request.progress else []),
        *([scored] if request.score_from is not None else []),
        *(Delta(text, (at,), entries[at]) for at, text in enumerate(WORDS)),
        finished(request, stop=request.stop[0] if request.stop else None),
    ]


WORDS = ("Hello", " wor", "ld")


@dataclass(frozen=True)
class Bench:
    """One server for all rows."""

    engine: FakeEngine
    app: Any

    def observe(self, path: str, fields: dict[str, Any], look: str) -> Any:
        """The value at `look` for a request with `fields`; None: there is none."""
        self.engine.requests.clear()
        self.engine.tokenizer.rendered.clear()
        answer = ask(self.app, "POST", path, json_body={**BODIES[path], **fields})
        assert answer.status == 200, answer.body
        return find(look, answer, self.engine.requests, (self.engine.tokenizer.rendered or [{}])[0])


@pytest.fixture(scope="module")
def bench() -> Bench:
    engine = FakeEngine(script, tokenizer=FakeTokenizer(HERMES))
    engine.tokenizer.fill_in_middle = FillInMiddle(1, 2, 3, (4,))
    return Bench(engine, create_app(engine, settings()))  # type: ignore[arg-type]


def find(look: str, answer: Answer, requests: Sequence[Request], rendered: dict[str, Any]) -> Any:
    """The value at `look`."""
    request = requests[0]
    match look.split(".", 1):
        case ["request", rest]:
            return walk(request, rest)
        case ["answer", rest]:
            return walk(answer.json, rest)
        case ["events", rest]:
            return walk(answer.events[:-1], rest)
        case ["rendered", rest]:
            return walk(rendered, rest)
    return {
        "type": lambda: answer.headers["content-type"],
        "said": lambda: walk(answer.json, "choices.0.message.content") or walk(answer.json, "choices.0.text"),
        "pieces": lambda: [text for event in answer.events[:-1] if (text := piece(event))],
        "named": lambda: answer.json["id"].endswith("-r.1") and not request.id.endswith("r.1"),
        "followed": lambda: request.grammar is not None,
        "salted": lambda: len(request.salt) == 32 and not request.cacheable,
        "budget": lambda: (
            request.reasoning_limit.budget if isinstance(request.reasoning_limit, ReasoningLimit) else None
        ),
        "tools": lambda: [tool.name for tool in rendered["tools"]],
        "requests": lambda: len(requests),
    }[look]()


def piece(event: Any) -> str:
    """The text of a chunk."""
    return walk(event, "choices.0.delta.content") or walk(event, "choices.0.text") or ""


def walk(value: Any, path: str) -> Any:
    """The value at a path of attributes, keys and indices."""
    for step in path.split("."):
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list | tuple):
            value = value[int(step)] if int(step) < len(value) else None
        else:
            value = getattr(value, step, None)
    return value


def rows(path: str) -> Sequence[Row]:
    return CHATS if path == CHAT else TEXTS


@pytest.mark.parametrize(
    ("path", "row"),
    [(path, row) for path in (CHAT, TEXT) for row in rows(path) if row.name not in ELSEWHERE],
    ids=lambda value: value.name if isinstance(value, Row) else value.rsplit("/", 2)[-2],
)
def test_parameter_has_its_effect(bench: Bench, path: str, row: Row) -> None:
    before = bench.observe(path, row.base, row.look)
    after = bench.observe(path, {**row.base, row.name: row.value}, row.look)

    assert row.expected == after
    assert row.expected != before


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("name", policy.NOTED)
def test_noted_parameters_change_nothing(bench: Bench, path: str, name: str) -> None:
    for look in ("request.prompt", "request.sampling", "request.salt", "request.tier", "answer.choices"):
        assert bench.observe(path, {}, look) == bench.observe(path, {name: "x"}, look)


def fields(shape: Any) -> set[str]:
    return {field.alias or name for name, field in shape.model_fields.items()}


@pytest.mark.parametrize(("path", "shape"), [(CHAT, ChatRequest), (TEXT, CompletionRequest)])
def test_every_field_has_a_row(path: str, shape: Any) -> None:
    """Every accepted field has a row or is listed in the policy."""
    assert fields(shape) == {row.name for row in rows(path)} | set(policy.NOTED)


@pytest.mark.parametrize(
    ("module", "shape"), [(openai_chat, ChatRequest), (openai_completions, CompletionRequest)], ids=["chat", "text"]
)
def test_every_openai_parameter_is_supported_or_refused(module: Any, shape: Any) -> None:
    """The installed openai package has no unknown parameter."""
    theirs = {*module.CompletionCreateParamsBase.__annotations__, "stream"}

    assert set() == theirs - fields(shape) - set(shape.documented)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("given", "limit"),
    [({}, 16), ({"max_tokens": -1}, 16), ({"max_tokens": 40}, 40), ({"min_tokens": 20}, 20)],
    ids=["none", "no limit", "a larger one", "a longer answer"],
)
def test_an_answer_without_limit_ends_at_that_of_the_model(path: str, given: dict[str, Any], limit: int) -> None:
    """Of its generation configuration, as in vLLM; a request may ask for more."""
    engine = FakeEngine(info_value=replace(INFO, default_max_tokens=16))
    answer = ask(create_app(engine, settings()), "POST", path, json_body={**BODIES[path], **given})  # type: ignore[arg-type]

    assert answer.status == 200
    assert [limit] == [request.max_tokens for request in engine.requests]
