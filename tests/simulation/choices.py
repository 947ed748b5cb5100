"""Random configurations and requests: a seed switches features on and off, so that runs differ in kind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from engine.types.request import Grammar, Request, SamplingParams, SpeculationParams
from kvcache.spec import AttentionRange
from tests.simulation.faults import KINDS, FaultKind
from tests.simulation.hash_model import HashModel
from tests.simulation.letters import VOCABULARY, letter

_LAYERS: tuple[tuple[AttentionRange, ...], ...] = (
    (AttentionRange(),),
    (AttentionRange(), AttentionRange()),
    (AttentionRange("window", 5), AttentionRange()),
    (AttentionRange("window", 3),),
    (AttentionRange("chunk", 8), AttentionRange()),
)

Drafting = Literal["none", "lookup", "same model", "other model", "both"]


@dataclass(frozen=True, slots=True)
class Configuration:
    """One engine and the traffic that it gets.

    cells           of the cache
    draft_depth     None: chosen by the controller
    memory_bytes    of evicted prefixes in host memory
    has_disk        whether prefixes are written to files
    faults          kinds that may occur
    weights         of the operations
    """

    model: HashModel
    slots: int
    capacity: int
    cells: int
    chunk: int
    overflow: Literal["length", "shift"]
    drafting: Drafting
    draft_depth: int | None
    memory_bytes: int
    has_disk: bool
    state_bytes: int
    checkpoint: int
    faults: tuple[FaultKind, ...]
    weights: dict[str, float]
    owners: int
    salts: int


def configuration(random: Random) -> Configuration:
    """A random configuration."""
    capacity = random.choice((16, 24, 40, 64))
    slots = random.choice((1, 2, 3, 4, 6))
    recurrent = random.random() < 0.2
    model = HashModel(random.randrange(1000), VOCABULARY, random.choice(_LAYERS), random.random() < 0.8, recurrent)
    has_faults = random.random() < 0.6
    weights = {
        "step": 10.0,
        "submit": random.choice((0.5, 1.0, 2.0)),
        "abort": random.choice((0.0, 0.2, 0.6)),
        "unread": random.choice((0.0, 0.3)),
        "clock": random.choice((0.0, 0.2)),
        "evict": random.choice((0.0, 0.2)),
        "flush": random.choice((0.0, 0.3)),
        "damage": 0.1,
        "fault": random.choice((0.1, 0.4)) if has_faults else 0.0,
    }
    return Configuration(
        model=model,
        slots=slots,
        capacity=capacity,
        cells=random.choice((capacity, capacity + 8, 2 * capacity, slots * capacity)),
        chunk=random.choice((3, 7, 16, 256)),
        overflow=random.choice(("length", "shift")),
        drafting=random.choice(("none", "lookup", "same model", "other model", "both")),
        draft_depth=random.choice((None, 1, 3, 5)),
        memory_bytes=random.choice((0, 0, 0, 2000, 20000)),
        has_disk=random.random() < 0.04,
        state_bytes=random.choice((0, 64, 4096)),
        checkpoint=random.choice((4, 16, 1024)),
        faults=tuple(random.sample(KINDS, random.randint(1, len(KINDS)))) if has_faults else (),
        weights=weights,
        owners=random.randint(1, 3),
        salts=random.randint(1, 3),
    )


class Traffic:
    """Random requests with shared prefixes."""

    def __init__(self, random: Random, configuration: Configuration) -> None:
        self._random, self._configuration = random, configuration
        self._count = 0
        most = configuration.capacity - 2
        self._texts = [self._tokens(random.randint(1, most)) for _ in range(4)]

    def remember(self, tokens: tuple[int, ...]) -> None:
        """Let later prompts begin with these tokens."""
        self._texts[self._random.randrange(len(self._texts))] = tokens

    def requests(self) -> list[Request]:
        """One request with one or several choices."""
        random, configuration = self._random, self._configuration
        self._count += 1
        first = self._request(f"r{self._count}")
        if random.random() < 0.85:
            return [first]
        count = random.randint(2, 4)
        return [
            replace(first, id=f"r{self._count}.{index}", group=first.id, sampling=replace(first.sampling, seed=index))
            for index in range(count if configuration.slots > 1 else 2)
        ]

    def _request(self, name: str) -> Request:
        random, capacity = self._random, self._configuration.capacity
        shared = random.choice(self._texts)
        prompt = [*shared[: random.randint(0, len(shared))], *self._tokens(random.randint(0, 5))]
        prompt = prompt[: capacity - 2] or [2]
        cacheable = random.random() < 0.93
        salt = b"" if self._configuration.salts == 1 else b"salt %d" % random.randrange(self._configuration.salts)
        grammar = Grammar("letters") if random.random() < 0.1 else None
        limit = random.choice((0, 1, 3, 8, 8, 20, 20, capacity, 2 * capacity, None))
        stop: tuple[str, ...] = ()
        if random.random() < 0.15:
            stop = tuple("".join(letter(token) for token in self._tokens(random.randint(1, 2))) for _ in range(2))
        return Request(
            name,
            tuple(prompt),
            sampling=self._sampling(has_grammar=grammar is not None),
            max_tokens=limit,
            stop=stop,
            stop_token_ids=self._tokens(2) if random.random() < 0.1 else (),
            ignore_eos=random.random() < 0.5,
            logprobs=random.randint(0, 2) if random.random() < 0.08 else None,
            overflow=random.choice((None, None, None, "length", "shift")),
            keep=random.choice((None, None, 0, 1, 6, 100)),
            recurrent_shift=random.choice(("rebuild", "carry")),
            checkpoints=(random.randint(0, len(prompt)),) if random.random() < 0.2 else (),
            salt=salt if cacheable else b"only " + name.encode(),
            cacheable=cacheable,
            speculation=SpeculationParams(
                random.choice(("auto", "auto", "none", "lookup", "model")), random.choice((None, None, 0, 2, 6))
            ),
            prediction=self._tokens(6) if random.random() < 0.1 else (),
            grammar=grammar,
            min_tokens=random.randint(1, 6) if grammar is None and not stop and random.random() < 0.1 else 0,
            score_from=random.randrange(len(prompt)) if random.random() < 0.04 else None,
            tier=random.choice(("default", "default", "default", "priority", "flex")),
            timeout_seconds=random.uniform(0.01, 2) if random.random() < 0.08 else None,
            owner=f"owner {random.randrange(self._configuration.owners)}",
        )

    def _sampling(self, *, has_grammar: bool) -> SamplingParams:
        random = self._random
        greedy = random.random() < 0.6
        sampling = SamplingParams(
            temperature=0.0 if greedy else random.choice((0.5, 1.0, 2.0)),
            top_k=0 if greedy else random.choice((0, 0, 5)),
            seed=random.randrange(-(2**63), 2**63),
        )
        if random.random() < 0.15:
            sampling = replace(
                sampling,
                frequency_penalty=random.choice((0.0, 0.5)),
                presence_penalty=random.choice((0.0, 0.75)),
                repetition_penalty=random.choice((1.0, 1.25)),
            )
        if random.random() < 0.05:
            sampling = replace(sampling, logit_bias=((random.randrange(VOCABULARY), 1.5),))
        if not has_grammar and random.random() < 0.05:
            sampling = replace(sampling, allowed_tokens=tuple(range(5, 25)))
        if not has_grammar and random.random() < 0.05:
            sampling = replace(sampling, bad_words=((random.randrange(2, VOCABULARY),), (7, 8), (9, 10, 11)))
        return sampling

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.choices(range(2, VOCABULARY), k=count))
