"""Simulate seeds: `python -m tests.simulation --seeds 0:2000 --steps 500 --jobs 2`; replay one with `--seed N`."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from tests.simulation.faults import KINDS
from tests.simulation.planted import DEFECTS, planted
from tests.simulation.world import world


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a seed showed; `failure` is empty if nothing is wrong. `counts` by name, and processor time."""

    seed: int
    failure: str
    counts: dict[str, int]
    seconds: float


def simulate(seed: int, operations: int) -> Outcome:
    """The outcome of a seed."""
    began = time.process_time()
    with world(seed) as simulated:
        failure = ""
        try:
            simulated.run(operations)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        stats = simulated.core.stats()
        counts = {
            "engine steps": simulated.steps,
            "requests": simulated.requests,
            "tokens compared": simulated.tokens,
            "prompt tokens from the prefix cache": stats.cached_tokens_total,
            "tokens evicted": stats.evicted_tokens_total,
            "tokens loaded from memory or disk": stats.loaded_tokens_total,
            "context shifts": stats.context_shifts_total,
            "preemptions": stats.preemptions_total,
            "time slices": stats.time_slices_total,
            "draft tokens": sum(sum(drafts.drafted) for drafts in stats.drafts),
            "draft tokens accepted": sum(sum(drafts.accepted) for drafts in stats.drafts),
            **{
                f"requests {end}": simulated.occurred[end]
                for end in ("stop", "length", "deadline", "aborted", "failed")
            },
            **{f"faults: {kind}": simulated.occurred[kind] for kind in KINDS},
        }
    return Outcome(seed, failure, counts, time.process_time() - began)


def _start_process() -> None:
    """Injected errors are not logged, and a process uses one core."""
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)


def first_seed(name: str, seeds: range, operations: int) -> Outcome | None:
    """The first seed that finds a planted defect, and what it shows; None: none finds it."""
    with planted(name):
        outcomes = (simulate(seed, operations) for seed in seeds)
        return next((outcome for outcome in outcomes if outcome.failure), None)


def main() -> int:
    """Print a summary; 1 if a seed fails or a planted defect is not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="first seed and the one after the last (default %(default)s)")
    parser.add_argument("--steps", type=int, default=500, help="random operations of a seed (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default %(default)s)")
    parser.add_argument("--seed", type=int, help="replay one seed and print its operations")
    parser.add_argument("--planted", action="store_true", help="plant defects; the first seed that finds each")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        with world(arguments.seed, print) as simulated:
            simulated.run(arguments.steps)
        return 0
    seeds = range(*map(int, arguments.seeds.split(":")))
    return _find_planted(seeds, arguments) if arguments.planted else _simulate_all(seeds, arguments)


def _simulate_all(seeds: range, arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    with ProcessPoolExecutor(arguments.jobs, initializer=_start_process) as pool:
        outcomes = list[Outcome]()
        for outcome in pool.map(partial(simulate, operations=arguments.steps), seeds, chunksize=8):
            outcomes.append(outcome)
            if outcome.failure:
                print(f"seed {outcome.seed}: {outcome.failure[:300]}")
                print(f"  python -m tests.simulation --seed {outcome.seed} --steps {arguments.steps}", flush=True)
    failures = [outcome for outcome in outcomes if outcome.failure]
    operations, seconds = len(seeds) * arguments.steps, sum(outcome.seconds for outcome in outcomes)
    counts = sum((Counter(outcome.counts) for outcome in outcomes), Counter[str]())
    summary = {
        "seeds": len(seeds),
        "operations": operations,
        **counts,
        "operations a second of processor time": round(operations / max(seconds, 1e-9)),
        "seconds": round(time.monotonic() - began),
        "failing seeds": len(failures),
    }
    for label, count in summary.items():
        print(f"{label:40}{count:>12,}")
    return int(bool(failures))


def _find_planted(seeds: range, arguments: argparse.Namespace) -> int:
    with ProcessPoolExecutor(arguments.jobs, initializer=_start_process) as pool:
        found = list(pool.map(partial(first_seed, seeds=seeds, operations=arguments.steps), DEFECTS))
    for name, outcome in zip(DEFECTS, found, strict=True):
        seed, failure = ("none", "") if outcome is None else (str(outcome.seed), outcome.failure)
        print(f"{name:42}{seed:>6}  {failure[:110]}")
    return int(None in found)


if __name__ == "__main__":
    sys.exit(main())
