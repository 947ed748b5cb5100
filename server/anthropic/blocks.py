"""Content blocks of an answer under construction, and their events."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from engine.chat_format.message import AnswerDelta, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from server.generation.arguments import read_arguments
from server.schemas.anthropic_answer import AnsweredBlock, AnsweredTool, AnthropicEvent

Kind = Literal["text", "thinking", "tool_use"]


class ContentBlocks:
    """Content blocks in the order of the answer.

    call_id  id of a tool call by its number
    """

    def __init__(self, call_id: Callable[[int], str]) -> None:
        self.content: list[AnsweredBlock] = []
        self._call_id = call_id
        self._open: Kind | None = None
        self._text: list[str] = []

    def push(self, deltas: Iterable[AnswerDelta]) -> Iterator[AnthropicEvent]:
        """Events of more deltas."""
        for delta in deltas:
            match delta:
                case TextDelta(text):
                    if self._open != "text":
                        yield from self._begin("text", {"type": "text", "text": "", "citations": None})
                    yield self._more(text, {"type": "text_delta", "text": text})
                case ReasoningDelta(text):
                    if self._open != "thinking":
                        yield from self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                    yield self._more(text, {"type": "thinking_delta", "thinking": text})
                case ToolCallStart(index, name):
                    block = AnsweredTool(type="tool_use", id=self._call_id(index), name=name, input={})
                    yield from self._begin("tool_use", block)
                case ToolCallDelta(_, text):
                    yield self._more(text, {"type": "input_json_delta", "partial_json": text})

    def stop(self) -> Iterator[AnthropicEvent]:
        """Events of the end of the current block, if any."""
        if self._open is None:
            return
        text = "".join(self._text)
        block = self.content[-1]
        if block["type"] == "text":
            block["text"] = text
        elif block["type"] == "thinking":
            block["thinking"], block["signature"] = text, _signature(text)
            yield self._more("", {"type": "signature_delta", "signature": block["signature"]})
        else:
            block["input"] = read_arguments(text)
        yield AnthropicEvent(type="content_block_stop", index=self._index)
        self._open = None

    @property
    def _index(self) -> int:
        return len(self.content) - 1

    def _begin(self, kind: Kind, empty: AnsweredBlock) -> Iterator[AnthropicEvent]:
        yield from self.stop()
        self._open, self._text = kind, []
        self.content.append(empty.copy())
        yield AnthropicEvent(type="content_block_start", index=self._index, content_block=empty)

    def _more(self, text: str, delta: Any) -> AnthropicEvent:
        self._text.append(text)
        return AnthropicEvent(type="content_block_delta", index=self._index, delta=delta)


def _signature(text: str) -> str:
    """Clients drop thinking without a signature. There is nothing to prove, so it is a digest."""
    return hashlib.sha256(text.encode()).hexdigest()
