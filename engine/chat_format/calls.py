"""Notations of one tool call in JSON: an object with name and arguments, or a name followed by its arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from engine.chat_format.delta_buffer import DeltaBuffer
from engine.chat_format.json_text import stream_json
from engine.chat_format.lark_writer import LarkWriter, regex
from engine.chat_format.message import INPUT_FIELD, Tool
from engine.chat_format.quoted_grammar import quoted_grammar
from engine.chat_format.schema import Schema, schema_of
from engine.chat_format.source import NoMatch, Parser, TextSource

_NAME = re.compile(r"""[^\s<>\[\]{}()"'`|,=]+""")
_NUMBER = re.compile(r":[0-9]+$")
_ARGUMENTS = frozenset(("arguments", "parameters"))


@dataclass(frozen=True, slots=True)
class CallableTools:
    """Tools that an answer may call.

    known_only  whether calls of other names are text: there is no marker to distinguish them
    """

    tools: Mapping[str, Tool]
    known_only: bool = False

    def check_name(self, name: str) -> str:
        """The name itself; raises NoMatch if it is no valid name."""
        if not name or (self.known_only and name not in self.tools):
            raise NoMatch
        return name

    def schema(self, name: str) -> Schema:
        """JSON schema of a function's arguments; {} for an unknown name."""
        return schema_of(self.tools[name]) if name in self.tools else {}

    def has_grammar(self, name: str) -> bool:
        """Whether `name` is a custom tool with a grammar."""
        return name in self.tools and bool(self.tools[name].grammar)


class CallNotation(Protocol):
    """Notation of one tool call."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Literals inside a call."""
        ...

    def parse(self, source: TextSource, deltas: DeltaBuffer, tools: CallableTools) -> Parser[bool]:
        """Parse one call; whether its arguments were complete and valid.

        Runs inside `source.attempt`: raises NoMatch if there is no call, and commits as soon as there is one.
        """
        ...

    def grammar_rule(self, lark: LarkWriter, tool: Tool) -> str:
        """A grammar expression for a call of `tool`."""
        ...


@dataclass(frozen=True, slots=True)
class ObjectCall:
    """A JSON object with keys for the name and the arguments."""

    name: str = "name"
    arguments: str = "arguments"

    @property
    def markers(self) -> tuple[str, ...]:
        return ()

    def parse(self, source: TextSource, deltas: DeltaBuffer, tools: CallableTools) -> Parser[bool]:
        """Parse the members up to the arguments with lookahead, then stream the arguments."""
        yield from source.expect("{")
        name, early_arguments = "", "{}"
        while True:
            key = yield from _key(source)
            if key == self.name:
                name = _string_value((yield from _captured(source)))
            elif key in _ARGUMENTS and not name:
                early_arguments = _object_text((yield from _captured(source)))
            elif key in _ARGUMENTS and (yield from source.peek()) == "{":
                return (yield from self._stream(source, deltas, tools.check_name(name)))
            elif key in _ARGUMENTS:
                early_arguments = _object_text((yield from _captured(source)))
            else:
                yield from _captured(source)
            yield from source.skip_space()
            if not (yield from source.accept(",")):
                break
        yield from source.expect("}")
        begin_call(source, deltas, tools.check_name(name))
        deltas.add_arguments(early_arguments)
        return True

    def grammar_rule(self, lark: LarkWriter, tool: Tool) -> str:
        """The name first, then arguments that follow the tool's schema."""
        head = f"{{{json.dumps(self.name)}: {json.dumps(tool.name)}, {json.dumps(self.arguments)}: "
        return f"{lark.plain_text(head)} {arguments_rule(lark, tool)} {lark.plain_text('}')}"

    def _stream(self, source: TextSource, deltas: DeltaBuffer, name: str) -> Parser[bool]:
        begin_call(source, deltas, name)
        if not (yield from stream_json(source, deltas.add_arguments)):
            return False
        yield from source.attempt(_skip_rest(source))
        return True


@dataclass(frozen=True, slots=True)
class NamedCall:
    """A name, followed by the arguments as a JSON object.

    name_prefix, name_suffix  literals before and after the name
    namespace                    namespace of the name, such as "functions."
    numbered                  whether ":" and a number follow the name
    id_marker                 literal before an optional call id after the name
    """

    name_prefix: tuple[str, ...] = ()
    name_suffix: tuple[str, ...] = ()
    namespace: str = ""
    numbered: bool = False
    id_marker: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.name_prefix, *self.name_suffix, self.id_marker)

    def parse(self, source: TextSource, deltas: DeltaBuffer, tools: CallableTools) -> Parser[bool]:
        """Parse the name with lookahead, then stream the arguments, which may be missing."""
        yield from source.expect(*self.name_prefix)
        yield from source.skip_space()
        name = (yield from parse_name(source)).removeprefix(self.namespace)
        if self.numbered:
            name = _NUMBER.sub("", name)
        yield from source.skip_space()
        if self.id_marker and (yield from source.accept(self.id_marker)):
            yield from source.skip_space()
            yield from parse_name(source)
            yield from source.skip_space()
        yield from source.expect(*self.name_suffix)
        yield from source.skip_space()
        begin_call(source, deltas, tools.check_name(name))
        return (yield from source.peek()) == "{" and (yield from stream_json(source, deltas.add_arguments))

    def grammar_rule(self, lark: LarkWriter, tool: Tool) -> str:
        """The name with its literals, then arguments that follow the tool's schema."""
        number = lark.pattern(regex(":[0-9]{1,3}")) if self.numbered else ""
        parts = [lark.literals(*self.name_prefix), f"{lark.plain_text(self.namespace + tool.name)} {number}"]
        if self.id_marker:
            parts += [lark.literal(self.id_marker), lark.pattern(regex("[a-zA-Z0-9]{9}"))]
        parts += [lark.literals(*self.name_suffix), arguments_rule(lark, tool)]
        return f" {lark.space()} ".join(filter(None, parts))


def arguments_rule(lark: LarkWriter, tool: Tool) -> str:
    """The arguments of a tool as JSON; without `strict`, unsupported keywords of the schema are ignored."""
    if tool.grammar:
        head = lark.plain_text(f"{{{json.dumps(INPUT_FIELD)}: ")
        return f"{head} {quoted_input_rule(lark, tool)} {lark.plain_text('}')}"
    return lark.json({"type": "object", **schema_of(tool)}, lenient=not tool.strict)


def quoted_input_rule(lark: LarkWriter, tool: Tool) -> str:
    """The input of a custom tool with a grammar, as a JSON string."""
    quote = lark.plain_text('"')
    return f"{quote} {lark.nested(quoted_grammar(tool.grammar))} {quote}"


def parse_name(source: TextSource) -> Parser[str]:
    """An unquoted function name; raises NoMatch if there is none, or if it may be incomplete."""
    name = yield from source.match(_NAME)
    if not (yield from source.peek()):
        raise NoMatch
    return name


def begin_call(source: TextSource, deltas: DeltaBuffer, name: str) -> None:
    """Commit the lookahead and emit the name of the call."""
    source.commit()
    deltas.begin_call(name)


def _key(source: TextSource) -> Parser[str]:
    """A key of an object, up to its value."""
    yield from source.skip_space()
    if (yield from source.peek()) != '"':
        raise NoMatch
    key = _string_value((yield from _captured(source)))
    yield from source.skip_space()
    yield from source.expect(":")
    yield from source.skip_space()
    return key


def _skip_rest(source: TextSource) -> Parser[None]:
    """Consume the members after the arguments, and the closing brace."""
    yield from source.skip_space()
    while (yield from source.accept(",")):
        yield from _key(source)
        yield from _captured(source)
        yield from source.skip_space()
    yield from source.expect("}")


def _captured(source: TextSource) -> Parser[str]:
    """A JSON value as text; raises NoMatch if there is none."""
    parts: list[str] = []
    if not (yield from stream_json(source, parts.append)):
        raise NoMatch
    return "".join(parts)


def _string_value(value: str) -> str:
    """A JSON string, decoded; raises NoMatch for other values."""
    text = json.loads(value)
    if not isinstance(text, str):
        raise NoMatch
    return text


def _object_text(value: str) -> str:
    """Arguments as JSON text, from an object, a string that contains one, or null; raises NoMatch for other values."""
    if value == "null":
        return "{}"
    inner = _string_value(value) if value.startswith('"') else value
    try:
        is_object = isinstance(json.loads(inner), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise NoMatch
    return inner
