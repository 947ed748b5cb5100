"""An answer to one question that is not thought over again while it seems right: thinking costs time too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

# An answer that was about right six times in a row is given 31 times before it is looked at again, or until it is old.
_LONGEST, _OLD = 5, 512

# Numbers by kind, the greatest first.
Answer: TypeAlias = Mapping[str, Sequence[int]]


class Habit:
    """The latest answer. The more often in a row it was about the same, the longer it is given without asking."""

    def __init__(self) -> None:
        self._answer: Answer = {}
        self._left = self._streak = self._learnt = 0

    def recall(self, step: int) -> Answer | None:
        """The answer in a step; None: it is time to think."""
        if self._left == 0 or step > self._learnt + _OLD:
            return None
        self._left -= 1
        return self._answer

    def learn(self, answer: Answer, step: int, most: int) -> None:
        """What thinking came to in a step, to be given `most` times at most."""
        self._streak = min(self._streak + 1, _LONGEST) if _alike(answer, self._answer) else 0
        self._answer, self._learnt, self._left = answer, step, min(2**self._streak - 1, most)


def _alike(answer: Answer, other: Answer) -> bool:
    """Whether those of each kind begin and end nearly alike: what is nearly the best is nearly as good."""
    return answer.keys() == other.keys() and all(
        _near(numbers[0], other[kind][0]) and _near(numbers[-1], other[kind][-1]) for kind, numbers in answer.items()
    )


def _near(one: int, other: int) -> bool:
    return abs(one - other) <= 1 + min(one, other) // 4
