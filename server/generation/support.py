"""What a model can do of what a body asks for: by the names that its chat template reads, and by its dialect."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from engine.chat_format.chat_format import ChatFormat
from server.generation.tools import ToolSet, tool_set
from server.http.errors import ApiError, unsupported_parameter
from server.schemas.chat import ChatRequest

# The names that templates have for whether the model thinks at all.
REASONING_SWITCHES = ("enable_thinking", "thinking")
REASONING_BUDGETS = ("thinking_token_budget", "thinking_budget_tokens")
NOT_IN_TEMPLATE = "its chat template does not read it"


@dataclass(frozen=True, slots=True)
class SupportedRequest:
    """A body, as far as the model can do it.

    template_arguments  of the template; what `chat_template_kwargs` says goes first
    tool_set      the tools that it may call
    reasoning_budget     of tokens to reason in; None: no limit
    missing    what it cannot do
    warnings   of what it was asked for and takes no notice of
    """

    template_arguments: dict[str, object]
    tool_set: ToolSet
    reasoning_budget: int | None
    missing: tuple[ApiError, ...]
    warnings: tuple[str, ...] = ()


def supported_request(body: ChatRequest, dialect: ChatFormat, template_names: Collection[str]) -> SupportedRequest:
    """What of the body a model can do that speaks `dialect`, and whose template reads the names `template_names`."""
    offered = tool_set(body)
    return SupportedRequest(
        template_arguments=_template_arguments(body, template_names),
        tool_set=offered if dialect.supports_tool_calls else ToolSet(),
        reasoning_budget=_budget(body)[1] if dialect.supports_reasoning else None,
        missing=tuple(_missing(body, dialect, template_names, offered)),
        warnings=tuple(_warnings(body, dialect, template_names)),
    )


def unsupported_parameters(dialect: ChatFormat, template_names: Collection[str]) -> dict[str, str]:
    """The parameters that a model cannot honour, and why."""
    verbosity = {} if "verbosity" in template_names else {"verbosity": NOT_IN_TEMPLATE}
    calls = (
        {} if dialect.supports_tool_calls else dict.fromkeys(("tools", "functions"), "its chat template has no calls")
    )
    return {**verbosity, **calls}


def ignored_parameters(dialect: ChatFormat, template_names: Collection[str]) -> dict[str, str]:
    """The parameters that are accepted and change nothing with a model, and why: clients send them with every model."""
    effort = (
        {} if {"reasoning_effort", *REASONING_SWITCHES} & set(template_names) else {"reasoning_effort": NOT_IN_TEMPLATE}
    )
    budget = {} if dialect.supports_reasoning else dict.fromkeys(REASONING_BUDGETS, "it writes no reasoning")
    return {**effort, **budget}


def _missing(body: ChatRequest, dialect: ChatFormat, named: Collection[str], offered: ToolSet) -> Iterator[ApiError]:
    # What OpenAI does unasked is no wish.
    verbosity = None if body.verbosity == "medium" else body.verbosity
    wishes = {
        "verbosity": verbosity,
        "functions" if offered.legacy else "tools": offered.tools or None,
    }
    for field, reason in unsupported_parameters(dialect, named).items():
        if wishes.get(field) is not None:
            yield unsupported_parameter(field, reason)


def _warnings(body: ChatRequest, dialect: ChatFormat, named: Collection[str]) -> Iterator[str]:
    # Where nothing is reasoned, neither no effort nor a budget of 0 asks for anything.
    effort = None if body.reasoning_effort == "none" and not dialect.supports_reasoning else body.reasoning_effort
    wishes = {"reasoning_effort": effort, _budget(body)[0]: _budget(body)[1] or None}
    for field, reason in ignored_parameters(dialect, named).items():
        if wishes.get(field) is not None:
            yield unsupported_parameter(field, reason).message


def _template_arguments(body: ChatRequest, named: Collection[str]) -> dict[str, object]:
    """The arguments of the template that reads the names `named`."""
    said: dict[str, object] = {}
    if body.reasoning_effort is not None:
        thinks = body.reasoning_effort != "none"
        said = {switch: thinks for switch in REASONING_SWITCHES if switch in named}
        # To a template with a switch, "none" is that and no effort.
        if "reasoning_effort" in named and (thinks or not said):
            said["reasoning_effort"] = body.reasoning_effort
    if body.verbosity is not None and "verbosity" in named:
        said["verbosity"] = body.verbosity
    return {**said, **(body.chat_template_kwargs or {})}


def _budget(body: ChatRequest) -> tuple[str, int | None]:
    name = next((name for name in REASONING_BUDGETS if getattr(body, name) is not None), REASONING_BUDGETS[0])
    budget: int | None = getattr(body, name)
    return name, budget
