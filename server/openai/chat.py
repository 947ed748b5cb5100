"""Chat completions: a turn's choices as one answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from engine.types.events import Finished
from server.generation.chat_turn import ChatTurn
from server.generation.choices import assembled
from server.generation.completed_message import CompletedMessage, ToolCall, collect_messages
from server.generation.logprobs import LogprobFormat, chat_logprobs, prompt_logprobs
from server.generation.requests import service_tier
from server.generation.stream_interval import with_interval
from server.generation.usage import timings, usage
from server.http.events import ChoiceEvents
from server.http.stream_encoder import StreamEncoder
from server.openai.chat_chunks import ChatChunkEncoder, finish_reason
from server.openai.diagnostics import cache_diagnostics
from server.schemas.chat import AnsweredCall, AnswerMessage, ChatChoice, ChatCompletion, ChatRequest


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The answer to one request, in one piece or as chunks; both are made of the same pieces.

    warnings  of what the body asked for in vain
    """

    turn: ChatTurn
    warnings: tuple[str, ...] = ()

    @property
    def body(self) -> ChatRequest:
        """What was asked for."""
        return self.turn.body

    async def response(self, events: ChoiceEvents) -> ChatCompletion:
        """All events as one answer."""
        replies = await collect_messages(self.turn, events)
        finished = [reply.ended.finished for reply in replies]
        answer = await assembled(sum(reply.scores for reply in replies), partial(self._answer, replies, finished))
        if self.body.return_cache_diagnostics:
            answer["prompt_cache_diagnostics"] = await cache_diagnostics(self.turn, finished[0])
        return answer

    def teller(self) -> StreamEncoder:
        """Tells the events as the chunks of a stream."""
        return with_interval(ChatChunkEncoder(self.turn, self.warnings), self.body.stream_interval)

    def _answer(self, replies: Sequence[CompletedMessage], finished: Sequence[Finished]) -> ChatCompletion:
        answer = ChatCompletion(
            id=self.turn.id,
            object="chat.completion",
            created=self.turn.created,
            model=self.turn.model,
            choices=[self._choice(index, reply) for index, reply in enumerate(replies)],
            usage=usage([finished], sum(reply.ended.reasoning_tokens for reply in replies)),
            service_tier=service_tier(self.body),
            system_fingerprint=self.turn.fingerprint,
        )
        # Those of several choices overlap and add up to nothing that was ever measured.
        if len(replies) == 1:
            answer["timings"] = timings(finished[0])
        self._add_prompt(answer, replies[0])
        if self.body.metadata is not None:
            answer["metadata"] = self.body.metadata
        if self.warnings:
            answer["warnings"] = list(self.warnings)
        return answer

    def _add_prompt(self, answer: ChatCompletion, first: CompletedMessage) -> None:
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = list(self.turn.requests[0].prompt)
        if first.scored is not None and self.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(first.scored.entries, self.body.prompt_logprobs)

    def _choice(self, index: int, reply: CompletedMessage) -> ChatChoice:
        wording = LogprobFormat.of(self.body, self.body.top_logprobs or 0)
        choice = ChatChoice(
            index=index,
            message=_message(reply, legacy=self.turn.tool_set.legacy),
            logprobs=chat_logprobs(reply.logprobs, wording) if self.body.logprobs else None,
            finish_reason=finish_reason(self.turn, reply.ended.reason),
            stop_reason=reply.ended.finished.stop,
        )
        if self.body.return_token_ids:
            choice["token_ids"] = [*reply.tokens, *reply.ended.finished.tokens]
        return choice


def _message(reply: CompletedMessage, *, legacy: bool) -> AnswerMessage:
    message = AnswerMessage(role="assistant", content=reply.text, refusal=None)
    if reply.reasoning:
        message["reasoning_content"] = message["reasoning"] = reply.reasoning
    if not reply.calls:
        return message
    # Nothing but calls: OpenAI says null there.
    message["content"] = reply.text or None
    if legacy:
        message["function_call"] = {"name": reply.calls[0].name, "arguments": reply.calls[0].arguments}
    else:
        message["tool_calls"] = [_call(call) for call in reply.calls]
    return message


def _call(call: ToolCall) -> AnsweredCall:
    if call.kind == "custom":
        return AnsweredCall(id=call.id, type="custom", custom={"name": call.name, "input": call.arguments})
    return AnsweredCall(id=call.id, type="function", function={"name": call.name, "arguments": call.arguments})
