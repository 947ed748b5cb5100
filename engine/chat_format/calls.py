"""One tool call as JSON writes it: an object that names the function, or a name and its arguments behind it."""

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
from engine.chat_format.source import NoMatch, Steps, TextSource

_NAME = re.compile(r"""[^\s<>\[\]{}()"'`|,=]+""")
_NUMBER = re.compile(r":[0-9]+$")
_ARGUMENTS = frozenset(("arguments", "parameters"))


@dataclass(frozen=True, slots=True)
class CallableTools:
    """The tools that an answer may call.

    only  whether a call of anything else is no call, since no marker says that it is one
    """

    tools: Mapping[str, Tool]
    only: bool = False

    def check_name(self, name: str) -> str:
        """A name itself; raises Unlike where it is none."""
        if not name or (self.only and name not in self.tools):
            raise NoMatch
        return name

    def schema(self, name: str) -> Schema:
        """What the arguments of a function should follow."""
        return schema_of(self.tools[name]) if name in self.tools else {}

    def has_grammar(self, name: str) -> bool:
        """Whether it takes a text that follows a grammar."""
        return name in self.tools and bool(self.tools[name].grammar)


class CallNotation(Protocol):
    """How one call is written."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The literals inside a call."""
        ...

    def parse(self, source: TextSource, speech: DeltaBuffer, offer: CallableTools) -> Steps[bool]:
        """Read one call; whether its arguments were whole and valid.

        The source is on trial: raises Unlike where there is no call, and settles it once there is one.
        """
        ...

    def grammar_rule(self, lark: LarkWriter, tool: Tool) -> str:
        """A call of this tool as an expression of the grammar."""
        ...


@dataclass(frozen=True, slots=True)
class ObjectCall:
    """A JSON object that holds the name and the arguments, by these keys."""

    name: str = "name"
    arguments: str = "arguments"

    @property
    def markers(self) -> tuple[str, ...]:
        """None."""
        return ()

    def parse(self, source: TextSource, speech: DeltaBuffer, offer: CallableTools) -> Steps[bool]:
        """Read the members up to the arguments on trial, then pass those on as they come."""
        yield from source.expect("{")
        name, early = "", "{}"
        while True:
            key = yield from _key(source)
            if key == self.name:
                name = _text((yield from _captured(source)))
            elif key in _ARGUMENTS and not name:
                early = _object((yield from _captured(source)))
            elif key in _ARGUMENTS and (yield from source.peek()) == "{":
                return (yield from self._stream(source, speech, offer.check_name(name)))
            elif key in _ARGUMENTS:
                early = _object((yield from _captured(source)))
            else:
                yield from _captured(source)
            yield from source.skip_space()
            if not (yield from source.accept(",")):
                break
        yield from source.expect("}")
        begin_call(source, speech, offer.check_name(name))
        speech.add_arguments(early)
        return True

    def grammar_rule(self, lark: LarkWriter, tool: Tool) -> str:
        """The name first, then arguments that follow the tool's schema."""
        head = f"{{{json.dumps(self.name)}: {json.dumps(tool.name)}, {json.dumps(self.arguments)}: "
        return f"{lark.plain_text(head)} {arguments_rule(lark, tool)} {lark.plain_text('}')}"

    def _stream(self, source: TextSource, speech: DeltaBuffer, name: str) -> Steps[bool]:
        begin_call(source, speech, name)
        if not (yield from stream_json(source, speech.add_arguments)):
            return False
        yield from source.attempt(_skip_rest(source))
        return True


@dataclass(frozen=True, slots=True)
class NamedCall:
    """A name, and the arguments as a JSON object behind it.

    before, after  what stands before and behind the name
    prefix         of the name, which is not part of it
    numbered       whether ":" and a number follow the name
    identity       what may stand before an identity behind the name
    """

    name_prefix: tuple[str, ...] = ()
    name_suffix: tuple[str, ...] = ()
    prefix: str = ""
    numbered: bool = False
    identity: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """What stands around the name."""
        return (*self.name_prefix, *self.name_suffix, self.identity)

    def parse(self, source: TextSource, speech: DeltaBuffer, offer: CallableTools) -> Steps[bool]:
        """Read the name on trial, then pass the arguments on as they come; there may be none."""
        yield from source.expect(*self.name_prefix)
        yield from source.skip_space()
        name = (yield from parse_name(source)).removeprefix(self.prefix)
        if self.numbered:
            name = _NUMBER.sub("", name)
        yield from source.skip_space()
        if self.identity and (yield from source.accept(self.identity)):
            yield from source.skip_space()
            yield from parse_name(source)
            yield from source.skip_space()
        yield from source.expect(*self.name_suffix)
        yield from source.skip_space()
        begin_call(source, speech, offer.check_name(name))
        return (yield from source.peek()) == "{" and (yield from stream_json(source, speech.add_arguments))

    def grammar_rule(self, lark: LarkWriter, tool: Tool) -> str:
        """The name with what belongs to it, then arguments that follow the tool's schema."""
        number = lark.pattern(regex(":[0-9]{1,3}")) if self.numbered else ""
        parts = [lark.literals(*self.name_prefix), f"{lark.plain_text(self.prefix + tool.name)} {number}"]
        if self.identity:
            parts += [lark.literal(self.identity), lark.pattern(regex("[a-zA-Z0-9]{9}"))]
        parts += [lark.literals(*self.name_suffix), arguments_rule(lark, tool)]
        return f" {lark.space()} ".join(filter(None, parts))


def arguments_rule(lark: LarkWriter, tool: Tool) -> str:
    """The arguments of a tool as JSON; a schema that is not strict is kept as far as it can be."""
    if tool.grammar:
        return f"{lark.plain_text(f'{{{json.dumps(INPUT_FIELD)}: ')} {quoted_input_rule(lark, tool)} {lark.plain_text('}')}"
    return lark.json({"type": "object", **schema_of(tool)}, lenient=not tool.strict)


def quoted_input_rule(lark: LarkWriter, tool: Tool) -> str:
    """The text of a custom tool that follows a grammar, as a JSON string."""
    quote = lark.plain_text('"')
    return f"{quote} {lark.nested(quoted_grammar(tool.grammar))} {quote}"


def parse_name(source: TextSource) -> Steps[str]:
    """The bare name of a function; raises Unlike where there is none, or where it may go on."""
    name = yield from source.match(_NAME)
    if not (yield from source.peek()):
        raise NoMatch
    return name


def begin_call(source: TextSource, speech: DeltaBuffer, name: str) -> None:
    """It is a call: its name is sent, and nothing is read again."""
    source.commit()
    speech.begin_call(name)


def _key(source: TextSource) -> Steps[str]:
    """A key of an object, up to its value."""
    yield from source.skip_space()
    if (yield from source.peek()) != '"':
        raise NoMatch
    key = _text((yield from _captured(source)))
    yield from source.skip_space()
    yield from source.expect(":")
    yield from source.skip_space()
    return key


def _skip_rest(source: TextSource) -> Steps[None]:
    """What stands behind the arguments in the object that holds them, and its end."""
    yield from source.skip_space()
    while (yield from source.accept(",")):
        yield from _key(source)
        yield from _captured(source)
        yield from source.skip_space()
    yield from source.expect("}")


def _captured(source: TextSource) -> Steps[str]:
    """A JSON value as text; raises Unlike where there is none."""
    parts: list[str] = []
    if not (yield from stream_json(source, parts.append)):
        raise NoMatch
    return "".join(parts)


def _text(value: str) -> str:
    """The string that a JSON value is; raises Unlike where it is none."""
    text = json.loads(value)
    if not isinstance(text, str):
        raise NoMatch
    return text


def _object(value: str) -> str:
    """Arguments as JSON text: an object, an object inside a string, or none at all; raises Unlike for others."""
    if value == "null":
        return "{}"
    inner = _text(value) if value.startswith('"') else value
    try:
        there = isinstance(json.loads(inner), dict)
    except ValueError:
        there = False
    if not there:
        raise NoMatch
    return inner
