"""Prompts of a given length in tokens: chats of seeded words, or random token ids.

One key and seed give one prompt, the same for every server that counts alike; other keys share the template only.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

from bench.client import Chat, Prompt

TEXT = (
    "river stone window garden letter morning paper silver winter bridge candle forest music summer table travel "
    "market doctor island yellow number animal school engine copper flower kitchen mountain pocket button carpet story "
    "harbor pepper ladder planet rabbit signal tunnel velvet wagon basket corner dinner feather guitar hammer insect"
)
WORDS = TEXT.split()
# Ids that vocabularies have, above the single bytes and special tokens that often stand in front.
FIRST_ID, LAST_ID = 300, 1900


class Prompts(Protocol):
    """A source of prompts; all lengths are tokens."""

    def unshared(self, tokens: int, *key: object) -> Prompt:
        """A prompt that shares nothing with others."""
        ...

    def shared_system(self, system: int, tokens: int, *key: object, number: int) -> Prompt:
        """The prompt of one of many users behind one system prompt, which depends on `key` alone."""
        ...

    def second_turn(self, first: Prompt, answer: str, tokens: int, *key: object) -> Prompt:
        """The conversation that `first` began, with its answer and `tokens` more."""
        ...


@dataclass(frozen=True, slots=True)
class TokenRatio:
    """Tokens of a number of words on a server: `template_tokens` for the template, `word` for each."""

    template_tokens: float
    word: float

    def words(self, tokens: int) -> int:
        """How many words come closest to `tokens`, one at least."""
        return max(1, round((tokens - self.template_tokens) / self.word))


def fit_ratio(short: tuple[int, int], long: tuple[int, int]) -> TokenRatio:
    """The line through two (words, tokens) that a server counted."""
    word = max((long[1] - short[1]) / (long[0] - short[0]), 0.1)
    return TokenRatio(template_tokens=short[1] - word * short[0], word=word)


@dataclass(frozen=True, slots=True)
class WordPrompts:
    """Chats of common English words, for a server that counts them so."""

    counted: TokenRatio
    seed: int

    def unshared(self, tokens: int, *key: object) -> Chat:
        """See Prompts."""
        return (("user", self._text(self.counted.words(tokens), key)),)

    def shared_system(self, system: int, tokens: int, *key: object, number: int) -> Chat:
        """See Prompts."""
        together = self._text(self.counted.words(system), key)
        return (("system", together), ("user", self._text(self._more(tokens), (key, number))))

    def second_turn(self, first: Prompt, answer: str, tokens: int, *key: object) -> Chat:
        """See Prompts."""
        assert isinstance(first, tuple)
        # Templates may refuse an empty answer, and one of thoughts alone leaves none.
        return (*first, ("assistant", answer or "yes"), ("user", self._text(self._more(tokens), key)))

    def _more(self, tokens: int) -> int:
        """Words of a further message of about `tokens` tokens; the template was counted with the first."""
        return max(1, round(tokens / self.counted.word))

    def _text(self, words: int, key: object) -> str:
        return sentence(words, f"{self.seed} {key}")


@dataclass(frozen=True, slots=True)
class TokenIdPrompts:
    """Random token ids, exactly as many as asked for; for servers whose /v1/completions takes them."""

    seed: int

    def unshared(self, tokens: int, *key: object) -> list[int]:
        """See Prompts."""
        source = random.Random(f"{self.seed} {key}")
        return [source.randint(FIRST_ID, LAST_ID) for _ in range(tokens)]

    def shared_system(self, system: int, tokens: int, *key: object, number: int) -> list[int]:
        """See Prompts."""
        return [*self.unshared(system, key), *self.unshared(tokens, key, number)]

    def second_turn(self, first: Prompt, answer: str, tokens: int, *key: object) -> list[int]:
        """See Prompts. The ids of the answer are not known, so all behind the first prompt is new."""
        assert isinstance(first, list)
        return [*first, *self.unshared(tokens, key)]


def sentence(words: int, seed: str) -> str:
    """That many words, drawn from `seed` alone."""
    source = random.Random(seed)
    return " ".join(source.choice(WORDS) for _ in range(words))
