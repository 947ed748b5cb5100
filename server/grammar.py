"""The grammar of an answer: made of what is asked for, tried before anything runs, and refused by the asking field."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine.dialect.dialect import Dialect
from engine.errors import InvalidRequest
from engine.message import Body, ToolChoice
from engine.types import Grammar
from server.schemas.common import Generation
from server.service import Service
from server.structure import structure
from server.tools import Offer

# Grammars that are compiled to tell which tool is at fault.
MOST_TRIED = 16


@dataclass(frozen=True, slots=True)
class Followed:
    """The grammar of an answer, if it has one, and a warning of what in its schema could not be kept."""

    grammar: Grammar | None = None
    warnings: tuple[str, ...] = ()


def follow(service: Service, body: Generation, dialect: Dialect, offered: Offer, opened: str) -> Followed:
    """What the whole answer must follow, for a worker thread; InvalidRequest names the field that cannot be."""
    field, wanted = structure(body) or ("response_format", None)
    exactly = None if wanted is None else replace(wanted, strict=True)
    made = _made(dialect, offered, field, exactly, opened)
    if made is None:
        return Followed()
    if body.ignore_eos:
        raise InvalidRequest("ignore_eos", "what follows a structure ends with it")
    reason = _fault(service, made)
    if reason is None:
        return Followed(made)
    if wanted is None:
        raise next(_worse(service, dialect, offered, opened), InvalidRequest("tools", reason))
    loosely = None if wanted.strict else _made(dialect, offered, field, wanted, opened)
    if loosely is None or _fault(service, loosely) is not None:
        raise InvalidRequest(field, reason)
    return Followed(loosely, (f"'{field}' is followed in part, since it is not strict: {reason}.",))


def _made(dialect: Dialect, offered: Offer, field: str, wanted: Body | None, opened: str) -> Grammar | None:
    try:
        return dialect.grammar(offered.tools, offered.choice, wanted, opened)
    except InvalidRequest as error:
        raise InvalidRequest(field if error.field == "response_format" else error.field, error.reason) from error


def _fault(service: Service, made: Grammar) -> str | None:
    """Why it cannot be followed, if it cannot."""
    try:
        service.engine.grammars.compile(made)
    except InvalidRequest as error:
        return error.reason
    return None


def _worse(service: Service, dialect: Dialect, offered: Offer, opened: str) -> Iterator[InvalidRequest]:
    """The tools that cannot be followed even alone."""
    place = "functions[{}].parameters" if offered.legacy else "tools[{}].function.parameters"
    strict = [(at, tool) for at, tool in enumerate(offered.tools) if tool.strict]
    for at, tool in strict[:MOST_TRIED]:
        made = dialect.grammar((tool,), ToolChoice("required", (tool.name,)), None, opened)
        reason = None if made is None else _fault(service, made)
        if reason is not None:
            yield InvalidRequest(place.format(at), reason)
