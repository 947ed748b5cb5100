"""Where tool calls stand in a text: what opens and closes them, one by one and all together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.chat_format.calls import Notation, Offer
from engine.chat_format.lark import Lark, alternatives
from engine.chat_format.message import Tool
from engine.chat_format.source import Literals, Source, Steps
from engine.chat_format.speech import Speech


@dataclass(frozen=True, slots=True)
class Frame:
    """The markers around calls; whitespace may stand between any two.

    opens, closes  around all calls
    call, ends     around each call
    between        what separates two calls
    bare           an answer may also begin with a call that nothing opens
    """

    notation: Notation
    opens: tuple[str, ...] = ()
    call: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    between: str = ""
    closes: tuple[str, ...] = ()
    bare: bool = False

    @property
    def opening(self) -> tuple[str, ...]:
        """What stands before the first call."""
        return self.opens + self.call

    @property
    def markers(self) -> frozenset[str]:
        """All literals."""
        return frozenset((*self.opens, *self.call, *self.notation.markers, *self.ends, *self.closes))

    def read(self, source: Source, speech: Speech, offer: Offer) -> Steps[bool]:
        """Read calls behind the first literal of the opening; False where there is none, and nothing was read."""
        return (yield from self._read(source, speech, offer, self.opening[1:]))

    def read_bare(self, source: Source, speech: Speech, offer: Offer) -> Steps[bool]:
        """Read calls that nothing opens."""
        return (yield from self._read(source, speech, offer, ()))

    def write(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Calls of these tools and nothing else, at least one."""
        first = f"{lark.literal(self.opening[0])} {lark.space()} {self.write_rest(lark, tools, parallel=parallel)}"
        if self.bare:
            return f"({first} | {self._write_all(lark, tools, parallel=parallel)})"
        return f"{first} ({lark.space()} {first})*" if parallel and not self.opens else first

    def write_rest(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """What follows the first literal: of all calls where something opens them all, or else of one."""
        return f"{lark.literals(*self.opening[1:])} {lark.space()} {self._write_all(lark, tools, parallel=parallel)}"

    def _write_all(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        space = lark.space()
        parts = [lark.rule(alternatives(self.notation.write(lark, tool) for tool in tools)), lark.literals(*self.ends)]
        one = f" {space} ".join(filter(None, parts))
        if parallel and self.opens:
            before = f" {space} ".join(filter(None, [lark.literals(self.between), lark.literals(*self.call)]))
            one += f" ({space} {before} {space} {one})*"
        return f"{one} {space} {lark.literals(*self.closes)}" if self.closes else one

    def _read(self, source: Source, speech: Speech, offer: Offer, rest: tuple[str, ...]) -> Steps[bool]:
        if not (yield from self._call(source, speech, offer, rest)):
            return False
        # Without an opening for all of them, each call opens and closes for itself.
        while self.opens and (yield from self._call(source, speech, offer, (self.between, *self.call))):
            pass
        yield from _pass(source, self.closes)
        return True

    def _call(self, source: Source, speech: Speech, offer: Offer, before: tuple[str, ...]) -> Steps[bool]:
        """Read one call; whether there was one."""
        return (yield from source.tried(self._one(source, speech, offer, before)))

    def _one(self, source: Source, speech: Speech, offer: Offer, before: tuple[str, ...]) -> Steps[None]:
        yield from source.expect("", *before)
        yield from source.skip_space()
        if (yield from self.notation.read(source, speech, offer)):
            yield from _pass(source, self.ends)
        else:
            yield from self._broken(source, speech)

    def _broken(self, source: Source, speech: Speech) -> Steps[None]:
        """What a model writes instead of JSON goes out as it is: who called sees what is wrong. Nothing means {}."""
        found = yield from source.until(Literals((*self.ends, *self.closes, *self.opening[:1])), speech.arguments)
        if found and not speech.argued:
            speech.arguments("{}")
        if found and found not in self.ends:
            source.unread(found)


def _pass(source: Source, literals: tuple[str, ...]) -> Steps[None]:
    """Read these literals away as far as they come."""
    for literal in literals:
        yield from source.tried(source.expect("", literal))
