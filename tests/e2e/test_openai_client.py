"""OpenAI's own client against the real server, the real engine and the bundled model."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.e2e.serving import serving

KEY = "e2e-key"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server logs to, at its most talkative."""
    return tmp_path_factory.mktemp("server") / "log"


@pytest.fixture(scope="module")
def url(log: Path) -> Iterator[str]:
    """A server process with the bundled model, once it is ready."""
    flags = ["--api-key", KEY, "--context", "256", "--slots", "2", "--max-waiting", "4", "--log-level", "debug"]
    with log.open("w") as errors, serving(flags, errors) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


MESSAGES = [{"role": "user", "content": "Hello"}]
SPECIAL = "<|im_start|>"


def _with_special_tokens(skipped: bool) -> dict[str, Any]:
    """Fields of a request with a special token among its 16 tokens."""
    extra = {"skip_special_tokens": skipped, "ignore_eos": True, "allowed_token_ids": [1, *range(32, 90)]}
    return {
        "model": "cellar-tiny",
        "max_tokens": 16,
        "seed": 3,
        "temperature": 2,
        "logit_bias": {"1": 6},
        "extra_body": extra,
    }


def test_a_chat_is_answered(client: openai.OpenAI) -> None:
    """A greedy answer has text, an end and honest numbers, and comes again the same."""
    first, second = (
        client.chat.completions.create(model="cellar-tiny", messages=MESSAGES, temperature=0, max_tokens=16)  # type: ignore[arg-type]
        for _ in range(2)
    )

    assert first.choices[0].message.content
    assert "assistant" == first.choices[0].message.role
    assert first.choices[0].finish_reason in ("stop", "length")
    assert first.usage is not None
    assert first.usage.completion_tokens <= 16
    assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
    assert first.choices[0].message.content == second.choices[0].message.content
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens - 1


def test_a_stream_equals_the_answer_in_one_piece(client: openai.OpenAI) -> None:
    """The client's own accumulator puts the chunks together; usage comes last."""
    options = {"model": "cellar-tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 16}
    whole = client.chat.completions.create(**options)  # type: ignore[call-overload]
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert whole.choices[0].message.content == text
    roles = [chunk.choices[0].delta.role for chunk in chunks if chunk.choices]
    assert ["assistant"] + [None] * (len(roles) - 1) == roles
    assert [None] * (len(chunks) - 1) == [chunk.usage for chunk in chunks[:-1]]
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens


@pytest.mark.parametrize("skipped", [True, False])
@pytest.mark.parametrize("streamed", [True, False])
def test_bytes_of_chat_logprobs_are_the_bytes_of_the_text(client: openai.OpenAI, streamed: bool, skipped: bool) -> None:
    """A special token that the text leaves out is named, and has none; the same of top tokens."""
    answer = client.chat.completions.create(  # type: ignore[call-overload]
        **_with_special_tokens(skipped), messages=MESSAGES, top_logprobs=2, logprobs=True, stream=streamed
    )
    if streamed:
        choices = [chunk.choices[0] for chunk in answer if chunk.choices]
        text = "".join(choice.delta.content or "" for choice in choices)
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    else:
        text, entries = answer.choices[0].message.content, answer.choices[0].logprobs.content
    special = [one for entry in entries for one in (entry, *entry.top_logprobs) if one.token == SPECIAL]

    assert text.encode() == b"".join(bytes(entry.bytes or ()) for entry in entries)
    assert 0 < sum(entry.token == SPECIAL for entry in entries) < len(entries) == 16
    assert all(one.bytes == (None if skipped else list(SPECIAL.encode())) for one in special)


@pytest.mark.parametrize("skipped", [True, False])
@pytest.mark.parametrize("streamed", [True, False])
def test_offsets_of_completion_logprobs_leave_out_special_tokens(
    client: openai.OpenAI, streamed: bool, skipped: bool
) -> None:
    answer = client.completions.create(  # type: ignore[call-overload]
        **_with_special_tokens(skipped), prompt="Hello", logprobs=2, stream=streamed
    )
    choices = [chunk.choices[0] for chunk in (answer if streamed else [answer]) if chunk.choices]
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens]
    offsets = [offset for choice in choices if choice.logprobs for offset in choice.logprobs.text_offset]
    kept = [0 if skipped and token == SPECIAL else len(token) for token in tokens]

    assert 0 < tokens.count(SPECIAL) < len(tokens) == 16
    assert [sum(kept[:index]) for index in range(16)] == offsets
    assert sum(kept) == len("".join(choice.text for choice in choices))


COPY = "Cellar is a server for language models. It keeps what it computed."
SAMPLINGS = (
    {"temperature": 0},
    {"temperature": 1, "seed": 5},
    {"temperature": 1, "seed": 6, "frequency_penalty": 0.7, "extra_body": {"repetition_penalty": 1.1}},
)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_drafts_make_answers_faster_and_never_different(client: openai.OpenAI, sampling: dict[str, Any]) -> None:
    """With a prediction, with drafts of the small model, with any: the text is the one without, and usage counts."""
    prediction = {"type": "content", "content": COPY}
    asked = {"model": "cellar-tiny", "messages": [{"role": "user", "content": f"Repeat: {COPY}"}], "max_tokens": 32}

    def answer(**changes: Any) -> Any:
        extra = {**sampling.get("extra_body", {}), **changes.pop("extra_body", {})}
        return client.chat.completions.create(**{**asked, **sampling, **changes, "extra_body": extra})  # type: ignore[call-overload]

    off = answer(extra_body={"speculation": {"drafter": "none"}})
    ways = [
        answer(),
        answer(prediction=prediction, extra_body={"speculation": {"drafter": "lookup", "tokens": 8}}),
        answer(extra_body={"speculation": {"drafter": "model", "tokens": 4}}),
    ]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(answer(**options, prediction=prediction, extra_body={"speculation": {"tokens": 4}}))

    assert {off.choices[0].message.content} == {way.choices[0].message.content for way in ways}
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert off.choices[0].message.content == streamed
    details = off.usage.completion_tokens_details
    assert (0, 0) == (details.accepted_prediction_tokens, details.rejected_prediction_tokens)
    for usage in (*(way.usage for way in ways[1:]), chunks[-1].usage):
        details = usage.completion_tokens_details
        assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0
        assert details.accepted_prediction_tokens <= usage.completion_tokens == off.usage.completion_tokens
    assert ways[2].usage.completion_tokens_details.accepted_prediction_tokens > 0


def test_drafts_are_on_the_metrics(client: openai.OpenAI, url: str) -> None:
    """Both drafters, sixteen positions, and no more accepted than drafted."""
    client.completions.create(
        model="cellar-tiny", prompt="One", max_tokens=8, extra_body={"speculation": {"drafter": "model", "tokens": 2}}
    )
    text = _metrics(url)

    counts = {
        name: {
            (drafter, int(position)): float(value)
            for drafter, position, value in re.findall(
                rf'cellar_draft_{name}_total{{drafter="(\w+)",model_name="cellar-tiny",position="(\d+)"}} (\S+)', text
            )
        }
        for name in ("tokens", "accepted_tokens")
    }
    drafters = ("grammar", "lookup", "model")
    assert counts["tokens"].keys() == {(drafter, at) for drafter in drafters for at in range(1, 17)}
    assert counts["tokens"]["model", 2] > 0
    assert all(counts["accepted_tokens"][place] <= drafted for place, drafted in counts["tokens"].items())


def test_a_prediction_longer_than_the_context_is_refused(client: openai.OpenAI) -> None:
    """By its own name."""
    prediction = {"type": "content", "content": "word " * 300}
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="cellar-tiny", messages=MESSAGES, prediction=prediction)  # type: ignore[arg-type]

    assert ("invalid_value", "prediction") == (raised.value.code, raised.value.param)


def test_completions_of_several_prompts(client: openai.OpenAI) -> None:
    """Each prompt is a choice; logprobs have one entry a token."""
    answer = client.completions.create(model="cellar-tiny", prompt=["One", "Two", "Three"], max_tokens=4, logprobs=2)

    assert [0, 1, 2] == [choice.index for choice in answer.choices]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs or ())
        assert all(value <= 0 for value in choice.logprobs.token_logprobs or ())


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_names_both_numbers(client: openai.OpenAI, stream: bool) -> None:
    """BadRequestError also for a stream, in the words that agents look for."""
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(
            model="cellar-tiny", messages=[{"role": "user", "content": "word " * 1000}], stream=stream
        )

    body = raised.value.body
    assert isinstance(body, dict)
    assert ("context_length_exceeded", "messages", 256) == (raised.value.code, raised.value.param, body["n_ctx"])
    assert body["n_prompt_tokens"] >= 1000
    assert "maximum context length is 256 tokens" in raised.value.message
    assert "exceeds the available context size" in raised.value.message


def test_leaving_a_stream_frees_its_slot(client: openai.OpenAI, url: str) -> None:
    """Two slots, and ten cancelled streams: after each one another request is served at once."""
    for _ in range(10):
        stream = client.chat.completions.create(
            model="cellar-tiny",
            messages=MESSAGES,
            stream=True,
            max_tokens=200,
            extra_body={"ignore_eos": True},  # type: ignore[arg-type]
        )
        next(iter(stream))
        stream.close()
    answer = client.chat.completions.create(model="cellar-tiny", messages=MESSAGES, max_tokens=2)  # type: ignore[arg-type]

    assert answer.usage is not None
    deadline = time.monotonic() + 30
    while 'cellar_requests_running{model_name="cellar-tiny"} 0.0' not in (text := _metrics(url)):
        assert time.monotonic() < deadline, text
    assert 'finish_reason="cancelled",model_name="cellar-tiny"} 10.0' in text


def test_a_full_context_ends_with_length(client: openai.OpenAI) -> None:
    """Without an end of its own a generation stops where the context does."""
    answer = client.completions.create(
        model="cellar-tiny", prompt="One", max_tokens=256, extra_body={"ignore_eos": True}
    )

    assert "length" == answer.choices[0].finish_reason
    assert answer.usage is not None
    assert answer.usage.total_tokens <= 256


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_is_called_and_its_result_answered(client: openai.OpenAI, choice: Any) -> None:
    """The helper for streams and the answer in one piece have one call, and its history is taken back."""
    asked = {"model": "cellar-tiny", "temperature": 0, "max_tokens": 48, "tools": [WEATHER]}
    history: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]

    whole = client.chat.completions.create(messages=history, tool_choice=choice, **asked)  # type: ignore[call-overload]
    with client.chat.completions.stream(messages=history, tool_choice=choice, **asked) as stream:  # type: ignore[arg-type]
        streamed = stream.get_final_completion().choices[0]
    (call,) = whole.choices[0].message.tool_calls
    history += [whole.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."}]
    answer = client.chat.completions.create(messages=history, **{**asked, "max_tokens": 24})  # type: ignore[call-overload]

    assert ("get_weather", {"city"}) == (call.function.name, set(json.loads(call.function.arguments)))
    assert whole.choices[0].message.content is None
    assert "tool_calls" == whole.choices[0].finish_reason == streamed.finish_reason
    assert streamed.message.tool_calls is not None
    assert [call.function.arguments] == [one.function.arguments for one in streamed.message.tool_calls]
    assert answer.choices[0].message.content
    assert answer.usage.prompt_tokens_details.cached_tokens > 0


class Person(BaseModel):
    """What the model is to fill in."""

    name: str
    age: int


def test_structure_is_kept_at_any_temperature(client: openai.OpenAI) -> None:
    """`parse` fills its model, a choice is one of the given ones, and an expression matches, in both APIs."""
    messages: list[Any] = [{"role": "user", "content": "Somebody, please."}]
    for seed in range(3):
        asked = {"model": "cellar-tiny", "messages": messages, "seed": seed}
        parsed = client.chat.completions.parse(**asked, response_format=Person, max_tokens=96)  # type: ignore[arg-type]
        if parsed.choices[0].finish_reason == "stop":
            assert isinstance(parsed.choices[0].message.parsed, Person)
        chosen = client.chat.completions.create(**asked, extra_body={"guided_choice": ["yes", "no"]})  # type: ignore[call-overload]
        matched = client.completions.create(
            model="cellar-tiny", prompt="Call", seed=seed, extra_body={"guided_regex": "[0-9]{3}-[0-9]{2}"}
        )

        assert chosen.choices[0].message.content in ("yes", "no")
        assert re.fullmatch("[0-9]{3}-[0-9]{2}", matched.choices[0].text)


def test_several_choices_share_their_prompt(client: openai.OpenAI) -> None:
    """They differ by their seeds, come again the same, and the prompt is paid once."""
    asked = {"model": "cellar-tiny", "messages": MESSAGES, "n": 3, "seed": 5, "max_tokens": 8}

    first, second = (client.chat.completions.create(**asked) for _ in range(2))  # type: ignore[call-overload]
    alone = client.chat.completions.create(**{**asked, "n": 1, "seed": 7})  # type: ignore[call-overload]

    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert texts[2] == alone.choices[0].message.content
    assert first.usage.prompt_tokens == alone.usage.prompt_tokens


def test_a_prompt_is_scored_by_the_parameters_of_lm_eval(client: openai.OpenAI) -> None:
    """echo with logprobs: what the prompt's tokens have as a prompt they have as an answer."""
    asked = {"model": "cellar-tiny", "temperature": 0, "logprobs": 1}
    output = client.completions.create(**asked, prompt=[5, 6], max_tokens=6, extra_body={"return_token_ids": True})  # type: ignore[call-overload]
    whole = [5, 6, *output.choices[0].token_ids]  # type: ignore[attr-defined]

    scored = client.completions.create(**asked, prompt=whole, max_tokens=1, echo=True).choices[0].logprobs  # type: ignore[call-overload]

    assert scored.token_logprobs[0] is None
    assert output.choices[0].logprobs is not None
    assert output.choices[0].logprobs.tokens == scored.tokens[2 : len(whole)]
    assert output.choices[0].logprobs.token_logprobs == pytest.approx(scored.token_logprobs[2 : len(whole)], abs=1e-4)


def test_no_word_of_a_client_gets_into_the_log(client: openai.OpenAI, log: Path) -> None:
    """Prompts, answers, stops, names and keys: nothing of them is logged, whatever the level, well or badly served."""
    canary = "CANARYBIRD"
    asked = {"model": "cellar-tiny", "messages": [{"role": "user", "content": canary}], "max_tokens": 4}
    tool = {"type": "function", "function": {"name": canary, "strict": True}}
    followed = ({"extra_body": {"guided_choice": [canary]}}, {"tools": [tool], "tool_choice": "required"})
    plain = ({}, {"stream": True}, {"stop": [canary]}, {"user": canary}, {"metadata": {canary: canary}})
    for extra in (*plain, *followed):
        answer = client.chat.completions.create(**{**asked, **extra})  # type: ignore[call-overload]
        assert list(answer) if "stream" in extra else answer.choices
    grammar = {"extra_body": {"grammar": f"root ::= {canary} ("}}
    for wrong in (
        {"model": canary},
        {"temperature": canary},
        {"messages": canary},
        {"extra_body": {canary: canary}},
        grammar,
    ):
        with pytest.raises(openai.APIStatusError):
            client.chat.completions.create(**{**asked, **wrong})  # type: ignore[call-overload]

    logged = log.read_text()
    assert "POST /v1/chat/completions 200" in logged
    assert canary not in logged
    assert KEY not in logged


def _metrics(url: str) -> str:
    return httpx.get(f"{url}/metrics", headers={"x-api-key": KEY}).text
