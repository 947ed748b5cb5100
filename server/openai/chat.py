"""Chat completions: a turn's choices as one answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from engine.types.events import Finished
from server.generation.fold import assembled
from server.generation.generation import tier
from server.generation.logprobs import Wording, chat_logprobs, prompt_logprobs
from server.generation.reply import Call, Reply, gather
from server.generation.spacing import spaced
from server.generation.turn import Turn
from server.generation.usage import timings, usage
from server.http.events import Events
from server.http.stream_encoder import Teller
from server.openai.chunks import ChatChunks, finish_reason
from server.openai.diagnostics import diagnose
from server.schemas.chat import AnsweredCall, AnswerMessage, ChatChoice, ChatCompletion, ChatRequest


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The answer to one request, in one piece or as chunks; both are made of the same pieces.

    warnings  of what the body asked for in vain
    """

    turn: Turn
    warnings: tuple[str, ...] = ()

    @property
    def body(self) -> ChatRequest:
        """What was asked for."""
        return self.turn.body

    async def whole(self, events: Events) -> ChatCompletion:
        """All events as one answer."""
        replies = await gather(self.turn, events)
        finished = [reply.ended.finished for reply in replies]
        answer = await assembled(sum(reply.scores for reply in replies), partial(self._answer, replies, finished))
        if self.body.return_cache_diagnostics:
            answer["prompt_cache_diagnostics"] = await diagnose(self.turn, finished[0])
        return answer

    def teller(self) -> Teller:
        """Tells the events as the chunks of a stream."""
        return spaced(ChatChunks(self.turn, self.warnings), self.body.stream_interval)

    def _answer(self, replies: Sequence[Reply], finished: Sequence[Finished]) -> ChatCompletion:
        answer = ChatCompletion(
            id=self.turn.id,
            object="chat.completion",
            created=self.turn.created,
            model=self.turn.model,
            choices=[self._choice(index, reply) for index, reply in enumerate(replies)],
            usage=usage([finished], sum(reply.ended.reasoning_tokens for reply in replies)),
            service_tier=tier(self.body),
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

    def _add_prompt(self, answer: ChatCompletion, first: Reply) -> None:
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = list(self.turn.requests[0].prompt)
        if first.scored is not None and self.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(first.scored.entries, self.body.prompt_logprobs)

    def _choice(self, index: int, reply: Reply) -> ChatChoice:
        wording = Wording.of(self.body, self.body.top_logprobs or 0)
        choice = ChatChoice(
            index=index,
            message=_message(reply, legacy=self.turn.offer.legacy),
            logprobs=chat_logprobs(reply.logprobs, wording) if self.body.logprobs else None,
            finish_reason=finish_reason(self.turn, reply.ended.reason),
            stop_reason=reply.ended.finished.stop,
        )
        if self.body.return_token_ids:
            choice["token_ids"] = [*reply.tokens, *reply.ended.finished.tokens]
        return choice


def _message(reply: Reply, *, legacy: bool) -> AnswerMessage:
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


def _call(call: Call) -> AnsweredCall:
    if call.kind == "custom":
        return AnsweredCall(id=call.id, type="custom", custom={"name": call.name, "input": call.arguments})
    return AnsweredCall(id=call.id, type="function", function={"name": call.name, "arguments": call.arguments})
