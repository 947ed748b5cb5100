"""Tool calls as a name and an object with unquoted keys, whose strings are quoted by a marker."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine.chat_format.calls import CallableTools, begin_call, parse_name
from engine.chat_format.delta_buffer import DeltaBuffer
from engine.chat_format.json_text import json_escaped, stream_json
from engine.chat_format.lark_writer import LarkWriter, alternatives
from engine.chat_format.message import INPUT_FIELD, Tool
from engine.chat_format.schema import (
    Schema,
    as_schema,
    patterns_of,
    properties_of,
    required_of,
    resolved,
    schema_of,
    values_of,
)
from engine.chat_format.source import Emit, Literals, Parser, TextSource

_KEY = re.compile(r"""[^\s:,<>"'{}\[\]]+""")
# Schemas may be recursive: values below this depth are unconstrained.
_MAX_DEPTH = 8
# Further values of a schema are unconstrained: a schema that contains itself several times grows exponentially.
_MAX_VALUES = 2000


@dataclass(frozen=True, slots=True)
class BraceCall:
    """`name{key:value}`, with `quote` on both sides of strings; parsed arguments are emitted as JSON."""

    quote: str

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.quote,)

    def parse(self, source: TextSource, deltas: DeltaBuffer, tools: CallableTools) -> Parser[bool]:
        """Parse the name with lookahead, then stream the arguments."""
        name = tools.check_name((yield from parse_name(source)))
        if (yield from source.peek()) == "{":
            begin_call(source, deltas, name)
            return (yield from stream_json(source, deltas.add_arguments, _BraceSyntax(self.quote)))
        yield from source.expect("{")
        return False

    def grammar_rule(self, lark: LarkWriter, tool: Tool) -> str:
        """A call with arguments that follow the tool's schema."""
        if tool.grammar:
            quote = lark.literal(self.quote)
            head = lark.plain_text(f"{tool.name}{{{INPUT_FIELD}:")
            return f"{head} {quote} {lark.nested(tool.grammar)} {quote} {lark.plain_text('}')}"
        schema = schema_of(tool)
        return f"{lark.plain_text(tool.name)} {_GrammarWriter(lark, self.quote, schema).fields(schema, 0)}"


@dataclass(frozen=True, slots=True)
class _BraceSyntax:
    quote: str

    def key(self, source: TextSource, emit: Emit) -> Parser[bool]:
        if self.quote.startswith((yield from source.peek()) or " "):
            return (yield from self.string(source, emit))
        key = yield from source.match(_KEY)
        emit(json.dumps(key, ensure_ascii=False) if key else "")
        return bool(key)

    def string(self, source: TextSource, emit: Emit) -> Parser[bool]:
        if not (yield from source.accept(self.quote)):
            return False
        emit('"')
        whole = yield from source.until(Literals((self.quote,)), lambda text: emit(json_escaped(text)))
        emit('"' if whole else "")
        return bool(whole)


@dataclass(slots=True)
class _GrammarWriter:
    """Grammar expressions for values of a schema."""

    lark: LarkWriter
    quote: str
    root: Schema
    _remaining_values: int = _MAX_VALUES

    def value(self, schema: Schema, depth: int) -> str:
        self._remaining_values -= 1
        if self._remaining_values < 0:
            depth = _MAX_DEPTH
        schema = resolved(schema, self.root)
        if values := values_of(schema):
            return alternatives(self.constant(value) for value in values)
        choices = schema.get("anyOf", schema.get("oneOf"))
        if isinstance(choices, list) and choices and depth < _MAX_DEPTH:
            return alternatives(self.value(as_schema(choice), depth + 1) for choice in choices)
        declared = schema.get("type")
        kinds = declared if isinstance(declared, list) else [declared]
        return alternatives(self.typed(str(kind), schema, depth + 1) for kind in kinds)

    def typed(self, kind: str, schema: Schema, depth: int) -> str:
        if kind == "string":
            return f"{self.lark.literal(self.quote)} {self.lark.until(self.quote, patterns=patterns_of(schema))}"
        if kind in ("integer", "number", "boolean", "null"):
            return self.lark.json({**schema, "type": kind})
        if kind == "array" and depth < _MAX_DEPTH:
            return self.items(schema, depth)
        if kind == "object" and depth < _MAX_DEPTH:
            return self.fields(schema, depth)
        return alternatives(self.typed(simple, {}, depth) for simple in ("string", "number", "boolean", "null"))

    def items(self, schema: Schema, depth: int) -> str:
        item = self.value(as_schema(schema.get("items")), depth)
        min_items, max_items = schema.get("minItems") or 0, schema.get("maxItems")
        if max_items == 0:
            return '"[" "]"'
        assert isinstance(min_items, int)
        more = f'("," {item}){{{max(min_items - 1, 0)},{"" if max_items is None else int(str(max_items)) - 1}}}'
        return f'"[" {item} {more} "]"' if min_items else f'"[" ({item} {more})? "]"'

    def fields(self, schema: Schema, depth: int) -> str:
        required = required_of(schema)
        members = [
            (f"{self.lark.plain_text(f'{key}:')} {self.value(part, depth)}", key in required)
            for key, part in properties_of(schema, self.root).items()
        ]
        return f'"{{" {self.members(members)} "}}"'

    def members(self, members: Sequence[tuple[str, bool]]) -> str:
        """Members in order, separated by commas; optional ones may be missing."""
        first = later = ""
        for member, required in reversed(members):
            opening = self.lark.rule(f"{member} {later}")
            following = self.lark.rule(f'"," {member} {later}')
            first = opening if required else self._or(opening, first)
            later = following if required else self._or(following, later)
        return first

    def _or(self, left: str, right: str) -> str:
        return self.lark.rule(f"{left} | {right}") if right else f"{left}?"

    def constant(self, value: object) -> str:
        if isinstance(value, str):
            quote = self.lark.literal(self.quote)
            return f"{quote} {self.lark.plain_text(value)} {quote}" if value else f"{quote} {quote}"
        return self.lark.plain_text(json.dumps(value))
