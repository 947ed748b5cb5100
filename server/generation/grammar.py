"""The grammar of an answer: made of what is asked for, tried before anything runs, and refused by the asking field."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import anyio.to_thread

from engine.chat_format.chat_format import Dialect
from engine.chat_format.message import Body, Tool, ToolChoice
from engine.errors import InvalidRequest, TooCostly
from engine.types.request import Grammar
from server.generation.structure import STRUCTURES, structure
from server.generation.tools import Offer, place
from server.schemas.common import Generation
from server.service import Service

ANYTHING = {"type": "object"}
IN_PART = "'{}' is followed in part, since it is not strict: {}."


@dataclass(frozen=True, slots=True)
class Followed:
    """The grammar of an answer, if it has one, and a warning of what in its schema could not be kept."""

    grammar: Grammar | None = None
    warnings: tuple[str, ...] = ()


async def follow(service: Service, body: Generation, dialect: Dialect, offered: Offer, opened: str) -> Followed:
    """What the whole answer must follow; InvalidRequest names the field that cannot be followed."""
    # A schema may be a text of megabytes that is to be parsed.
    structured = not STRUCTURES.isdisjoint(body.model_fields_set)
    asked = await anyio.to_thread.run_sync(structure, body) if structured else None
    if asked is None and not offered.tools:
        return Followed()
    return await anyio.to_thread.run_sync(
        _follow, service, body, asked, dialect, offered, opened, limiter=service.compiling
    )


def _follow(
    service: Service, body: Generation, asked: tuple[str, Body] | None, dialect: Dialect, offered: Offer, opened: str
) -> Followed:
    field, wanted = asked or ("response_format", None)
    exactly = None if wanted is None else replace(wanted, strict=True)
    made = _made(dialect, offered, field, exactly, opened)
    if made is None:
        return Followed()
    if body.ignore_eos:
        raise InvalidRequest("ignore_eos", "what follows a structure ends with it")
    blamed = "tools" if wanted is None else field
    if _fault(service, made, blamed) is None:
        return Followed(made)
    tools, warnings = _eased(service, dialect, offered, opened)
    eased = _made(dialect, replace(offered, tools=tools), field, wanted, opened)
    reason = None if eased is None else _fault(service, eased, blamed)
    if reason is not None:
        raise InvalidRequest(blamed, reason)
    return Followed(eased, warnings or (IN_PART.format(field, _fault(service, made, blamed)),))


def _made(dialect: Dialect, offered: Offer, field: str, wanted: Body | None, opened: str) -> Grammar | None:
    try:
        return dialect.grammar(offered.tools, offered.choice, wanted, opened)
    except InvalidRequest as error:
        named = {"response_format": field, "grammar": _unwritable(dialect, offered, opened)}
        raise InvalidRequest(named.get(error.field, error.field), error.reason) from error


def _unwritable(dialect: Dialect, offered: Offer, opened: str) -> str:
    """Where the first custom tool stands whose grammar the model's format cannot hold."""
    for at, tool in enumerate(offered.tools):
        try:
            dialect.grammar((tool,), ToolChoice("required", (tool.name,)), None, opened)
        except InvalidRequest:
            return f"{place(at, tool, legacy=offered.legacy)}.format"
    return "tools"


def _fault(service: Service, made: Grammar, blamed: str) -> str | None:
    """Why it cannot be followed, if it cannot; InvalidRequest where that took so long that nothing else is tried."""
    try:
        service.engine.grammars.compile(made)
    except TooCostly as error:
        raise InvalidRequest(blamed, error.reason) from error
    except InvalidRequest as error:
        return error.reason
    return None


def _eased(service: Service, dialect: Dialect, offered: Offer, opened: str) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """The tools without schemas that cannot be followed, and a warning of each; InvalidRequest where it is strict."""
    tools, warnings = list(offered.tools), []
    for at, tool in enumerate(tools):
        alone = dialect.grammar((tool,), ToolChoice("required", (tool.name,)), None, opened)
        part = "parameters" if tool.kind == "function" else "format"
        field = f"{place(at, tool, legacy=offered.legacy)}.{part}"
        reason = None if alone is None else _fault(service, alone, field)
        if reason is not None and tool.strict:
            raise InvalidRequest(field, reason)
        if reason is not None:
            tools[at] = replace(tool, parameters=json.dumps(ANYTHING))
            warnings.append(IN_PART.format(field, reason))
    return tuple(tools), tuple(warnings)
