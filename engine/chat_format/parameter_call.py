"""Tool calls in XML-like notations: each argument between its own markers; parsed arguments are emitted as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from engine.chat_format.calls import CallableTools, begin_call, parse_name, quoted_input_rule
from engine.chat_format.delta_buffer import DeltaBuffer
from engine.chat_format.json_text import json_escaped
from engine.chat_format.lark_writer import LarkWriter, alternatives
from engine.chat_format.message import Tool
from engine.chat_format.schema import (
    Schema,
    defined_in,
    json_of,
    patterns_of,
    properties_of,
    required_of,
    schema_of,
    types_of,
    values_of,
)
from engine.chat_format.source import Emit, Literals, Parser, TextSource

_STRING = frozenset(("string",))


@dataclass(frozen=True, slots=True)
class ParameterCall:
    """A name, then keys and values, each between two markers, then a closing marker.

    on_own_lines  whether a value is on separate lines
    type_markers  after the key of a string, and after the key of any other value; unset: the tool's schema has the type
    Strings are unquoted; other values are JSON.
    """

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    close: str
    on_own_lines: bool = False
    type_markers: tuple[str, str] = ("", "")
    _next_literals: Literals = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_next_literals", Literals((self.key[0], self.close)))

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.name, *self.key, *self.type_markers, *self.value, self.close)

    def parse(self, source: TextSource, deltas: DeltaBuffer, tools: CallableTools) -> Parser[bool]:
        """Parse the name with lookahead, then emit strings as they arrive and other arguments when complete."""
        yield from source.expect(self.name[0])
        name = tools.check_name((yield from parse_name(source)))
        yield from source.expect(self.name[1])
        begin_call(source, deltas, name)
        schema = tools.schema(name)
        properties = properties_of(schema, schema)
        before = "{"
        while (literal := (yield from source.until(self._next_literals, _discard))) == self.key[0]:
            key: list[str] = []
            if not (yield from source.until(Literals((self.key[1],)), key.append)):
                return False
            text = "".join(key)
            deltas.add_arguments(f"{before}{json.dumps(text, ensure_ascii=False)}: ")
            # Input under a grammar is written as a JSON string, since the closing marker could be part of it.
            types = frozenset[str]() if tools.has_grammar(name) else types_of(properties.get(text, {}), schema)
            types = yield from self._declared_types(source, types)
            if not (yield from self._value(source, deltas.add_arguments, types)):
                return False
            before = ", "
        if literal:
            deltas.add_arguments("{}" if before == "{" else "}")
        return bool(literal)

    def _declared_types(self, source: TextSource, types: frozenset[str]) -> Parser[frozenset[str]]:
        """The types that a value may have; a type marker before it has priority over the schema."""
        as_string, as_json = self.type_markers
        if as_string and (yield from source.accept(as_string)):
            return _STRING
        return frozenset() if as_json and (yield from source.accept(as_json)) else types

    def _value(self, source: TextSource, emit: Emit, types: frozenset[str]) -> Parser[bool]:
        if self.value[0]:
            yield from source.skip_space()
            yield from source.accept(self.value[0])
        close = Literals((self.value[1],))
        if types != _STRING:
            parts: list[str] = []
            closing = yield from source.until(close, parts.append)
            emit(json_of("".join(parts), types) if closing else "".join(parts))
            return bool(closing)
        emit('"')
        lines = _StripOuterNewlines(emit) if self.on_own_lines else None
        closing = yield from source.until(close, lines.push if lines else lambda text: emit(json_escaped(text)))
        if closing:
            emit('"')
        return bool(closing)

    def grammar_rule(self, lark: LarkWriter, tool: Tool) -> str:
        """Arguments in the order of the schema; optional ones may be missing."""
        schema, space = schema_of(tool), lark.space()
        required = required_of(schema)
        parts = [f"{lark.literals(self.name[0])} {lark.plain_text(tool.name)} {lark.literals(self.name[1])}"]
        for key, part in properties_of(schema, schema).items():
            is_string = not tool.grammar and types_of(part, schema) == _STRING
            key_end = self.key[1] + self.type_markers[0 if is_string else 1]
            head = f"{lark.literal(self.key[0])} {lark.plain_text(key)} {lark.literal(key_end)}"
            value = self._write_value(lark, tool, part, schema)
            opens = f"{space} {lark.literal(self.value[0])}" if self.value[0] else ""
            argument = f"{head} {opens} {value} {space}"
            parts.append(argument if key in required else f"({argument})?")
        return f" {space} ".join([*parts, lark.literal(self.close)])

    def _write_value(self, lark: LarkWriter, tool: Tool, schema: Schema, root: Schema) -> str:
        close = lark.literal(self.value[1])
        if tool.grammar or types_of(schema, root) != _STRING:
            space_around = f"{lark.space()} " if self.on_own_lines else ""
            value_schema = {**schema, **defined_in(root)}
            value = quoted_input_rule(lark, tool) if tool.grammar else lark.json(value_schema, lenient=not tool.strict)
            return f"{space_around}{value} {space_around}{close}"
        line = "\n" if self.on_own_lines else ""
        before = lark.plain_text(line) if line else ""
        if values := values_of(schema):
            return f"{before} {alternatives(lark.plain_text(str(value)) for value in values)} {before} {close}"
        return f"{before} {lark.until(self.value[1], patterns=patterns_of(schema), before=line)}"


class _StripOuterNewlines:
    """Emits a text without one line break at its start and one at its end."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._pending = ""
        self._started = False

    def push(self, text: str) -> None:
        if not self._started:
            self._started, text = True, text.removeprefix("\n")
        text = self._pending + text
        self._pending = "\n" if text.endswith("\n") else ""
        self._emit(json_escaped(text.removesuffix("\n")))


def _discard(_: str) -> None: ...
