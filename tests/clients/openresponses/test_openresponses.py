"""The 17 cases of the Open Responses compliance suite, rewritten.

The suite itself is TypeScript and in no package registry. The cases here have its names; its zod
schemas are replaced by the types that openresponses-types generates from the same OpenAPI document.
`python test_openresponses.py URL KEY MODEL` prints the outcome of each case.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openresponses_types.types as spec
import pytest
from pydantic import ValidationError
from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

PATIENCE_SECONDS = 60.0
TERMINAL = ("response.completed", "response.failed", "response.incomplete")
# One red pixel.
PIXEL = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQ"
    "GAhKmMIQAAAABJRU5ErkJggg=="
)
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a place",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}
EVENTS = {
    kind.model_fields["type"].annotation: kind
    for kind in vars(spec).values()
    if isinstance(kind, type) and kind.__name__.endswith("StreamingEvent")
}

Body = dict[str, Any]
Case = Callable[["Api"], None]
CASES: dict[str, Case] = {}


class Api:
    """A server, its key and its model."""

    def __init__(self, url: str, key: str, model: str) -> None:
        self.url, self.model = url.rstrip("/") + "/v1/responses", model
        self.headers = {"Authorization": f"Bearer {key}"}

    def post(self, body: Body, path: str = "", expected: tuple[int, ...] = (200,)) -> Body:
        """The JSON of an answer with one of the expected statuses."""
        answer = httpx.post(self.url + path, json=body, headers=self.headers, timeout=PATIENCE_SECONDS)
        assert answer.status_code in expected, f"HTTP {answer.status_code}: {answer.text[:300]}"
        return answer.json()

    def create(self, input: object, **more: object) -> Body:
        """A response that fits its schema, has output and is complete."""
        return whole(self.post({"model": self.model, "input": input, **more}))

    def stream(self, input: object, **more: object) -> list[Body]:
        """The events of a stream, each of which fits its schema."""
        body = {"model": self.model, "input": input, "stream": True, **more}
        with httpx.stream("POST", self.url, json=body, headers=self.headers, timeout=PATIENCE_SECONDS) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line.removeprefix("data:").strip() for line in answer.iter_lines() if line.startswith("data:")]
        events = [json.loads(line) for line in lines if line != "[DONE]"]
        for event in events:
            fits_event(event)
        return events

    @contextmanager
    def socket(self) -> Iterator[Socket]:
        """A WebSocket to the same URL."""
        url = self.url.replace("http", "ws", 1)
        with connect(url, additional_headers=self.headers, open_timeout=PATIENCE_SECONDS) as connection:
            yield Socket(connection, self.model)


class Socket:
    """One WebSocket connection."""

    def __init__(self, connection: ClientConnection, model: str) -> None:
        self._connection, self._model = connection, model

    def create(self, input: object, **more: object) -> Body:
        """The terminal event or the error event of a response; all events fit their schemas."""
        body = {"type": "response.create", "model": self._model, "input": input, **more}
        self._connection.send(json.dumps(body))
        while True:
            event = json.loads(self._connection.recv(PATIENCE_SECONDS))
            if event["type"] == "error":
                spec.WebSocketErrorEvent.model_validate(event)
                return event
            fits_event(event)
            if event["type"] in TERMINAL:
                return event

    def complete(self, input: object, **more: object) -> Body:
        """A response that is complete."""
        event = self.create(input, store=False, **more)
        assert event["type"] == "response.completed", event
        return whole(event["response"])

    def rejected_tokens(self, input: object, code: str | None = None, **more: object) -> None:
        """An error, of this code if one is given."""
        event = self.create(input, store=False, **more)
        found = event.get("error") or event["response"]["error"]
        assert found is not None, event
        assert code in (None, found["code"]), event


def whole(response: Body) -> Body:
    """The response, checked."""
    spec.ResponseResource.model_validate(response)
    assert response["output"], "no output"
    assert response["status"] == "completed", response["status"]
    return response


def fits_event(event: Body) -> None:
    """Check an event against all shapes that its type has."""
    shapes = [shape for names, shape in EVENTS.items() if event["type"] in {str(name) for name in kinds(names)}]
    assert shapes, f"no event of the specification has the type {event['type']}"
    shapes[0].model_validate(event)


def kinds(names: Any) -> Any:
    """The values of an enumeration or a literal."""
    return getattr(names, "__args__", None) or list(names)


def message_item(role: str, text: str, **more: object) -> Body:
    """A message."""
    return {"type": "message", "role": role, "content": text, **more}


def case(name: str) -> Callable[[Case], Case]:
    """Register a case under its name in the suite."""

    def add(run: Case) -> Case:
        CASES[name] = run
        return run

    return add


@case("basic-response")
def _basic(api: Api) -> None:
    api.create([message_item("user", "Greet me in three words.")])


@case("assistant-phase")
def _phase(api: Api) -> None:
    history = [
        message_item("assistant", "Let me look.", phase="commentary"),
        message_item("assistant", "Four.", phase="final_answer"),
    ]
    api.create([*history, message_item("user", "Say the number again.")])


@case("response-output-phase-schema")
def _phase_schema(api: Api) -> None:
    """No request: the schema takes phases in an output. Ours stands in for the response that the suite has made up."""
    answer = api.create("Hello")
    for phase in ("commentary", "final_answer"):
        spec.ResponseResource.model_validate({**answer, "output": [{**answer["output"][-1], "phase": phase}]})


@case("streaming-response")
def _streaming(api: Api) -> None:
    events = api.stream([message_item("user", "Count from 1 to 5.")])
    whole(events[-1]["response"])


@case("system-prompt")
def _system(api: Api) -> None:
    api.create([message_item("system", "You are a pirate and talk like one."), message_item("user", "Say hello.")])


@case("tool-calling")
def _tool(api: Api) -> None:
    question = [message_item("user", "What's the weather like in San Francisco?")]
    response = api.create(question, tools=[WEATHER])
    assert "function_call" in [item["type"] for item in response["output"]], response["output"]


@case("image-input")
def _image(api: Api) -> None:
    parts = [{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": PIXEL}]
    api.create([{"type": "message", "role": "user", "content": parts}])


@case("multi-turn")
def _turns(api: Api) -> None:
    api.create(
        [
            message_item("user", "I am Alice."),
            message_item("assistant", "Hello Alice!"),
            message_item("user", "What is my name?"),
        ]
    )


@case("compact-response")
def _compact(api: Api) -> None:
    talk = [
        message_item("user", "The launch is on Tuesday; support hears of it first."),
        message_item("assistant", "Understood."),
    ]
    answer = api.post({"model": api.model, "prompt_cache_key": "compact", "input": talk}, "/compact")
    spec.CompactResource.model_validate(answer)
    assert answer["object"] == "response.compaction"
    assert "compaction" in [item["type"] for item in answer["output"]]


@case("compact-missing-model")
def _compact_nobody(api: Api) -> None:
    api.post({"input": [message_item("user", "Compact this.")]}, "/compact", expected=(400, 422))


@case("websocket-response")
def _socket(api: Api) -> None:
    with api.socket() as socket:
        event = socket.create([message_item("user", "Count from 1 to 3.")])
        whole(event["response"])


@case("websocket-sequential-responses")
def _sequence(api: Api) -> None:
    with api.socket() as socket:
        for word in ("first", "second"):
            socket.complete(f"Reply with the word {word}")


@case("websocket-continuation")
def _continuation(api: Api) -> None:
    with api.socket() as socket:
        first = socket.complete("The code word is cobalt. Reply with OK.")
        second = socket.complete("What is the code word?", previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"]


@case("websocket-reconnect-store-false-recovery")
def _recovery(api: Api) -> None:
    with api.socket() as socket:
        first = socket.complete("The code word is copper. Reply with OK.")
    with api.socket() as socket:
        socket.rejected_tokens("Go on.", "previous_response_not_found", previous_response_id=first["id"])
        socket.complete([message_item("user", "Then begin anew.")])


@case("websocket-previous-response-not-found")
def _missing(api: Api) -> None:
    with api.socket() as socket:
        socket.rejected_tokens("Go on.", "previous_response_not_found", previous_response_id=f"resp_{time.time_ns()}")


@case("websocket-failed-continuation-evicts-cache")
def _eviction(api: Api) -> None:
    with api.socket() as socket:
        first = socket.complete("The code word is ember. Reply with OK.")
        orphan = {"type": "function_call_output", "call_id": "call_of_nobody", "output": "nothing called this"}
        socket.rejected_tokens([orphan], previous_response_id=first["id"])
        socket.rejected_tokens("Go on.", "previous_response_not_found", previous_response_id=first["id"])


@case("websocket-compact-new-chain")
def _compacted(api: Api) -> None:
    talk = [
        message_item("user", "The code word is slate."),
        message_item("assistant", "OK."),
        message_item("user", "Keep that in mind."),
    ]
    output = api.post({"model": api.model, "input": talk}, "/compact")["output"]
    with api.socket() as socket:
        socket.complete([*output, message_item("user", "Go on.")], tools=[])


# Needs a model that sees.
SEEING = ("image-input",)


@pytest.mark.parametrize("name", [name for name in CASES if name not in SEEING])
def test_open_responses(server: Any, name: str) -> None:
    """A case of the suite."""
    CASES[name](Api(server.url, server.key, server.model))


def test_open_responses_images_are_refused(server: Any) -> None:
    """The case that a model without eyes cannot pass ends in an error that says so."""
    with pytest.raises(AssertionError, match="HTTP 400.*reads text only"):
        CASES[SEEING[0]](Api(server.url, server.key, server.model))


def main(url: str, key: str, model: str) -> int:
    """Print the outcome of each case; the number of failed ones."""
    api, failed = Api(url, key, model), 0
    for name, run in CASES.items():
        try:
            run(api)
            outcome = "pass"
        except (AssertionError, ValidationError, OSError, httpx.HTTPError, WebSocketException, KeyError) as error:
            outcome, failed = f"FAIL  {' '.join(str(error).split())[:200]}", failed + 1
        print(f"{name:45} {outcome}")
    print(f"{len(CASES) - failed} of {len(CASES)}")
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
