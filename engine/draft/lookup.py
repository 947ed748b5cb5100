"""N-gram lookup: the most frequent continuation of the context's longest suffix that occurred before.

It searches the client's prediction, the context of the sequence and the outputs of finished requests. The longer the
match, the longer the proposal (SuffixDecoding, arXiv 2411.04975).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.draft.outputs import LONGEST_SUFFIX, SEPARATOR, SHORTEST_SUFFIX, OutputStore, TokenBuffer, Tokens
from engine.schedule.draft import DraftRequest

# Maximum proposed tokens for each matched one, and the relative frequency below which a proposal ends.
_TOKENS_PER_MATCHED, _LEAST_FREQUENCY = 2.0, 0.1


class LookupDrafter:
    """Implements Drafter."""

    kind = "lookup"

    def __init__(self, store: OutputStore) -> None:
        self._store = store
        self._texts: dict[str, _Text] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """The continuation of the longest match of each request."""
        return [self._propose(request) for request in requests]

    def forget(self, sequence_id: str, output: Sequence[int]) -> None:
        """Store the output of a finished sequence, if a draft was requested for it and its request is cached."""
        if (text := self._texts.pop(sequence_id, None)) and text.cacheable:
            self._store.add(text.salt, output)

    def flush(self, budget_bytes: int) -> bool:
        """False: nothing is kept on disk."""
        return False

    def _propose(self, request: DraftRequest) -> list[int]:
        text = self._texts.get(request.sequence_id)
        if text is None:
            text = self._texts[request.sequence_id] = _Text(request)
        buffer, stored = text.buffer, None
        suffix = text.update(request)
        best = buffer.find(suffix, buffer.size - 1)
        for outputs in self._store.outputs(request.salt):
            match = outputs.buffer.find(suffix, outputs.buffer.size)
            if match.length > best.length:
                buffer, best, stored = outputs.buffer, match, outputs
        if best.length < SHORTEST_SUFFIX:
            return []
        if stored is not None:
            self._store.refresh(request.salt, stored, best.positions[0])
        limit = min(request.limit, int(_TOKENS_PER_MATCHED * best.length))
        return buffer.continuation(best.positions, limit, _LEAST_FREQUENCY)


class _Text:
    """The prediction and the context of one sequence."""

    def __init__(self, request: DraftRequest) -> None:
        self.salt, self.cacheable = request.salt, request.cacheable
        self.buffer = TokenBuffer(_prediction(request))
        self._start = self.buffer.size
        self._position = request.draw.position - len(request.tokens)

    def update(self, request: DraftRequest) -> Tokens:
        """Append the new tokens of the context; its last tokens."""
        new = request.draw.position - self._position
        self.buffer.extend(request.tokens[-new:] if new else ())
        self._position = request.draw.position
        return self.buffer.between(max(self._start, self.buffer.size - LONGEST_SUFFIX), self.buffer.size)


def _prediction(request: DraftRequest) -> list[int]:
    """The prediction after the end of the prompt, so that this end matches it."""
    if not request.prediction:
        return []
    end = len(request.tokens) - request.emitted
    return [*request.tokens[max(0, end - LONGEST_SUFFIX) : end], *request.prediction, SEPARATOR]
