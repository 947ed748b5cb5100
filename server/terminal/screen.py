"""Shows a streamed answer: Markdown block by block, reasoning dimmed, and the figures of the answer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from server.terminal.client import AnswerEnd, AnswerPiece
from server.terminal.printable import printable

REFRESH_SECONDS = 0.08
_parser = MarkdownIt().enable("table")


@dataclass(slots=True)
class AnswerFigures:
    """Times of an answer in seconds since the request, and the counts of its usage."""

    begun: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float = 0.0
    pieces: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None

    def add(self, piece: AnswerPiece | AnswerEnd) -> None:
        """Record the arrival of text, or the counts at the end."""
        if isinstance(piece, AnswerEnd):
            self.usage, self.finish_reason = piece.usage, piece.finish_reason
            return
        self.last = time.perf_counter() - self.begun
        self.first = self.last if self.first is None else self.first
        self.pieces += 1

    @property
    def tokens(self) -> int:
        """Tokens of the answer; pieces of text if the server did not count tokens."""
        return int(self.usage.get("completion_tokens") or self.pieces)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after the first one by the time that they took; None for a single token.

        An answer that arrived in one piece: all tokens by the time to it.
        """
        if not self.first or self.tokens < 2:
            return None
        if self.last <= self.first:
            return self.tokens / self.first
        return (self.tokens - 1) / (self.last - self.first)

    def line(self) -> str:
        """The figures in one line."""
        speed, prompt, cached = self.tokens_per_second, self.usage.get("prompt_tokens"), self._cached_tokens()
        parts = (
            f"{self.tokens} token{'' if self.tokens == 1 else 's'}",
            f"{speed:.1f} tokens/s" if speed else "",
            f"first token after {self.first:.2f} s" if self.first is not None else "",
            f"{cached} of {prompt} prompt tokens cached" if cached else "",
            "cut at --max-tokens or the context" if self.finish_reason == "length" else "",
        )
        return ", ".join(filter(None, parts))

    def _cached_tokens(self) -> int:
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


class MarkdownScreen:
    """Prints Markdown while it grows. Finished blocks are printed for good, the last block is drawn again and again.

    A block that is higher than the terminal shows its last lines until it is finished.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._block, self._printed, self._drawn = "", False, 0.0

    def open(self) -> None:
        """Begin to draw."""
        self._live.start()

    def close(self) -> None:
        """Print the last block."""
        self._live.update(Text(""), refresh=True)
        self._live.stop()
        self._print(self._block)

    def add(self, text: str) -> None:
        """Add text and draw it, if the last drawing is long enough ago."""
        self._block += printable(text)
        now = time.monotonic()
        if now - self._drawn < REFRESH_SECONDS:
            return
        self._drawn = now
        finished, self._block = split_blocks(self._block)
        self._print(finished)
        self._live.update(_Block(self._block, gap=self._printed, whole=False), refresh=True)

    def _print(self, text: str) -> None:
        if text.strip():
            self.console.print(_Block(text, gap=self._printed, whole=True), end="")
            self._printed = True


def split_blocks(text: str) -> tuple[str, str]:
    """All blocks of Markdown but the last, and the last, which may still grow."""
    starts = [token.map[0] for token in _parser.parse(text) if token.level == 0 and token.nesting >= 0 and token.map]
    if len(starts) < 2:
        return "", text
    lines = text.splitlines(keepends=True)
    return "".join(lines[: starts[-1]]), "".join(lines[starts[-1] :])


@dataclass(frozen=True, slots=True)
class _Block:
    """Blocks of Markdown.

    gap    an empty line precedes them
    whole  all lines; else the last ones that fit the terminal
    """

    text: str
    gap: bool
    whole: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(Markdown(self.text), options.update(height=None), pad=False)
        # Lists, tables, quotes and code begin with an empty line.
        own_gap = bool(lines) and not any(segment.text.strip() for segment in lines[0])
        rows = [*([[]] if self.gap else []), *lines[own_gap:]]
        for row in rows if self.whole else rows[-max(options.size.height - 1, 1) :]:
            yield from row
            yield Segment.line()


class AnswerScreen:
    """Shows the pieces of one answer: its reasoning dimmed, then its text as Markdown."""

    def __init__(self, console: Console) -> None:
        self.console, self.text = console, ""
        self._reasoning, self._markdown = False, MarkdownScreen(console)

    def __enter__(self) -> AnswerScreen:
        return self

    def __exit__(self, *_: object) -> None:
        if self.text:
            self._markdown.close()
        elif self._reasoning:
            self.console.print()

    def add(self, piece: AnswerPiece | AnswerEnd) -> None:
        """Show a piece; the end shows nothing."""
        if isinstance(piece, AnswerEnd):
            return
        if piece.reasoning:
            self._reasoning = True
            self.console.print(Text(printable(piece.text), style="dim"), end="", soft_wrap=True)
            return
        if not self.text:
            if self._reasoning:
                self.console.print("\n")
            self._markdown.open()
        self.text += piece.text
        self._markdown.add(piece.text)
