"""Makes prompts of a wanted length in tokens out of seeded words; two share what is asked for and a few words more."""

from __future__ import annotations

import random
from dataclasses import dataclass

TEXT = (
    "river stone window garden letter morning paper silver winter bridge candle forest music summer table travel "
    "market doctor island yellow number animal school engine copper flower kitchen mountain pocket button carpet story "
    "harbor pepper ladder planet rabbit signal tunnel velvet wagon basket corner dinner feather guitar hammer insect"
)
WORDS = TEXT.split()


@dataclass(frozen=True, slots=True)
class Prompts:
    """A source of prompts.

    words   in every prompt
    shared  words, out of these, that all prompts begin with
    """

    words: int
    shared: int
    seed: int

    def text(self, *key: object) -> str:
        """Return the prompt named by `key`; the same key and seed give the same text."""
        together = sentence(self.shared, f"{self.seed} shared")
        return " ".join(filter(None, [together, sentence(self.words - self.shared, f"{self.seed} {key}")]))


@dataclass(frozen=True, slots=True)
class Length:
    """How many tokens a server makes of so many words: `around` for the template, `word` for each."""

    around: float
    word: float

    def words(self, tokens: int) -> int:
        """Return how many words come closest to `tokens`, one at least."""
        return max(1, round((tokens - self.around) / self.word))


def length(few: tuple[int, int], many: tuple[int, int]) -> Length:
    """Return the line through two (words, tokens) that a server counted."""
    word = max((many[1] - few[1]) / (many[0] - few[0]), 0.1)
    return Length(around=few[1] - word * few[0], word=word)


def sentence(words: int, seed: str) -> str:
    """Return that many words, drawn from `seed` alone."""
    source = random.Random(seed)
    return " ".join(source.choice(WORDS) for _ in range(words))
