"""Parameters of a chat that a model supports, by the variables of its chat template and by its chat format."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from engine.chat_format.chat_format import ChatFormat
from server.generation.tools import ToolSet, tool_set
from server.http.errors import ApiError, unsupported_parameter
from server.schemas.chat import ChatRequest

# Variables of chat templates that switch reasoning on and off.
REASONING_SWITCHES = ("enable_thinking", "thinking")
REASONING_BUDGETS = ("thinking_token_budget", "thinking_budget_tokens")
NOT_IN_TEMPLATE = "its chat template does not read it"


@dataclass(frozen=True, slots=True)
class SupportedRequest:
    """The supported part of a body.

    template_arguments  variables of the chat template; `chat_template_kwargs` has priority
    tool_set            tools that the model may call
    reasoning_budget    limit of reasoning tokens; None: unlimited
    missing             errors for unsupported parameters
    warnings            messages for ignored parameters
    """

    template_arguments: dict[str, object]
    tool_set: ToolSet
    reasoning_budget: int | None
    missing: tuple[ApiError, ...]
    warnings: tuple[str, ...] = ()


def supported_request(body: ChatRequest, chat_format: ChatFormat, template_names: Collection[str]) -> SupportedRequest:
    """The part of `body` that a model with this chat format and these template variables supports."""
    requested_tools = tool_set(body)
    return SupportedRequest(
        template_arguments=_template_arguments(body, template_names),
        tool_set=requested_tools if chat_format.supports_tool_calls else ToolSet(),
        reasoning_budget=_budget(body)[1] if chat_format.supports_reasoning else None,
        missing=tuple(_missing(body, chat_format, template_names, requested_tools)),
        warnings=tuple(_warnings(body, chat_format, template_names)),
    )


def unsupported_parameters(chat_format: ChatFormat, template_names: Collection[str]) -> dict[str, str]:
    """Parameters that the model cannot honour, with the reason."""
    if chat_format.supports_tool_calls:
        return {}
    return dict.fromkeys(("tools", "functions"), "its chat template has no tool calls")


def ignored_parameters(chat_format: ChatFormat, template_names: Collection[str]) -> dict[str, str]:
    """Parameters that are accepted without effect, with the reason: clients send them to every model."""
    effort = (
        {} if {"reasoning_effort", *REASONING_SWITCHES} & set(template_names) else {"reasoning_effort": NOT_IN_TEMPLATE}
    )
    budget = {} if chat_format.supports_reasoning else dict.fromkeys(REASONING_BUDGETS, "it writes no reasoning")
    verbosity = {} if "verbosity" in template_names else {"verbosity": NOT_IN_TEMPLATE}
    return {**effort, **budget, **verbosity}


def _missing(
    body: ChatRequest, chat_format: ChatFormat, template_names: Collection[str], requested_tools: ToolSet
) -> Iterator[ApiError]:
    requested = {"functions" if requested_tools.legacy else "tools": requested_tools.tools or None}
    for field, reason in unsupported_parameters(chat_format, template_names).items():
        if requested.get(field) is not None:
            yield unsupported_parameter(field, reason)


def _warnings(body: ChatRequest, chat_format: ChatFormat, template_names: Collection[str]) -> Iterator[str]:
    # Without reasoning, effort "none" and a budget of 0 are satisfied already.
    effort = None if body.reasoning_effort == "none" and not chat_format.supports_reasoning else body.reasoning_effort
    # "medium" is OpenAI's default.
    verbosity = None if body.verbosity == "medium" else body.verbosity
    requested = {"reasoning_effort": effort, _budget(body)[0]: _budget(body)[1] or None, "verbosity": verbosity}
    for field, reason in ignored_parameters(chat_format, template_names).items():
        if requested.get(field) is not None:
            yield unsupported_parameter(field, reason).message


def _template_arguments(body: ChatRequest, template_names: Collection[str]) -> dict[str, object]:
    arguments: dict[str, object] = {}
    if body.reasoning_effort is not None:
        with_reasoning = body.reasoning_effort != "none"
        arguments = {switch: with_reasoning for switch in REASONING_SWITCHES if switch in template_names}
        # If the template has a switch, "none" switches reasoning off and sets no effort.
        if "reasoning_effort" in template_names and (with_reasoning or not arguments):
            arguments["reasoning_effort"] = body.reasoning_effort
    if body.verbosity is not None and "verbosity" in template_names:
        arguments["verbosity"] = body.verbosity
    return {**arguments, **(body.chat_template_kwargs or {})}


def _budget(body: ChatRequest) -> tuple[str, int | None]:
    name = next((name for name in REASONING_BUDGETS if getattr(body, name) is not None), REASONING_BUDGETS[0])
    budget: int | None = getattr(body, name)
    return name, budget
