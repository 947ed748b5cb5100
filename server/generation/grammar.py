"""The grammar of an answer, compiled before the request is admitted; errors name the field of the constraint."""

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

ANY_OBJECT = {"type": "object"}
PARTIALLY_ENFORCED = "'{}' is enforced only in part, because it is not strict: {}."


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """The grammar of an answer, if any, and a warning for each part of a schema that is not enforced."""

    grammar: Grammar | None = None
    warnings: tuple[str, ...] = ()


async def answer_grammar(
    service: Service, body: Generation, chat_format: ChatFormat, tool_set: ToolSet, generation_prompt: str
) -> AnswerGrammar:
    """The grammar for the whole answer; InvalidRequest names the field of the invalid constraint."""
    # Parsing a schema of megabytes takes long.
    has_structure = not STRUCTURES.isdisjoint(body.model_fields_set)
    requested = await anyio.to_thread.run_sync(structure, body) if has_structure else None
    if requested is None and not tool_set.tools:
        return AnswerGrammar()
    return await anyio.to_thread.run_sync(
        _answer_grammar,
        service,
        body,
        requested,
        chat_format,
        tool_set,
        generation_prompt,
        limiter=service.threads.grammar,
    )


def _answer_grammar(
    service: Service,
    body: Generation,
    requested: tuple[str, AnswerConstraint] | None,
    chat_format: ChatFormat,
    tool_set: ToolSet,
    generation_prompt: str,
) -> AnswerGrammar:
    field, constraint = requested or ("response_format", None)
    strict_constraint = None if constraint is None else replace(constraint, strict=True)
    grammar = _build_grammar(chat_format, tool_set, field, strict_constraint, generation_prompt)
    if grammar is None:
        return AnswerGrammar()
    if body.ignore_eos:
        raise InvalidRequest("ignore_eos", "a structured answer ends when it is complete")
    error_field = "tools" if constraint is None else field
    if _compile_error(service, grammar, error_field) is None:
        return AnswerGrammar(grammar)
    tools, warnings = _lenient_tools(service, chat_format, tool_set, generation_prompt)
    lenient_grammar = _build_grammar(chat_format, replace(tool_set, tools=tools), field, constraint, generation_prompt)
    reason = None if lenient_grammar is None else _compile_error(service, lenient_grammar, error_field)
    if reason is not None:
        raise InvalidRequest(error_field, reason)
    return AnswerGrammar(
        lenient_grammar, warnings or (PARTIALLY_ENFORCED.format(field, _compile_error(service, grammar, error_field)),)
    )


def _build_grammar(
    chat_format: ChatFormat, tool_set: ToolSet, field: str, constraint: AnswerConstraint | None, generation_prompt: str
) -> Grammar | None:
    try:
        return chat_format.grammar(tool_set.tools, tool_set.choice, constraint, generation_prompt)
    except InvalidRequest as error:
        fields = {"response_format": field, "grammar": _unsupported_tool(chat_format, tool_set, generation_prompt)}
        raise InvalidRequest(fields.get(error.field, error.field), error.reason) from error


def _unsupported_tool(chat_format: ChatFormat, tool_set: ToolSet, generation_prompt: str) -> str:
    """Field of the first custom tool with a grammar that the chat format does not support."""
    for index, tool in enumerate(tool_set.tools):
        try:
            chat_format.grammar((tool,), ToolChoice("required", (tool.name,)), None, generation_prompt)
        except InvalidRequest:
            return f"{tool_path(index, tool, legacy=tool_set.legacy)}.format"
    return "tools"


def _compile_error(service: Service, grammar: Grammar, error_field: str) -> str | None:
    """The compiler's error, if any; InvalidRequest if compilation takes too long, so that nothing else is compiled."""
    try:
        service.engine.grammars.compile(grammar)
    except GrammarTooCostly as error:
        raise InvalidRequest(error_field, error.reason) from error
    except InvalidRequest as error:
        return error.reason
    return None


def _lenient_tools(
    service: Service, chat_format: ChatFormat, tool_set: ToolSet, generation_prompt: str
) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """Tools without the schemas that cannot be enforced, and a warning for each; InvalidRequest for strict tools."""
    tools, warnings = list(tool_set.tools), []
    for index, tool in enumerate(tools):
        tool_grammar = chat_format.grammar((tool,), ToolChoice("required", (tool.name,)), None, generation_prompt)
        part = "parameters" if tool.kind == "function" else "format"
        field = f"{tool_path(index, tool, legacy=tool_set.legacy)}.{part}"
        reason = None if tool_grammar is None else _compile_error(service, tool_grammar, field)
        if reason is not None and tool.strict:
            raise InvalidRequest(field, reason)
        if reason is not None:
            tools[index] = replace(tool, parameters=json.dumps(ANY_OBJECT))
            warnings.append(PARTIALLY_ENFORCED.format(field, reason))
    return tuple(tools), tuple(warnings)
