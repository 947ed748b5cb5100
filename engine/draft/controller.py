"""Draft depth at run time: the depth with the most expected tokens a second, from measured rates and costs.

    tokens a second = (batch tokens + sum of survival) / (step seconds(batch tokens + drafts) + draft seconds(depth))

Survival is the product of the acceptance rates up to a position. A decision holds for 32 steps of a batch size.
Now and then another depth is measured for a few steps, within 1 % of the time and after cooldowns that double.
Nothing reads a clock or draws a random number: equal inputs give equal depths.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil
from operator import attrgetter
from typing import NamedTuple

from engine.draft.depth import Candidate, DraftCall, StepOutcome
from engine.draft.draft_cost import DraftCost
from engine.schedule.step_cost import StepCost

# Steps until the depth is chosen again: the same, a new or an explored one.
PLAN_STEPS, CHECK_STEPS, EXPLORATION_STEPS = 32, 4, 8
# Share of the time that depths other than the best one may cost, and the same for lookups without a proposal: together
# 1 % of the time.
EXPLORATION_SHARE = 0.005
# Maximum steps of a cooldown.
LONGEST_COOLDOWN = 256
# Acceptance rate before any draft was verified; it counts for two drafts (rule of succession).
PRIOR_RATE = 0.5
# Share of the verified drafts that still counts one step later, and of a drafter's calls one call later.
MEMORY = 0.99
# Factor by which a depth must be faster than the present one to replace it.
LEAST_GAIN = 1.02


class _Acceptance:
    """Acceptance rates of one drafter by position: exponential averages; older drafts count less."""

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._rates: list[float] = []
        self._drafts: list[float] = []

    def observe(self, verified: int, accepted: int) -> None:
        """Of a draft, the first `verified` tokens were compared with the output and the first `accepted` were equal."""
        while len(self._rates) < verified:
            self._rates.append(self._rates[-1] if self._rates else self._prior)
            self._drafts.append(0.0)
        for index in range(verified):
            self._drafts[index] += 1
            self._rates[index] += ((index < accepted) - self._rates[index]) / (self._drafts[index] + 2)

    def fade(self, steps: int) -> None:
        """Reduce the weight of drafts verified before."""
        self._drafts = [drafts * MEMORY**steps for drafts in self._drafts]

    def survival(self, depth: int) -> list[float]:
        """Probabilities that the first 1, 2, ... `depth` draft tokens are all accepted."""
        chances, chance, rate = [], 1.0, self._prior
        for index in range(depth):
            rate = self._rates[index] if index < len(self._rates) else rate
            chance *= rate
            chances.append(chance)
        return chances


class _Option(NamedTuple):
    """Depths by drafter, with the batch tokens, output tokens and seconds that a step is expected to have."""

    depths: Mapping[str, int]
    batch_tokens: int
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def loss(self, rate: float) -> float:
        """Seconds lost against another option of `rate` tokens a second."""
        return max(self.seconds - self.tokens / rate, 0.0)


@dataclass(slots=True)
class _Plan:
    """The best depths by drafter, or for a few steps explored ones.

    until     step of the batch size at which depths are chosen again
    explore   step of the batch size before which nothing is explored
    cooldown  steps from one exploration to the next
    rate      expected tokens a second at the best depths; 0: not measured yet
    """

    best: Mapping[str, int]
    until: int
    explore: int = 0
    cooldown: int = PLAN_STEPS
    rate: float = 0.0
    explored: Mapping[str, int] | None = None

    @property
    def depths(self) -> Mapping[str, int]:
        """The depths in use."""
        return self.explored or self.best


@dataclass(slots=True)
class _BatchSize:
    """Steps without prefill and with batch tokens between two powers of 2.

    seconds    of all steps, drafting included; `explored`: of them lost by exploration
    cooldowns  step at which the cooldown of a drafter ends
    unused     steps of the latest cooldown of a drafter without proposals
    catch_up   seconds a step spent on texts that are new to a drafter: exponential average
    """

    steps: int = 0
    seconds: float = 0.0
    explored: float = 0.0
    plans: dict[frozenset[str], _Plan] = field(default_factory=dict)
    cooldowns: dict[str, int] = field(default_factory=dict)
    unused: dict[str, int] = field(default_factory=dict)
    catch_up: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class DepthController:
    """Implements Depth. One for each model, for as long as it runs.

    priors  acceptance rates of drafters before any of their drafts was verified, where not PRIOR_RATE
    """

    def __init__(self, priors: Mapping[str, float] | None = None) -> None:
        self.cost = StepCost()
        self._priors = priors or {}
        self._acceptance: dict[str, _Acceptance] = {}
        self._draft_costs = defaultdict[str, DraftCost](lambda: DraftCost(MEMORY))
        self._sizes = defaultdict[int, _BatchSize](_BatchSize)
        self._steps = self._learnt = 0
        # Not learnt yet, and the step in which a position of a drafter was verified last.
        self._outcomes: list[StepOutcome] = []
        self._verified: dict[tuple[str, int], int] = {}

    def cooldown(self, kind: str, batch_tokens: int) -> int:
        """Steps until the drafter's cooldown at this batch size ends; 0 in a step with prefill."""
        size = self._sizes[batch_tokens.bit_length()]
        return 0 if self.cost.work.has_prefill else max(size.cooldowns.get(kind, 0) - size.steps, 0)

    def prefers(self, kind: str, other: str) -> bool:
        """Whether the first tokens of `kind` have the higher acceptance rate, or none was verified for long."""
        unseen = self._steps - self._verified.get((kind, 1), 0) > LONGEST_COOLDOWN
        return unseen or self._rates(kind).survival(1) >= self._rates(other).survival(1)

    def choose(self, candidates: Sequence[Candidate], *, batch_tokens: int) -> list[int]:
        """The depths with the most expected tokens a second, or explored ones."""
        kinds = frozenset([candidate.kind for candidate in candidates])
        if self.cost.work.has_prefill:
            return self._depths_with_prefill(kinds, candidates, batch_tokens)
        size = self._sizes[batch_tokens.bit_length()]
        plan = size.plans.get(kinds)
        if plan is None or size.steps >= plan.until:
            self._learn()
            plan = size.plans[kinds] = self._plan(plan, candidates, batch_tokens, size)
        return [min(plan.depths[candidate.kind], candidate.limit) for candidate in candidates]

    def observe(self, outcome: StepOutcome) -> None:
        """Record a step. Rates and costs are updated when depths are chosen, or after 32 steps with drafts."""
        self._steps += 1
        self.cost.observe(outcome.batch_tokens + outcome.draft_tokens, outcome.seconds)
        if self.cost.work.has_prefill:
            outcome.calls.clear()
        else:
            self._count(outcome, self._sizes[outcome.batch_tokens.bit_length()])
        if outcome.calls or outcome.verified:
            self._outcomes.append(outcome)
            if len(self._outcomes) == PLAN_STEPS:
                self._learn()

    def _count(self, outcome: StepOutcome, size: _BatchSize) -> None:
        """Count a step, and begin or double the cooldowns of drafters without a proposal."""
        size.steps += 1
        size.catch_up.update({kind: MEMORY * seconds for kind, seconds in size.catch_up.items()})
        size.seconds += outcome.seconds + sum([call.seconds for call in outcome.calls])
        for draft in outcome.verified:
            size.unused[draft.kind] = 0
        for kind, seconds in outcome.unused.items():
            max_cooldown = seconds * size.steps / (EXPLORATION_SHARE * size.seconds) if size.seconds else 0
            size.unused[kind] = min(2 * size.unused.get(kind, 0) + 1, int(max_cooldown), LONGEST_COOLDOWN)
            size.cooldowns[kind] = size.steps + size.unused[kind]

    def _learn(self) -> None:
        """Update acceptance rates and draft costs."""
        passed, self._learnt = self._steps - self._learnt, self._steps
        for acceptance in self._acceptance.values():
            acceptance.fade(passed)
        for outcome in self._outcomes:
            for call in filter(attrgetter("depth"), outcome.calls):
                self._learn_call(call, outcome.batch_tokens)
            for kind, verified, accepted in outcome.verified:
                self._rates(kind).observe(verified, accepted)
                self._verified.update(dict.fromkeys([(kind, index + 1) for index in range(verified)], self._steps))
        self._outcomes.clear()

    def _learn_call(self, call: DraftCall, batch_tokens: int) -> None:
        """Update the cost of a drafter's calls, or of texts that are new to it."""
        cost = self._draft_costs[call.kind]
        expected = cost.seconds(call.depth, batch_tokens)
        if call.catches_up and expected:
            size = self._sizes[batch_tokens.bit_length()]
            size.catch_up[call.kind] += (1 - MEMORY) * max(call.seconds - expected, 0.0)
        else:
            cost.observe(call.depth, batch_tokens, call.seconds)

    def _draft_seconds(self, depths: Mapping[str, int], batch_tokens: int) -> float:
        """Seconds of drafting at these depths."""
        catch_up = self._sizes[batch_tokens.bit_length()].catch_up
        drafting = [(kind, depth) for kind, depth in depths.items() if depth]
        return sum([self._draft_costs[kind].seconds(depth, batch_tokens) + catch_up[kind] for kind, depth in drafting])

    def _rates(self, kind: str) -> _Acceptance:
        return self._acceptance.setdefault(kind, _Acceptance(self._priors.get(kind, PRIOR_RATE)))

    def _plan(
        self, before: _Plan | None, candidates: Sequence[Candidate], batch_tokens: int, size: _BatchSize
    ) -> _Plan:
        """The next plan: no drafts until a batch size is measured, then the best depths; at times others."""
        if before is None or self.cost.measured(batch_tokens) < CHECK_STEPS:
            return _Plan(dict.fromkeys([candidate.kind for candidate in candidates], 0), size.steps + CHECK_STEPS)
        options = list(self._options(candidates, batch_tokens))
        best = max(options, key=attrgetter("rate"))
        present = next((option for option in options if option.depths == before.best), options[0])
        if best.rate < LEAST_GAIN * present.rate:
            best = present
        changed = best.depths != before.best
        until = size.steps + (CHECK_STEPS if changed else PLAN_STEPS)
        plan = _Plan(best.depths, until, before.explore, before.cooldown, best.rate)
        if before.explored is not None:
            tried = next((option for option in options if option.depths == before.explored), options[0])
            size.explored += EXPLORATION_STEPS * tried.loss(best.rate)
            plan.cooldown = PLAN_STEPS if changed else min(2 * plan.cooldown, LONGEST_COOLDOWN)
            plan.explore = size.steps + plan.cooldown
        elif len(options) > 1 and not changed and size.steps >= plan.explore:
            self._explore(plan, [option for option in options if option is not best], best, size)
        if plan.explored is None:
            size.cooldowns.update({kind: plan.explore for kind, depth in plan.best.items() if not depth})
        return plan

    def _explore(self, plan: _Plan, others: Sequence[_Option], best: _Option, size: _BatchSize) -> None:
        """Explore the depths that were measured longest ago for what they cost, once the exploration budget has it."""
        least = EXPLORATION_SHARE * best.seconds
        explored = min(others, key=lambda option: (option.loss(best.rate) + least) / self._age(option))
        lost = size.explored + EXPLORATION_STEPS * explored.loss(best.rate)
        missing_steps = (lost / EXPLORATION_SHARE - size.seconds) / best.seconds
        cooldown = plan.cooldown
        if missing_steps <= 0:
            plan.explored, plan.until = explored.depths, size.steps + EXPLORATION_STEPS
        elif not any(best.depths.values()):
            # Nothing changes until then.
            cooldown = min(max(cooldown, ceil(missing_steps)), LONGEST_COOLDOWN)
        plan.explore = size.steps + cooldown

    def _age(self, option: _Option) -> float:
        """Steps since its batch tokens or its depths were measured."""
        verified = [self._verified.get((kind, depth), 0) for kind, depth in option.depths.items() if depth]
        return max(self.cost.age(option.batch_tokens), self._steps - min(verified, default=self._steps), 1.0)

    def _options(self, candidates: Sequence[Candidate], batch_tokens: int) -> Iterator[_Option]:
        """No drafts, then a position of a drafter more at a time, the likeliest first, as far as steps are measured."""
        positions = list[tuple[float, int, str, int]]()
        for kind in {candidate.kind for candidate in candidates}:
            limits = [candidate.limit for candidate in candidates if candidate.kind == kind]
            for index, survival in enumerate(self._rates(kind).survival(max(limits))):
                positions.append((-survival, index + 1, kind, sum([limit > index for limit in limits])))
        totals = list(accumulate([drafts for *_, drafts in sorted(positions)], initial=batch_tokens))
        depths, tokens, reach = (
            dict.fromkeys([candidate.kind for candidate in candidates], 0),
            float(batch_tokens),
            self.cost.reach,
        )
        plain, *costs = self.cost.seconds(totals)
        yield _Option(dict(depths), batch_tokens, tokens, plain)
        for (chance, depth, kind, drafts), total, seconds in zip(sorted(positions), totals[1:], costs, strict=True):
            if total > reach:
                return
            tokens, depths[kind] = tokens - chance * drafts, depth
            yield _Option(dict(depths), total, tokens, seconds + self._draft_seconds(depths, batch_tokens))

    def _depths_with_prefill(
        self, kinds: frozenset[str], candidates: Sequence[Candidate], batch_tokens: int
    ) -> list[int]:
        """The depths of prefill-free steps if drafts cost no more per token next to prefill; otherwise 0."""
        size = self._sizes[len(candidates).bit_length()]
        plan = size.plans.get(kinds)
        if plan is None or not any(plan.best.values()) or batch_tokens >= self.cost.reach:
            return [0] * len(candidates)
        depths = [min(plan.best[candidate.kind], candidate.limit) for candidate in candidates]
        tokens = sum(
            [
                sum(self._rates(candidate.kind).survival(depth))
                for candidate, depth in zip(candidates, depths, strict=True)
            ]
        )
        without, seconds = self.cost.seconds([batch_tokens, batch_tokens + sum(depths)])
        pays = seconds - without + self._draft_seconds(plan.best, len(candidates)) <= tokens / plan.rate
        return depths if pays else [0] * len(candidates)
