"""Anthropic's response to a chat turn: one message, or its stream of events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from engine.types.events import Event, Finished, Started
from server.anthropic.blocks import ContentBlocks
from server.generation.chat_turn import ChatTurn, ChoiceDelta, ChoiceEnd, ChoiceEvent, ChoiceParser, parse_choices
from server.generation.usage import cache_write_tokens
from server.http.errors import check_deadline
from server.http.events import ChoiceEvents
from server.http.sse import named_frame
from server.http.stream_encoder import StreamEncoder
from server.schemas.anthropic_answer import AnsweredMessage, AnthropicUsage, MessageStop, StopReason


@dataclass(frozen=True, slots=True)
class AnthropicAnswer:
    """The answer to one request. `breakpoints`: the client sets cache breakpoints, so usage includes cache writes."""

    turn: ChatTurn
    breakpoints: bool

    async def response(self, events: ChoiceEvents) -> AnsweredMessage:
        """All events as one message."""
        message, blocks = self._empty(0), self.blocks()
        async for _, event in parse_choices(self.turn, events):
            if isinstance(event, ChoiceDelta):
                list(blocks.push(event.deltas))
            if isinstance(event, ChoiceEnd):
                check_deadline([event.finished])
                list(blocks.stop())
                message = {**message, **_stopping(event), "usage": self._usage(event.finished)}
        return {**message, "content": blocks.content}

    def encoder(self) -> StreamEncoder:
        """Encoder of the events of a stream."""
        return _EventEncoder(self)

    def events(self, parsed: ChoiceEvent, blocks: ContentBlocks) -> Iterator[Mapping[str, object]]:
        """Anthropic's events of one choice event; content blocks are started, extended and stopped."""
        match parsed:
            case Started():
                yield {"type": "message_start", "message": self._empty(parsed.cached_tokens)}
                yield {"type": "ping"}
            case ChoiceDelta():
                yield from blocks.push(parsed.deltas)
            case ChoiceEnd():
                check_deadline([parsed.finished])
                yield from blocks.stop()
                yield {
                    "type": "message_delta",
                    "delta": _stopping(parsed),
                    "usage": self._usage(parsed.finished),
                }

    def blocks(self) -> ContentBlocks:
        """Empty content blocks of the answer."""
        return ContentBlocks(partial(self.turn.call_id, 0))

    def _empty(self, cached: int) -> AnsweredMessage:
        return AnsweredMessage(
            id=self.turn.id,
            type="message",
            role="assistant",
            model=self.turn.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=AnthropicUsage(
                input_tokens=len(self.turn.requests[0].prompt) - cached,
                cache_creation_input_tokens=0,
                cache_read_input_tokens=cached,
                output_tokens=0,
            ),
        )

    def _usage(self, finished: Finished) -> AnthropicUsage:
        cost = finished.usage
        written = cache_write_tokens(finished) if self.breakpoints else 0
        return AnthropicUsage(
            input_tokens=cost.prompt_tokens - cost.cached_tokens - written,
            cache_creation_input_tokens=written,
            cache_read_input_tokens=cost.cached_tokens,
            output_tokens=cost.completion_tokens,
        )


class _EventEncoder:
    def __init__(self, answer: AnthropicAnswer) -> None:
        self._answer, self._parser, self._blocks = answer, ChoiceParser(answer.turn), answer.blocks()

    def encode(self, choice: int, event: Event) -> bytes:
        """Encode Anthropic's events for an engine event."""
        parsed = self._parser.parse(event)
        return b"".join([named_frame(body) for part in parsed for body in self._answer.events(part, self._blocks)])

    async def close(self) -> bytes:
        """The last event."""
        return named_frame({"type": "message_stop"})


def _stopping(end: ChoiceEnd) -> MessageStop:
    stop = end.finished.stop
    if end.reason == "stop" and isinstance(stop, str):
        return MessageStop(stop_reason="stop_sequence", stop_sequence=stop)
    reasons: Mapping[str, StopReason] = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
    return MessageStop(stop_reason=reasons[end.reason], stop_sequence=None)
