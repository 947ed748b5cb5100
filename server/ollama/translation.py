"""Ollama's chat and generate: translates requests to chat requests, and the answer to Ollama's JSON lines."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel

from engine.chat_format.message import AnswerDelta, ReasoningDelta, TextDelta
from engine.errors import EngineError
from engine.types.events import Event, TokenLogprob
from server.generation.arguments import read_arguments
from server.generation.chat_turn import ChatTurn, ChoiceDelta, ChoiceEnd, ChoiceEvent, ChoiceParser
from server.generation.completed_message import CompletedToolCall as CompletedToolCall
from server.generation.completed_message import MessageBuilder, collect_messages
from server.generation.error_fields import warnings_with_client_field_names, with_client_field_names
from server.generation.jobs import EmbeddingResult
from server.generation.logprobs import LogprobFormat, chat_logprobs
from server.http.errors import OLLAMA_PREFIX, ApiError
from server.http.events import ChoiceEvents
from server.http.parsing import validated
from server.http.stream_encoder import StreamEncoder, json_line
from server.openai.embeddings import vector
from server.schemas.chat import ChatRequest
from server.schemas.completions import CompletionRequest
from server.schemas.media import InlineMedia, MediaPart
from server.schemas.ollama import (
    GenerateRequest,
    OllamaAnswerMessage,
    OllamaCall,
    OllamaChatRequest,
    OllamaEmbeddings,
    OllamaGenerationFields,
    OllamaLine,
    OllamaMessage,
    OllamaOptions,
    now,
)

Model = TypeVar("Model", bound=BaseModel)

_NANOSECONDS = 10**9
# Ollama's default of repeat_last_n.
REPEAT_LAST_N = 64
# Options with the same name and meaning in chat requests.
_SAME = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
)
# Messages and tools have the same names in both APIs.
_NAMES = {
    r"max_tokens": "options.num_predict",
    r"keep": "options.num_keep",
    r"repetition_penalty": "options.repeat_penalty",
    r"repeat_last_n": "options.repeat_last_n",
    r"overflow": "shift",
    rf"({'|'.join(_SAME)})(.*)": r"options.\1\2",
    r"response_format.*": "format",
    r"reasoning_effort|enable_thinking": "think",
}


def client_warnings(warnings: Sequence[str]) -> tuple[str, ...]:
    """Warnings of the chat with Ollama's field names."""
    return warnings_with_client_field_names(warnings, _NAMES)


def chat_body(body: OllamaChatRequest, model: str) -> ChatRequest:
    """The chat request for a body, with the model name of the response; ApiError if it cannot be translated."""
    fields = {"model": model, "messages": list(_messages(body.messages)), **_common(body), **_logprobs(body)}
    if body.tools:
        fields["tools"] = body.tools
    return _translated(ChatRequest, fields)


def generate_body(body: GenerateRequest, model: str, before: Sequence[OllamaMessage] = ()) -> ChatRequest:
    """The chat request for a prompt: the system prompt, the messages `before` and one user message."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": body.system}] if body.system else []
    messages += _messages(before)
    messages.append({"role": "user", "content": _content(body.prompt, body.images, "images")})
    return _translated(ChatRequest, {"model": model, "messages": messages, **_common(body), **_logprobs(body)})


def plain_body(body: GenerateRequest, model: str) -> CompletionRequest:
    """The completion request for a prompt without the chat template: `raw`, or with a suffix."""
    fields = {"model": model, "prompt": body.prompt, "suffix": body.suffix, **_common(body)}
    # Without a template, there is no reasoning to switch off.
    fields.pop("enable_thinking", None)
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    return _translated(CompletionRequest, fields)


def with_ollama_field_names(error: ApiError | EngineError) -> ApiError:
    """The error with Ollama's field names."""
    return with_client_field_names(error, OLLAMA_PREFIX, _NAMES)


@dataclass(frozen=True, slots=True)
class OllamaAnswer:
    """The answer to a chat or generate request, as one object or line by line.

    model     its name in the request
    warnings  ignored or partly enforced parameters
    """

    turn: ChatTurn
    model: str
    is_generate: bool
    warnings: tuple[str, ...] = ()
    started_at: float = field(default_factory=time.monotonic)

    async def response(self, events: ChoiceEvents) -> OllamaLine:
        """All events as one object."""
        [message] = await collect_messages(self.turn, events)
        line = self._with_content(self._last(message.ended), message.text, message.reasoning, message.calls)
        return self._with_logprobs(line, message.logprobs)

    def encoder(self) -> StreamEncoder:
        """Encoder of the lines of a stream."""
        return _LineEncoder(self)

    def delta_line(self, delta: ChoiceDelta) -> Iterator[OllamaLine]:
        text, thinking = (_joined(delta.deltas, kind) for kind in (TextDelta, ReasoningDelta))
        if text or thinking or (delta.logprobs and self.turn.body.logprobs):
            yield self._with_logprobs(self._with_content(self._line(), text, thinking), delta.logprobs)

    def final_lines(self, end: ChoiceEnd, builder: MessageBuilder) -> Iterator[OllamaLine]:
        """Complete tool calls, then the last line with usage and timings."""
        if builder.call_starts:
            yield self._with_content(self._line(), "", "", builder.calls(self.turn, 0))
        yield self._last(end)

    def _line(self) -> OllamaLine:
        return OllamaLine(model=self.model, created_at=now(), done=False)

    def _last(self, end: ChoiceEnd) -> OllamaLine:
        usage, times = end.finished.usage, end.finished.timings
        line = OllamaLine(
            model=self.model,
            created_at=now(),
            done=True,
            done_reason="length" if end.reason == "length" else "stop",
            total_duration=_duration(time.monotonic() - self.started_at),
            load_duration=0,
            prompt_eval_count=usage.prompt_tokens,
            prompt_eval_duration=_duration(times.prompt_seconds),
            eval_count=usage.completion_tokens,
            eval_duration=_duration(times.generation_seconds),
        )
        if self.warnings:
            line["warnings"] = list(self.warnings)
        return self._with_content(line, "", "")

    def _with_logprobs(self, line: OllamaLine, logprobs: Sequence[TokenLogprob]) -> OllamaLine:
        body = self.turn.body
        if body.logprobs:
            line["logprobs"] = chat_logprobs(logprobs, LogprobFormat(body.top_logprobs or 0))["content"]
        return line

    def _with_content(
        self, line: OllamaLine, text: str, thinking: str, calls: Sequence[CompletedToolCall] = ()
    ) -> OllamaLine:
        """The line with its content in the fields of the endpoint."""
        line = line.copy()
        if self.is_generate:
            line["response"] = text
            if thinking:
                line["thinking"] = thinking
            return line
        message = line["message"] = OllamaAnswerMessage(role="assistant", content=text)
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = [_tool_call(index, call) for index, call in enumerate(calls)]
        return line


class _LineEncoder:
    def __init__(self, answer: OllamaAnswer) -> None:
        self._answer, self._parser, self._message = answer, ChoiceParser(answer.turn), MessageBuilder()

    def encode(self, choice: int, event: Event) -> bytes:
        """Encode the lines of an event."""
        return b"".join([json_line(line) for parsed in self._parser.parse(event) for line in self._lines(parsed)])

    async def close(self) -> bytes:
        return b""

    def _lines(self, parsed: ChoiceEvent) -> Iterator[OllamaLine]:
        if isinstance(parsed, ChoiceDelta):
            self._message.add(parsed)
            yield from self._answer.delta_line(parsed)
        elif isinstance(parsed, ChoiceEnd):
            yield from self._answer.final_lines(parsed, self._message)


def embed_response(model: str, result: EmbeddingResult, dimensions: int | None, started_at: float) -> OllamaEmbeddings:
    """Ollama's response to an embed request."""
    return OllamaEmbeddings(
        model=model,
        embeddings=[list(vector(data, dimensions)) for data in result.vectors],
        total_duration=_duration(time.monotonic() - started_at),
        load_duration=0,
        prompt_eval_count=result.tokens,
    )


def _joined(deltas: Sequence[AnswerDelta], kind: type[TextDelta | ReasoningDelta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, kind))


def _tool_call(index: int, call: CompletedToolCall) -> OllamaCall:
    return OllamaCall(
        id=call.id, function={"index": index, "name": call.name, "arguments": read_arguments(call.arguments)}
    )


def _translated(model: type[Model], fields: dict[str, Any]) -> Model:
    try:
        return validated(model, fields)
    except ApiError as error:
        raise with_ollama_field_names(error) from error


def _common(body: OllamaGenerationFields) -> dict[str, Any]:
    fields: dict[str, Any] = {"stream": body.stream is not False, **_options(body.options or OllamaOptions())}
    match body.format:
        case None | "":
            pass
        case "json":
            fields["response_format"] = {"type": "json_object"}
        case schema:
            named = {"name": "format", "schema": schema, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": named}
    if body.shift is not None:
        fields["overflow"] = "shift" if body.shift else "length"
    match body.think:
        case None:
            pass
        case bool():
            fields["enable_thinking"] = body.think
        case effort:
            fields["reasoning_effort"] = effort
    return fields


def _logprobs(body: OllamaGenerationFields) -> dict[str, Any]:
    """Log-probabilities by the names of chat requests."""
    fields = {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs}
    return {name: value for name, value in fields.items() if value is not None}


def _options(options: OllamaOptions) -> dict[str, Any]:
    fields = {name: getattr(options, name) for name in _SAME}
    fields["repetition_penalty"] = options.repeat_penalty
    fields["repeat_last_n"] = REPEAT_LAST_N if options.repeat_last_n is None else options.repeat_last_n
    # -1: up to the end of the context; -2: until the context is full.
    fields["max_tokens"] = options.num_predict if (options.num_predict or 0) > 0 else None
    fields["keep"] = None if options.num_keep == -1 else options.num_keep
    return {name: value for name, value in fields.items() if value is not None}


def _messages(messages: Sequence[OllamaMessage]) -> Iterator[dict[str, Any]]:
    """OpenAI messages. Ollama's calls need no ids: a result belongs to the first call without a result."""
    open_calls: list[str] = []
    for index, message in enumerate(messages):
        content = _content(message.content, message.images, f"messages[{index}].images")
        converted: dict[str, Any] = {"role": message.role, "content": content}
        if message.thinking:
            converted["reasoning_content"] = message.thinking
        if message.tool_calls:
            ids = [call.id or f"call_{index}_{call_index}" for call_index, call in enumerate(message.tool_calls)]
            open_calls += ids
            converted["tool_calls"] = [
                {"id": id, "type": "function", "function": _function(call.function.name, call.function.arguments)}
                for id, call in zip(ids, message.tool_calls, strict=True)
            ]
        if message.role == "tool":
            converted["tool_call_id"] = message.tool_call_id or (open_calls.pop(0) if open_calls else f"call_{index}")
            if message.tool_name:
                converted["name"] = message.tool_name
        yield converted


def _content(text: str, images: Sequence[InlineMedia] | None, path: str) -> str | list[object]:
    """The text after its images."""
    if not images:
        return text
    parts = [MediaPart("image", image, "", field=f"{path}[{index}]") for index, image in enumerate(images)]
    return [*parts, {"type": "text", "text": text}] if text else [*parts]


def _function(name: str, arguments: Mapping[str, Any]) -> dict[str, str]:
    return {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}


def _duration(seconds: float) -> int:
    return round(seconds * _NANOSECONDS)
