"""The events of a response, checked by openai's types and accumulator."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai._models import construct_type
from openai._types import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from engine.chat_format.message import AnswerDelta, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from server.responses.encrypted_content import decode_content
from server.responses.writer import ResponseWriter
from server.schemas.response_items import ResponseBody, ResponseUsage

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
BODY: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "completed_at": None,
    "status": "in_progress",
    "background": False,
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "model": "fake",
    "output": [],
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "system_fingerprint": "fp",
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "usage": None,
    "user": None,
    "metadata": {},
}
USAGE = ResponseUsage(
    input_tokens=3,
    input_tokens_details={"cached_tokens": 1, "cache_write_tokens": 2},
    output_tokens=4,
    output_tokens_details={"reasoning_tokens": 0},
    total_tokens=7,
)
THINKING = [
    ReasoningDelta("I "),
    ReasoningDelta("see."),
    TextDelta("Hel"),
    TextDelta("lo"),
    ToolCallStart(0, "f"),
    ToolCallDelta(0, '{"a"'),
]
ENDING = [ToolCallDelta(0, ":1}"), ToolCallStart(1, "g"), ToolCallDelta(1, "{}")]


def writer(**changes: Any) -> ResponseWriter:
    """The writer of a response before its first event."""
    sealed = changes.pop("sealed", False)
    body: ResponseBody = {**BODY, **changes}  # type: ignore[typeddict-item]
    return ResponseWriter(body, encrypted=sealed)


def round_trip(events: Iterable[Any]) -> list[Any]:
    """The events after a JSON round trip."""
    return [json.loads(json.dumps(event)) for event in events]


def response_events(pieces: Sequence[AnswerDelta], writer: ResponseWriter, status: Any = "completed") -> list[Any]:
    """The events of a whole response."""
    return round_trip([*writer.created(), *writer.in_progress(), *writer.add(pieces), *writer.finish(status, USAGE)])


def accumulate(events: Sequence[Any]) -> Any:
    """The response that openai's accumulator builds; it raises for an invalid sequence."""
    state: Any = ResponseStreamState(input_tools=omit, text_format=omit)
    for event in events:
        state.handle_event(construct_type(type_=ResponseStreamEvent, value=event))
    return state._completed_response


def test_the_complete_sequence_of_every_item() -> None:
    """Reasoning, text and calls: added, deltas, done; between the events of the response."""
    events = response_events([*THINKING, *ENDING], writer())

    kinds = [event["type"].removeprefix("response.") for event in events]
    text = ["content_part.added", "output_text.delta", "output_text.delta", "output_text.done", "content_part.done"]
    reasoning = [kind.replace("output_text", "reasoning_text") for kind in text]
    arguments = "function_call_arguments"
    assert [
        "created",
        "in_progress",
        "output_item.added",
        *reasoning,
        "output_item.done",
        "output_item.added",
        *text,
        "output_item.done",
        "output_item.added",
        f"{arguments}.delta",
        f"{arguments}.delta",
        f"{arguments}.done",
        "output_item.done",
        "output_item.added",
        f"{arguments}.delta",
        f"{arguments}.done",
        "output_item.done",
        "completed",
    ] == kinds
    assert list(range(len(events))) == [event["sequence_number"] for event in events]


def test_the_accumulator_of_openai_gets_the_same_response() -> None:
    """The sum of the deltas equals the last event."""
    events = response_events([*THINKING, *ENDING], writer())

    response = accumulate(events)
    assert "Hello" == response.output_text
    assert ["reasoning", "message", "function_call", "function_call"] == [item.type for item in response.output]
    assert "I see." == response.output[0].content[0].text
    assert [("f", '{"a":1}'), ("g", "{}")] == [(item.name, item.arguments) for item in response.output[2:]]
    assert response.usage.total_tokens == 7


@given(
    st.lists(
        st.one_of(
            st.builds(TextDelta, st.text(min_size=1, max_size=3)),
            st.builds(ReasoningDelta, st.text(min_size=1, max_size=3)),
            st.builds(lambda name: ToolCallStart(0, name), st.sampled_from("fg")),
        ),
        max_size=12,
    ),
    st.sampled_from(["completed", "incomplete"]),
    st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_any_pieces_make_a_valid_stream(pieces: list[AnswerDelta], status: str, sealed: bool) -> None:
    """Every event has openai's type, in order, without loss."""
    events = response_events(pieces, writer(sealed=sealed), status)

    for event in events:
        EVENT.validate_python(event)
    response = accumulate(events)
    assert (response is not None) == (status == "completed")
    output = events[-1]["response"]["output"]
    assert output == [event["item"] for event in events if event["type"] == "response.output_item.done"]
    answer = "".join(part["text"] for item in output if item["type"] == "message" for part in item["content"])
    assert "".join(piece.text for piece in pieces if isinstance(piece, TextDelta)) == answer
    assert all("{}" == item["arguments"] for item in output[:-1] if item["type"] == "function_call")


def test_a_truncated_answer_has_an_incomplete_item() -> None:
    """Earlier items are complete."""
    events = response_events(THINKING, writer(), "incomplete")

    last = events[-1]
    assert "response.incomplete" == last["type"]
    assert {"reason": "max_output_tokens"} == last["response"]["incomplete_details"]
    assert ["completed", "completed", "incomplete"] == [item["status"] for item in last["response"]["output"]]
    assert '{"a"' == last["response"]["output"][2]["arguments"]


def test_no_text_is_an_empty_message() -> None:
    response = accumulate(response_events([], writer()))

    assert "" == response.output_text
    assert ["message"] == [item.type for item in response.output]


def test_an_error_is_two_events_and_ends_the_stream() -> None:
    """An error event, flat and nested, and the failed response."""
    one = writer()
    events = round_trip([*one.created(), *one.in_progress(), *one.add([TextDelta("Hel")])])
    error = {"message": "broken", "type": "server_error", "param": None, "code": "generation_failed"}
    events += round_trip(one.fail(error))

    *_, fault, last = events
    assert {"type": "error", "code": "generation_failed", "message": "broken", "param": None, "error": error} == {
        key: value for key, value in fault.items() if key != "sequence_number"
    }
    assert "response.failed" == last["type"]
    assert ("failed", "server_error") == (last["response"]["status"], last["response"]["error"]["code"])
    assert list(range(len(events))) == [event["sequence_number"] for event in events]
    assert "Hel" == last["response"]["output"][0]["content"][0]["text"]
    for event in events:
        EVENT.validate_python(event)


def test_a_background_response_is_queued_first() -> None:
    """Created and queued, then in progress; cancelled, it ends as incomplete with that status."""
    one = writer(status="queued", background=True)
    events = round_trip([*one.created(), *one.in_progress(), *one.add([TextDelta("a")]), *one.cancel()])

    assert ["created", "queued", "in_progress"] == [event["type"].split(".")[1] for event in events[:3]]
    assert ["queued", "queued", "in_progress"] == [event["response"]["status"] for event in events[:3]]
    assert ("response.incomplete", "cancelled") == (events[-1]["type"], events[-1]["response"]["status"])
    accumulate(events)


def test_the_response_can_be_read_during_the_generation() -> None:
    """With the text so far."""
    one = writer()
    round_trip([*one.created(), *one.in_progress(), *one.add([ReasoningDelta("Hm"), TextDelta("Hel")])])

    output: Any = one.response["output"]
    assert [("completed", "Hm"), ("in_progress", "Hel")] == [
        (item["status"], item["content"][0]["text"]) for item in output
    ]


@pytest.mark.parametrize("sealed", [True, False])
def test_encrypted_reasoning_is_optional(sealed: bool) -> None:
    """It equals the plain reasoning."""
    item = response_events([ReasoningDelta("I see.")], writer(sealed=sealed))[-1]["response"]["output"][0]

    assert sealed == ("encrypted_content" in item)
    assert not sealed or "I see." == decode_content(item["encrypted_content"])


def test_logprobs_go_with_the_text() -> None:
    """In deltas and in the item; never with reasoning."""
    entry: Any = {"token": "Hel", "logprob": -0.5, "bytes": [72], "top_logprobs": []}
    one = writer()
    spoken = [*one.add([ReasoningDelta("Hm")], [{**entry, "token": "Hm"}]), *one.add([TextDelta("Hel")], [entry])]
    events = round_trip([*one.created(), *one.in_progress(), *spoken, *one.finish("completed", USAGE)])

    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [[entry]] == [event["logprobs"] for event in deltas]
    assert [entry] == events[-1]["response"]["output"][1]["content"][0]["logprobs"]


def test_logprobs_are_held_back_with_their_text() -> None:
    """The next token decides whether held-back text is shown."""
    first, second = ({"token": token, "logprob": -0.5, "bytes": [60], "top_logprobs": []} for token in "<b")
    one = writer()
    events = round_trip(
        [*one.created(), *one.in_progress(), *one.add([], [first]), *one.add([TextDelta("<b")], [second])]
    )  # type: ignore[list-item]

    assert [first, second] == events[-1]["logprobs"]


def test_the_first_event_is_a_response_of_openais_type() -> None:
    """Validated strictly, with every required field."""
    assert Response.model_validate(round_trip(writer().created())[0]["response"])
