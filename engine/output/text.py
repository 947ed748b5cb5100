"""From tokens to text that can be sent: whole characters, cut at the first stop.

It buffers the bytes of an incomplete character, and text that may still become a stop string.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from engine.output.stop_regex import StopRegex
from engine.text.detokenizer import Detokenizer
from engine.types.events import Delta, TokenLogprob


class StopStringMatcher:
    """Finds stop strings in text that arrives in pieces; the result does not depend on the pieces.

    The stop string that is complete first wins; of several complete at one character, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(sorted(filter(None, stops), key=len, reverse=True))
        self._held = ""
        # Leading characters of the held text in which no stop string may end.
        self._ignored = 0

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; the text that can be released, and the stop string if one is complete: the rest is dropped."""
        if not self._stops:
            return text, None
        self._held += text
        match = self._first_match()
        if match is not None:
            stop, start = match
            released, self._held = self._held[:start], ""
            return released, stop
        return self._release(), None

    def push_ignoring_stops(self, text: str) -> str:
        """Add text in which stop strings do not count; the text that can be released."""
        if not self._stops:
            return text
        self._held += text
        self._ignored = len(self._held)
        return self._release()

    def flush(self) -> str:
        """Release the held text at the end of the sequence."""
        released, self._held = self._held, ""
        return released

    def _release(self) -> str:
        """Release all but the text that may still become a stop string."""
        safe = len(self._held) - self._partial_match_length()
        released, self._held = self._held[:safe], self._held[safe:]
        self._ignored = max(self._ignored - safe, 0)
        return released

    def _first_match(self) -> tuple[str, int] | None:
        matches = [
            (start + len(stop), -len(stop), stop, start)
            for stop in self._stops
            if (start := self._held.find(stop, max(self._ignored + 1 - len(stop), 0))) >= 0
        ]
        return min(matches)[2:] if matches else None

    def _partial_match_length(self) -> int:
        """Length of the longest suffix of the held text that is a prefix of a stop string."""
        longest = min(len(self._held), max(len(stop) for stop in self._stops) - 1)
        for length in range(longest, 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class TextStream:
    """The output text of one sequence as deltas, each with its tokens.

    stops       stop strings: the text ends before the first
    stop_regex  stop expressions: the text ends after the first match
    min_tokens  tokens before which no stop counts
    at_once     each delta has the token that was added, not the tokens whose text it begins
    stop        the stop that ended the text, if one did
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        stop_regex: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        at_once: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopStringMatcher(stops)
        self._stop_regex, self._expressions = StopRegex(stop_regex) if stop_regex else None, tuple(stop_regex)
        self._min_tokens_left, self._at_once = min_tokens, at_once
        self._decoded = 0
        self._released = 0
        self._pending: deque[tuple[int, int, TokenLogprob | None]] = deque()
        self._pushed = 0
        self.stop: str | None = None

    def push(self, token: int, logprob: TokenLogprob | None = None) -> Delta | None:
        """Add a token; the text that it releases, if any. Sets `stop` when a stop is complete."""
        text = self._detokenizer.push(token)
        self._pushed += 1
        # A token belongs to the first character that it completes and is released together with it.
        self._pending.append((self._decoded, token, logprob))
        self._decoded += len(text)
        self._min_tokens_left -= 1
        too_early = self._min_tokens_left > 0
        end = None if self._stop_regex is None else self._stop_regex.push(text, ignoring_matches=too_early)
        if too_early:
            return self._release(self._matcher.push_ignoring_stops(text), everything=False)
        released, self.stop = self._matcher.push(text[:end])
        if end is not None and self.stop is None:
            released += self._matcher.flush()
            self.stop = self._expressions[0] if len(self._expressions) == 1 else "|".join(self._expressions)
        return self._release(released, everything=False)

    @property
    def released_tokens(self) -> int:
        """Tokens in the deltas so far."""
        return self._pushed - len(self._pending)

    @property
    def error(self) -> str:
        """Why the stop expressions can no longer be matched; "" while they can."""
        return "" if self._stop_regex is None else self._stop_regex.error

    def flush(self) -> Delta | None:
        """Release the buffered text at the end of a sequence that no stop has ended."""
        rest = self._detokenizer.flush()
        if self._min_tokens_left > 0:
            return self._release(self._matcher.push_ignoring_stops(rest) + self._matcher.flush(), everything=True)
        released, self.stop = self._matcher.push(rest)
        return self._release(released + self._matcher.flush(), everything=self.stop is None)

    def _release(self, text: str, *, everything: bool) -> Delta | None:
        self._released += len(text)
        tokens, entries = [], []
        everything = everything or self._at_once
        while self._pending and (everything or self._pending[0][0] < self._released):
            offset, token, entry = self._pending.popleft()
            tokens.append(token)
            if entry is not None:
                entries.append(replace(entry, text_offset=offset))
        return Delta(text, tuple(tokens), tuple(entries)) if text or tokens else None
