"""Chat completions: the choices of a chat turn as one response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from engine.types.events import Finished
from server.generation.chat_turn import ChatTurn
from server.generation.choices import assembled
from server.generation.completed_message import CompletedMessage, CompletedToolCall, collect_messages
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
    """The answer to one chat completion request, as one object or as chunks.

    warnings  ignored or partly enforced parameters
    """

    turn: ChatTurn
    warnings: tuple[str, ...] = ()

    @property
    def body(self) -> ChatRequest:
        """The request body."""
        return self.turn.body

    async def response(self, events: ChoiceEvents) -> ChatCompletion:
        """All events as one response."""
        messages = await collect_messages(self.turn, events)
        finished = [completed.ended.finished for completed in messages]
        answer = await assembled(
            sum(completed.scores for completed in messages), partial(self._answer, messages, finished)
        )
        if self.body.return_cache_diagnostics:
            answer["prompt_cache_diagnostics"] = await cache_diagnostics(self.turn, finished[0])
        return answer

    def encoder(self) -> StreamEncoder:
        """Encoder of the chunks of a stream."""
        return with_interval(ChatChunkEncoder(self.turn, self.warnings), self.body.stream_interval)

    def _answer(self, messages: Sequence[CompletedMessage], finished: Sequence[Finished]) -> ChatCompletion:
        answer = ChatCompletion(
            id=self.turn.id,
            object="chat.completion",
            created=self.turn.created,
            model=self.turn.model,
            choices=[self._choice(index, completed) for index, completed in enumerate(messages)],
            usage=usage(
                [finished],
                sum(completed.ended.reasoning_tokens for completed in messages),
                self.turn.requests[0].contents,
            ),
            service_tier=service_tier(self.body),
            system_fingerprint=self.turn.fingerprint,
        )
        # Choices run concurrently: the sum of their times has no meaning.
        if len(messages) == 1:
            answer["timings"] = timings(finished[0])
        self._add_prompt(answer, messages[0])
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

    def _choice(self, index: int, completed: CompletedMessage) -> ChatChoice:
        logprob_format = LogprobFormat.of(self.body, self.body.top_logprobs or 0)
        choice = ChatChoice(
            index=index,
            message=_message(completed, legacy=self.turn.tool_set.legacy),
            logprobs=chat_logprobs(completed.logprobs, logprob_format) if self.body.logprobs else None,
            finish_reason=finish_reason(self.turn, completed.ended.reason),
            stop_reason=completed.ended.finished.stop,
        )
        if self.body.return_token_ids:
            choice["token_ids"] = [*completed.tokens, *completed.ended.finished.tokens]
        return choice


def _message(completed: CompletedMessage, *, legacy: bool) -> AnswerMessage:
    message = AnswerMessage(role="assistant", content=completed.text, refusal=None)
    if completed.reasoning:
        message["reasoning_content"] = message["reasoning"] = completed.reasoning
    if not completed.calls:
        return message
    # OpenAI: null if there are only tool calls.
    message["content"] = completed.text or None
    if legacy:
        message["function_call"] = {"name": completed.calls[0].name, "arguments": completed.calls[0].arguments}
    else:
        message["tool_calls"] = [_call(call) for call in completed.calls]
    return message


def _call(call: CompletedToolCall) -> AnsweredCall:
    if call.kind == "custom":
        return AnsweredCall(id=call.id, type="custom", custom={"name": call.name, "input": call.arguments})
    return AnsweredCall(id=call.id, type="function", function={"name": call.name, "arguments": call.arguments})
