"""Simulated machines and drafters for the depth controller: expected tokens a second, beside the best fixed depth.

    python -m tests.engine.draft.simulate [SEEDS]

prints shares of the best fixed depth in 198 worlds (11 step costs, 6 acceptance rates, 3 draft costs).

A world has the seconds of a step by its batch tokens and the acceptance rates by position; both may change. Rates are
computed from expected tokens, not from the sampled ones, so that they compare to a hundredth.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby
from operator import mul
from statistics import mean

from engine.draft.controller import DepthController
from engine.draft.depth import Candidate, Depth, DraftCall, StepOutcome, VerifiedDraft
from engine.schedule.step_cost import Work

Cost = Callable[[int], float]
KIND = "model"
DEEPEST = 8
# Rounds that are not counted.
WARM_UP = 20


@dataclass(frozen=True)
class World:
    """Seconds of a step by its batch tokens, acceptance rates by position, seconds to draft a position."""

    seconds: Cost
    rates: Sequence[float]
    draft_seconds: float = 0.0

    @cached_property
    def _tokens(self) -> list[float]:
        """Expected tokens of a sequence by its depth."""
        survival = accumulate(self.rates, mul)
        return [1 + accepted for accepted in accumulate(survival, initial=0.0)]

    def tokens(self, depths: Sequence[int]) -> float:
        """Expected tokens of a step."""
        return sum(self._tokens[depth] for depth in depths)

    def cost(self, depths: Sequence[int]) -> float:
        """Seconds of a step and of its drafts."""
        return self.seconds(len(depths) + sum(depths)) + self.draft_seconds * max(depths)


@dataclass
class Score:
    """Expected tokens and seconds of a run, and the depths of its rounds."""

    tokens: float = 0.0
    seconds: float = 0.0
    depths: list[list[int]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Expected tokens a second."""
        return self.tokens / self.seconds


def run(
    depth: Depth,
    worlds: Sequence[World],
    *,
    batch: int,
    warm_up: int = WARM_UP,
    seed: int = 0,
    noise: float = 0.05,
    cold: float = 0.0,
) -> Score:
    """Run a batch for one round a world; the first `warm_up` rounds do not count.

    noise  relative deviation of measured seconds, upwards only, as on a machine with other load
    cold   share of a step that the first step without drafts takes longer after one with drafts (cold processor
           caches); each further one two thirds of that
    """
    chance, score, late = random.Random(seed), Score(), 0.0
    for number, world in enumerate(worlds):
        depths = _choose(depth, world, batch)
        late = 0.0 if any(depths) else late
        seconds = (1 + late) * world.seconds(batch + sum(depths))
        outcome = StepOutcome(batch, sum(depths), seconds * (1 + abs(chance.gauss(0, noise))))
        for drafted in depths:
            accepted = next((at for at in range(drafted) if chance.random() >= world.rates[at]), drafted)
            outcome.verified.append(VerifiedDraft(KIND, min(accepted + 1, drafted), accepted))
        if any(depths):
            outcome.calls.append(DraftCall(KIND, max(depths), world.draft_seconds * max(depths)))
        depth.observe(outcome)
        if number >= warm_up:
            score.tokens += world.tokens(depths)
            score.seconds += world.cost(depths) + late * world.seconds(batch)
            score.depths.append(depths)
        late = cold if any(depths) else 2 / 3 * late
    return score


def _choose(depth: Depth, world: World, batch: int) -> list[int]:
    depth.cost.expect(Work(batch, logit_tokens=batch))
    if depth.cooldown(KIND, batch):
        return [0] * batch
    return depth.choose([Candidate(KIND, len(world.rates))] * batch, batch_tokens=batch)


def best_fixed(worlds: Sequence[World], *, batch: int = 1) -> float:
    """Expected tokens a second of the best depth that is the same for all sequences and rounds."""
    rates, rounds = [], [(world, len([*same])) for world, same in groupby(worlds)]
    for depth in range(len(worlds[0].rates) + 1):
        depths = [depth] * batch
        tokens = sum(count * world.tokens(depths) for world, count in rounds)
        rates.append(tokens / sum(count * world.cost(depths) for world, count in rounds))
    return max(rates)


def share(worlds: Sequence[World], *, batch: int = 1, seed: int = 0, cold: float = 0.0) -> float:
    """Tokens a second with the depth controller as a share of the best fixed depth."""
    score = run(DepthController(), worlds, batch=batch, seed=seed, cold=cold)
    return score.rate / best_fixed(worlds[WARM_UP:], batch=batch)


def flat(tokens: int) -> float:
    """Any batch takes the same time: bound by the bandwidth for the weights."""
    return 1.0


def linear(share: float) -> Cost:
    """Each token takes a share of the time of the first one."""
    return lambda tokens: 1 + share * (tokens - 1)


def roof(free: int) -> Cost:
    """Roofline: the first tokens take the time of one, then each its share."""
    return lambda tokens: max(1.0, tokens / free)


def tiles(width: int, price: float) -> Cost:
    """Kernels that compute tokens by the tile."""
    return lambda tokens: 1 + price * ((tokens - 1) // width)


def two_cores(tokens: int) -> float:
    """Measured with a 0.6 B model in int8 on two cores; 3 and 5 tokens take longer than 4 and 6."""
    measured = {1: 1.0, 2: 1.18, 3: 1.47, 4: 1.40, 5: 1.67, 6: 1.66, 7: 1.69, 8: 1.71, 9: 2.04}
    return measured.get(tokens, 2.04 + 0.175 * (tokens - 9))


COSTS: dict[str, Cost] = {
    "flat": flat,
    "linear 0.05": linear(0.05),
    "linear 0.15": linear(0.15),
    "linear 0.3": linear(0.3),
    "linear 0.6": linear(0.6),
    "linear 1": linear(1.0),
    "roof 4": roof(4),
    "roof 8": roof(8),
    "tiles of 4": tiles(4, 0.5),
    "two tokens take longer than one": lambda tokens: 1.0 if tokens == 1 else 1.6,
    "two cores": two_cores,
}
RATES = (0.1, 0.3, 0.5, 0.7, 0.9, 0.98)
DRAFT_SECONDS = (0.0, 0.1, 0.24)


def steady(cost: Cost, rate: float, draft_seconds: float = 0.0, rounds: int = 2000) -> list[World]:
    """A world that does not change, with the same acceptance rate at all positions."""
    return [World(cost, [rate] * DEEPEST, draft_seconds)] * rounds


def shares(cost: Cost, seeds: int) -> list[float]:
    """Shares of the best fixed depth in the 18 worlds of a step cost, each a mean over seeds."""
    return [
        mean(share(steady(cost, rate, seconds), seed=seed) for seed in range(seeds))
        for rate in RATES
        for seconds in DRAFT_SECONDS
    ]


def main(seeds: int) -> None:
    """Print a line for each step cost, and the mean and the minimum of all worlds."""
    every = {name: shares(cost, seeds) for name, cost in COSTS.items()}
    every["all worlds"] = [one for found in every.values() for one in found]
    for name, found in every.items():
        print(f"{name:32} mean {mean(found):.3f}, worst {min(found):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="?", default=1, help="runs of each world")
    main(parser.parse_args().seeds)
