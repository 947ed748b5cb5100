"""Seconds of a drafter's calls: a base, a level of depth, and a drafted token each have a cost."""

from __future__ import annotations

import numpy as np

# Singular values below this share of the largest are noise: calls of one depth and batch size give one cost only.
_NOISE = 1e-7
# The unit of the cost of a call: small, so that calls of one depth are attributed to their levels and tokens.
_CALL = 0.1


class DraftCost:
    """Least squares over the calls of one drafter: seconds = call + level x depth + token x depth x batch tokens.

    Errors are relative to the seconds of a call, so that short calls count as much as long ones.

    memory  share of a call that still counts one call later
    """

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._products, self._sums = np.zeros((3, 3)), np.zeros(3)
        self._costs: list[float] = []

    def observe(self, depth: int, batch_tokens: int, seconds: float) -> None:
        """Measure a call of `depth` levels, in a step with `batch_tokens` without drafts."""
        if seconds <= 0:
            return
        features = np.array([_CALL, depth, depth * batch_tokens]) / seconds
        self._products = self._memory * self._products + np.outer(features, features)
        self._sums = self._memory * self._sums + features
        self._costs = []

    def seconds(self, depth: int, batch_tokens: int) -> float:
        """The expected seconds of a call; 0 before any was measured."""
        call, level, token = self._costs = self._costs or self._solved()
        return _CALL * call + depth * (level + batch_tokens * token)

    def _solved(self) -> list[float]:
        """The costs with the smallest error of which none is negative."""
        used, costs = np.flatnonzero(self._sums), np.zeros(3)
        while used.size:
            solution = np.linalg.lstsq(self._products[np.ix_(used, used)], self._sums[used], rcond=_NOISE)[0]
            if (solution >= 0).all():
                costs[used] = solution
                break
            used = used[solution > 0]
        result: list[float] = costs.tolist()
        return result
