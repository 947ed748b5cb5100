"""Text in chunks for parsers that are written as if the text were complete.

A parser is a generator that yields where it needs more text, so its result cannot depend on how the text is chunked.
Text that may turn out to be no tool call is parsed with lookahead (`attempt`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

Result = TypeVar("Result")
# A running parser: it yields where it needs more text, and returns its result.
Parser = Generator[None, None, Result]
Emit = Callable[[str], None]

# Limit of the lookahead, in characters: text with many opening markers costs at most its length times this limit.
MAX_LOOKAHEAD = 4096

SPACE = re.compile(r"[ \t\r\n]+")


class NoMatch(Exception):
    """The attempted text is no tool call."""


class Literals:
    """Literals that are searched together: the first match in the text, then the longest."""

    def __init__(self, literals: Iterable[str]) -> None:
        ordered = sorted({*literals} - {""}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self._prefixes = frozenset(literal[:length] for literal in ordered for length in range(1, len(literal)))
        self._longest = max((len(beginning) for beginning in self._prefixes), default=0)

    def find(self, text: str, position: int, *, ended: bool) -> tuple[int, str]:
        """Position of the first match, and its literal; "" with the position up to which there is no match."""
        match = self._pattern.search(text, position)
        safe = len(text) if ended else self._unfinished(text, position)
        if match is not None and (match.start() < safe or ended):
            return match.start(), match.group()
        return safe, ""

    def _unfinished(self, text: str, position: int) -> int:
        """Start of the longest suffix of the text that may become a literal."""
        for start in range(max(position, len(text) - self._longest), len(text)):
            if text[start:] in self._prefixes:
                return start
        return len(text)


class TextSource:
    """Text that has arrived and is not parsed yet.

    is_broken  whether the text was truncated inside the part that is parsed
    """

    def __init__(self) -> None:
        self.is_broken = False
        self._truncated = False
        self._text = ""
        self._position = 0
        self._lookahead: int | None = None
        self._ended = False

    def push(self, text: str) -> None:
        cut = self._position if self._lookahead is None else self._lookahead
        self._text = self._text[cut:] + text
        self._position -= cut
        if self._lookahead is not None:
            self._lookahead = 0

    def end(self) -> None:
        """The text is complete."""
        self._ended = True

    def cut(self) -> None:
        """The text is truncated: no more arrives."""
        self._ended = self._truncated = True

    def discard(self) -> None:
        """Skip the remaining text."""
        self._position = len(self._text)

    def attempt(self, parser: Parser[object]) -> Parser[bool]:
        """Run a parser with lookahead. If it raises NoMatch, nothing is consumed and the result is False."""
        self._lookahead = self._position
        try:
            yield from parser
        except NoMatch:
            assert self._lookahead is not None
            self._position = self._lookahead
            return False
        finally:
            self._lookahead = None
        return True

    def commit(self) -> None:
        """End the lookahead: consumed text is not restored any more."""
        self._lookahead = None

    def push_back(self, literal: str) -> None:
        """Restore the literal that was consumed last."""
        self._position -= len(literal)

    def peek(self) -> Parser[str]:
        """The next character; "" at the end."""
        while self._position == len(self._text):
            if self._ended:
                self.is_broken = self._truncated
                return ""
            yield
        return self._text[self._position]

    def take(self, count: int) -> Parser[str]:
        """Consume the next `count` characters, fewer at the end."""
        while len(self._text) < self._position + count and not self._ended:
            yield
        return self._advance(min(self._position + count, len(self._text)))

    def match(self, pattern: re.Pattern[str], emit: Emit | None = None) -> Parser[str]:
        """Consume characters that match `pattern`, a repeated character class; with `emit`, emit them instead."""
        parts = []
        while True:
            match = pattern.match(self._text, self._position)
            if match is not None:
                text = self._advance(match.end())
                if emit is None:
                    parts.append(text)
                else:
                    emit(text)
            if self._position < len(self._text) or self._ended:
                return "".join(parts)
            yield

    def skip_space(self) -> Parser[None]:
        yield from self.match(SPACE, lambda _: None)

    def accept(self, literal: str) -> Parser[bool]:
        """Consume `literal` if it is next."""
        while True:
            upcoming = self._text[self._position : self._position + len(literal)]
            if upcoming == literal:
                self._advance(self._position + len(literal))
                return True
            if not literal.startswith(upcoming):
                return False
            if self._ended:
                self.is_broken = self._truncated
                return False
            yield

    def expect(self, *literals: str) -> Parser[None]:
        """Consume `literals`, with optional whitespace before each but the first; raises NoMatch for other text."""
        for number, literal in enumerate(literals):
            if number:
                yield from self.skip_space()
            if not (yield from self.accept(literal)):
                raise NoMatch

    def until(self, literals: Literals, emit: Emit) -> Parser[str]:
        """Emit the text before the first of `literals` and consume that literal; "" if the text ends before one."""
        while True:
            stop, literal = literals.find(self._text, self._position, ended=self._ended)
            if stop > self._position:
                emit(self._advance(stop))
            if literal:
                self._advance(stop + len(literal))
                return literal
            if self._ended:
                return ""
            yield

    def _advance(self, stop: int) -> str:
        text = self._text[self._position : stop]
        self._position = stop
        if self._lookahead is not None and stop - self._lookahead > MAX_LOOKAHEAD:
            raise NoMatch
        return text
