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
from server.schemas.anthropic_answer import AnsweredMessage, AnthropicUsage, Stopping, StopReason


@dataclass(frozen=True, slots=True)
class AnthropicAnswer:
    """The answer to one request. `breakpoints`: the client sets cache breakpoints, so usage includes cache writes."""

    turn: ChatTurn
    breakpoints: bool

    async def response(self, events: ChoiceEvents) -> AnsweredMessage:
        """All events as one message."""
        message, blocks = self._empty(0), self.blocks()
        async for _, what in parse_choices(self.turn, events):
            if isinstance(what, ChoiceDelta):
                list(blocks.push(what.deltas))
            if isinstance(what, ChoiceEnd):
                check_deadline([what.finished])
                list(blocks.stop())
                message = {**message, **_stopping(what), "usage": self._usage(what.finished)}
        return {**message, "content": blocks.content}

    def encoder(self) -> StreamEncoder:
        """Encoder of the events of a stream."""
        return _EventEncoder(self)

    def events(self, choice_event: ChoiceEvent, blocks: ContentBlocks) -> Iterator[Mapping[str, object]]:
        """Anthropic's events of one choice event; content blocks are started, extended and stopped."""
        match choice_event:
            case Started():
                yield {"type": "message_start", "message": self._empty(choice_event.cached_tokens)}
                yield {"type": "ping"}
            case ChoiceDelta():
                yield from blocks.push(choice_event.deltas)
            case ChoiceEnd():
                check_deadline([choice_event.finished])
                yield from blocks.stop()
                yield {
                    "type": "message_delta",
                    "delta": _stopping(choice_event),
                    "usage": self._usage(choice_event.finished),
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
        kept = cache_write_tokens(finished) if self.breakpoints else 0
        return AnthropicUsage(
            input_tokens=cost.prompt_tokens - cost.cached_tokens - kept,
            cache_creation_input_tokens=kept,
            cache_read_input_tokens=cost.cached_tokens,
            output_tokens=cost.completion_tokens,
        )


class _EventEncoder:
    def __init__(self, answer: AnthropicAnswer) -> None:
        self._answer, self._parser, self._blocks = answer, ChoiceParser(answer.turn), answer.blocks()

    def encode(self, choice: int, event: Event) -> bytes:
        """Encode Anthropic's events for an engine event."""
        choice_event = self._parser.parse(event)
        return b"".join(
            [named_frame(told) for each in choice_event for told in self._answer.events(each, self._blocks)]
        )

    async def close(self) -> bytes:
        """The last event."""
        return named_frame({"type": "message_stop"})


def _stopping(ended: ChoiceEnd) -> Stopping:
    stop = ended.finished.stop
    if ended.reason == "stop" and isinstance(stop, str):
        return Stopping(stop_reason="stop_sequence", stop_sequence=stop)
    reasons: Mapping[str, StopReason] = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
    return Stopping(stop_reason=reasons[ended.reason], stop_sequence=None)
