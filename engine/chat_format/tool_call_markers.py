"""Where tool calls stand in a text: what opens and closes them, one by one and all together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.chat_format.calls import CallableTools, CallNotation
from engine.chat_format.delta_buffer import DeltaBuffer
from engine.chat_format.lark_writer import LarkWriter, alternatives
from engine.chat_format.message import Tool
from engine.chat_format.source import Literals, Steps, TextSource


@dataclass(frozen=True, slots=True)
class ToolCallMarkers:
    """The markers around calls; whitespace may stand between any two.

    opens, closes  around all calls
    call, ends     around each call
    separator        what separates two calls
    allows_unmarked           an answer may also begin with a call that nothing opens
    """

    notation: CallNotation
    opens: tuple[str, ...] = ()
    call: tuple[str, ...] = ()
    call_ends: tuple[str, ...] = ()
    separator: str = ""
    closes: tuple[str, ...] = ()
    allows_unmarked: bool = False

    @property
    def opening(self) -> tuple[str, ...]:
        """What stands before the first call."""
        return self.opens + self.call

    @property
    def markers(self) -> frozenset[str]:
        """All literals."""
        return frozenset((*self.opens, *self.call, *self.notation.markers, *self.call_ends, *self.closes))

    def parse(self, source: TextSource, speech: DeltaBuffer, offer: CallableTools) -> Steps[bool]:
        """Read calls behind the first literal of the opening; False where there is none, and nothing was read."""
        return (yield from self._parse(source, speech, offer, self.opening[1:]))

    def parse_unmarked(self, source: TextSource, speech: DeltaBuffer, offer: CallableTools) -> Steps[bool]:
        """Read calls that nothing opens."""
        return (yield from self._parse(source, speech, offer, ()))

    def grammar_rule(self, lark: LarkWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Calls of these tools and nothing else, at least one."""
        first = f"{lark.literal(self.opening[0])} {lark.space()} {self.grammar_after_opening(lark, tools, parallel=parallel)}"
        if self.allows_unmarked:
            return f"({first} | {self._all_calls_rule(lark, tools, parallel=parallel)})"
        return f"{first} ({lark.space()} {first})*" if parallel and not self.opens else first

    def grammar_after_opening(self, lark: LarkWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        """What follows the first literal: of all calls where something opens them all, or else of one."""
        return (
            f"{lark.literals(*self.opening[1:])} {lark.space()} {self._all_calls_rule(lark, tools, parallel=parallel)}"
        )

    def _all_calls_rule(self, lark: LarkWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        space = lark.space()
        parts = [
            lark.rule(alternatives(self.notation.grammar_rule(lark, tool) for tool in tools)),
            lark.literals(*self.call_ends),
        ]
        one = f" {space} ".join(filter(None, parts))
        if parallel and self.opens:
            before = f" {space} ".join(filter(None, [lark.literals(self.separator), lark.literals(*self.call)]))
            one += f" ({space} {before} {space} {one})*"
        return f"{one} {space} {lark.literals(*self.closes)}" if self.closes else one

    def _parse(
        self, source: TextSource, speech: DeltaBuffer, offer: CallableTools, rest: tuple[str, ...]
    ) -> Steps[bool]:
        if not (yield from self._parse_call(source, speech, offer, rest)):
            return False
        # Without an opening for all of them, each call opens and closes for itself.
        while self.opens and (yield from self._parse_call(source, speech, offer, (self.separator, *self.call))):
            pass
        yield from _skip(source, self.closes)
        return True

    def _parse_call(
        self, source: TextSource, speech: DeltaBuffer, offer: CallableTools, before: tuple[str, ...]
    ) -> Steps[bool]:
        """Read one call; whether there was one."""
        return (yield from source.attempt(self._parse_one(source, speech, offer, before)))

    def _parse_one(
        self, source: TextSource, speech: DeltaBuffer, offer: CallableTools, before: tuple[str, ...]
    ) -> Steps[None]:
        yield from source.expect("", *before)
        yield from source.skip_space()
        if (yield from self.notation.parse(source, speech, offer)):
            yield from _skip(source, self.call_ends)
        else:
            yield from self._emit_invalid(source, speech)

    def _emit_invalid(self, source: TextSource, speech: DeltaBuffer) -> Steps[None]:
        """What a model writes instead of JSON goes out as it is: who called sees what is wrong. Nothing means {}."""
        found = yield from source.until(
            Literals((*self.call_ends, *self.closes, *self.opening[:1])), speech.add_arguments
        )
        if found and not speech.has_arguments:
            speech.add_arguments("{}")
        if found and found not in self.call_ends:
            source.push_back(found)


def _skip(source: TextSource, literals: tuple[str, ...]) -> Steps[None]:
    """Read these literals away as far as they come."""
    for literal in literals:
        yield from source.attempt(source.expect("", literal))
