"""The grammar of an answer: made of what is asked for, tried before anything runs, and refused by the asking field."""

from __future__ import annotations

from collections.abc import Iterator

from engine.dialect.dialect import Dialect
from engine.errors import InvalidRequest
from engine.message import ToolChoice
from engine.types import Grammar
from server.schemas.common import Generation
from server.service import Service
from server.structure import structure
from server.tools import Offer


def grammar(service: Service, body: Generation, dialect: Dialect, offered: Offer, opened: str) -> Grammar | None:
    """What the whole answer must follow, for a worker thread; InvalidRequest names the field that cannot be."""
    field, wanted = structure(body) or ("response_format", None)
    try:
        made = dialect.grammar(offered.tools, offered.choice, wanted, opened)
    except InvalidRequest as error:
        raise InvalidRequest(field if error.field == "response_format" else error.field, error.reason) from error
    reason = None if made is None else _fault(service, made)
    if reason is None:
        return made
    if wanted is None:
        raise next(_worse(service, dialect, offered, opened), InvalidRequest("tools", reason))
    raise InvalidRequest(field, reason)


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
    for at, tool in enumerate(offered.tools):
        made = dialect.grammar((tool,), ToolChoice("required", (tool.name,)), None, opened)
        reason = None if made is None else _fault(service, made)
        if reason is not None:
            yield InvalidRequest(place.format(at), reason)
