"""Greedy text in any mix equals `generate` alone: prompts with shared beginnings, arrivals, chunks, cancels, overload.

float64 judges exactly: transformers' own modules differ there by less than 1e-12, so any mismatch is a bug. float32 has
ties; at the first difference our token must be the reference's second, closer than rounding (reliability 3.4 b).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.core import Core
from engine.load.load import LoadedModel
from engine.types.events import Finished
from tests.engine.mixes import LONGEST, Mix, mix, prompts
from tests.engine.models import END, Reference
from tests.engine.play import Answer, Job, play

JUDGED = ("llama", "qwen3", "gemma", "phi3", "gpt_neox", "olmo2")
ALSO = ("gemma2", "gemma3", "mistral", "cohere", "smollm3", "gpt2")
# What float32 may differ by between two orders of summation, for logits of this size (reliability M22).
ROUNDING = 2e-5

Models = Callable[..., LoadedModel]
References = Callable[..., Reference]


def expected(reference: Reference, job: Job) -> list[int]:
    """The reference's tokens, as far as the request lets them be heard: the end token is not."""
    tokens = reference.greedy(job.request.prompt, LONGEST)[: job.request.max_tokens]
    return list(tokens[: tokens.index(END)] if END in tokens else tokens)


def mismatches(
    reference: Reference, traffic: Mix, answers: dict[str, Answer]
) -> list[tuple[Job, list[int], list[int]]]:
    """The jobs whose tokens differ: what should be and what is; who left early must hold a beginning."""
    found = []
    for job in traffic.jobs:
        answer, right = answers[job.request.id], expected(reference, job)
        if job.leaves is None:
            assert isinstance(answer.end, Finished), f"{job.request.id} did not finish: {answer.end}"
        if answer.tokens != (right[: len(answer.tokens)] if answer.end is None else right):
            found.append((job, right, answer.tokens))
    return found


def is_tie(reference: Reference, job: Job, right: list[int], actual: list[int]) -> bool:
    """Whether the first difference is one that rounding explains."""
    at = next(at for at, pair in enumerate(zip(right, actual, strict=False)) if pair[0] != pair[1])
    top = reference.logits((*job.request.prompt, *right[:at])).topk(2)
    return float(top.values[0] - top.values[1]) < 8 * ROUNDING and actual[at] == int(top.indices[1])


def check_clean(engine: Core) -> None:
    """Nobody runs or waits; the cells in use are those that the cache remembers for others, and all can be had."""
    stats = engine.stats()
    assert (0, 0) == (stats.running, stats.waiting)
    assert engine.cache.evictable_cells() == engine.cache.cells - engine.cache.free_cells
    engine.cache.evict(engine.cache.cells)
    assert engine.cache.cells == engine.cache.free_cells


def run(models: Models, references: References, family: str, seeds: range, dtype: str, *, scarce: bool = False) -> int:
    """Play mixes and return how many tokens were judged; fails at the first difference that is a bug."""
    loaded, reference = models(family, dtype), references(family, dtype)
    pool = prompts(len(family))
    judged = ties = 0
    for seed in seeds:
        traffic = mix(seed, pool, scarce=scarce)
        engine = traffic.core(loaded)
        answers = play(engine, traffic.jobs)
        for job, right, actual in mismatches(reference, traffic, answers):
            assert dtype == "float32", f"mix {seed}, {job}: {right} != {actual}"
            assert is_tie(reference, job, right, actual), f"mix {seed}, {job}: {right} != {actual}"
            ties += 1
        judged += sum(len(answer.tokens) for answer in answers.values())
        check_clean(engine)
    assert ties <= max(1, judged // 10_000)
    return judged


@pytest.mark.parametrize("family", JUDGED + ALSO)
def test_any_mix_says_what_generate_says_alone(loaded: Models, reference: References, family: str) -> None:
    """In float64 not one token differs from transformers alone, whoever shares the batch."""
    judged = run(loaded, reference, family, range(40 if family in JUDGED else 12), "float64")

    assert 200 < judged


@pytest.mark.parametrize("family", JUDGED)
def test_any_mix_says_the_same_in_float32(loaded: Models, reference: References, family: str) -> None:
    """In float32 tokens differ at ties only."""
    judged = run(loaded, reference, family, range(1000, 1008), "float32")

    assert 200 < judged


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_preemption_does_not_change_the_text(loaded: Models, reference: References, family: str) -> None:
    """With too few cells for the slots, sequences go back to the queue and still say the same."""
    judged = run(loaded, reference, family, range(2000, 2016), "float64", scarce=True)

    assert 200 < judged


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("family", JUDGED + ALSO)
def test_two_hundred_mixes_of_every_family(loaded: Models, reference: References, family: str, dtype: str) -> None:
    """The same laws over 200 mixes more, a quarter of them with too few cells."""
    judged = run(loaded, reference, family, range(10_000, 10_150), dtype)
    judged += run(loaded, reference, family, range(10_150, 10_200), dtype, scarce=True)

    assert 6_000 < judged
