"""One tool call as JSON writes it: an object that names the function, or a name and its arguments behind it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from engine.chat_format.json_text import read_json
from engine.chat_format.lark import Lark, regex
from engine.chat_format.message import INPUT, Tool
from engine.chat_format.quoting import quoted_grammar
from engine.chat_format.schema import Schema, schema_of
from engine.chat_format.source import Source, Steps, Unlike
from engine.chat_format.speech import Speech

_NAME = re.compile(r"""[^\s<>\[\]{}()"'`|,=]+""")
_NUMBER = re.compile(r":[0-9]+$")
_ARGUMENTS = frozenset(("arguments", "parameters"))


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools that an answer may call.

    only  whether a call of anything else is no call, since no marker says that it is one
    """

    tools: Mapping[str, Tool]
    only: bool = False

    def checked(self, name: str) -> str:
        """A name itself; raises Unlike where it is none."""
        if not name or (self.only and name not in self.tools):
            raise Unlike
        return name

    def schema(self, name: str) -> Schema:
        """What the arguments of a function should follow."""
        return schema_of(self.tools[name]) if name in self.tools else {}

    def follows_grammar(self, name: str) -> bool:
        """Whether it takes a text that follows a grammar."""
        return name in self.tools and bool(self.tools[name].grammar)


class Notation(Protocol):
    """How one call is written."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The literals inside a call."""
        ...

    def read(self, source: Source, speech: Speech, offer: Offer) -> Steps[bool]:
        """Read one call; whether its arguments were whole and valid.

        The source is on trial: raises Unlike where there is no call, and settles it once there is one.
        """
        ...

    def write(self, lark: Lark, tool: Tool) -> str:
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

    def read(self, source: Source, speech: Speech, offer: Offer) -> Steps[bool]:
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
                return (yield from self._stream(source, speech, offer.checked(name)))
            elif key in _ARGUMENTS:
                early = _object((yield from _captured(source)))
            else:
                yield from _captured(source)
            yield from source.skip_space()
            if not (yield from source.accept(",")):
                break
        yield from source.expect("}")
        begin(source, speech, offer.checked(name))
        speech.arguments(early)
        return True

    def write(self, lark: Lark, tool: Tool) -> str:
        """The name first, then arguments that follow the tool's schema."""
        head = f"{{{json.dumps(self.name)}: {json.dumps(tool.name)}, {json.dumps(self.arguments)}: "
        return f"{lark.letters(head)} {arguments(lark, tool)} {lark.letters('}')}"

    def _stream(self, source: Source, speech: Speech, name: str) -> Steps[bool]:
        begin(source, speech, name)
        if not (yield from read_json(source, speech.arguments)):
            return False
        yield from source.tried(_rest(source))
        return True


@dataclass(frozen=True, slots=True)
class NamedCall:
    """A name, and the arguments as a JSON object behind it.

    before, after  what stands before and behind the name
    prefix         of the name, which is not part of it
    numbered       whether ":" and a number follow the name
    identity       what may stand before an identity behind the name
    """

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    prefix: str = ""
    numbered: bool = False
    identity: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """What stands around the name."""
        return (*self.before, *self.after, self.identity)

    def read(self, source: Source, speech: Speech, offer: Offer) -> Steps[bool]:
        """Read the name on trial, then pass the arguments on as they come; there may be none."""
        yield from source.expect(*self.before)
        yield from source.skip_space()
        name = (yield from read_name(source)).removeprefix(self.prefix)
        if self.numbered:
            name = _NUMBER.sub("", name)
        yield from source.skip_space()
        if self.identity and (yield from source.accept(self.identity)):
            yield from source.skip_space()
            yield from read_name(source)
            yield from source.skip_space()
        yield from source.expect(*self.after)
        yield from source.skip_space()
        begin(source, speech, offer.checked(name))
        return (yield from source.peek()) == "{" and (yield from read_json(source, speech.arguments))

    def write(self, lark: Lark, tool: Tool) -> str:
        """The name with what belongs to it, then arguments that follow the tool's schema."""
        number = lark.pattern(regex(":[0-9]{1,3}")) if self.numbered else ""
        parts = [lark.literals(*self.before), f"{lark.letters(self.prefix + tool.name)} {number}"]
        if self.identity:
            parts += [lark.literal(self.identity), lark.pattern(regex("[a-zA-Z0-9]{9}"))]
        parts += [lark.literals(*self.after), arguments(lark, tool)]
        return f" {lark.space()} ".join(filter(None, parts))


def arguments(lark: Lark, tool: Tool) -> str:
    """The arguments of a tool as JSON; a schema that is not strict is kept as far as it can be."""
    if tool.grammar:
        return f"{lark.letters(f'{{{json.dumps(INPUT)}: ')} {quoted_input(lark, tool)} {lark.letters('}')}"
    return lark.json({"type": "object", **schema_of(tool)}, lenient=not tool.strict)


def quoted_input(lark: Lark, tool: Tool) -> str:
    """The text of a custom tool that follows a grammar, as a JSON string."""
    quote = lark.letters('"')
    return f"{quote} {lark.nested(quoted_grammar(tool.grammar))} {quote}"


def read_name(source: Source) -> Steps[str]:
    """The bare name of a function; raises Unlike where there is none, or where it may go on."""
    name = yield from source.run(_NAME)
    if not (yield from source.peek()):
        raise Unlike
    return name


def begin(source: Source, speech: Speech, name: str) -> None:
    """It is a call: its name is sent, and nothing is read again."""
    source.settle()
    speech.call(name)


def _key(source: Source) -> Steps[str]:
    """A key of an object, up to its value."""
    yield from source.skip_space()
    if (yield from source.peek()) != '"':
        raise Unlike
    key = _text((yield from _captured(source)))
    yield from source.skip_space()
    yield from source.expect(":")
    yield from source.skip_space()
    return key


def _rest(source: Source) -> Steps[None]:
    """What stands behind the arguments in the object that holds them, and its end."""
    yield from source.skip_space()
    while (yield from source.accept(",")):
        yield from _key(source)
        yield from _captured(source)
        yield from source.skip_space()
    yield from source.expect("}")


def _captured(source: Source) -> Steps[str]:
    """A JSON value as text; raises Unlike where there is none."""
    parts: list[str] = []
    if not (yield from read_json(source, parts.append)):
        raise Unlike
    return "".join(parts)


def _text(value: str) -> str:
    """The string that a JSON value is; raises Unlike where it is none."""
    text = json.loads(value)
    if not isinstance(text, str):
        raise Unlike
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
        raise Unlike
    return inner
