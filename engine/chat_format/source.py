"""Text that comes in pieces, for readers that are written as if it were whole.

A reader is a generator: it yields where it needs more text than there is. So what it reads cannot depend on how the
text was cut. What may turn out to be no call after all is read on trial (`attempt`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

Result = TypeVar("Result")
# A reader's work; it yields where it waits for text.
Steps = Generator[None, None, Result]
Emit = Callable[[str], None]

# What is read on trial is at most so long, so that text full of openings costs no more than its length times this.
MAX_LOOKAHEAD = 4096

SPACE = re.compile(r"[ \t\r\n]+")


class NoMatch(Exception):
    """What was read on trial is no call."""


class Literals:
    """Strings that are looked for together: the one that begins first wins, then the longest."""

    def __init__(self, literals: Iterable[str]) -> None:
        ordered = sorted({*literals} - {""}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self._prefixes = frozenset(literal[:length] for literal in ordered for length in range(1, len(literal)))
        self._longest = max((len(beginning) for beginning in self._prefixes), default=0)

    def find(self, text: str, at: int, *, ended: bool) -> tuple[int, str]:
        """Where the first one begins, and which; "" with the place up to which there is certainly none."""
        found = self._pattern.search(text, at)
        safe = len(text) if ended else self._unfinished(text, at)
        if found is not None and (found.start() < safe or ended):
            return found.start(), found.group()
        return safe, ""

    def _unfinished(self, text: str, at: int) -> int:
        """Where the longest end of the text begins that may yet become one of them."""
        for start in range(max(at, len(text) - self._longest), len(text)):
            if text[start:] in self._prefixes:
                return start
        return len(text)


class TextSource:
    """What has come and is not read yet.

    is_broken  the text was cut, and in what was being read: more of it was needed
    """

    def __init__(self) -> None:
        self.is_broken = False
        self._cut = False
        self._text = ""
        self._at = 0
        self._lookahead: int | None = None
        self._ended = False

    def push(self, text: str) -> None:
        """More text has come."""
        cut = self._at if self._lookahead is None else self._lookahead
        self._text = self._text[cut:] + text
        self._at -= cut
        if self._lookahead is not None:
            self._lookahead = 0

    def end(self) -> None:
        """No more will come."""
        self._ended = True

    def cut(self) -> None:
        """No more will come, though the text is not over."""
        self._ended = self._cut = True

    def discard(self) -> None:
        """Nobody reads what is left."""
        self._at = len(self._text)

    def attempt(self, steps: Steps[object]) -> Steps[bool]:
        """Read on trial. Where that raises Unlike, nothing was read, and the answer is False."""
        self._lookahead = self._at
        try:
            yield from steps
        except NoMatch:
            assert self._lookahead is not None
            self._at = self._lookahead
            return False
        finally:
            self._lookahead = None
        return True

    def commit(self) -> None:
        """It is certain by now: what was read on trial is not read again."""
        self._lookahead = None

    def push_back(self, literal: str) -> None:
        """Take back what was read last."""
        self._at -= len(literal)

    def peek(self) -> Steps[str]:
        """The next letter; "" at the end."""
        while self._at == len(self._text):
            if self._ended:
                self.is_broken = self._cut
                return ""
            yield
        return self._text[self._at]

    def take(self, count: int) -> Steps[str]:
        """The next letters, fewer at the end."""
        while len(self._text) < self._at + count and not self._ended:
            yield
        return self._advance(min(self._at + count, len(self._text)))

    def match(self, pattern: re.Pattern[str], emit: Emit | None = None) -> Steps[str]:
        """The letters that come and match `pattern`, a repeated class of letters; with `emit` they go there instead."""
        taken = []
        while True:
            found = pattern.match(self._text, self._at)
            if found is not None:
                text = self._advance(found.end())
                if emit is None:
                    taken.append(text)
                else:
                    emit(text)
            if self._at < len(self._text) or self._ended:
                return "".join(taken)
            yield

    def skip_space(self) -> Steps[None]:
        """Read whitespace away."""
        yield from self.match(SPACE, lambda _: None)

    def accept(self, literal: str) -> Steps[bool]:
        """Read this literal if it comes next."""
        while True:
            there = self._text[self._at : self._at + len(literal)]
            if there == literal:
                self._advance(self._at + len(literal))
                return True
            if not literal.startswith(there):
                return False
            if self._ended:
                self.is_broken = self._cut
                return False
            yield

    def expect(self, *literals: str) -> Steps[None]:
        """Read these literals, with whitespace before each but the first; raises Unlike where another text comes."""
        for number, literal in enumerate(literals):
            if number:
                yield from self.skip_space()
            if not (yield from self.accept(literal)):
                raise NoMatch

    def until(self, literals: Literals, emit: Emit) -> Steps[str]:
        """Pass on the text before the first of the literals, and read that; "" where the text ends before one."""
        while True:
            stop, literal = literals.find(self._text, self._at, ended=self._ended)
            if stop > self._at:
                emit(self._advance(stop))
            if literal:
                self._advance(stop + len(literal))
                return literal
            if self._ended:
                return ""
            yield

    def _advance(self, stop: int) -> str:
        text = self._text[self._at : stop]
        self._at = stop
        if self._lookahead is not None and stop - self._lookahead > MAX_LOOKAHEAD:
            raise NoMatch
        return text
