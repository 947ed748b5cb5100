"""Drafters whose guesses are written down beforehand; each implements Drafter. None may ever change a text."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from engine.schedule.draft import DraftRequest

Guess = Callable[[DraftRequest], Sequence[int]]


class ScriptedDrafter:
    """Says what a script says, and writes down which sequences are over, and what they said."""

    kind = "scripted"

    def __init__(self, guess: Guess) -> None:
        self._guess = guess
        self.over: list[tuple[str, list[int]]] = []

    def propose(self, wants: Sequence[DraftRequest]) -> list[list[int]]:
        """What the script says, as much of it as is wanted."""
        return [list(self._guess(want))[: want.limit] for want in wants]

    def forget(self, sequence_id: str, said: Sequence[int]) -> None:
        """Write it down."""
        self.over.append((sequence_id, list(said)))

    def flush(self, budget_bytes: int) -> bool:
        """Nothing outlives the process."""
        return False


def always_right(outputs: Mapping[str, Sequence[int]], prompts: Mapping[str, int]) -> ScriptedDrafter:
    """Knows the outputs, by sequence; `prompts` are the lengths of their prompts."""
    return ScriptedDrafter(lambda want: _rest(want, outputs, prompts))


def always_wrong(outputs: Mapping[str, Sequence[int]], prompts: Mapping[str, int], vocabulary: int) -> ScriptedDrafter:
    """Knows the outputs, and says the token next to each."""
    return ScriptedDrafter(lambda want: [(token + 1) % vocabulary for token in _rest(want, outputs, prompts)])


def partly_right(
    outputs: Mapping[str, Sequence[int]], prompts: Mapping[str, int], vocabulary: int, seed: int = 0
) -> ScriptedDrafter:
    """Right for a random number of tokens, then wrong; of random length."""
    chance = random.Random(seed)

    def guess(want: DraftRequest) -> list[int]:
        rest = _rest(want, outputs, prompts)
        right, length = chance.randint(0, len(rest)), chance.randint(0, want.limit)
        return [*rest[:right], *((token + 1) % vocabulary for token in rest[right:])][:length]

    return ScriptedDrafter(guess)


def of_random_length(vocabulary: int, seed: int = 0) -> ScriptedDrafter:
    """Random tokens, of random length."""
    chance = random.Random(seed)
    return ScriptedDrafter(lambda want: [chance.randrange(vocabulary) for _ in range(chance.randint(0, want.limit))])


def says_the_end(token: int) -> ScriptedDrafter:
    """Nothing but the end of the text, over and over."""
    return ScriptedDrafter(lambda want: [token] * want.limit)


def _rest(want: DraftRequest, outputs: Mapping[str, Sequence[int]], prompts: Mapping[str, int]) -> list[int]:
    """What comes next. The draw's position is that in the text, which no context shift changes."""
    said = want.draw.position - prompts[want.sequence_id]
    return list(outputs[want.sequence_id][said : said + want.limit])
