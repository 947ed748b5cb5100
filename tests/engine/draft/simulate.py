"""A machine and drafters that exist as curves: what a depth controller would gain on them, without a model.

A world says what a step of so many rows costs and how often a draft at a position is right; both may change. Gains are
computed from expected tokens and not from the tokens that chance gave, so that they compare to a hundredth.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.draft.depth import Depth
from engine.draft.offer import Candidate
from engine.schedule.work import Work

Cost = Callable[[int], float]
KIND = "model"


@dataclass(frozen=True)
class World:
    """What is true: seconds of a step by its rows, chances of a draft by its position, seconds to draft a level."""

    seconds: Cost
    chances: Sequence[float]
    level_seconds: float = 0.0

    def tokens(self, depths: Sequence[int]) -> float:
        """Tokens that a step is expected to bring."""
        return sum(1 + sum(self._survival(depth)) for depth in depths)

    def cost(self, depths: Sequence[int]) -> float:
        """Seconds of a step and of its drafting."""
        return self.seconds(len(depths) + sum(depths)) + self.level_seconds * max(depths)

    def rate(self, depths: Sequence[int]) -> float:
        """Expected tokens a second."""
        return self.tokens(depths) / self.cost(depths)

    def _survival(self, depth: int) -> list[float]:
        chance, chances = 1.0, []
        for each in self.chances[:depth]:
            chance *= each
            chances.append(chance)
        return chances


@dataclass
class Score:
    """What a run brought: expected tokens and seconds, over its rounds."""

    tokens: float = 0.0
    seconds: float = 0.0
    depths: list[list[int]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Expected tokens a second."""
        return self.tokens / self.seconds


def play(
    depth: Depth,
    worlds: Sequence[World],
    *,
    batch: int,
    warm: int,
    seed: int = 0,
    noise: float = 0.05,
    cold: float = 0.0,
) -> Score:
    """Let a controller choose for a batch, one world a round; what the first `warm` rounds bring is not counted.

    noise  relative deviation of measured seconds; they are never less than true, as on a machine with other work
    cold   what the first step without drafts takes longer behind one with drafts, of which the processor's caches are
           full, as a share of a step; the next ones two thirds of that, and so on
    """
    chance = random.Random(seed)
    limit = len(worlds[0].chances)
    score, chill = Score(), 0.0
    for number, world in enumerate(worlds):
        depth.cost.expect(Work(batch, told=batch))
        asked = not depth.rests(KIND, batch)
        depths = depth.choose([Candidate(KIND, limit)] * batch, rows=batch) if asked else [0] * batch
        for drafted in depths:
            accepted = next((at for at in range(drafted) if chance.random() >= world.chances[at]), drafted)
            depth.verified(KIND, min(accepted + 1, drafted), accepted)
        if any(depths):
            depth.drafted(KIND, batch, max(depths), world.level_seconds * max(depths))
        chill = cold if any(depths) else 2 / 3 * chill
        late = 0.0 if any(depths) else 1.5 * chill
        seconds = (1 + late) * world.seconds(batch + sum(depths))
        depth.stepped(batch + sum(depths), seconds * (1 + abs(chance.gauss(0, noise))))
        if number >= warm:
            score.tokens += world.tokens(depths)
            score.seconds += world.cost(depths) + late * world.seconds(batch)
            score.depths.append(depths)
    return score


def best_fixed(worlds: Sequence[World], *, batch: int) -> float:
    """Expected tokens a second of the best depth that is the same for all sequences and rounds."""
    rates = []
    for depth in range(len(worlds[0].chances) + 1):
        depths = [depth] * batch
        rates.append(sum(world.tokens(depths) for world in worlds) / sum(world.cost(depths) for world in worlds))
    return max(rates)


def flat(rows: int) -> float:
    """Rows cost nothing: a machine that waits for its weights."""
    return 1.0


def linear(share: float) -> Cost:
    """Each row costs a share of the first one."""
    return lambda rows: 1 + share * (rows - 1)


def roof(free: int) -> Cost:
    """The first rows are free, then each costs its share: a machine that waits for its weights until it computes."""
    return lambda rows: max(1.0, rows / free)


def tiles(width: int, price: float) -> Cost:
    """Rows cost by the tile."""
    return lambda rows: 1 + price * ((rows - 1) // width)


def two_cores(rows: int) -> float:
    """Measured: a 0.6 B model in int8 on two cores (performance notes, 6); 3 and 5 rows cost more than 4 and 6."""
    measured = {1: 1.0, 2: 1.18, 3: 1.47, 4: 1.40, 5: 1.67, 6: 1.66, 7: 1.69, 8: 1.71, 9: 2.04}
    return measured.get(rows, 2.04 + 0.175 * (rows - 9))
