"""The events of one response, from the parsed pieces of an answer: deterministic except for random ids.

Events are numbered from 0, and every item has its complete sequence: added, parts, done. openai's accumulator raises
for any other sequence.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from engine.chat_format.message import AnswerDelta, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from server.responses.partial_items import (
    EventFields,
    PartialCall,
    PartialCustomCall,
    PartialItem,
    PartialMessage,
    PartialReasoning,
)
from server.schemas.chat import ChatLogprob
from server.schemas.response_items import (
    CacheDiagnostics,
    ItemStatus,
    OutputItem,
    ResponseBody,
    ResponseStatus,
    ResponseUsage,
)

FINAL_STATUSES = frozenset({"completed", "incomplete", "failed", "cancelled"})
# The last event by status. OpenAI has no event for a cancelled response.
FINAL_EVENTS = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "failed": "response.failed",
    "cancelled": "response.incomplete",
}


class ResponseWriter:
    """Makes the events of one response. `encrypted`: reasoning items have `encrypted_content`."""

    def __init__(self, response: ResponseBody, *, encrypted: bool = False) -> None:
        self._response, self._encrypted = response, encrypted
        self._namespaces = _namespaces(response["tools"])
        self._number = 0
        self._done: list[OutputItem] = []
        self._open_output: PartialItem | None = None
        self._pending_logprobs: list[ChatLogprob] = []

    @property
    def response(self) -> ResponseBody:
        """The current state of the response."""
        growing = [] if self._open_output is None else [self._open_output.item("in_progress")]
        return {**self._response, "output": [*self._done, *growing]}

    def created(self) -> Iterator[EventFields]:
        """The response exists; in the background it is queued."""
        yield self._lifecycle_event("response.created")
        if self._response["status"] == "queued":
            yield self._lifecycle_event("response.queued")

    def in_progress(self) -> Iterator[EventFields]:
        """The generation has started."""
        self._response["status"] = "in_progress"
        yield self._lifecycle_event("response.in_progress")

    def add(self, pieces: Iterable[AnswerDelta], logprobs: Sequence[ChatLogprob] = ()) -> Iterator[EventFields]:
        """The events of further pieces; log-probabilities belong to their text."""
        self._pending_logprobs.extend(logprobs)
        for piece in pieces:
            # Log-probabilities of held-back text precede the new ones; of reasoning and tool calls they are dropped.
            entries, self._pending_logprobs = self._pending_logprobs, []
            match piece:
                case TextDelta(text=text):
                    yield from self._add_text(text, entries)
                case ReasoningDelta(text=text):
                    yield from self._add_reasoning(text)
                case ToolCallStart(name=name, kind="custom"):
                    yield from self._open_item(PartialCustomCall(name))
                case ToolCallStart(name=name):
                    yield from self._open_item(PartialCall(name, self._namespaces.get(name)))
                case ToolCallDelta(text=text):
                    called = self._open_output
                    # Arguments follow the opening of their call.
                    assert isinstance(called, PartialCall | PartialCustomCall)
                    yield from self._item_events(called.add(text))

    def finish(
        self, status: ResponseStatus, usage: ResponseUsage, diagnostics: CacheDiagnostics | None = None
    ) -> Iterator[EventFields]:
        """The answer is complete (completed) or truncated (incomplete)."""
        whole = status == "completed"
        if not self._done and self._open_output is None:
            yield from self._open_item(PartialMessage())
        yield from self._close_item("completed" if whole else "incomplete")
        self._response["status"], self._response["usage"] = status, usage
        if diagnostics is not None:
            self._response["prompt_cache_diagnostics"] = diagnostics
        if whole:
            self._response["completed_at"] = int(time.time())
        else:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        yield self._lifecycle_event("response.completed" if whole else "response.incomplete")

    def not_stored(self, reason: str) -> Iterator[EventFields]:
        """A replacement of the last event: the response is final but could not be stored."""
        self._response["store"] = False
        self._response["warnings"] = [*self._response.get("warnings", []), reason]
        self._number -= 1
        yield self._lifecycle_event(FINAL_EVENTS[self._response["status"]])

    def cancel(self) -> Iterator[EventFields]:
        """The response is cancelled; its last event is `response.incomplete`, with status cancelled."""
        yield from self._close_item("incomplete")
        self._response["status"] = "cancelled"
        yield self._lifecycle_event("response.incomplete")

    def fail(self, error: dict[str, Any]) -> Iterator[EventFields]:
        """The generation failed; `error` is the content of the error envelope."""
        yield from self._close_item("incomplete")
        flat = {name: error.get(name) for name in ("code", "message", "param")}
        # The error flat, as OpenAI documents it, and nested, as OpenAI sends it.
        yield {"type": "error", "sequence_number": self._next_number(), **flat, "error": error}
        self._response["status"] = "failed"
        self._response["error"] = {"code": "server_error", "message": error["message"]}
        yield self._lifecycle_event("response.failed")

    def _add_text(self, text: str, logprobs: Sequence[ChatLogprob]) -> Iterator[EventFields]:
        if not isinstance(self._open_output, PartialMessage):
            yield from self._open_item(PartialMessage())
        assert isinstance(self._open_output, PartialMessage)
        yield from self._item_events(self._open_output.add(text, logprobs))

    def _add_reasoning(self, text: str) -> Iterator[EventFields]:
        if not isinstance(self._open_output, PartialReasoning):
            yield from self._open_item(PartialReasoning(self._encrypted))
        assert isinstance(self._open_output, PartialReasoning)
        yield from self._item_events(self._open_output.add(text))

    def _open_item(self, item: PartialItem) -> Iterator[EventFields]:
        yield from self._close_item("completed")
        self._open_output = item
        yield self._output_event({"type": "response.output_item.added", "item": item.item("in_progress")})
        yield from self._item_events(item.opening_events())

    def _close_item(self, status: ItemStatus) -> Iterator[EventFields]:
        if self._open_output is None:
            return
        yield from self._item_events(self._open_output.closing_events(status))
        whole = self._open_output.item(status)
        yield self._output_event({"type": "response.output_item.done", "item": whole})
        self._done.append(whole)
        self._open_output = None

    def _item_events(self, events: Iterable[EventFields]) -> Iterator[EventFields]:
        """The events of the open item."""
        assert self._open_output is not None
        id = self._open_output.id
        for event in events:
            yield self._output_event({**event, "item_id": id})

    def _output_event(self, event: EventFields) -> EventFields:
        return {**event, "output_index": len(self._done), "sequence_number": self._next_number()}

    def _lifecycle_event(self, kind: str) -> EventFields:
        return {"type": kind, "sequence_number": self._next_number(), "response": self.response}

    def _next_number(self) -> int:
        number = self._number
        self._number += 1
        return number


def _namespaces(tools: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The namespace of each function that has one, by the function's name."""
    return {function["name"]: tool["name"] for tool in tools for function in tool.get("tools", ())}
