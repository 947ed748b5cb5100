"""Output items during the generation: each yields its events and can be converted to an item at any time."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from server.responses.encrypted_content import encode_content
from server.schemas.chat import ChatLogprob
from server.schemas.response_items import (
    CallItem,
    CustomCallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
)

# The fields of an event; its type determines them.
EventFields = dict[str, Any]


def new_id(prefix: str) -> str:
    """A random id."""
    return f"{prefix}_{uuid.uuid4().hex}"


class PartialItem(Protocol):
    """A message, a reasoning or a tool call during the generation."""

    id: str

    def item(self, status: ItemStatus) -> OutputItem:
        """The item with its current content."""

    def opening_events(self) -> Iterator[EventFields]:
        """The events after `response.output_item.added`."""

    def closing_events(self, status: ItemStatus) -> Iterator[EventFields]:
        """The events before `response.output_item.done`."""


@dataclass(slots=True)
class PartialMessage:
    """Text of the answer."""

    id: str = field(default_factory=lambda: new_id("msg"))
    text: list[str] = field(default_factory=list)
    logprobs: list[ChatLogprob] = field(default_factory=list)

    def item(self, status: ItemStatus) -> MessageItem:
        """The item with its current content."""
        content = [self._part()] if self.text or status != "in_progress" else []
        return MessageItem(id=self.id, type="message", status=status, role="assistant", content=content)

    def opening_events(self) -> Iterator[EventFields]:
        """The start of its only content part."""
        yield {"type": "response.content_part.added", "content_index": 0, "part": _output_text("", [])}

    def add(self, text: str, logprobs: Sequence[ChatLogprob]) -> Iterator[EventFields]:
        """A text delta."""
        self.text.append(text)
        self.logprobs.extend(logprobs)
        yield {"type": "response.output_text.delta", "content_index": 0, "delta": text, "logprobs": list(logprobs)}

    def closing_events(self, status: ItemStatus) -> Iterator[EventFields]:
        """The whole text, and the content part."""
        part = self._part()
        done = {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
        yield {"type": "response.output_text.done", **done}
        yield {"type": "response.content_part.done", "content_index": 0, "part": part}

    def _part(self) -> OutputText:
        return _output_text("".join(self.text), self.logprobs)


@dataclass(slots=True)
class PartialReasoning:
    """Reasoning text. `encrypted`: the item also has `encrypted_content`."""

    encrypted: bool
    id: str = field(default_factory=lambda: new_id("rs"))
    text: list[str] = field(default_factory=list)

    def item(self, status: ItemStatus) -> ReasoningItem:
        """The item with its current content."""
        text = "".join(self.text)
        content = [self._part(text)] if text or status != "in_progress" else []
        item = ReasoningItem(id=self.id, type="reasoning", status=status, summary=[], content=content)
        if self.encrypted and status != "in_progress":
            item["encrypted_content"] = encode_content(text)
        return item

    def opening_events(self) -> Iterator[EventFields]:
        """The start of its only content part."""
        yield {"type": "response.content_part.added", "content_index": 0, "part": self._part("")}

    def add(self, text: str) -> Iterator[EventFields]:
        """A text delta."""
        self.text.append(text)
        yield {"type": "response.reasoning_text.delta", "content_index": 0, "delta": text}

    def closing_events(self, status: ItemStatus) -> Iterator[EventFields]:
        """The whole text, and the content part."""
        text = "".join(self.text)
        yield {"type": "response.reasoning_text.done", "content_index": 0, "text": text}
        yield {"type": "response.content_part.done", "content_index": 0, "part": self._part(text)}

    def _part(self, text: str) -> Any:
        return {"type": "reasoning_text", "text": text}


@dataclass(slots=True)
class PartialCall:
    """A function call. `namespace`: the group of the function."""

    name: str
    namespace: str | None = None
    id: str = field(default_factory=lambda: new_id("fc"))
    call_id: str = field(default_factory=lambda: new_id("call"))
    arguments: list[str] = field(default_factory=list)

    def item(self, status: ItemStatus) -> CallItem:
        """The item with its current arguments."""
        item = CallItem(
            id=self.id,
            type="function_call",
            status=status,
            call_id=self.call_id,
            name=self.name,
            arguments="".join(self.arguments),
        )
        if self.namespace is not None:
            item["namespace"] = self.namespace
        return item

    def opening_events(self) -> Iterator[EventFields]:
        """No event: arguments are not a content part."""
        return iter(())

    def add(self, text: str) -> Iterator[EventFields]:
        """A delta of the arguments."""
        self.arguments.append(text)
        yield {"type": "response.function_call_arguments.delta", "delta": text}

    def closing_events(self, status: ItemStatus) -> Iterator[EventFields]:
        """All arguments; an empty object for a completed call without any."""
        if not self.arguments and status == "completed":
            yield from self.add("{}")
        yield {"type": "response.function_call_arguments.done", "arguments": "".join(self.arguments)}


@dataclass(slots=True)
class PartialCustomCall:
    """A call of a custom tool."""

    name: str
    id: str = field(default_factory=lambda: new_id("ctc"))
    call_id: str = field(default_factory=lambda: new_id("call"))
    input: list[str] = field(default_factory=list)

    def item(self, status: ItemStatus) -> CustomCallItem:
        """The item with its current input."""
        return CustomCallItem(
            id=self.id,
            type="custom_tool_call",
            status=status,
            call_id=self.call_id,
            name=self.name,
            input="".join(self.input),
        )

    def opening_events(self) -> Iterator[EventFields]:
        """No event: the input is not a content part."""
        return iter(())

    def add(self, text: str) -> Iterator[EventFields]:
        """A delta of the input."""
        self.input.append(text)
        yield {"type": "response.custom_tool_call_input.delta", "delta": text}

    def closing_events(self, status: ItemStatus) -> Iterator[EventFields]:
        """The whole input."""
        yield {"type": "response.custom_tool_call_input.done", "input": "".join(self.input)}


def _output_text(text: str, logprobs: Sequence[ChatLogprob]) -> OutputText:
    return OutputText(type="output_text", text=text, annotations=[], logprobs=list(logprobs))
