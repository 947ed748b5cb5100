"""The events of one response, from the pieces of an answer: a pure function of what it is given, but for random names.

Every event has a number, from 0 in steps of 1, and every item is told whole: added, its parts, done. openai's own
accumulator raises at anything else.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from engine.chat_format.message import CallArguments, CallOpened, Piece, Reasoning, Text
from server.responses.items import Growing, GrowingCall, GrowingCustomCall, GrowingMessage, GrowingReasoning, Told
from server.schemas.chat import ChatLogprob
from server.schemas.response_items import (
    CacheDiagnostics,
    ErrorEvent,
    ItemStatus,
    OutputItem,
    ResponseBody,
    ResponseEvent,
    ResponseStatus,
    ResponseUsage,
)

SETTLED = frozenset({"completed", "incomplete", "failed", "cancelled"})
# The last event of a response. There is none of the name of a response that was cancelled.
_LAST = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "failed": "response.failed",
    "cancelled": "response.incomplete",
}


class Writer:
    """Tells one response. `sealed`: reasoning is also given in the form that clients send back."""

    def __init__(self, response: ResponseBody, *, sealed: bool = False) -> None:
        self._response, self._sealed = response, sealed
        self._number = 0
        self._done: list[OutputItem] = []
        self._open: Growing | None = None
        self._waiting: list[ChatLogprob] = []

    @property
    def response(self) -> ResponseBody:
        """The response as it stands."""
        growing = [] if self._open is None else [self._open.item("in_progress")]
        return {**self._response, "output": [*self._done, *growing]}

    def begin(self) -> Iterator[ResponseEvent]:
        """The response is there; one in the background waits."""
        yield self._lifecycle("response.created")
        if self._response["status"] == "queued":
            yield self._lifecycle("response.queued")

    def start(self) -> Iterator[ResponseEvent]:
        """Work on it begins."""
        self._response["status"] = "in_progress"
        yield self._lifecycle("response.in_progress")

    def push(self, pieces: Iterable[Piece], logprobs: Sequence[ChatLogprob] = ()) -> Iterator[ResponseEvent]:
        """More of the answer; log-probabilities belong to its text."""
        self._waiting.extend(logprobs)
        for piece in pieces:
            # Those of a text that was held back come before it; those of anything else are told to nobody.
            entries, self._waiting = self._waiting, []
            match piece:
                case Text(text=text):
                    yield from self._say(text, entries)
                case Reasoning(text=text):
                    yield from self._reason(text)
                case CallOpened(name=name, kind="custom"):
                    yield from self._opening(GrowingCustomCall(name))
                case CallOpened(name=name):
                    yield from self._opening(GrowingCall(name))
                case CallArguments(text=text):
                    called = self._open
                    # They come behind the call that they belong to.
                    assert isinstance(called, GrowingCall | GrowingCustomCall)
                    yield from self._numbered(called.add(text))

    def end(
        self, status: ResponseStatus, usage: ResponseUsage, diagnostics: CacheDiagnostics | None = None
    ) -> Iterator[ResponseEvent]:
        """The answer is whole (completed), or was cut off (incomplete)."""
        whole = status == "completed"
        if not self._done and self._open is None:
            yield from self._opening(GrowingMessage())
        yield from self._closing("completed" if whole else "incomplete")
        self._response["status"], self._response["usage"] = status, usage
        if diagnostics is not None:
            self._response["prompt_cache_diagnostics"] = diagnostics
        if whole:
            self._response["completed_at"] = int(time.time())
        else:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        yield self._lifecycle("response.completed" if whole else "response.incomplete")

    def unkept(self, reason: str) -> Iterator[ResponseEvent]:
        """The last event once more, in place of the one told before: the response is over, and was not kept."""
        self._response["store"] = False
        self._response["warnings"] = [*self._response.get("warnings", []), reason]
        self._number -= 1
        yield self._lifecycle(_LAST[self._response["status"]])

    def cancel(self) -> Iterator[ResponseEvent]:
        """Nobody wants the rest. There is no event of this name: streams end as incomplete, with this status."""
        yield from self._closing("incomplete")
        self._response["status"] = "cancelled"
        yield self._lifecycle("response.incomplete")

    def fail(self, error: dict[str, Any]) -> Iterator[ResponseEvent]:
        """It broke; `error` is what stands in the envelope of an answer."""
        yield from self._closing("incomplete")
        flat = {name: error.get(name) for name in ("code", "message", "param")}
        told = {"type": "error", "sequence_number": self._next(), **flat, "error": error}
        yield cast(ErrorEvent, told)
        self._response["status"] = "failed"
        self._response["error"] = {"code": "server_error", "message": error["message"]}
        yield self._lifecycle("response.failed")

    def _say(self, text: str, logprobs: Sequence[ChatLogprob]) -> Iterator[ResponseEvent]:
        if not isinstance(self._open, GrowingMessage):
            yield from self._opening(GrowingMessage())
        assert isinstance(self._open, GrowingMessage)
        yield from self._numbered(self._open.add(text, logprobs))

    def _reason(self, text: str) -> Iterator[ResponseEvent]:
        if not isinstance(self._open, GrowingReasoning):
            yield from self._opening(GrowingReasoning(self._sealed))
        assert isinstance(self._open, GrowingReasoning)
        yield from self._numbered(self._open.add(text))

    def _opening(self, item: Growing) -> Iterator[ResponseEvent]:
        yield from self._closing("completed")
        self._open = item
        yield self._placed({"type": "response.output_item.added", "item": item.item("in_progress")})
        yield from self._numbered(item.opened())

    def _closing(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        if self._open is None:
            return
        yield from self._numbered(self._open.closed(status))
        whole = self._open.item(status)
        yield self._placed({"type": "response.output_item.done", "item": whole})
        self._done.append(whole)
        self._open = None

    def _numbered(self, told: Iterable[Told]) -> Iterator[ResponseEvent]:
        """Events of the open item."""
        assert self._open is not None
        id = self._open.id
        for event in told:
            yield self._placed({**event, "item_id": id})

    def _placed(self, told: Told) -> ResponseEvent:
        return cast(ResponseEvent, {**told, "output_index": len(self._done), "sequence_number": self._next()})

    def _lifecycle(self, kind: str) -> ResponseEvent:
        return cast(ResponseEvent, {"type": kind, "sequence_number": self._next(), "response": self.response})

    def _next(self) -> int:
        number = self._number
        self._number += 1
        return number
