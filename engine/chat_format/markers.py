"""Markers of reasoning and of tool calls: the literals around them in an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.chat_format.calls import CallableTools, CallNotation
from engine.chat_format.delta_buffer import DeltaBuffer
from engine.chat_format.lark_writer import LarkWriter, alternatives
from engine.chat_format.message import Tool
from engine.chat_format.source import Literals, Parser, TextSource
from engine.types.request import ReasoningLimit


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """Markers around the reasoning before an answer.

    label        literal after the opening marker
    start_token  opening marker as a token, if it is one token
    end_tokens   tokens of the closing marker
    """

    opens: str
    closes: str
    label: str = ""
    start_token: int | None = None
    end_tokens: tuple[int, ...] = ()

    def is_open(self, generation_prompt: str) -> bool:
        """Whether the generation prompt ends inside reasoning."""
        return generation_prompt.rfind(self.opens) > generation_prompt.rfind(self.closes)

    def is_closed(self, generation_prompt: str) -> bool:
        """Whether the generation prompt ends after closed reasoning."""
        return self.closes in generation_prompt and not self.is_open(generation_prompt)

    def reasoning_limit(self, budget: int, generation_prompt: str) -> ReasoningLimit | None:
        """A limit of `budget` tokens; None: reasoning is closed already, or its opening marker is not one token."""
        if self.is_open(generation_prompt):
            return ReasoningLimit(None, self.end_tokens, budget)
        return (
            None
            if self.start_token is None or self.is_closed(generation_prompt)
            else ReasoningLimit(self.start_token, self.end_tokens, budget)
        )

    def grammar_rule(self, lark: LarkWriter, generation_prompt: str) -> str:
        """Reasoning up to its closing marker: required if it is open, absent if it is closed, else optional."""
        if self.is_open(generation_prompt):
            return f"{lark.until(self.closes)} {lark.space()}"
        if self.is_closed(generation_prompt):
            return ""
        return f"({lark.space()} {lark.literals(self.opens, self.label)} {lark.until(self.closes)} {lark.space()})?"


@dataclass(frozen=True, slots=True)
class ToolCallMarkers:
    """Literals around tool calls; whitespace may separate any two.

    opens, closes     around all calls
    call, call_ends   around each call
    separator         between two calls
    allows_unmarked   whether an answer may begin with a call without opening marker
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
        """Literals before the first call."""
        return self.opens + self.call

    @property
    def markers(self) -> frozenset[str]:
        """All literals."""
        return frozenset((*self.opens, *self.call, *self.notation.markers, *self.call_ends, *self.closes))

    def parse(self, source: TextSource, deltas: DeltaBuffer, tools: CallableTools) -> Parser[bool]:
        """Parse calls after the first literal of the opening. False: there is none; nothing is consumed."""
        return (yield from self._parse(source, deltas, tools, self.opening[1:]))

    def parse_unmarked(self, source: TextSource, deltas: DeltaBuffer, tools: CallableTools) -> Parser[bool]:
        """Parse calls without opening marker. False: there is none, and nothing is consumed."""
        return (yield from self._parse(source, deltas, tools, ()))

    def grammar_rule(self, lark: LarkWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        """One or more calls of `tools`, and nothing else."""
        after_opening = self.grammar_after_opening(lark, tools, parallel=parallel)
        first = f"{lark.literal(self.opening[0])} {lark.space()} {after_opening}"
        if self.allows_unmarked:
            return f"({first} | {self._all_calls_rule(lark, tools, parallel=parallel)})"
        return f"{first} ({lark.space()} {first})*" if parallel and not self.opens else first

    def grammar_after_opening(self, lark: LarkWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        """The rest of `grammar_rule` after the first literal: of all calls if `opens` is set, else of one call."""
        calls = self._all_calls_rule(lark, tools, parallel=parallel)
        return f"{lark.literals(*self.opening[1:])} {lark.space()} {calls}"

    def _all_calls_rule(self, lark: LarkWriter, tools: Sequence[Tool], *, parallel: bool) -> str:
        space = lark.space()
        parts = [
            lark.rule(alternatives(self.notation.grammar_rule(lark, tool) for tool in tools)),
            lark.literals(*self.call_ends),
        ]
        call_rule = f" {space} ".join(filter(None, parts))
        if parallel and self.opens:
            literals = f" {space} ".join(filter(None, [lark.literals(self.separator), lark.literals(*self.call)]))
            call_rule += f" ({space} {literals} {space} {call_rule})*"
        return f"{call_rule} {space} {lark.literals(*self.closes)}" if self.closes else call_rule

    def _parse(
        self, source: TextSource, deltas: DeltaBuffer, tools: CallableTools, literals: tuple[str, ...]
    ) -> Parser[bool]:
        if not (yield from self._parse_call(source, deltas, tools, literals)):
            return False
        # Without a marker around all calls, each call has its own.
        while self.opens and (yield from self._parse_call(source, deltas, tools, (self.separator, *self.call))):
            pass
        yield from _skip(source, self.closes)
        return True

    def _parse_call(
        self, source: TextSource, deltas: DeltaBuffer, tools: CallableTools, literals: tuple[str, ...]
    ) -> Parser[bool]:
        return (yield from source.attempt(self._parse_one(source, deltas, tools, literals)))

    def _parse_one(
        self, source: TextSource, deltas: DeltaBuffer, tools: CallableTools, literals: tuple[str, ...]
    ) -> Parser[None]:
        yield from source.expect("", *literals)
        yield from source.skip_space()
        if (yield from self.notation.parse(source, deltas, tools)):
            yield from _skip(source, self.call_ends)
        else:
            yield from self._emit_invalid(source, deltas)

    def _emit_invalid(self, source: TextSource, deltas: DeltaBuffer) -> Parser[None]:
        """Pass invalid arguments on unchanged, so that the client can see the error; missing arguments are {}."""
        literal = yield from source.until(
            Literals((*self.call_ends, *self.closes, *self.opening[:1])), deltas.add_arguments
        )
        if literal and not deltas.has_arguments:
            deltas.add_arguments("{}")
        if literal and literal not in self.call_ends:
            source.push_back(literal)


def _skip(source: TextSource, literals: tuple[str, ...]) -> Parser[None]:
    """Consume the prefix of `literals` that follows, in order."""
    for literal in literals:
        yield from source.attempt(source.expect("", literal))
