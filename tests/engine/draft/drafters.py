"""Drafters with scripted drafts; each implements Drafter. No draft may change an output."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from engine.schedule.draft import DraftRequest

Script = Callable[[DraftRequest], Sequence[int]]


class ScriptedDrafter:
    """Proposes the tokens of a script, and records the finished sequences with their outputs."""

    kind = "scripted"

    def __init__(self, script: Script) -> None:
        self._script = script
        self.finished: list[tuple[str, list[int]]] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """The tokens of the script, up to the limit of each request."""
        return [list(self._script(request))[: request.limit] for request in requests]

    def forget(self, sequence_id: str, output: Sequence[int]) -> None:
        """Record the finished sequence."""
        self.finished.append((sequence_id, list(output)))

    def flush(self, budget_bytes: int) -> bool:
        """There is nothing to write."""
        return False


def always_right(outputs: Mapping[str, Sequence[int]], prompts: Mapping[str, int]) -> ScriptedDrafter:
    """Proposes the outputs, by sequence; `prompts` are the lengths of their prompts."""
    return ScriptedDrafter(lambda request: _remaining(request, outputs, prompts))


def always_wrong(outputs: Mapping[str, Sequence[int]], prompts: Mapping[str, int], vocabulary: int) -> ScriptedDrafter:
    """Proposes another token in place of each token of the outputs."""
    return ScriptedDrafter(
        lambda request: [(token + 1) % vocabulary for token in _remaining(request, outputs, prompts)]
    )


def partly_right(
    outputs: Mapping[str, Sequence[int]], prompts: Mapping[str, int], vocabulary: int, seed: int = 0
) -> ScriptedDrafter:
    """Drafts of random length, right for a random number of tokens."""
    chance = random.Random(seed)

    def script(request: DraftRequest) -> list[int]:
        remaining = _remaining(request, outputs, prompts)
        right, length = chance.randint(0, len(remaining)), chance.randint(0, request.limit)
        return [*remaining[:right], *((token + 1) % vocabulary for token in remaining[right:])][:length]

    return ScriptedDrafter(script)


def random_tokens(vocabulary: int, seed: int = 0) -> ScriptedDrafter:
    """Random tokens, in drafts of random length."""
    chance = random.Random(seed)
    return ScriptedDrafter(
        lambda request: [chance.randrange(vocabulary) for _ in range(chance.randint(0, request.limit))]
    )


def end_tokens(token: int) -> ScriptedDrafter:
    """Proposes the end token at every position."""
    return ScriptedDrafter(lambda request: [token] * request.limit)


def _remaining(request: DraftRequest, outputs: Mapping[str, Sequence[int]], prompts: Mapping[str, int]) -> list[int]:
    """The next tokens of the output. Context shifts do not change the position of a draw."""
    emitted = request.draw.position - prompts[request.sequence_id]
    return list(outputs[request.sequence_id][emitted : emitted + request.limit])
