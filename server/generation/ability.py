"""What a model can do of what a body asks for: by the names that its chat template reads, and by its dialect."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from engine.chat_format.chat_format import Dialect
from server.generation.tools import Offer, offer
from server.http.errors import ApiError, unsupported
from server.schemas.chat import ChatRequest

# The names that templates have for whether the model thinks at all.
SWITCHES = ("enable_thinking", "thinking")
BUDGETS = ("thinking_token_budget", "thinking_budget_tokens")
UNREAD = "its chat template does not read it"


@dataclass(frozen=True, slots=True)
class Ability:
    """A body, as far as the model can do it.

    arguments  of the template; what `chat_template_kwargs` says goes first
    offer      the tools that it may call
    budget     of tokens to reason in; None: no limit
    missing    what it cannot do
    warnings   of what it was asked for and takes no notice of
    """

    arguments: dict[str, object]
    offer: Offer
    budget: int | None
    missing: tuple[ApiError, ...]
    warnings: tuple[str, ...] = ()


def ability(body: ChatRequest, dialect: Dialect, named: Collection[str]) -> Ability:
    """What of the body a model can do that speaks `dialect`, and whose template reads the names `named`."""
    offered = offer(body)
    return Ability(
        arguments=_told(body, named),
        offer=offered if dialect.calls else Offer(),
        budget=_budget(body)[1] if dialect.reasons else None,
        missing=tuple(_missing(body, dialect, named, offered)),
        warnings=tuple(_warnings(body, dialect, named)),
    )


def unable(dialect: Dialect, named: Collection[str]) -> dict[str, str]:
    """The parameters that a model cannot honour, and why."""
    verbosity = {} if "verbosity" in named else {"verbosity": UNREAD}
    calls = {} if dialect.calls else dict.fromkeys(("tools", "functions"), "its chat template has no calls")
    return {**verbosity, **calls}


def unheeded(dialect: Dialect, named: Collection[str]) -> dict[str, str]:
    """The parameters that are accepted and change nothing with a model, and why: clients send them with every model."""
    effort = {} if {"reasoning_effort", *SWITCHES} & set(named) else {"reasoning_effort": UNREAD}
    budget = {} if dialect.reasons else dict.fromkeys(BUDGETS, "it writes no reasoning")
    return {**effort, **budget}


def _missing(body: ChatRequest, dialect: Dialect, named: Collection[str], offered: Offer) -> Iterator[ApiError]:
    # What OpenAI does unasked is no wish.
    verbosity = None if body.verbosity == "medium" else body.verbosity
    wishes = {
        "verbosity": verbosity,
        "functions" if offered.legacy else "tools": offered.tools or None,
    }
    for field, reason in unable(dialect, named).items():
        if wishes.get(field) is not None:
            yield unsupported(field, reason)


def _warnings(body: ChatRequest, dialect: Dialect, named: Collection[str]) -> Iterator[str]:
    # Where nothing is reasoned, neither no effort nor a budget of 0 asks for anything.
    effort = None if body.reasoning_effort == "none" and not dialect.reasons else body.reasoning_effort
    wishes = {"reasoning_effort": effort, _budget(body)[0]: _budget(body)[1] or None}
    for field, reason in unheeded(dialect, named).items():
        if wishes.get(field) is not None:
            yield unsupported(field, reason).message


def _told(body: ChatRequest, named: Collection[str]) -> dict[str, object]:
    """The arguments of the template that reads the names `named`."""
    said: dict[str, object] = {}
    if body.reasoning_effort is not None:
        thinks = body.reasoning_effort != "none"
        said = {switch: thinks for switch in SWITCHES if switch in named}
        # To a template with a switch, "none" is that and no effort.
        if "reasoning_effort" in named and (thinks or not said):
            said["reasoning_effort"] = body.reasoning_effort
    if body.verbosity is not None and "verbosity" in named:
        said["verbosity"] = body.verbosity
    return {**said, **(body.chat_template_kwargs or {})}


def _budget(body: ChatRequest) -> tuple[str, int | None]:
    name = next((name for name in BUDGETS if getattr(body, name) is not None), BUDGETS[0])
    budget: int | None = getattr(body, name)
    return name, budget
