"""Compares the simulator with real servers: one workload, the same policies, costs measured from one of the servers.

Each replica is a `cellar serve` of the bundled model with one thread. A round sends conversations through a router with
the policy, in this process; the simulator then gets the same arrivals, lengths, routing keys and random numbers. The
replicas share the processors of this machine, so the slowdown of one by others is measured, too.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.client import Chat, RequestOptions, Server, send
from bench.launch import cellar
from bench.load_generator import LoadGenerator
from bench.probe import ProbedServer, check_sample, probe
from bench.prompts import WordPrompts, sentence
from bench.samples import Sample, percentile
from bench.target import find
from benchmarks.fleet.costs import ServerCosts, costs_of_cells
from benchmarks.fleet.page import load_note
from benchmarks.fleet.policies import POLICIES
from benchmarks.fleet.simulator import Fleet, FleetOptions, FleetResult
from benchmarks.fleet.workload import Conversation, Turn
from benchmarks.result import measured
from server.affinity.keys import RequestKeys, request_keys

# Agreement: of the cached share in absolute terms, of the median time to the first token in relative ones.
SHARE_GOAL, FIRST_TOKEN_GOAL = 0.03, 0.2
CHECKED = ("affinity", "power of two", "random")
CONVERSATIONS, TURNS, GROUPS = 16, 4, 4
SYSTEM_TOKENS, USER_TOKENS, ANSWER_TOKENS = 400, 48, 24
# Mean seconds between the starts of conversations, and between an answer and the next turn: a light load.
START_SECONDS, PAUSE_SECONDS = 0.4, 1.5
SLOTS, CELLS = 8, 1 << 20
LENGTHS = ("--lengths", "64,256,512,1024")
BENCH = ("--only", "latency,throughput,reuse", *LENGTHS, "--streams", "1,4", "--requests", "6")
# With pauses, like those of conversations.
PACED = ("--only", "throughput", "--rate", "2", "--requests", "16", "--prompt-tokens", "64")
# Requests of each replica for a slowdown.
SLOWDOWN_REQUESTS, SLOWDOWN_PROMPT, SLOWDOWN_ROUNDS = 4, 256, 3


@dataclass(frozen=True, slots=True)
class Script:
    """A conversation to hold: the texts of its user, and its times."""

    group: str
    system: str
    texts: tuple[str, ...]
    start: float
    pauses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """A request of a real run: its routing keys and sample."""

    keys: RequestKeys
    sample: Sample


class LoopbackRouter:
    """Sends each request to the replica that a policy chooses, with the loads of this router."""

    def __init__(self, servers: Sequence[Server], policy: str, options: RequestOptions, seed: int) -> None:
        self._servers = {f"r{number}": server for number, server in enumerate(servers)}
        self._options = options
        self.loads = dict.fromkeys(self._servers, 0)
        self._policy = POLICIES[policy]([*self._servers], self.loads, seed)

    async def send(self, chat: Chat) -> Answered:
        """The complete answer to a chat; BenchError without one."""
        messages = [{"role": role, "content": text} for role, text in chat]
        keys = request_keys({"messages": messages})
        name = self._policy.choose(keys)
        self._change(name, 1)
        try:
            sent = await send(self._servers[name], self._options, prompt=chat, max_tokens=ANSWER_TOKENS, begun=0.0)
        finally:
            self._change(name, -1)
        return Answered(keys, check_sample(self._servers[name], sent.read()))

    def _change(self, name: str, by: int) -> None:
        self.loads[name] += by
        self._policy.changed(name)


@dataclass(slots=True)
class Measurements:
    """Of all rounds so far: cells of `cellar bench`, and the seconds of a request by the number of busy replicas."""

    cells: list[dict[str, Any]] = field(default_factory=list)
    paced: list[dict[str, Any]] = field(default_factory=list)
    seconds: list[tuple[float, ...]] = field(default_factory=list)

    @property
    def costs(self) -> ServerCosts:
        """The costs of a server."""
        return costs_of_cells(self.cells, self.paced)

    @property
    def slowdowns(self) -> tuple[float, ...]:
        """Of 1, 2, ... busy replicas, relative to one."""
        ratios = [[seconds / found[0] for seconds in found] for found in self.seconds]
        return tuple(max(1.0, median(column)) for column in zip(*ratios, strict=True))

    def add(self, found: ProbedServer, servers: Sequence[Server], folder: Path) -> None:
        """Measure once more."""
        self.cells += bench_cells(servers[0].url, folder, BENCH)
        self.paced += bench_cells(servers[0].url, folder, PACED)
        generators = [replace(found.generator, server=server, key=f"busy {time.time_ns()}") for server in servers]
        counts = range(1, len(servers) + 1)
        for number in range(SLOWDOWN_ROUNDS):
            own = [replace(one, key=f"{one.key} {number}") for one in generators]
            self.seconds.append(tuple(asyncio.run(busy_seconds(own[:count])) for count in counts))


async def busy_seconds(generators: Sequence[LoadGenerator]) -> float:
    """Median seconds of a request while each server has a stream."""

    async def load(generator: LoadGenerator) -> list[Sample]:
        unshared = partial(generator.prompts.unshared, SLOWDOWN_PROMPT, generator.key, len(generators))
        prompts = [unshared(number) for number in range(SLOWDOWN_REQUESTS)]
        return (await generator.closed_loop(prompts, 2 * ANSWER_TOKENS, streams=1)).whole

    return median(sample.finished for run in await asyncio.gather(*map(load, generators)) for sample in run)


def validate(replicas: Sequence[int], *, rounds: int, json_path: Path | None) -> int:
    """Compare at each number of replicas; 0 if all figures agree within the goals."""
    note = load_note()
    rows: list[dict[str, Any]] = []
    measurements = Measurements()
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"server-{number}.log" for number in range(max(replicas))]
        arguments = ("--threads", "1", "--drafter", "none", "--slots", str(SLOTS))
        urls = [stack.enter_context(cellar(arguments, log)) for log in logs]
        servers = [find("cellar", url, model=None, api_key=None, context=None) for url in urls]
        found = asyncio.run(
            probe(servers[0], RequestOptions(timeout_seconds=600, extra={"ignore_eos": True}), "text", 0)
        )
        for number in range(rounds):
            measurements.add(found, servers, Path(folder))
            print(measurements.costs, measurements.slowdowns, flush=True)
            for count in replicas:
                for policy in policies(count):
                    rows.append(compared(found, servers[:count], policy, len(rows), measurements))
                    print(f"round {number + 1}: {shown(rows[-1])}", flush=True)
    summaries = [summary(rows, count, policy) for count in replicas for policy in policies(count)]
    for row in summaries:
        print(row)
    if json_path:
        known = {"costs": asdict(measurements.costs), "slowdowns": measurements.slowdowns}
        measured("fleet_validation", [{**row, **known} for row in summaries], note).write(json_path)
    return 0 if all(row["agrees"] for row in summaries) else 1


def policies(replicas: int) -> Sequence[str]:
    """The policies to compare; of one replica, which shows the error of the costs alone, any."""
    return CHECKED if replicas > 1 else CHECKED[:1]


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the times of all requests."""
    return {name: value for name, value in row.items() if not isinstance(value, list)}


def bench_cells(url: str, folder: Path, options: Sequence[str]) -> list[dict[str, Any]]:
    """The cells of a run of `cellar bench` against a server."""
    command = (sys.executable, "-c", "from server.cli import main; main()", "bench", "--base-url", url, *options)
    lengths = ("--max-tokens", str(2 * ANSWER_TOKENS), "--rounds", "1", "--out", str(folder))
    subprocess.run([*command, *lengths], check=True, capture_output=True)
    cells: list[dict[str, Any]] = json.loads((folder / "bench.json").read_text(encoding="utf-8"))["cells"]
    return cells


def compared(
    found: ProbedServer, servers: Sequence[Server], policy: str, seed: int, measurements: Measurements
) -> dict[str, Any]:
    """A row: one real run, and its simulation with the costs measured so far."""
    plans = scripts(found, seed)
    router = LoopbackRouter(servers, policy, found.generator.options, seed)
    began = time.perf_counter()
    answers = asyncio.run(hold_all(router, plans))
    seconds = time.perf_counter() - began
    real = [answer.sample for conversation in answers for answer in conversation]
    user_tokens = asyncio.run(own_tokens(found, seed))
    options = FleetOptions(replicas=len(servers), slots=SLOTS, cells=CELLS, seed=seed, slowdowns=measurements.slowdowns)
    simulated = simulate(plans, answers, measurements.costs, options, policy=policy, own=user_tokens)
    real_times = [one.first_token_seconds or 0.0 for one in real]
    return {
        "replicas": len(servers),
        "policy": policy,
        "seconds": round(seconds, 1),
        "real_hit_share": sum(one.cached_tokens or 0 for one in real) / sum(one.prompt_tokens or 0 for one in real),
        "hit_share": simulated.hit_share,
        "real_ttft_p50": percentile(real_times, 0.5),
        "ttft_p50": simulated.first_token(0.5),
        "real_times": real_times,
        "times": [one.first - one.asked for one in simulated.finished if one.first is not None],
        # The first turns of conversations compute most of their prompts: which costs are wrong.
        "real_first_turns": median(own[0].sample.first_token_seconds or 0.0 for own in answers),
        "first_turns": median(one.first - one.asked for one in simulated.finished if one.first and one.turn == 0),
    }


def summary(rows: Sequence[dict[str, Any]], replicas: int, policy: str) -> dict[str, Any]:
    """The mean shares and the median times of the requests of all rounds, and whether they agree."""
    own = [row for row in rows if (row["replicas"], row["policy"]) == (replicas, policy)]
    middle: dict[str, Any] = {name: mean(row[name] for row in own) for name in ("real_hit_share", "hit_share")}
    for name, times in (("real_ttft_p50", "real_times"), ("ttft_p50", "times")):
        middle[name] = median(time for row in own for time in row[times])
    middle |= {name: median(row[name] for row in own) for name in ("real_first_turns", "first_turns")}
    share = abs(middle["hit_share"] - middle["real_hit_share"])
    ratio = middle["ttft_p50"] / middle["real_ttft_p50"]
    return {
        "replicas": replicas,
        "policy": policy,
        **middle,
        "hit_share_difference": share,
        "ttft_ratio": ratio,
        "agrees": share <= SHARE_GOAL and abs(ratio - 1) <= FIRST_TOKEN_GOAL,
    }


def scripts(found: ProbedServer, seed: int) -> list[Script]:
    """The conversations of one round; no other round has their texts."""
    source = random.Random(f"scripts {seed}")
    words = word_counts(found)
    plans, start = [], 0.0
    for number in range(CONVERSATIONS):
        group = f"{seed} group {source.randrange(GROUPS)}"
        texts = tuple(sentence(words[1], f"{seed} {number} {turn}") for turn in range(TURNS))
        pauses = tuple(source.expovariate(1 / PAUSE_SECONDS) for _ in range(TURNS))
        plans.append(Script(group, sentence(words[0], group), texts, start, pauses))
        start += source.expovariate(1 / START_SECONDS)
    return plans


def word_counts(found: ProbedServer) -> tuple[int, int]:
    """Words of a system prompt and of a user's message."""
    prompts = found.generator.prompts
    assert isinstance(prompts, WordPrompts)
    return round(SYSTEM_TOKENS / prompts.counted.word), round(USER_TOKENS / prompts.counted.word)


async def hold_all(router: LoopbackRouter, plans: Sequence[Script]) -> list[list[Answered]]:
    """Hold all conversations at their times."""
    return await asyncio.gather(*(hold(router, plan) for plan in plans))


async def hold(router: LoopbackRouter, plan: Script) -> list[Answered]:
    """Hold one conversation: each turn after a pause behind the answer before it."""
    await asyncio.sleep(plan.start)
    chat: Chat = (("system", plan.system),)
    answers: list[Answered] = []
    for turn, text in enumerate(plan.texts):
        if turn:
            await asyncio.sleep(plan.pauses[turn])
        answers.append(await router.send((*chat, ("user", text))))
        chat = (*chat, ("user", text), ("assistant", answers[-1].sample.text or "yes"))
    return answers


async def own_tokens(found: ProbedServer, seed: int) -> int:
    """Tokens of a first turn that a conversation does not share with others of its group, from a second one's hit."""
    words = word_counts(found)
    system = sentence(words[0], f"{seed} shared")
    for number in range(2):
        chat: Chat = (("system", system), ("user", sentence(words[1], f"{seed} own {number}")))
        sent = await send(found.generator.server, found.generator.options, prompt=chat, max_tokens=1, begun=0.0)
        sample = check_sample(found.generator.server, sent.read())
    return (sample.prompt_tokens or 0) - (sample.cached_tokens or 0)


def simulate(
    plans: Sequence[Script],
    answers: Sequence[Sequence[Answered]],
    costs: ServerCosts,
    options: FleetOptions,
    *,
    policy: str,
    own: int,
) -> FleetResult:
    """The simulation of a real run."""
    found = [
        conversation(f"c{number}", plan, got, own)
        for number, (plan, got) in enumerate(zip(plans, answers, strict=True))
    ]
    return Fleet(options, costs, POLICIES[policy], found).run()


def conversation(name: str, plan: Script, answers: Sequence[Answered], own: int) -> Conversation:
    """A script with the lengths of its real prompts."""
    prompts = [answer.sample.prompt_tokens or 0 for answer in answers]
    generated = [answer.sample.completion_tokens for answer in answers]
    system = prompts[0] - own
    before = [system, *(prompt + tokens for prompt, tokens in zip(prompts, generated, strict=True))]
    turns = [
        Turn(prompt - earlier, tokens, pause)
        for prompt, earlier, tokens, pause in zip(prompts, before, generated, plan.pauses, strict=False)
    ]
    keys = tuple(answer.keys for answer in answers)
    return replace(Conversation(name, plan.group, system, plan.start, tuple(turns)), known_keys=keys)
