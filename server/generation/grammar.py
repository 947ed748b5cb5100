"""The grammar of an answer: made of what is asked for, tried before anything runs, and refused by the asking field."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import anyio.to_thread

from engine.chat_format.chat_format import ChatFormat
from engine.chat_format.message import AnswerConstraint, Tool, ToolChoice
from engine.errors import GrammarTooCostly, InvalidRequest
from engine.types.request import Grammar
from server.generation.structure import STRUCTURES, structure
from server.generation.tools import ToolSet, tool_path
from server.schemas.common import Generation
from server.service import Service

ANYTHING = {"type": "object"}
PARTIALLY_FOLLOWED = "'{}' is followed in part, since it is not strict: {}."


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """The grammar of an answer, if it has one, and a warning of what in its schema could not be kept."""

    grammar: Grammar | None = None
    warnings: tuple[str, ...] = ()


async def answer_grammar(
    service: Service, body: Generation, dialect: ChatFormat, offered: ToolSet, opened: str
) -> AnswerGrammar:
    """What the whole answer must follow; InvalidRequest names the field that cannot be followed."""
    # A schema may be a text of megabytes that is to be parsed.
    structured = not STRUCTURES.isdisjoint(body.model_fields_set)
    asked = await anyio.to_thread.run_sync(structure, body) if structured else None
    if asked is None and not offered.tools:
        return AnswerGrammar()
    return await anyio.to_thread.run_sync(
        _answer_grammar, service, body, asked, dialect, offered, opened, limiter=service.grammar_threads
    )


def _answer_grammar(
    service: Service,
    body: Generation,
    asked: tuple[str, AnswerConstraint] | None,
    dialect: ChatFormat,
    offered: ToolSet,
    opened: str,
) -> AnswerGrammar:
    field, wanted = asked or ("response_format", None)
    exactly = None if wanted is None else replace(wanted, strict=True)
    made = _compile(dialect, offered, field, exactly, opened)
    if made is None:
        return AnswerGrammar()
    if body.ignore_eos:
        raise InvalidRequest("ignore_eos", "what follows a structure ends with it")
    blamed = "tools" if wanted is None else field
    if _compile_error(service, made, blamed) is None:
        return AnswerGrammar(made)
    tools, warnings = _lenient_tools(service, dialect, offered, opened)
    eased = _compile(dialect, replace(offered, tools=tools), field, wanted, opened)
    reason = None if eased is None else _compile_error(service, eased, blamed)
    if reason is not None:
        raise InvalidRequest(blamed, reason)
    return AnswerGrammar(eased, warnings or (PARTIALLY_FOLLOWED.format(field, _compile_error(service, made, blamed)),))


def _compile(
    dialect: ChatFormat, offered: ToolSet, field: str, wanted: AnswerConstraint | None, opened: str
) -> Grammar | None:
    try:
        return dialect.grammar(offered.tools, offered.choice, wanted, opened)
    except InvalidRequest as error:
        named = {"response_format": field, "grammar": _unsupported_tool(dialect, offered, opened)}
        raise InvalidRequest(named.get(error.field, error.field), error.reason) from error


def _unsupported_tool(dialect: ChatFormat, offered: ToolSet, opened: str) -> str:
    """Where the first custom tool stands whose grammar the model's format cannot hold."""
    for at, tool in enumerate(offered.tools):
        try:
            dialect.grammar((tool,), ToolChoice("required", (tool.name,)), None, opened)
        except InvalidRequest:
            return f"{tool_path(at, tool, legacy=offered.legacy)}.format"
    return "tools"


def _compile_error(service: Service, made: Grammar, blamed: str) -> str | None:
    """Why it cannot be followed, if it cannot; InvalidRequest where that took so long that nothing else is tried."""
    try:
        service.engine.grammars.compile(made)
    except GrammarTooCostly as error:
        raise InvalidRequest(blamed, error.reason) from error
    except InvalidRequest as error:
        return error.reason
    return None


def _lenient_tools(
    service: Service, dialect: ChatFormat, offered: ToolSet, opened: str
) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """The tools without schemas that cannot be followed, and a warning of each; InvalidRequest where it is strict."""
    tools, warnings = list(offered.tools), []
    for at, tool in enumerate(tools):
        alone = dialect.grammar((tool,), ToolChoice("required", (tool.name,)), None, opened)
        part = "parameters" if tool.kind == "function" else "format"
        field = f"{tool_path(at, tool, legacy=offered.legacy)}.{part}"
        reason = None if alone is None else _compile_error(service, alone, field)
        if reason is not None and tool.strict:
            raise InvalidRequest(field, reason)
        if reason is not None:
            tools[at] = replace(tool, parameters=json.dumps(ANYTHING))
            warnings.append(PARTIALLY_FOLLOWED.format(field, reason))
    return tuple(tools), tuple(warnings)
