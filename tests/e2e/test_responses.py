"""OpenAI's own client on /v1/responses, on the real server and the bundled model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from tests.e2e.serving import serving

MODEL = "cellar-tiny"
QUESTION = "What is Cellar?"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 64}
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
LASTING_SECONDS = 60


@contextmanager
def served(folder: Path) -> Iterator[openai.OpenAI]:
    """A client of a server with its store in `folder`."""
    flags = ["--context", "512", "--slots", "2", "--store", str(folder / "responses.sqlite")]
    with (
        (folder / "log").open("a") as log,
        serving(flags, log) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def client(bundled_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{bundled_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def whole(client: openai.OpenAI) -> Any:
    """The answer in one piece."""
    return client.responses.create(input=QUESTION, **GREEDY)


def test_a_stream_adds_up_to_the_answer(client: openai.OpenAI, whole: Any) -> None:
    """The helper's accumulator, which raises at events that cannot be, agrees with the answer in one piece."""
    options: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    with client.responses.stream(input=QUESTION, **GREEDY, **options) as stream:
        events = list(stream)
        final: Any = stream.get_final_response()

    assert list(range(len(events))) == [event.sequence_number for event in events]
    assert whole.output_text == final.output_text
    (content,) = final.output[0].content
    assert content.text == "".join(entry.token for entry in content.logprobs)
    assert [2] * len(content.logprobs) == [len(entry.top_logprobs) for entry in content.logprobs]


def test_a_conversation_goes_on_in_the_cache(client: openai.OpenAI, whole: Any) -> None:
    """The prompt of the second answer starts with the first one; its count equals the computed tokens."""
    second = client.responses.create(input="What is a slot?", previous_response_id=whole.id, **GREEDY)

    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= whole.usage.input_tokens
    assert whole.usage.input_tokens == client.responses.input_tokens.count(model=MODEL, input=QUESTION).input_tokens
    roles = [item.role for item in client.responses.input_items.list(second.id, order="asc")]  # type: ignore[union-attr]
    assert ["user", "assistant", "user"] == roles


def test_a_tool_is_called_and_answered(client: openai.OpenAI) -> None:
    """The call is stored with the response, so its output alone is sent."""
    asked: Any = client.responses.create(
        input="What is the weather in Paris?", tools=[WEATHER], tool_choice="required", **GREEDY
    )
    (called,) = asked.output
    assert ("function_call", "get_weather", '{"city": "Paris"}') == (called.type, called.name, called.arguments)

    answer: Any = {"type": "function_call_output", "call_id": called.call_id, "output": '{"temperature": 21}'}
    reply = client.responses.create(input=[answer], previous_response_id=asked.id, tools=[WEATHER], **GREEDY)
    assert "21" in reply.output_text


def test_an_answer_is_parsed(client: openai.OpenAI) -> None:
    """A class of pydantic comes back as one of its values, whatever the model would rather have said."""

    class Person(pydantic.BaseModel):
        name: str
        age: int

    parsed = client.responses.parse(input="Extract: Anna is 31 years old.", text_format=Person, **GREEDY)

    assert isinstance(parsed.output_parsed, Person)


def test_a_background_response_needs_no_client(client: openai.OpenAI, whole: Any) -> None:
    """The same text, read when it is done, and streamed from any event on."""
    made = client.responses.create(input=QUESTION, background=True, **GREEDY)
    deadline = time.monotonic() + LASTING_SECONDS
    while (found := client.responses.retrieve(made.id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.02)

    assert ("completed", whole.output_text) == (found.status, found.output_text)
    events = list(client.responses.retrieve(made.id, stream=True))
    assert ["response.created", "response.queued", "response.in_progress"] == [event.type for event in events[:3]]
    assert events[5:] == list(client.responses.retrieve(made.id, stream=True, starting_after=4))


# openai 3.54 calls websockets in a way that 17.1 deprecates.
@pytest.mark.filterwarnings("ignore:connect:DeprecationWarning")
def test_a_websocket_answers_as_a_request_does(client: openai.OpenAI, whole: Any) -> None:
    """In turns on one connection: the same text, and a chain that no store knows."""
    with client.responses.connect() as connection:

        def turn(**asked: Any) -> Any:
            connection.response.create(store=False, **GREEDY, **asked)
            return next(event.response for event in connection if event.type == "response.completed")  # type: ignore[union-attr]

        first = turn(input=QUESTION)
        second = turn(input="Thank you", previous_response_id=first.id)

    alone = client.responses.create(
        input=[*_items(QUESTION, first), {"role": "user", "content": "Thank you"}], **GREEDY
    )
    assert (whole.output_text, alone.output_text) == (first.output_text, second.output_text)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_a_compacted_conversation_goes_on(client: openai.OpenAI, whole: Any) -> None:
    """What compaction gives is taken back in place of the conversation."""
    made = client.responses.compact(model=MODEL, input=_items(QUESTION, whole))
    asked: Any = [*(item.model_dump(exclude_none=True) for item in made.output), {"role": "user", "content": "Hello"}]

    assert ["compaction"] == [item.type for item in made.output]
    assert "completed" == client.responses.create(input=asked, **GREEDY).status


def _items(question: str, response: Any) -> Any:
    """A question and its answer, as a stateless client sends them back."""
    return [{"role": "user", "content": question}, *(item.model_dump(exclude_none=True) for item in response.output)]


def test_a_cancelled_response_is_over(client: openai.OpenAI) -> None:
    """And can be deleted, which is the end of it."""
    endless: Any = {"ignore_eos": True}
    long = client.responses.create(
        model=MODEL, input="Go on", background=True, max_output_tokens=400, extra_body=endless
    )

    assert "cancelled" == client.responses.cancel(long.id).status
    assert "cancelled" == client.responses.retrieve(long.id).status
    client.responses.delete(long.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(long.id)


@pytest.mark.slow
def test_responses_survive_a_restart(tmp_path: Path) -> None:
    """A second server goes on where the first one ended, and tells its events again."""
    with served(tmp_path) as client, client.responses.stream(input=QUESTION, **GREEDY) as stream:
        events = list(stream)
        first = stream.get_final_response()
    with served(tmp_path) as client:
        assert first.output_text == client.responses.retrieve(first.id).output_text
        again = client.responses.retrieve(first.id, stream=True, starting_after=4)
        assert [event.type for event in events[5:]] == [event.type for event in again]
        second = client.responses.create(input="Thank you", previous_response_id=first.id, **GREEDY)
        items: Any = client.responses.input_items.list(second.id, order="asc")
        assert ["user", "assistant", "user"] == [item.role for item in items]
