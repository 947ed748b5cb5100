"""Simulates fleets of replicas under several routing policies, with the costs of a measured server.

    cellar bench MODEL --threads 1 --drafter none --lengths 128,512,1024,2048 --streams 1,4,8 --out FOLDER
    python -m benchmarks.fleet.simulate --costs FOLDER/bench.json [--replicas 100 1000] [--json FILE] [--plot FILE]
    python -m benchmarks.fleet.simulate --validate [--replicas 1 2 3] [--json FILE] [--page]

The router of the simulation has server.affinity, as shipped. Conversations have system prompts with Zipf's law and
several turns; midway a share of the replicas fails. `--validate` runs one workload on real servers, too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.fleet.costs import ServerCosts, read_costs
from benchmarks.fleet.page import add_page_option, write_page
from benchmarks.fleet.plot import draw, markdown
from benchmarks.fleet.policies import POLICIES
from benchmarks.fleet.simulator import Fleet, FleetOptions
from benchmarks.fleet.workload import Conversation, conversations, mean_prompt
from benchmarks.result import RESULTS, add_json_option, command_parser, measured

COSTS = RESULTS / "fleet.json"
GROUPS_PER_REPLICA = 2


def main(arguments: list[str] | None = None) -> int:
    """Simulate or validate; 1 if the validation failed."""
    given = parser().parse_args(arguments)
    if given.validate:
        from benchmarks.fleet.validation import validate

        code = validate(given.replicas or [1, 2, 3], rounds=given.rounds, json_path=given.json)
        if given.page:
            write_page()
        return code
    costs, rows = read_costs(given.costs), []
    print(costs)
    for replicas in given.replicas or [100, 1000, 10_000]:
        found = workload(costs, given, replicas)
        for name in given.policies:
            row = simulated(costs, given, name, found, replicas)
            rows.append(row)
            print(line(row), flush=True)
        if given.json:
            # Sizes take minutes each: an interrupted run has those that are complete.
            measured("fleet", [{**row, "costs": asdict(costs)} for row in rows]).write(given.json)
    print(markdown(rows))
    if given.plot:
        draw(rows, given.plot)
    if given.page:
        write_page()
    return 0


def line(row: dict[str, Any]) -> str:
    """A printed row."""
    values = (f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items())
    return "  ".join(values)


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = command_parser("fleet.simulate", __doc__)
    result.add_argument(
        "--costs",
        type=Path,
        default=COSTS,
        metavar="FILE",
        help="bench.json of cellar bench, or a result of this command",
    )
    result.add_argument("--replicas", type=int, nargs="+", metavar="N")
    result.add_argument("--policies", nargs="+", choices=POLICIES, default=[*POLICIES])
    result.add_argument("--requests", type=int, default=100_000, help="about this many, 10 a replica at least")
    result.add_argument("--load", type=float, default=0.6, help="share of the capacity with all earlier turns cached")
    result.add_argument("--slots", type=int, default=8)
    result.add_argument("--cells", type=int, default=65_536, help="tokens in the cache of a replica")
    result.add_argument("--failures", type=float, default=0.01, help="share of the replicas that fail midway")
    result.add_argument("--seed", type=int, default=0)
    result.add_argument("--plot", type=Path, metavar="FILE", help="write a plot of the table here")
    result.add_argument("--validate", action="store_true", help="compare with 1, 2 and 3 real servers")
    result.add_argument("--rounds", type=int, default=3, help="repetitions of the validation")
    add_json_option(result)
    add_page_option(result)
    return result


def workload(costs: ServerCosts, given: argparse.Namespace, replicas: int) -> list[Conversation]:
    """Conversations that use the given share of the capacity."""
    groups = GROUPS_PER_REPLICA * replicas
    prompt, fresh = mean_prompt(conversations(1000, groups, 1.0, given.seed))
    seconds = request_seconds(costs, prompt, fresh, slots=given.slots)
    found = conversations(given.requests, groups, given.load * replicas / seconds, given.seed)
    return [conversation.with_keys() for conversation in found]


def request_seconds(costs: ServerCosts, prompt: float, fresh: float, *, slots: int) -> float:
    """Seconds of a replica for a mean request whose earlier turns are cached, with half of the slots in decode."""
    answer, streams = 120, slots / 2
    decode = costs.decode(1, 0) + (streams - 1) * costs.sequence + costs.cell * streams * prompt
    return costs.first_token(int(prompt), int(prompt - fresh)) + answer * decode / streams


def simulated(
    costs: ServerCosts, given: argparse.Namespace, policy: str, found: Sequence[Conversation], replicas: int
) -> dict[str, Any]:
    """A row of the table: one policy; loads and times in seconds."""
    began = time.process_time()
    options = FleetOptions(
        replicas=replicas, slots=given.slots, cells=given.cells, failures=given.failures, seed=given.seed
    )
    result = Fleet(options, costs, POLICIES[policy], found).run()
    return {
        "replicas": replicas,
        "policy": policy,
        "load": given.load,
        "failures": given.failures,
        "requests": len(result.finished),
        "hit_share": result.hit_share,
        "ttft_p50": result.first_token(0.5),
        "ttft_p99": result.first_token(0.99),
        "imbalance": result.imbalance,
        "interrupted": result.interrupted,
        "rerouted": result.rerouted,
        "cpu_seconds": round(time.process_time() - began, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
