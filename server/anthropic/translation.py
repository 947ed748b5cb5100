"""Translates Anthropic's requests to chat requests, and field names in errors back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from pydantic import ValidationError

from engine.errors import EngineError
from server.generation.error_fields import with_client_field_names
from server.http.errors import ANTHROPIC_PREFIX, ApiError, invalid_value
from server.schemas.anthropic import (
    AnthropicMessage,
    AnthropicTool,
    Base64Image,
    CacheableBlock,
    CountRequest,
    ImageAt,
    ImageBlock,
    ImageFile,
    MessagesRequest,
    NamedTool,
    TextBlock,
    ThinkingBlock,
    ToolMode,
    ToolResultBlock,
    ToolUseBlock,
)
from server.schemas.chat import ChatRequest
from server.schemas.content import Breakpoint
from server.schemas.media import FileId, InlineMedia, MediaPart, MediaSource

# Claude Code's system prompt has a line that differs in every request, and would end every cached prefix.
BILLING_HEADER = "x-anthropic-billing-header"
_NAMES = {
    # An image has its place in the request.
    r"(messages\[\d+\]\.content.*\.source\..*)": r"\1",
    r"prompt|messages.*": "messages",
    r"reasoning_effort": "output_config.effort",
    r"response_format.*": "output_config.format",
    r"stop(.*)": r"stop_sequences\1",
    r"(tools\[\d+\])\.function\.parameters(.*)": r"\1.input_schema\2",
    r"(tools\[\d+\]|tool_choice)\.function(.*)": r"\1\2",
}

Fields = dict[str, object]


def chat_request(body: CountRequest) -> ChatRequest:
    """The chat request for a body; ApiError if it cannot be translated."""
    fields: Fields = {
        "model": body.model,
        "messages": [
            *_system(body),
            *(
                converted
                for index, message in enumerate(body.messages)
                for converted in _messages(message, f"messages[{index}].content")
            ),
        ],
        "continue_final_message": _is_prefill(body) or None,
        "tools": [_tool(tool) for tool in body.tools] if body.tools else None,
        **_choice(body),
        **_thinking(body),
        **_output(body),
    }
    if isinstance(body, MessagesRequest):
        fields.update(_generating(body))
    try:
        return ChatRequest.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        raise invalid_value("messages", error.errors()[0]["msg"]) from error


def with_anthropic_field_names(error: ApiError | EngineError) -> ApiError:
    """The error with Anthropic's field names."""
    return with_client_field_names(error, ANTHROPIC_PREFIX, _NAMES)


def has_cache_control(body: CountRequest) -> bool:
    """Whether the client has set cache breakpoints."""
    system = [] if isinstance(body.system, str | None) else body.system
    blocks = [block for message in body.messages if not isinstance(message.content, str) for block in message.content]
    parts: Sequence[object] = [*system, *blocks, *(body.tools or ())]
    marked = any(isinstance(part, CacheableBlock) and part.cache_control is not None for part in parts)
    return marked or body.cache_control is not None


def _system(body: CountRequest) -> list[Fields]:
    """The system message, without the billing header, which would invalidate the prefix cache."""
    texts = [TextBlock(type="text", text=body.system)] if isinstance(body.system, str) else body.system or []
    parts = [_part(block.text, block) for block in texts if not block.text.startswith(BILLING_HEADER)]
    return [{"role": "system", "content": parts}] if parts else []


def _messages(message: AnthropicMessage, path: str) -> Iterator[Fields]:
    """Chat messages for one message: tool results are separate messages, before the user's text."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    blocks = list(enumerate(message.content))
    parts = [
        _content_part(block, f"{path}[{index}]") for index, block in blocks if isinstance(block, TextBlock | ImageBlock)
    ]
    calls = [_call(block) for block in message.content if isinstance(block, ToolUseBlock)]
    reasoning = [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]
    results = [
        _result(block, f"{path}[{index}].content") for index, block in blocks if isinstance(block, ToolResultBlock)
    ]
    yield from results
    converted: Fields = {"role": message.role, "content": parts or None}
    if reasoning:
        converted["reasoning_content"] = "\n".join(reasoning)
    if calls:
        converted["tool_calls"] = calls
    if parts or calls or reasoning or not results:
        yield converted


def _part(text: str, block: CacheableBlock) -> Fields:
    part: Fields = {"type": "text", "text": text}
    return part if block.cache_control is None else {**part, "prompt_cache_breakpoint": {"mode": "explicit"}}


def _content_part(block: TextBlock | ImageBlock, path: str) -> Fields | MediaPart:
    if isinstance(block, TextBlock):
        return _part(block.text, block)
    mark = None if block.cache_control is None else Breakpoint(mode="explicit")
    source, member = _source(block)
    return MediaPart("image", source, member, "auto", mark, f"{path}.{member}")


def _source(block: ImageBlock) -> tuple[MediaSource, str]:
    """The image, and the path of its field."""
    match block.source:
        case Base64Image(data=data, media_type=media_type):
            return InlineMedia(data.data, media_type, data.characters), "source.data"
        case ImageAt(url=url):
            return url, "source.url"
        case ImageFile(file_id=id):
            return FileId(id), "source.file_id"


def _result(block: ToolResultBlock, path: str) -> Fields:
    content = [TextBlock(type="text", text=block.content)] if isinstance(block.content, str) else block.content or []
    # Chat messages have no error flag.
    if block.is_error:
        content = [TextBlock(type="text", text="Error:"), *content]
    message: Fields = {"role": "tool", "tool_call_id": block.tool_use_id}
    if not any(isinstance(part, ImageBlock) for part in content):
        text = "\n".join(part.text for part in content if isinstance(part, TextBlock))
        return {**message, "content": [_part(text, block)]}
    first = 1 if block.is_error else 0
    parts = [_content_part(part, f"{path}[{index - first}]") for index, part in enumerate(content)]
    return {**message, "content": parts}


def _call(block: ToolUseBlock) -> Fields:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _is_prefill(body: CountRequest) -> bool:
    """Whether the last message is a prefill of the answer."""
    last = body.messages[-1]
    called = not isinstance(last.content, str) and any(isinstance(block, ToolUseBlock) for block in last.content)
    return last.role == "assistant" and not called


def _tool(tool: AnthropicTool) -> Fields:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {**function, "strict": tool.strict}}


def _choice(body: CountRequest) -> Fields:
    choice = body.tool_choice
    if choice is None:
        return {}
    parallel = None if choice.disable_parallel_tool_use is None else not choice.disable_parallel_tool_use
    match choice:
        case NamedTool(name=name):
            mode_or_tool: object = {"type": "function", "function": {"name": name}}
        case ToolMode(type=mode):
            mode_or_tool = "required" if mode == "any" else mode
    return {"tool_choice": mode_or_tool, "parallel_tool_calls": parallel}


def _thinking(body: CountRequest) -> Fields:
    return {} if body.thinking is None else {"thinking": body.thinking.model_dump()}


def _output(body: CountRequest) -> Fields:
    config = body.output_config
    if config is None:
        return {}
    format = config.format and {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": config.format.schema_},
    }
    return {"reasoning_effort": config.effort, "response_format": format}


def _generating(body: MessagesRequest) -> Fields:
    return {
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "user": body.metadata and body.metadata.user_id,
        "service_tier": "default" if body.service_tier == "standard_only" else None,
    }
