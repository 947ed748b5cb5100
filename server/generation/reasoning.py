"""Reasoning that a chat asks for, by the names of OpenAI, Anthropic, DeepSeek, Qwen, OpenRouter, vLLM and llama.cpp."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.chat_format.chat_format import ChatFormat
from server.http.errors import invalid_value, unsupported_parameter
from server.schemas.chat import ChatRequest, ReasoningOptions, ThinkingOptions

Value = TypeVar("Value")

# Variables of chat templates that switch reasoning on and off, and the one that sets its effort.
REASONING_SWITCHES = ("enable_thinking", "thinking")
EFFORT = "reasoning_effort"
# Names of the reasoning budget at the top level of a body.
REASONING_BUDGETS = ("thinking_token_budget", "thinking_budget_tokens", "thinking_budget")
NOT_IN_TEMPLATE = "its chat template does not read it"
NO_REASONING = "it writes no reasoning"
_BUDGET_SWITCH = "reasoning.max_tokens"
_SWITCH_FIELDS = ("enable_thinking", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class SentField(Generic[Value]):
    """A value and the field of the body that has it."""

    name: str
    value: Value


@dataclass(frozen=True, slots=True)
class RequestedReasoning:
    """What a body asks for; None: nothing.

    switch    whether the model should reason
    effort    how much
    budget    limit of reasoning tokens
    included  whether the answer has the reasoning
    """

    switch: SentField[bool] | None
    effort: SentField[str] | None
    budget: SentField[int] | None
    included: bool

    def template_arguments(self, template_names: Collection[str]) -> dict[str, object]:
        """Variables for the chat template, restricted to `template_names`."""
        effort = None if self.effort is None else self.effort.value
        enabled = self._enabled()
        if enabled is None:
            return {}
        arguments: dict[str, object] = {name: enabled for name in REASONING_SWITCHES if name in template_names}
        if not enabled:
            effort = "none"
        # If the template has a switch, "none" switches reasoning off and sets no effort.
        if effort is not None and EFFORT in template_names and (enabled or not arguments):
            arguments[EFFORT] = effort
        return arguments

    def warnings(self, chat_format: ChatFormat, template_names: Collection[str]) -> Iterator[str]:
        """Messages for the fields that have no effect, unless the model behaves as requested anyway."""
        with_reasoning = chat_format.supports_reasoning
        if not has_switch(template_names):
            if self.switch is not None and self.switch.value != with_reasoning:
                yield unsupported_parameter(self.switch.name, NOT_IN_TEMPLATE).message
            if self.effort is not None and (with_reasoning or self.effort.value != "none"):
                yield unsupported_parameter(self.effort.name, NOT_IN_TEMPLATE).message
        if self.budget is not None and self.budget.value and not with_reasoning:
            yield unsupported_parameter(self.budget.name, NO_REASONING).message

    def _enabled(self) -> bool | None:
        """Whether reasoning is switched on or off: also by an effort and, as at OpenRouter, by its budget."""
        if self.switch is not None:
            return self.switch.value
        if self.effort is not None:
            return self.effort.value != "none"
        has_budget = self.budget is not None and self.budget.name == _BUDGET_SWITCH and self.budget.value > 0
        return True if has_budget else None


def requested_reasoning(body: ChatRequest) -> RequestedReasoning:
    """The reasoning that a body asks for; ApiError if two of its fields contradict each other."""
    thinking, options = body.thinking or ThinkingOptions(), body.reasoning or ReasoningOptions()
    enabled = {"enabled": True, "adaptive": True, "disabled": False}.get(thinking.type or "auto")
    switch = _one_of(
        {"enable_thinking": body.enable_thinking, "thinking.type": enabled, "reasoning.enabled": options.enabled}
    )
    efforts: dict[str, str | None] = {EFFORT: body.reasoning_effort, "reasoning.effort": options.effort}
    budgets: dict[str, int | None] = {name: getattr(body, name) for name in REASONING_BUDGETS}
    budget = _one_of({**budgets, "thinking.budget_tokens": thinking.budget_tokens, _BUDGET_SWITCH: options.max_tokens})
    effort = _one_of(efforts)
    if switch is not None and switch.value and effort is not None and effort.value == "none":
        raise invalid_value(effort.name, f"'{switch.name}' asks for reasoning")
    included = body.include_reasoning is not False and not options.exclude and thinking.display != "omitted"
    return RequestedReasoning(switch, effort, budget, included)


def has_switch(template_names: Collection[str]) -> bool:
    """Whether the chat template reads a variable that switches reasoning."""
    return bool({EFFORT, *REASONING_SWITCHES} & set(template_names))


def ignored_reasoning_parameters(chat_format: ChatFormat, template_names: Collection[str]) -> dict[str, str]:
    """Fields of reasoning that are accepted without effect, with the reason."""
    switches = {} if has_switch(template_names) else dict.fromkeys((EFFORT, *_SWITCH_FIELDS), NOT_IN_TEMPLATE)
    return (
        switches if chat_format.supports_reasoning else {**switches, **dict.fromkeys(REASONING_BUDGETS, NO_REASONING)}
    )


def _one_of(fields: dict[str, Value | None]) -> SentField[Value] | None:
    """The value of one setting with several names; ApiError if two differ."""
    sent = [SentField(name, value) for name, value in fields.items() if value is not None]
    for other in sent[1:]:
        if other.value != sent[0].value:
            raise invalid_value(other.name, f"it is an alias of '{sent[0].name}' with another value")
    return sent[0] if sent else None
