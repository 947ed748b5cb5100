"""An answer that is not thought over again while the question stays: thinking costs time too."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeAlias

# An answer that was right three times in a row is given seven times before it is looked at again.
_LONGEST = 3

# Numbers by kind, the greatest first. Two answers are the same where those of each kind begin and end alike.
Answer: TypeAlias = Mapping[str, Sequence[int]]


class Habit:
    """The latest answer. The more often in a row it was the same, the longer it is given without asking."""

    def __init__(self) -> None:
        self._question: Hashable = None
        self._answer: Answer = {}
        self._left = self._streak = 0

    def recall(self, question: Hashable) -> Answer | None:
        """The answer; None: the question is another one, or it is time to think."""
        if self._left == 0 or question != self._question:
            return None
        self._left -= 1
        return self._answer

    def learn(self, question: Hashable, answer: Answer) -> None:
        """What thinking came to. An answer that was right for other questions too has proven itself."""
        same = _gist(answer) == _gist(self._answer)
        self._streak = min(self._streak + 1, _LONGEST) if same else 0
        self._question, self._answer, self._left = question, answer, 2**self._streak - 1

    def hold(self, times: int) -> None:
        """The latest answer is an exception: it is given so many more times, and what comes next is new."""
        self._left, self._streak = times, 0


def _gist(answer: Answer) -> dict[str, tuple[int, int]]:
    return {kind: (numbers[0], numbers[-1]) for kind, numbers in answer.items()}
