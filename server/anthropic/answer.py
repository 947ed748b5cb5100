"""A chat's answer as Anthropic's: one message, or the events of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from engine.types.events import Event, Finished, Started
from server.anthropic.blocks import Blocks
from server.generation.turn import Ended, Heard, Said, Turn, Voice, said
from server.generation.usage import written
from server.http.errors import check_deadline
from server.http.events import Events
from server.http.sse import named_frame
from server.http.stream_encoder import Teller
from server.schemas.anthropic_answer import AnsweredMessage, AnthropicUsage, Stopping, StopReason


@dataclass(frozen=True, slots=True)
class AnthropicAnswer:
    """The answer to one request. `breakpoints`: the client said what is worth keeping, and reads what was kept."""

    turn: Turn
    breakpoints: bool

    async def whole(self, events: Events) -> AnsweredMessage:
        """All events as one message."""
        message, blocks = self._empty(0), self.blocks()
        async for _, what in said(self.turn, events):
            if isinstance(what, Said):
                list(blocks.push(what.pieces))
            if isinstance(what, Ended):
                check_deadline([what.finished])
                list(blocks.stop())
                message = {**message, **_stopping(what), "usage": self._usage(what.finished)}
        return {**message, "content": blocks.content}

    def teller(self) -> Teller:
        """Tells the events in Anthropic's words."""
        return _Told(self)

    def events(self, heard: Heard, blocks: Blocks) -> Iterator[Mapping[str, object]]:
        """Each block begins, is told in pieces, and stops."""
        match heard:
            case Started():
                yield {"type": "message_start", "message": self._empty(heard.cached_tokens)}
                yield {"type": "ping"}
            case Said():
                yield from blocks.push(heard.pieces)
            case Ended():
                check_deadline([heard.finished])
                yield from blocks.stop()
                yield {"type": "message_delta", "delta": _stopping(heard), "usage": self._usage(heard.finished)}

    def blocks(self) -> Blocks:
        """Those of the answer, before anything is said."""
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


class _Told:
    def __init__(self, answer: AnthropicAnswer) -> None:
        self._answer, self._voice, self._blocks = answer, Voice(answer.turn), answer.blocks()

    def tell(self, choice: int, event: Event) -> bytes:
        """The events of what is heard."""
        heard = self._voice.hear(event)
        return b"".join([named_frame(told) for each in heard for told in self._answer.events(each, self._blocks)])

    async def close(self) -> bytes:
        """The last event."""
        return named_frame({"type": "message_stop"})


def _stopping(ended: Ended) -> Stopping:
    stop = ended.finished.stop
    if ended.reason == "stop" and isinstance(stop, str):
        return Stopping(stop_reason="stop_sequence", stop_sequence=stop)
    reasons: Mapping[str, StopReason] = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
    return Stopping(stop_reason=reasons[ended.reason], stop_sequence=None)
