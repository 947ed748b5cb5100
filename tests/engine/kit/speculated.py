"""Cases of speculative decoding: a drafter, a kind of cache, a batch size, a chunk size and an event.

The requests of a case have different sampling parameters; each output must equal that of the request alone, without
drafts.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from engine.core import Core
from engine.draft.depth import FixedDepth
from engine.draft.forced import ForcedDrafter
from engine.draft.lookup import LookupDrafter
from engine.draft.model import ModelDrafter
from engine.draft.outputs import OutputStore
from engine.draft.speculation import Speculation
from engine.load.load import LoadedModel
from engine.schedule.draft import Drafter
from engine.types.request import Grammar, Request, SamplingParams
from kvcache.cache import Cache
from tests.engine.draft import drafters
from tests.engine.kit.models import END, VOCABULARY, Models, core
from tests.engine.kit.play import Answer, Job, ask, play

KINDS = {
    "full": "llama",
    "window": "gemma3",
    "chunk": "llama4",
    "recurrent": "mamba2",
    "hybrid": "qwen3_next",
    "latent": "deepseek_v3",
}
DRAFTERS = ("none", "model", "itself", "lookup", "prediction", "wrong", "right", "partly", "random", "end")
BATCHES = (1, 3, 8)
CHUNKS = (1, 7, 64, 256)
EVENTS = ("nothing", "cancel", "preempt", "shift")
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=1.3, top_p=0.9, seed=2),
    SamplingParams(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.2, seed=3),
    SamplingParams(temperature=0.0, frequency_penalty=1.5),
    SamplingParams(temperature=0.5, logit_bias=((7, 3.0), (11, -100.0)), seed=4),
)
# An array of at least 31 numbers; other draft tokens are rejected.
ARRAY = Grammar('start: "[" NUMBER ("," " " NUMBER){30,} "]"\nNUMBER: /[0-9]{1,3}/')
# Sampling parameters and grammars of requests.
VARIANTS: tuple[tuple[SamplingParams, Grammar | None], ...] = (
    *((sampling, None) for sampling in SAMPLINGS),
    (SamplingParams(temperature=0.0), ARRAY),
    (SamplingParams(temperature=1.0, seed=5), ARRAY),
)
CONTEXT = 64
_COUNT = 28
_DEPTH = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One combination."""

    drafter: str
    kind: str
    batch: int
    chunk: int
    event: str


def every() -> list[Case]:
    """All combinations."""
    return [Case(*values) for values in itertools.product(DRAFTERS, KINDS, BATCHES, CHUNKS, EVENTS)]


def covering(seed: int = 0) -> list[Case]:
    """Combinations with every pair of values of two axes at least once."""
    axes: list[Sequence[object]] = [DRAFTERS, list(KINDS), BATCHES, CHUNKS, EVENTS]
    places = list(itertools.combinations(range(len(axes)), 2))
    open_ = {(at, left, to, right) for at, to in places for left in axes[at] for right in axes[to]}
    chance, found = random.Random(seed), []
    while open_:
        some = [[chance.choice(axis) for axis in axes] for _ in range(60)]
        best = max(some, key=lambda values: len(_pairs(values, places) & open_))
        if met := _pairs(best, places) & open_:
            open_ -= met
            found.append(Case(*best))
    return found


def _pairs(values: Sequence[object], places: Iterable[tuple[int, int]]) -> set[tuple[int, object, int, object]]:
    return {(at, values[at], to, values[to]) for at, to in places}


def differences(case: Case, models: Models) -> list[tuple[str, list[int], list[int]]]:
    """The requests of a case with a wrong output: their ids, the expected tokens, and the tokens."""
    return played(case, models).wrong


@dataclass(frozen=True, slots=True)
class Played:
    """The outcome of a case.

    wrong   ids of requests with a wrong output, the expected tokens, and the tokens
    drafts  drafted and accepted tokens by kind of drafter
    """

    wrong: list[tuple[str, list[int], list[int]]]
    drafts: dict[str, tuple[int, int]]


def played(case: Case, models: Models) -> Played:
    """Run all requests of a case together, and each alone."""
    loaded, requests = models(KINDS[case.kind]), _requests(case)
    alone = {request.id: _alone(loaded, request) for request in requests}
    engine = _engine(case, models, requests, {name: answer.tokens for name, answer in alone.items()})
    cancelled = requests[0].id if case.event == "cancel" else None
    jobs = [
        Job(request, 2 * at, 2 * at + 6 if request.id == cancelled else None) for at, request in enumerate(requests)
    ]
    answers = play(engine, jobs, most_steps=20_000)
    wrong = []
    for name, answer in answers.items():
        right = alone[name]
        if name == cancelled and answer.end is None:
            right = replace(right, tokens=right.tokens[: len(answer.tokens)], text=answer.text)
        if (answer.tokens, answer.text) != (right.tokens, right.text):
            wrong.append((name, right.tokens, answer.tokens))
    counts = engine.stats().drafts
    return Played(wrong, {one.kind: (sum(one.drafted), sum(one.accepted)) for one in counts})


def _requests(case: Case) -> tuple[Request, ...]:
    """Prompts with repetitions, for the n-gram lookup, each with another variant of sampling."""
    return _cached_requests(case.kind, case.batch, case.event == "shift")


@cache
def _cached_requests(kind: str, batch: int, shift: bool) -> tuple[Request, ...]:
    chance = random.Random(repr((kind, batch, shift)))
    stem = [chance.randrange(VOCABULARY) for _ in range(9)]
    # A batch of one has another variant for each kind of cache.
    first = chance.randrange(len(VARIANTS))
    fields = {"overflow": "shift", "ignore_eos": True} if shift else {}
    requests = []
    for at in range(batch):
        sampling, grammar = VARIANTS[(first + at) % len(VARIANTS)]
        prompt = [*stem, *(chance.randrange(VOCABULARY) for _ in range(chance.randint(0, 6))), *stem[: at + 2]]
        requests.append(ask(f"{at}", prompt, 70 if shift else _COUNT, sampling=sampling, grammar=grammar, **fields))
    return tuple(requests)


@cache
def _alone(loaded: LoadedModel, request: Request) -> Answer:
    return play(core(loaded, slots=1, context=CONTEXT), [Job(request)])[request.id]


def _engine(case: Case, models: Models, requests: Sequence[Request], outputs: Mapping[str, Sequence[int]]) -> Core:
    loaded = models(KINDS[case.kind])
    slots = min(case.batch, 4)
    cells = CONTEXT + 8 if case.event == "preempt" else None
    quick, slow = _drafter(case, models, {request.id: len(request.prompt) for request in requests}, outputs)
    speculation = None
    if quick is not None or slow is not None:
        speculation = Speculation(quick, slow, FixedDepth(_DEPTH), lambda: 0.0, forced=ForcedDrafter())
    return core(loaded, slots=slots, context=CONTEXT, cells=cells, chunk=case.chunk, speculation=speculation)


def _drafter(
    case: Case, models: Models, prompts: Mapping[str, int], outputs: Mapping[str, Sequence[int]]
) -> tuple[Drafter | None, Drafter | None]:
    """The quick and the slow drafter of a case."""
    match case.drafter:
        case "none":
            return None, None
        case "lookup" | "prediction":
            return LookupDrafter(OutputStore(4096)), None
        case "model" | "itself":
            return None, model_drafter(models("llama" if case.drafter == "model" else KINDS[case.kind]))
        case "wrong":
            return None, drafters.always_wrong(outputs, prompts, VOCABULARY)
        case "right":
            return None, drafters.always_right(outputs, prompts)
        case "partly":
            return None, drafters.partly_right(outputs, prompts, VOCABULARY)
        case "random":
            return None, drafters.random_tokens(VOCABULARY)
        case "end":
            return None, drafters.end_tokens(END)
    raise AssertionError(case.drafter)


def model_drafter(loaded: LoadedModel, *, slots: int = 4) -> ModelDrafter:
    """A model as a drafter, with a cache of its own."""
    cache = Cache(
        [plan.spec for plan in loaded.layers],
        slots=slots,
        capacity=CONTEXT,
        cells=slots * CONTEXT,
        state_bytes=2**24 if loaded.recurrent else None,
        dtype=loaded.dtype,
        device=loaded.info.device,
    )
    return ModelDrafter(cache, loaded.runner, vocabulary=VOCABULARY, chunk=16)
