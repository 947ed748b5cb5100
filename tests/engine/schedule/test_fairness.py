"""Fair sharing of slots by owner and request; the text does not depend on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from engine.core import Core
from engine.schedule import fairness
from engine.schedule.fairness import MAX_DEBT, QUANTUM, TIME_SLICE_STEPS, DeficitRoundRobin
from engine.types.events import Delta, Finished, Started
from engine.types.request import Request, Tier
from tests.engine.kit.mixes import prompts
from tests.engine.kit.models import Models, References, core
from tests.engine.kit.play import Job, ask, play
from tests.selection import quick


def choices(name: str, number: int, tokens: int = 40, **fields: Any) -> list[Request]:
    """A request of several sequences with one prompt."""
    fields = {"owner": "", "group": name, "ignore_eos": True, **fields}
    return [ask(f"{name}-{at}", (len(name), 5, 7), tokens, **fields) for at in range(number)]


def submit(engine: Core, requests: Iterable[Request]) -> None:
    for request in requests:
        engine.submit(request)


def slots(engine: Core) -> Counter[str]:
    """The slots of each request."""
    return Counter(sequence.request.group for sequence in engine._scheduler.running)


def steps_until(engine: Core, event: type[Started | Finished], name: str) -> int:
    """The steps until the first event of a sequence."""
    for count in range(1, 10_000):
        if any(of == name and isinstance(what, event) for of, what in engine.step()):
            return count
    raise AssertionError(f"{name} never got there")


def test_a_new_owner_gets_a_slot_at_once(loaded: Models) -> None:
    """A request of 64 sequences has all slots until another request arrives, which gets one in the next step."""
    engine = core(loaded("llama"), slots=4)
    submit(engine, choices("many", 64))
    for _ in range(5):
        engine.step()
    assert {"many": 4} == slots(engine)

    submit(engine, choices("one", 1))

    assert 1 == steps_until(engine, Started, "one-0")
    assert {"many": 3, "one": 1} == slots(engine)
    # The prompt in one step, a token in each.
    assert 39 == steps_until(engine, Finished, "one-0")


def test_slots_are_shared_evenly_by_request(loaded: Models) -> None:
    """Two requests of many sequences have half of the slots each, in either order of arrival."""
    engine = core(loaded("llama"), slots=4)
    submit(engine, choices("first", 20, tokens=7))
    engine.step()
    submit(engine, choices("second", 20, tokens=7))
    engine.step()
    shares = []
    for _ in range(40):
        # A sequence that finished in a step frees its slot for the next one.
        shares.append(slots(engine))
        engine.step()

    assert {2} == {max(share[name] for share in shares) for name in ("first", "second")}
    assert 20 < sum(share == {"first": 2, "second": 2} for share in shares)
    # Two for the second request, and none after that.
    assert 2 == engine.stats().preemptions_total


def test_slots_are_shared_evenly_by_owner(loaded: Models) -> None:
    """Twenty requests of one owner have no more slots than one request of another."""
    engine = core(loaded("llama"), slots=4)
    for at in range(20):
        submit(engine, choices(f"a{at}", 1, owner="a"))
    engine.step()
    submit(engine, choices("b", 20, owner="b"))
    engine.step()

    owners = Counter(sequence.owner for sequence in engine._scheduler.running)
    assert {"a": 2, "b": 2} == owners


def test_single_requests_are_first_come_first_served(loaded: Models) -> None:
    """Without preemption, as no owner has more slots than others."""
    engine = core(loaded("llama"), slots=2)
    names = [f"r{at}" for at in range(12)]
    for at, name in enumerate(names):
        submit(engine, choices(name, 1, tokens=2 + at * 5 % 7))
    order = []
    while engine.busy:
        order += [of.removesuffix("-0") for of, what in engine.step() if isinstance(what, Started)]

    assert names == order
    assert 0 == engine.stats().preemptions_total


def test_sequences_of_a_request_keep_their_order(loaded: Models) -> None:
    """Beside other requests, and after preemptions."""
    engine = core(loaded("llama"), slots=3)
    submit(engine, choices("many", 12, tokens=6))
    order = []
    for number in range(200):
        if number % 5 == 2 and number < 30:
            submit(engine, choices(f"one{number}", 1, tokens=6))
        order += [of for of, what in engine.step() if isinstance(what, Started) and of.startswith("many")]

    assert [f"many-{at}" for at in range(12)] == order


def test_new_requests_do_not_starve_old_ones(loaded: Models) -> None:
    """A request of many sequences finishes though single requests alone would fill all slots."""
    engine = core(loaded("llama"), slots=2)
    submit(engine, choices("many", 6, tokens=12))
    ended: set[str] = set()
    for number in range(400):
        if number % 3 == 0:
            submit(engine, choices(f"new{number}", 1, tokens=6))
        ended |= {of for of, what in engine.step() if isinstance(what, Finished) and of.startswith("many")}

    assert {f"many-{at}" for at in range(6)} == ended


def test_an_owner_s_requests_share_its_slots(loaded: Models) -> None:
    """A new request gets a slot of its own owner; another owner keeps its slots."""
    engine = core(loaded("llama"), slots=4)
    submit(engine, choices("a", 20, owner="a"))
    submit(engine, choices("b", 20, owner="b"))
    engine.step()
    submit(engine, choices("new", 1, owner="b"))
    engine.step()

    assert {"a": 2, "b": 1, "new": 1} == slots(engine)


@pytest.mark.parametrize(("tier", "slots_of_one"), [("default", 2), ("priority", 0)])
def test_a_higher_tier_is_not_preempted(loaded: Models, tier: Tier, slots_of_one: int) -> None:
    """A new request of the default tier gets slots of its own tier only."""
    engine = core(loaded("llama"), slots=4)
    submit(engine, choices("many", 8, tier=tier))
    engine.step()
    submit(engine, choices("one", 4))
    engine.step()

    assert slots_of_one == slots(engine)["one"]


def test_preemption_does_not_change_the_text(loaded: Models, reference: References) -> None:
    """Requests of several owners with few cells."""
    pool = prompts(3)
    yielded = 0
    for seed in range(6):
        engine = core(loaded("llama"), slots=3, cells=130 if seed % 2 else None, chunk=8)
        jobs = []
        for at in range(14):
            prompt = pool[(seed * 5 + at // 5) % 9 + 20]
            owner, group = "ab"[at % 5 == 4], f"{at // 5}" if at % 5 < 4 else f"one{at}"
            jobs.append(Job(ask(str(at), prompt, 10, ignore_eos=True, owner=owner, group=group), at))
        answers = play(engine, jobs)
        for job in jobs:
            expected = reference("llama").greedy(job.request.prompt, 10)
            assert list(expected) == answers[job.request.id].tokens[: len(expected)]
        yielded += engine.stats().preemptions_total

    assert 6 < yielded


@pytest.mark.parametrize("owners", [1, 9])
def test_equal_requests_take_turns(loaded: Models, owners: int) -> None:
    """Of one owner, or of more owners than slots; no token is computed twice."""
    engine = core(loaded("llama"), slots=4, cells=1200)
    requests = [ask(f"r{at}", (at, 5, 7), 110, owner=f"o{at % owners}", ignore_eos=True) for at in range(9)]
    submit(engine, requests)
    computed: Counter[str] = Counter()
    for _ in range(6 * TIME_SLICE_STEPS):
        computed.update(of for of, what in engine.step() if isinstance(what, Delta))

    assert set(computed) == {request.id for request in requests}
    assert max(computed.values()) - min(computed.values()) <= 2 * TIME_SLICE_STEPS
    assert 0 == engine.stats().preemptions_total
    while engine.busy:
        engine.step()
    assert 9 * (3 + 110 - 1) == engine.stats().batch_tokens_total


def test_a_new_request_gets_a_slot_within_a_time_slice(loaded: Models) -> None:
    """Though more equal requests wait than there are slots."""
    engine = core(loaded("llama"), slots=4, cells=3000)
    submit(engine, (ask(f"old{at}", (at, 5, 7), 120, ignore_eos=True) for at in range(24)))
    steps_until(engine, Started, "old23")
    waits = []
    for number in range(12):
        for _ in range(number * 3 + 2):
            engine.step()
        engine.submit(ask(f"new{number}", (number, 9, 7), 1))
        waits.append(steps_until(engine, Finished, f"new{number}"))

    assert max(waits) <= TIME_SLICE_STEPS + 1


def test_a_new_request_does_not_wait_for_one_without_cells(loaded: Models) -> None:
    """The preempted sequence comes first, but its return would evict the running one."""
    engine = core(loaded("llama"), slots=1, cells=160)
    engine.submit(ask("old", range(60), 60, ignore_eos=True))
    steps_until(engine, Started, "old")
    engine.submit(ask("second", range(9, 69), 60, ignore_eos=True))
    steps_until(engine, Started, "second")
    for _ in range(12):
        engine.step()
    engine.submit(ask("new", (1, 9, 7), 1))

    assert steps_until(engine, Finished, "new") <= TIME_SLICE_STEPS


def test_new_requests_leave_every_second_slot_to_others(loaded: Models) -> None:
    """So that preempted requests finish though new ones wait all the time."""
    engine = core(loaded("llama"), slots=1)
    engine.submit(ask("old", (1, 5, 7), 100, ignore_eos=True))
    ended: list[str] = []
    for number in range(150):
        engine.submit(ask(f"new{number}", (number, 9, 7), 4, ignore_eos=True))
        ended += [of for of, what in engine.step() if isinstance(what, Finished)]

    assert "old" in ended


def test_slots_of_clients_that_do_not_read_are_for_others(loaded: Models) -> None:
    """In the next step; they do not preempt others, and get free slots."""
    engine = core(loaded("llama"), slots=2)
    submit(engine, (ask(f"frozen{at}", (at, 5, 7), 100, ignore_eos=True) for at in range(8)))
    for _ in range(3):
        engine.step()
    for at in range(8):
        engine.set_unread(f"frozen{at}", True)
    submit(engine, (ask(f"read{at}", (at, 9, 7), 60, ignore_eos=True) for at in range(2)))
    engine.step()
    for _ in range(58):
        assert {"read0", "read1"} == {sequence.request.id for sequence in engine._scheduler.running}
        engine.step()
    assert 1 == steps_until(engine, Finished, "read1")
    engine.step()
    assert 2 == engine.stats().running


def test_output_that_is_not_read_waits_for_output_that_is(loaded: Models, reference: References) -> None:
    """It gets no token while another sequence decodes, and its cells go first; then it goes on with the same text."""
    engine = core(loaded("llama"), slots=3, cells=160)
    frozen, read = ask("frozen", range(40), 60, ignore_eos=True), ask("read", range(9, 69), 60, ignore_eos=True)
    tokens: dict[str, list[int]] = {"frozen": [], "read": []}

    def step() -> None:
        for of, what in engine.step():
            if isinstance(what, Delta):
                tokens[of] += what.tokens

    submit(engine, [frozen, read])
    while min(map(len, tokens.values())) < 3:
        step()
    engine.set_unread("frozen", True)
    unread = len(tokens["frozen"])
    while len(tokens["read"]) < 60:
        step()
        assert len(tokens["frozen"]) == unread
    assert engine.stats().preemptions_total == 1
    while engine.busy:
        step()

    assert tokens == {of.id: [*reference("llama").greedy(of.prompt, 60)] for of in (frozen, read)}


def test_evicted_sequences_have_longer_time_slices(loaded: Models) -> None:
    """With cells for two of eight sequences, they are computed to the end."""
    engine = core(loaded("llama"), slots=2, cells=250)
    submit(engine, (ask(f"r{at}", tuple(range(at, at + 80)), 40, ignore_eos=True) for at in range(8)))
    while engine.busy:
        engine.step()

    assert 8 * (80 + 40 - 1) == engine.stats().batch_tokens_total
    assert 0 == engine.stats().time_slices_total


@pytest.mark.parametrize("family", quick(("gemma3", "qwen3_next"), ("llama", "gemma3", "qwen3_next", "deepseek_v3")))
def test_time_slices_do_not_change_the_text(
    loaded: Models, reference: References, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Of attention with windows, recurrent states and latents."""
    monkeypatch.setattr(fairness, "TIME_SLICE_STEPS", 3)
    pool = prompts(5)
    engine = core(loaded(family), slots=2, chunk=8)
    jobs = [Job(ask(str(at), pool[at + 10], 10, ignore_eos=True), at // 2) for at in range(7)]
    answers = play(engine, jobs)

    assert 7 < engine.stats().time_slices_total
    for job in jobs:
        expected = list(reference(family).greedy(job.request.prompt, 10))
        assert expected == answers[job.request.id].tokens[: len(expected)]


def test_scores_and_log_probabilities_are_charged(loaded: Models) -> None:
    """A scored prompt is charged twice the tokens."""
    engine = core(loaded("llama"), slots=2)
    plain, scored = (ask(name, tuple(range(30)), 1, group=name) for name in ("plain", "scored"))
    costs = []
    for request in (plain, Request(**{**_fields(scored), "score_from": 0, "logprobs": 0})):
        engine.submit(request)
        (scheduled,) = engine._scheduler.schedule()
        costs.append(scheduled.charged_tokens)
        engine.cancel(request.id)

    assert [30, 30 + 29 + 1] == costs


def _fields(request: Request) -> dict[str, Any]:
    return {name: getattr(request, name) for name in Request.__slots__}


def test_a_flow_in_debt_waits_for_a_bounded_number_of_rounds() -> None:
    rounds: DeficitRoundRobin[str] = DeficitRoundRobin()
    rounds.add("heavy")
    rounds.charge("heavy", 10**9)
    chosen = []
    for number in range(100):
        rounds.add(f"new{number}")
        flow = rounds.choose({"heavy", f"new{number}"})
        chosen.append(flow)
        rounds.move_last(flow)
        rounds.remove(f"new{number}")

    assert chosen.index("heavy") <= MAX_DEBT // QUANTUM + 1


def test_a_flow_without_sequences_is_forgotten() -> None:
    rounds: DeficitRoundRobin[str] = DeficitRoundRobin()
    for _ in range(3):
        rounds.add("one")
    rounds.charge("one", 5)
    for _ in range(3):
        rounds.remove("one")

    assert (0, 0) == (len(rounds._credit), len(rounds._members))


def test_a_new_request_starts_soon_beside_scored_prompts(loaded: Models) -> None:
    """A request of many long scored prompts delays a short one by a few steps only."""
    engine = core(loaded("llama"), slots=4, chunk=16)
    for at in range(16):
        prompt = tuple((at * 31 + 7 * token) % 250 for token in range(100))
        engine.submit(ask(f"long-{at}", prompt, 20, group="long", score_from=0, logprobs=0, ignore_eos=True))
    waits = []
    for number in range(8):
        for _ in range(3):
            engine.step()
        engine.submit(ask(f"new{number}", (number, 5, 7), 1, ignore_eos=True))
        waits.append(steps_until(engine, Finished, f"new{number}"))

    # Fewer steps than one long prompt takes.
    assert max(waits) <= 100 // 16
