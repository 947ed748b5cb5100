"""benchmarks/fleet/simulate.py: the costs, the simulated replica and fleet, the comparison with real servers."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.client import RequestOptions
from bench.samples import Sample
from bench.target import find
from benchmarks.fleet import replica as simulated
from benchmarks.fleet.costs import ServerCosts, costs_of_cells, read_costs
from benchmarks.fleet.policies import POLICIES
from benchmarks.fleet.replica import PrefixCache, SimulatedReplica, SimulatedRequest
from benchmarks.fleet.simulate import main
from benchmarks.fleet.simulator import Fleet, FleetOptions, FleetResult
from benchmarks.fleet.validation import Answered, LoopbackRouter, Measurements, Script, hold_all, simulate, summary
from benchmarks.fleet.workload import Conversation, Turn, conversations
from engine.schedule import prefill_budget
from server.affinity.keys import RequestKeys
from tests.server.peer import Peer

COSTS = ServerCosts(request=0.01, token=0.001, pair=1e-7, step=0.02, sequence=0.005, cell=1e-6)


def bench_cell(scenario: str, at: float, tokens: int, first: float, step: float, *, cached: int = 0) -> dict[str, Any]:
    """A cell of bench.json with one answer of eleven tokens."""
    arrivals = [first + number * step for number in range(11)]
    sample = {
        "outcome": "ok",
        "arrivals": arrivals,
        "prompt_tokens": tokens,
        "completion_tokens": 11,
        "cached_tokens": cached,
    }
    return {"server": "cellar", "scenario": scenario, "at": at, "runs": [{"samples": [sample]}]}


def bench_cells(costs: ServerCosts) -> list[dict[str, Any]]:
    """What `cellar bench` measures of a server with these costs."""
    lone = [
        bench_cell("latency", tokens, tokens, costs.request + costs.prefill(tokens, 0), costs.decode(1, tokens + 5.5))
        for tokens in (100, 500, 1000, 2000)
    ]
    crowds = [bench_cell("throughput", count, 200, 1.0, costs.decode(count, count * 205.5)) for count in (1, 2, 4, 8)]
    return [*lone, *crowds]


def test_costs_are_fitted_to_the_json_of_bench(tmp_path: Path) -> None:
    """Exact measurements give the costs that they were computed with; a result of the simulator repeats them."""
    bench, result = tmp_path / "bench.json", tmp_path / "fleet.json"
    bench.write_text(json.dumps({"cells": bench_cells(COSTS)}))
    result.write_text(json.dumps([{"rows": [{"replicas": 1}]}, {"rows": [{"costs": asdict(COSTS)}]}]))

    assert asdict(COSTS) == pytest.approx(asdict(read_costs(bench)), rel=1e-6)
    assert COSTS == read_costs(result)


def test_cached_prefixes_tell_the_cost_of_text_from_that_of_computed_tokens() -> None:
    """And requests with pauses the cost of a request after a pause."""
    costs = replace(COSTS, text=1e-5)
    reused = [
        bench_cell("reuse", at, tokens, costs.first_token(tokens, cached), 0.1, cached=cached)
        for at, (tokens, cached) in enumerate([(600, 0), (600, 500), (2000, 1950)])
    ]
    lone = [
        bench_cell("latency", tokens, tokens, costs.first_token(tokens, 0), costs.decode(1, tokens + 5.5))
        for tokens in (100, 500, 1000)
    ]
    crowds = bench_cells(COSTS)[4:]
    paced = [bench_cell("throughput", 2, 64, 0.005 + costs.first_token(64, 3), 0.1, cached=3)]

    assert asdict(costs_of_cells([*reused, *lone, *crowds])) == pytest.approx(asdict(costs), rel=1e-6)
    assert costs_of_cells([*reused, *lone, *crowds], paced).request == pytest.approx(COSTS.request + 0.005)


def test_too_few_measurements_are_refused() -> None:
    """One number of streams gives no cost of a sequence."""
    with pytest.raises(ValueError, match="two numbers of streams"):
        costs_of_cells(bench_cells(COSTS)[:4])


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_the_tokens_that_fit_a_time_are_those_that_take_it(tokens: int, start: int) -> None:
    """The inverse of the prefill time, with and without attention."""
    for costs in (COSTS, ServerCosts(request=0, token=0.001, pair=0, step=0, sequence=0, cell=0)):
        assert tokens == costs.fitting_tokens(costs.prefill(tokens, start) + 1e-9, start)


def test_the_prefill_budget_is_that_of_the_scheduler() -> None:
    """The values are equal to those of engine/schedule/prefill_budget.py."""
    own = (simulated.TARGET_SECONDS, simulated.TARGET_STEPS, simulated.ALONE_SECONDS)

    assert own == (prefill_budget._TARGET_SECONDS, prefill_budget._TARGET_STEPS, prefill_budget._ALONE_SECONDS)
    assert (prefill_budget.MIN_TOKENS, prefill_budget.MIN_TOKENS_ALONE) == (
        simulated.LEAST_TOKENS,
        simulated.LEAST_TOKENS_ALONE,
    )


def test_a_cache_evicts_the_conversations_of_a_prompt_before_the_prompt() -> None:
    """Least recently used first; a match ends at the first segment that is not complete."""
    cache = PrefixCache(capacity=100)
    cache.insert((("system", 40), ("one", 30)))
    cache.insert((("system", 40), ("two", 30)))

    assert 40 == cache.match((("system", 40), ("three", 30)))
    cache.insert((("other", 25),))

    assert 40 == cache.match((("system", 40), ("one", 30)))
    assert 70 == cache.match((("system", 40), ("two", 35)))
    assert 0 == cache.match((("else", 5), ("two", 30)))


def request(name: str, *, system: int = 100, own: int = 50, answer: int = 10, group: str = "group") -> SimulatedRequest:
    """A first turn of a conversation."""
    return SimulatedRequest(0, 0, 0.0, ((group, system), (name, own)), answer)


def run_to_end(replica: SimulatedReplica) -> list[tuple[float, SimulatedRequest]]:
    """All finished requests with the times of their ends."""
    ended = []
    while replica.load:
        now = replica.until
        ended += [(now, one) for one in replica.finish()]
    return ended


def replica(slots: int = 8) -> SimulatedReplica:
    """A replica with a large cache."""
    return SimulatedReplica(COSTS, slots, PrefixCache(1 << 20))


def test_a_lone_request_takes_the_time_of_its_prefill_and_of_its_steps() -> None:
    """The first token comes with the prefill, each other one with a step."""
    one, lone = replica(), request("a")
    one.add(lone, 5.0)
    [(end, _)] = run_to_end(one)

    first = 5.0 + COSTS.request + COSTS.prefill(150, 0)

    assert lone.first == pytest.approx(first)
    assert end == pytest.approx(first + 9 * COSTS.decode(1, 151))


def test_requests_that_share_a_prompt_compute_it_once() -> None:
    """The second of two waits for the first, and then has the system prompt in the cache."""
    one, first, second = replica(), request("a"), request("b")
    one.add(first, 0.0)
    one.add(second, 0.0)
    run_to_end(one)

    assert (0, 100) == (first.cached, second.cached)
    assert first.first is not None
    assert second.first is not None
    assert first.first < second.first


def test_an_arrival_ends_a_run_of_steps_at_a_whole_step() -> None:
    """A request that arrives amid many steps of decoding starts at the end of the current one."""
    one, early, late = replica(), request("a", answer=1000), request("b", group="other")
    one.add(early, 0.0)
    one.finish()
    began, step = one.since, COSTS.decode(1, 151)
    one.add(late, began + 2.5 * step)

    assert one.until == pytest.approx(began + 3 * step)
    one.finish()
    assert [late] == [chunk for chunk, _ in one._chunks]


def test_steps_take_longer_from_the_change_of_the_slowdown_on() -> None:
    """A change amid steps keeps those that are done; back at 1 the end is that of the rest."""
    one, lone = replica(), request("a", answer=101)
    one.add(lone, 0.0)
    one.finish()
    began, step = one.since, one.until - one.since
    one.slow_down(2.0, began + step / 4)
    assert one.until == pytest.approx(began + step / 4 + 2 * step * 3 / 4)
    one.slow_down(1.0, began + step / 4 + step)

    assert one.until == pytest.approx(began + 1.5 * step)


def test_replicas_on_one_machine_share_its_processors() -> None:
    """Two lone requests at a time take as long as the slowdown says; one after the other is at full speed."""
    turns = (Turn(100, 50, 0.0),)
    costs = replace(COSTS, cell=0.0)

    def seconds(start: float, *slowdowns: float) -> list[float]:
        found = [Conversation(f"c{number}", f"g{number}", 100, number * start, turns) for number in range(2)]
        options = FleetOptions(replicas=2, slots=8, cells=4096, slowdowns=slowdowns)
        return [one.first - one.asked for one in Fleet(options, costs, POLICIES["round robin"], found).run().finished]

    alone = costs.first_token(200, 0)
    assert [alone] * 2 == pytest.approx(seconds(0.0))
    assert [1.5 * alone] * 2 == pytest.approx(seconds(0.0, 1.0, 1.5))
    assert [alone] * 2 == pytest.approx(seconds(100.0, 1.0, 1.5))


@given(
    st.lists(st.tuples(st.integers(1, 900), st.integers(1, 60), st.integers(0, 3), st.floats(0, 3)), max_size=25),
    st.integers(1, 4),
)
def test_every_request_ends_once_with_its_tokens(asked: list[tuple[int, int, int, float]], slots: int) -> None:
    """In any order of arrivals, with fewer slots than requests: none is lost, none is early."""
    one = replica(slots)
    waiting = sorted(asked, key=lambda item: item[3])
    ended: list[SimulatedRequest] = []
    for number, (own, answer, group, time) in enumerate(waiting):
        while one.until <= time:
            ended += one.finish()
        one.add(request(f"c{number}", own=own, answer=answer, group=f"g{group}"), time)
        assert len(one.prefill) + len(one.decode) <= slots
    ended += [found for _, found in run_to_end(one)]

    assert sorted(one.path[1][0] for one in ended) == sorted(f"c{number}" for number in range(len(asked)))
    assert all(found.first is not None and found.first > found.arrived for found in ended)


def run(policy: str, *, failures: float = 0.0, replicas: int = 20, rate: float = 12.0) -> FleetResult:
    """A small fleet with 800 requests."""
    options = FleetOptions(replicas=replicas, slots=8, cells=32_768, failures=failures)
    return Fleet(options, COSTS, POLICIES[policy], conversations(800, 2 * replicas, rate, seed=1)).run()


@pytest.mark.parametrize("policy", POLICIES)
def test_no_request_is_lost_with_failures(policy: str) -> None:
    """Every turn of every conversation ends once, under each policy, when a fifth of the replicas fails."""
    found = conversations(800, 40, 12.0, seed=1)
    expected = Counter((number, turn) for number, one in enumerate(found) for turn in range(len(one.turns)))
    result = run(policy, failures=0.2)

    assert expected == Counter((one.conversation, one.turn) for one in result.finished)
    assert result.interrupted + result.rerouted > 0
    assert 16 == len(result.loads)
    assert 0 <= result.hit_share < 1


def test_affinity_has_the_hits_of_a_prefix_hash_and_the_earliest_tokens() -> None:
    """The order of the policies on a small fleet; a simulation is repeatable."""
    found = {policy: run(policy) for policy in POLICIES}
    shares = {policy: result.hit_share for policy, result in found.items()}

    assert shares["affinity"] == run("affinity").hit_share
    assert shares["affinity"] == pytest.approx(shares["prefix hash"], abs=0.02)
    assert shares["random"] < shares["conversation hash"] < shares["affinity"]
    for percentile in (0.5, 0.99):
        assert "affinity" == min(found, key=lambda policy: found[policy].first_token(percentile))
    assert found["prefix hash"].imbalance > 2 * found["affinity"].imbalance


def test_the_command_writes_a_table_a_plot_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row a policy and size, with the machine, the commit and the costs."""
    bench, out, plot = (tmp_path / name for name in ("bench.json", "fleet.json", "fleet.svg"))
    bench.write_text(json.dumps({"cells": bench_cells(COSTS)}))
    sizes = ("--replicas", "2", "3", "--requests", "60", "--policies", "random", "affinity")
    assert 0 == main(["--costs", str(bench), *sizes, "--json", str(out), "--plot", str(plot)])
    content = json.loads(out.read_text())

    assert [(2, "random"), (2, "affinity"), (3, "random"), (3, "affinity")] == [
        (row["replicas"], row["policy"]) for row in content["rows"]
    ]
    assert "fleet" == content["benchmark"]
    assert "| policy | 2 replicas | 3 replicas |" in capsys.readouterr().out
    assert "<svg" in plot.read_text()


def sample(prompt: int, cached: int) -> Sample:
    """A complete answer of ten tokens."""
    return Sample(
        outcome="ok",
        sent=0.0,
        arrivals=(0.1, 0.2),
        finished=0.2,
        prompt_tokens=prompt,
        completion_tokens=10,
        cached_tokens=cached,
    )


def test_a_real_run_is_simulated_with_its_lengths_and_keys() -> None:
    """One conversation on one replica: all but the new message of each later turn is cached."""
    plan = Script("group", "system", ("a", "b"), 0.0, (0.0, 1.0))
    answers = [Answered(RequestKeys("c", ("p",)), sample(tokens, 0)) for tokens in (150, 200)]
    options = FleetOptions(replicas=1, slots=8, cells=4096, slowdowns=(1.0,))
    found = simulate([plan], [answers], COSTS, options, policy="affinity", own=50)

    assert found.hit_share == pytest.approx(160 / 350)


def test_real_and_simulated_figures_agree_within_the_goals() -> None:
    """3 points of the cached share, 20 % of the time to the first token, as the median over all rounds."""
    row = {
        "replicas": 2,
        "policy": "random",
        "real_hit_share": 0.7,
        "real_times": [0.1],
        "real_first_turns": 1,
        "first_turns": 1,
    }
    good = [{**row, "hit_share": 0.72, "times": [time]} for time in (0.11, 0.9, 0.09)]
    wrong_share, wrong_time = (
        [{**row, "hit_share": 0.74, "times": [0.1]}],
        [{**row, "hit_share": 0.7, "times": [0.13]}],
    )

    assert [True, False, False] == [summary(rows, 2, "random")["agrees"] for rows in (good, wrong_share, wrong_time)]


def test_slowdowns_are_relative_to_a_replica_alone() -> None:
    """Medians of the rounds; noise makes none faster."""
    found = Measurements(seconds=[(1.0, 1.2, 2.0), (2.0, 2.6, 3.0), (1.0, 1.4, 0.9)])

    assert (1.0, 1.3, 1.5) == pytest.approx(found.slowdowns)


def test_conversations_are_held_over_the_replicas_of_a_policy(peer: Peer) -> None:
    """Each turn has the answers before it, and the loads return to zero."""
    servers = [find(f"r{number}", peer.url, model=None, api_key=None, context=None) for number in range(2)]
    router = LoopbackRouter(servers, "affinity", RequestOptions(timeout_seconds=20), seed=0)
    plans = [Script("group", "system", ("first", "second"), 0.0, (0.0, 0.01)) for _ in range(3)]
    answers = asyncio.run(hold_all(router, plans))

    assert [2, 2, 2] == [len(conversation) for conversation in answers]
    assert {0} == set(router.loads.values())
    assert Counter({2: 3, 4: 3}) == Counter(len(body["messages"]) for body in peer.bodies)
    assert 1 == len({answer.keys.conversation for conversation in answers for answer in conversation})


def test_turns_count_what_is_new_in_their_prompts() -> None:
    """Prompts grow by the message and the answer of each turn."""
    found = Conversation("name", "group", 100, 0.0, (Turn(10, 20, 0.0), Turn(30, 40, 0.0)))

    assert [110, 160] == [found.prompt_tokens(turn) for turn in range(2)]
    assert found.keys(0).conversation == found.keys(1).conversation
