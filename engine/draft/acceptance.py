"""How often the drafts of one kind are right, by their position in the draft."""

from __future__ import annotations

# What a rate is worth before anything was seen of it: so many observations. A first position starts at a guess, a later
# one at the rate of the position before it.
_PRIOR = 3.0
# What a round forgets of all rounds before it: about the last 500 count.
_KEPT = 0.998


class Acceptance:
    """Chances that a draft is right, given that all drafts before it were.

    Old rounds fade with time and not with observations: what was not tried for long becomes uncertain, and then a
    single surprise changes the estimate.

    guess  how often the first is right, as long as nothing is known
    """

    def __init__(self, guess: float = 0.6) -> None:
        self._guess = guess
        self._right: list[float] = []
        self._judged: list[float] = []
        self._tried: list[int] = []
        self._round = 0

    def observe(self, judged: int, accepted: int, times: int = 1) -> None:
        """Of so many drafts, the first `judged` tokens were compared, and the first `accepted` were right."""
        missing = [0.0] * (judged - len(self._judged))
        self._right += missing
        self._judged += missing
        for at in range(judged):
            self._judged[at] += times
            self._right[at] += times * (at < accepted)

    def fade(self, rounds: int) -> None:
        """So many rounds passed."""
        self._round += rounds
        kept = _KEPT**rounds
        self._right = [count * kept for count in self._right]
        self._judged = [count * kept for count in self._judged]

    def survival(self, length: int) -> list[float]:
        """Chances that the first 1, 2, ... `length` drafts are all right."""
        chances, rate, chance = [], self._guess, 1.0
        for at in range(length):
            right, judged = (self._right[at], self._judged[at]) if at < len(self._judged) else (0.0, 0.0)
            rate = (right + _PRIOR * rate) / (judged + _PRIOR)
            chance *= rate
            chances.append(chance)
        return chances

    def tried(self, length: int) -> None:
        """This round tries the first `length` positions, whether they come to be judged or not."""
        self._tried += [0] * (length - len(self._tried))
        self._tried[:length] = [self._round] * length

    def ages(self, length: int) -> list[float]:
        """Rounds since each of the first `length` positions was tried."""
        tried = self._tried[:length] + [0] * (length - len(self._tried))
        return [float(self._round - at) for at in tried]
