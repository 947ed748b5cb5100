"""From tokens to text that may be sent: whole characters only, cut at the earliest stop.

Owns what is held back: the bytes of an unfinished character, and text that may yet become a stop string.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from engine.output.stop_regex import StopRegex
from engine.text.detokenizer import Detokenizer
from engine.types.events import Delta, TokenLogprob


class StopStringMatcher:
    """Looks for stop strings in text that comes in pieces; the result does not depend on how it is cut.

    The stop that is complete first wins; of those complete at the same character, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(sorted(filter(None, stops), key=len, reverse=True))
        self._held = ""
        # How much of what is held no stop string may end in.
        self._ignored = 0

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that can be released, and the stop string if one is complete: then what follows it is dropped."""
        if not self._stops:
            return text, None
        self._held += text
        found = self._first_match()
        if found is not None:
            stop, start = found
            released, self._held = self._held[:start], ""
            return released, stop
        return self._release(), None

    def push_ignoring_stops(self, text: str) -> str:
        """The text that can be released, where no stop string counts that is complete by now."""
        if not self._stops:
            return text
        self._held += text
        self._ignored = len(self._held)
        return self._release()

    def flush(self) -> str:
        """The text still held when no more will come: it did not become a stop string."""
        released, self._held = self._held, ""
        return released

    def _release(self) -> str:
        """All but what may yet become a stop string."""
        safe = len(self._held) - self._partial_match_length()
        released, self._held = self._held[:safe], self._held[safe:]
        self._ignored = max(self._ignored - safe, 0)
        return released

    def _first_match(self) -> tuple[str, int] | None:
        found = [
            (start + len(stop), -len(stop), stop, start)
            for stop in self._stops
            if (start := self._held.find(stop, max(self._ignored + 1 - len(stop), 0))) >= 0
        ]
        return min(found)[2:] if found else None

    def _partial_match_length(self) -> int:
        """The length of the longest end of the held text with which a stop string begins."""
        longest = min(len(self._held), max(len(stop) for stop in self._stops) - 1)
        for length in range(longest, 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class TextStream:
    """The text of one sequence, and which tokens belong to what has been released.

    stops     it ends before the first of these
    patterns  it ends behind the first match of these regular expressions
    least     tokens before which none of both counts
    """

    def __init__(
        self, decoder: Detokenizer, stops: Sequence[str], stop_regex: Sequence[str] = (), *, min_tokens: int = 0
    ) -> None:
        self._decoder = decoder
        self._matcher = StopStringMatcher(stops)
        self._stop_regex, self._expressions = StopRegex(stop_regex) if stop_regex else None, tuple(stop_regex)
        self._min_tokens_left = min_tokens
        self._decoded = 0
        self._released = 0
        self._pending: deque[tuple[int, int, TokenLogprob | None]] = deque()
        self._pushed = 0
        self.stop: str | None = None

    def push(self, token: int, logprob: TokenLogprob | None = None) -> Delta | None:
        """Take one token; the text that this releases, if any. `stop` is set once a stop string is complete."""
        text = self._decoder.push(token)
        self._pushed += 1
        # A token belongs to the first character that it completes: it is released together with it.
        self._pending.append((self._decoded, token, logprob))
        self._decoded += len(text)
        self._min_tokens_left -= 1
        end = None if self._stop_regex is None else self._stop_regex.push(text)
        if self._min_tokens_left > 0:
            return self._release(self._matcher.push_ignoring_stops(text), everything=False)
        released, self.stop = self._matcher.push(text[:end])
        if end is not None and self.stop is None:
            released += self._matcher.flush()
            self.stop = self._expressions[0] if len(self._expressions) == 1 else "|".join(self._expressions)
        return self._release(released, everything=False)

    @property
    def released_tokens(self) -> int:
        """Number of pushed tokens that the deltas hold so far."""
        return self._pushed - len(self._pending)

    @property
    def error(self) -> str:
        """Why it cannot be told where the text ends; "": it can."""
        return "" if self._stop_regex is None else self._stop_regex.error

    def flush(self) -> Delta | None:
        """What is still held when the sequence ends other than by a stop string."""
        rest = self._decoder.flush()
        if self._min_tokens_left > 0:
            return self._release(self._matcher.push_ignoring_stops(rest) + self._matcher.flush(), everything=True)
        released, self.stop = self._matcher.push(rest)
        return self._release(released + self._matcher.flush(), everything=self.stop is None)

    def _release(self, text: str, *, everything: bool) -> Delta | None:
        self._released += len(text)
        tokens, entries = [], []
        while self._pending and (everything or self._pending[0][0] < self._released):
            offset, token, entry = self._pending.popleft()
            tokens.append(token)
            if entry is not None:
                entries.append(replace(entry, text_offset=offset))
        return Delta(text, tuple(tokens), tuple(entries)) if text or tokens else None
