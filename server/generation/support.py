"""Parameters of a chat that a model supports, by the variables of its chat template and by its chat format."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from engine.chat_format.chat_format import ChatFormat
from server.generation.reasoning import (
    NOT_IN_TEMPLATE,
    RequestedReasoning,
    ignored_reasoning_parameters,
    requested_reasoning,
)
from server.generation.tools import ToolSet, tool_set
from server.http.errors import ApiError, unsupported_parameter
from server.schemas.chat import ChatRequest


@dataclass(frozen=True, slots=True)
class SupportedRequest:
    """The supported part of a body.

    template_arguments  variables of the chat template; `chat_template_kwargs` has priority
    tool_set            tools that the model may call
    reasoning           the reasoning that it asks for
    missing             errors for unsupported parameters
    warnings            messages for ignored parameters
    """

    template_arguments: dict[str, object]
    tool_set: ToolSet
    reasoning: RequestedReasoning
    missing: tuple[ApiError, ...]
    warnings: tuple[str, ...] = ()


def supported_request(body: ChatRequest, chat_format: ChatFormat, template_names: Collection[str]) -> SupportedRequest:
    """The part of `body` that a model with this chat format and these template variables supports."""
    requested_tools, reasoning = tool_set(body), requested_reasoning(body)
    return SupportedRequest(
        template_arguments=_template_arguments(body, reasoning, template_names),
        tool_set=requested_tools if chat_format.supports_tool_calls else ToolSet(),
        reasoning=reasoning,
        missing=tuple(_missing(body, chat_format, template_names, requested_tools)),
        warnings=(*reasoning.warnings(chat_format, template_names), *_warnings(body, template_names)),
    )


def unsupported_parameters(chat_format: ChatFormat, template_names: Collection[str]) -> dict[str, str]:
    """Parameters that the model cannot honour, with the reason."""
    if chat_format.supports_tool_calls:
        return {}
    return dict.fromkeys(("tools", "functions"), "its chat template has no tool calls")


def ignored_parameters(chat_format: ChatFormat, template_names: Collection[str]) -> dict[str, str]:
    """Parameters that are accepted without effect, with the reason: clients send them to every model."""
    verbosity = {} if "verbosity" in template_names else {"verbosity": NOT_IN_TEMPLATE}
    return {**ignored_reasoning_parameters(chat_format, template_names), **verbosity}


def _missing(
    body: ChatRequest, chat_format: ChatFormat, template_names: Collection[str], requested_tools: ToolSet
) -> Iterator[ApiError]:
    requested = {"functions" if requested_tools.legacy else "tools": requested_tools.tools or None}
    for field, reason in unsupported_parameters(chat_format, template_names).items():
        if requested.get(field) is not None:
            yield unsupported_parameter(field, reason)


def _warnings(body: ChatRequest, template_names: Collection[str]) -> Iterator[str]:
    # "medium" is OpenAI's default.
    if body.verbosity not in (None, "medium") and "verbosity" not in template_names:
        yield unsupported_parameter("verbosity", NOT_IN_TEMPLATE).message


def _template_arguments(
    body: ChatRequest, reasoning: RequestedReasoning, template_names: Collection[str]
) -> dict[str, object]:
    arguments = reasoning.template_arguments(template_names)
    if body.verbosity is not None and "verbosity" in template_names:
        arguments["verbosity"] = body.verbosity
    return {**arguments, **(body.chat_template_kwargs or {})}
