"""A chat's answer as Anthropic's: one message, or the events of one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from functools import partial

from engine.types import Finished, Started
from server.anthropic.blocks import Blocks
from server.errors import check_deadline
from server.schemas.anthropic_answer import AnsweredMessage, AnthropicUsage, Stopping, StopReason
from server.service import Events
from server.sse import Frames, framed, named_frame
from server.turn import Ended, Said, Turn, said
from server.usage import written


@dataclass(frozen=True, slots=True)
class AnthropicAnswer:
    """The answer to one request. `breakpoints`: the client said what is worth keeping, and reads what was kept."""

    turn: Turn
    breakpoints: bool

    async def whole(self, events: Events) -> AnsweredMessage:
        """All events as one message."""
        message, blocks = self._empty(0), self._blocks()
        async for _, what in said(self.turn, events):
            if isinstance(what, Said):
                list(blocks.push(what.pieces))
            if isinstance(what, Ended):
                check_deadline([what.finished])
                list(blocks.stop())
                message = {**message, **_stopping(what), "usage": self._usage(what.finished)}
        return {**message, "content": blocks.content}

    def frames(self, events: Events) -> Frames:
        """The events in Anthropic's words."""
        return framed(self._chunks(events), named_frame)

    async def _chunks(self, events: Events) -> AsyncGenerator[Mapping[str, object], None]:
        """Each block begins, is told in pieces, and stops."""
        blocks = self._blocks()
        async for _, what in said(self.turn, events):
            match what:
                case Started():
                    yield {"type": "message_start", "message": self._empty(what.cached_tokens)}
                    yield {"type": "ping"}
                case Said():
                    for event in blocks.push(what.pieces):
                        yield event
                case Ended():
                    check_deadline([what.finished])
                    for event in blocks.stop():
                        yield event
                    yield {"type": "message_delta", "delta": _stopping(what), "usage": self._usage(what.finished)}
        yield {"type": "message_stop"}

    def _blocks(self) -> Blocks:
        return Blocks(partial(self.turn.call_id, 0))

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
        kept = written(finished) if self.breakpoints else 0
        return AnthropicUsage(
            input_tokens=cost.prompt_tokens - cost.cached_tokens - kept,
            cache_creation_input_tokens=kept,
            cache_read_input_tokens=cost.cached_tokens,
            output_tokens=cost.completion_tokens,
        )


def _stopping(ended: Ended) -> Stopping:
    stop = ended.finished.stop
    if ended.reason == "stop" and isinstance(stop, str):
        return Stopping(stop_reason="stop_sequence", stop_sequence=stop)
    reasons: Mapping[str, StopReason] = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
    return Stopping(stop_reason=reasons[ended.reason], stop_sequence=None)
