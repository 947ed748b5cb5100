"""Translation of Responses requests to chat completions, and of field names in chat errors back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import ValidationError

from engine.errors import EngineError
from server.generation.error_fields import warnings_with_client_field_names, with_client_field_names
from server.http.errors import ApiError, invalid_value, missing_parameter
from server.responses.messages import chat_messages
from server.schemas.chat import ChatRequest
from server.schemas.response_input import InputItem
from server.schemas.responses import (
    AllowedFunctions,
    CustomChoice,
    FunctionChoice,
    GrammarFormat,
    NamespaceTool,
    PromptFields,
    ResponseCustomTool,
    ResponseFunctionTool,
    ResponseRequest,
    SchemaFormat,
    TextConfig,
    plain,
)

# Fields with the same name and meaning in both APIs.
SHARED_FIELDS = (
    "cache_salt",
    "frequency_penalty",
    "ignore_eos",
    "metadata",
    "min_p",
    "presence_penalty",
    "prompt_cache_key",
    "prompt_cache_options",
    "repetition_penalty",
    "safety_identifier",
    "seed",
    "service_tier",
    "speculation",
    "stop",
    "temperature",
    "timeout",
    "top_k",
    "top_p",
    "user",
)
# Field names of a chat and of a response. Positions in messages are dropped: items are merged into messages, and the
# conversation history precedes them.
FIELD_NAMES = {
    r"messages.*|prompt": "input",
    r"max_completion_tokens|max_tokens": "max_output_tokens",
    r"reasoning_effort": "reasoning.effort",
    r"response_format(\.json_schema)?(.*)": r"text.format\2",
    r"(tools\[\d+\])\.(?:function|custom)(.*)": r"\1\2",
    r"tool_choice(\.allowed_tools)?(\.tools\[\d+\])?(?:\.(?:function|custom))?\.name": r"tool_choice\2.name",
    r"verbosity": "text.verbosity",
}
_PATH = "/v1/responses"


def chat_request(body: PromptFields, model: str, items: Sequence[InputItem], history: int = 0) -> ChatRequest:
    """The chat request for the whole conversation `items`; ApiError if a chat cannot express it.

    history  leading items that are not of the body's input
    """
    conversation = chat_messages(body.instructions, items, history)
    if not conversation:
        raise missing_parameter("input")
    fields = {"model": model, "messages": conversation, **_prompt_fields(body)}
    if isinstance(body, ResponseRequest):
        fields.update(_generation_fields(body))
    try:
        return ChatRequest.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        raise invalid_value("input", error.errors()[0]["msg"]) from error


def single_tools(
    tools: Sequence[ResponseFunctionTool | ResponseCustomTool | NamespaceTool],
) -> Iterator[ResponseFunctionTool | ResponseCustomTool]:
    """The tools, and those of namespaces."""
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            yield from tool.tools
        else:
            yield tool


def renamed_error(error: ApiError | EngineError) -> ApiError:
    """An error of the chat with the field names of this API."""
    return with_client_field_names(error, _PATH, FIELD_NAMES)


def client_warnings(warnings: Sequence[str]) -> tuple[str, ...]:
    """Warnings of the chat with the field names of this API."""
    return warnings_with_client_field_names(warnings, FIELD_NAMES)


def _prompt_fields(body: PromptFields) -> dict[str, object]:
    text, reasoning = body.text or TextConfig(), body.reasoning
    return {
        "tools": [_tool(tool) for tool in single_tools(body.tools)] if body.tools else None,
        "tool_choice": _choice(body),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _format(text),
        "verbosity": text.verbosity,
        "reasoning_effort": None if reasoning is None else reasoning.effort,
        "chat_template_kwargs": body.chat_template_kwargs,
    }


def _generation_fields(body: ResponseRequest) -> dict[str, object]:
    with_logprobs = body.includes("message.output_text.logprobs") or bool(body.top_logprobs)
    return {
        **{name: getattr(body, name) for name in SHARED_FIELDS},
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": with_logprobs or None,
        "top_logprobs": body.top_logprobs if with_logprobs else None,
    }


def _tool(tool: ResponseFunctionTool | ResponseCustomTool) -> dict[str, object]:
    if isinstance(tool, ResponseCustomTool):
        custom = {"name": tool.name, "description": tool.description, "format": _input_format(tool)}
        return {"type": "custom", "custom": custom}
    named = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    # OpenAI's default is strict in this API, but not in chats.
    return {"type": "function", "function": {**named, "strict": tool.strict is not False}}


def _choice(body: PromptFields) -> object:
    match body.tool_choice:
        case FunctionChoice() | CustomChoice():
            return _named_tool(body.tool_choice)
        case AllowedFunctions(mode=mode, tools=tools):
            named = [_named_tool(tool) for tool in tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    return body.tool_choice


def _named_tool(choice: FunctionChoice | CustomChoice) -> dict[str, object]:
    return {"type": choice.type, choice.type: {"name": choice.name}}


def _input_format(tool: ResponseCustomTool) -> object:
    if isinstance(tool.format, GrammarFormat):
        return {"type": "grammar", "grammar": {"syntax": tool.format.syntax, "definition": tool.format.definition}}
    return None if tool.format is None else plain(tool.format)


def _format(text: TextConfig) -> object:
    if isinstance(text.format, SchemaFormat):
        fields = plain(text.format)
        return {"type": fields.pop("type"), "json_schema": fields}
    return None if text.format is None else plain(text.format)
