"""A tool call whose arguments stand one by one between markers, as XML-like formats write them; they become JSON."""

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
from engine.chat_format.source import Emit, Literals, Steps, TextSource

_STRING = frozenset(("string",))


@dataclass(frozen=True, slots=True)
class ParameterCall:
    """A name, then keys and values, each between two markers, then the end.

    on_own_lines  whether a value stands on lines of its own
    typed  what stands behind a key before a string, and before any other value; else the tool's schema says what it is
    A string stands as it is; any other value is JSON.
    """

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    close: str
    on_own_lines: bool = False
    typed: tuple[str, str] = ("", "")
    _next: Literals = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_next", Literals((self.key[0], self.close)))

    @property
    def markers(self) -> tuple[str, ...]:
        """What stands around keys and values."""
        return (*self.name, *self.key, *self.typed, *self.value, self.close)

    def parse(self, source: TextSource, speech: DeltaBuffer, offer: CallableTools) -> Steps[bool]:
        """Read the name on trial, then one argument after the other; a string goes on as it comes, others whole."""
        yield from source.expect(self.name[0])
        name = offer.check_name((yield from parse_name(source)))
        yield from source.expect(self.name[1])
        begin_call(source, speech, name)
        schema = offer.schema(name)
        described = properties_of(schema, schema)
        before = "{"
        while (found := (yield from source.until(self._next, _discard))) == self.key[0]:
            key: list[str] = []
            if not (yield from source.until(Literals((self.key[1],)), key.append)):
                return False
            text = "".join(key)
            speech.add_arguments(f"{before}{json.dumps(text, ensure_ascii=False)}: ")
            # What follows a grammar is written as JSON, or nobody could tell where it ends.
            types = frozenset[str]() if offer.has_grammar(name) else types_of(described.get(text, {}), schema)
            if not (
                yield from self._value(source, speech.add_arguments, (yield from self._declared_types(source, types)))
            ):
                return False
            before = ", "
        if found:
            speech.add_arguments("{}" if before == "{" else "}")
        return bool(found)

    def _declared_types(self, source: TextSource, types: frozenset[str]) -> Steps[frozenset[str]]:
        """The types that a value may have: what stands before it goes first."""
        as_string, as_json = self.typed
        if as_string and (yield from source.accept(as_string)):
            return _STRING
        return frozenset() if as_json and (yield from source.accept(as_json)) else types

    def _value(self, source: TextSource, emit: Emit, types: frozenset[str]) -> Steps[bool]:
        if self.value[0]:
            yield from source.skip_space()
            yield from source.accept(self.value[0])
        close = Literals((self.value[1],))
        if types != _STRING:
            parts: list[str] = []
            found = yield from source.until(close, parts.append)
            emit(json_of("".join(parts), types) if found else "".join(parts))
            return bool(found)
        emit('"')
        lines = _StripOuterNewlines(emit) if self.on_own_lines else None
        found = yield from source.until(close, lines.push if lines else lambda text: emit(json_escaped(text)))
        if found:
            emit('"')
        return bool(found)

    def grammar_rule(self, lark: LarkWriter, tool: Tool) -> str:
        """The arguments in the order of the schema, at least those that are required."""
        schema, space = schema_of(tool), lark.space()
        required = required_of(schema)
        parts = [f"{lark.literals(self.name[0])} {lark.plain_text(tool.name)} {lark.literals(self.name[1])}"]
        for key, part in properties_of(schema, schema).items():
            bare = not tool.grammar and types_of(part, schema) == _STRING
            behind = self.key[1] + self.typed[0 if bare else 1]
            head = f"{lark.literal(self.key[0])} {lark.plain_text(key)} {lark.literal(behind)}"
            value = self._write_value(lark, tool, part, schema)
            opens = f"{space} {lark.literal(self.value[0])}" if self.value[0] else ""
            argument = f"{head} {opens} {value} {space}"
            parts.append(argument if key in required else f"({argument})?")
        return f" {space} ".join([*parts, lark.literal(self.close)])

    def _write_value(self, lark: LarkWriter, tool: Tool, schema: Schema, root: Schema) -> str:
        close = lark.literal(self.value[1])
        if tool.grammar or types_of(schema, root) != _STRING:
            break_ = f"{lark.space()} " if self.on_own_lines else ""
            described = {**schema, **defined_in(root)}
            value = quoted_input_rule(lark, tool) if tool.grammar else lark.json(described, lenient=not tool.strict)
            return f"{break_}{value} {break_}{close}"
        line = "\n" if self.on_own_lines else ""
        before = lark.plain_text(line) if line else ""
        if values := values_of(schema):
            return f"{before} {alternatives(lark.plain_text(str(value)) for value in values)} {before} {close}"
        return f"{before} {lark.until(self.value[1], like=patterns_of(schema), before=line)}"


class _StripOuterNewlines:
    """A text without the line breaks that set it apart: one in front, one behind."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._pending = ""
        self._started = False

    def push(self, text: str) -> None:
        """More of the text."""
        if not self._started:
            self._started, text = True, text.removeprefix("\n")
        text = self._pending + text
        self._pending = "\n" if text.endswith("\n") else ""
        self._emit(json_escaped(text.removesuffix("\n")))


def _discard(_: str) -> None:
    """Text between arguments is nobody's."""
