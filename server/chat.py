"""Chat completions: messages to a prompt, events to one answer or to the chunks of a stream."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import anyio.to_thread

from engine.types import Delta, Finished, Rendering, Request, TokenLogprob
from server.errors import INVALID_VALUE, ApiError
from server.fold import Choice, fold
from server.generation import Events, prediction, request
from server.logprobs import chat_logprobs
from server.schemas.chat import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    ChunkChoice,
    Message,
    ToolCall,
)
from server.schemas.content import text_of
from server.service import Service
from server.usage import timings, usage


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The answer to one request, in one piece or as chunks; both are made of the same events."""

    id: str
    created: int
    model: str
    fingerprint: str
    body: ChatRequest

    async def whole(self, events: Events) -> ChatCompletion:
        """All events as one answer."""
        choices = await fold(events, 1)
        finished = choices[0].finished
        answer = ChatCompletion(
            id=self.id,
            object="chat.completion",
            created=self.created,
            model=self.model,
            choices=[self._choice(choices[0])],
            usage=usage([finished]),
            service_tier="default",
            system_fingerprint=self.fingerprint,
            timings=timings(finished),
        )
        if self.body.metadata is not None:
            answer["metadata"] = self.body.metadata
        return answer

    async def chunks(self, events: Events) -> AsyncGenerator[ChatChunk, None]:
        """The events as chunks: the role once, text, the end, and the usage if it was asked for."""
        begun = False
        async for _, event in events:
            if isinstance(event, Delta | Finished) and not begun:
                begun = True
                yield self._chunk({"role": "assistant", "content": ""})
            if isinstance(event, Delta) and (event.text or event.logprobs):
                yield self._chunk({"content": event.text}, self._logprobs(event.logprobs))
            if isinstance(event, Finished):
                yield self._last(event)
                if self.body.include_usage:
                    yield self._cost(event)

    def _choice(self, choice: Choice) -> ChatChoice:
        return ChatChoice(
            index=0,
            message={"role": "assistant", "content": choice.text, "refusal": None},
            logprobs=self._logprobs(choice.logprobs),
            finish_reason=choice.finished.reason,
            stop_reason=choice.finished.stop,
        )

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        return chat_logprobs(tokens) if self.body.logprobs else None

    def _last(self, finished: Finished) -> ChatChunk:
        chunk = self._chunk({})
        chunk["choices"][0]["finish_reason"] = finished.reason
        chunk["choices"][0]["stop_reason"] = finished.stop
        if not self.body.include_usage:
            chunk["timings"] = timings(finished)
        return chunk

    def _cost(self, finished: Finished) -> ChatChunk:
        chunk = self._frame([])
        chunk["usage"] = usage([finished])
        chunk["timings"] = timings(finished)
        return chunk

    def _chunk(self, delta: ChatDelta, logprobs: ChatLogprobs | None = None) -> ChatChunk:
        return self._frame([ChunkChoice(index=0, delta=delta, logprobs=logprobs, finish_reason=None)])

    def _frame(self, choices: list[ChunkChoice]) -> ChatChunk:
        chunk = ChatChunk(
            id=self.id,
            object="chat.completion.chunk",
            created=self.created,
            model=self.model,
            service_tier="default",
            system_fingerprint=self.fingerprint,
            choices=choices,
        )
        if self.body.include_usage:
            chunk["usage"] = None
        return chunk


async def chat_request(service: Service, body: ChatRequest, id: str) -> Request:
    """Check and render the body; raises what the client did wrong."""
    if body.top_logprobs and not body.logprobs:
        raise _invalid("top_logprobs", "it needs 'logprobs' to be true")
    for place, message in enumerate(body.messages):
        if message.content is None and message.role != "assistant":
            raise _invalid(f"messages[{place}].content", f"a message of the role '{message.role}' needs it")
    max_tokens = _max_tokens(body)
    prompt = await _render(service, body)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    expected = await prediction(service, body)
    return request(service, body, prompt, id=id, max_tokens=max_tokens, logprobs=logprobs, prediction=expected)


def _max_tokens(body: ChatRequest) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise _invalid("max_tokens", "it differs from 'max_completion_tokens'; give one of them")
    return old if new is None else new


async def _render(service: Service, body: ChatRequest) -> Rendering:
    continued = bool(body.continue_final_message)
    if continued and body.add_generation_prompt:
        raise _invalid("add_generation_prompt", "it cannot be true together with 'continue_final_message'")
    if continued and body.messages[-1].role != "assistant":
        raise _invalid("continue_final_message", "the last message is not one of the assistant")
    render = functools.partial(
        service.engine.tokenizer.render_chat,
        [_plain(message) for message in body.messages],
        add_generation_prompt=not continued and body.add_generation_prompt is not False,
        continue_final_message=continued,
        arguments=body.chat_template_kwargs,
    )
    return await anyio.to_thread.run_sync(render)


def _plain(message: Message) -> dict[str, object]:
    """A message as templates expect it: content as one string, and only the keys that are there."""
    # No template here knows the name that OpenAI gave the system role later.
    plain: dict[str, object] = {"role": "system" if message.role == "developer" else message.role}
    plain["content"] = _text(message)
    for key in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, key)
        if value is not None:
            plain[key] = value
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": _arguments(call)}}
            for call in message.tool_calls
        ]
    return plain


def _text(message: Message) -> str:
    return "" if message.content is None else text_of(message.content, "\n")


def _arguments(call: ToolCall) -> object:
    # Templates print arguments with tojson, which would escape a string a second time.
    try:
        return json.loads(call.function.arguments)
    except ValueError:
        return call.function.arguments


def _invalid(field: str, reason: str) -> ApiError:
    return ApiError(INVALID_VALUE, f"Invalid value for '{field}': {reason}.", param=field)
