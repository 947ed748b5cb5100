"""Greedy text in any mix equals `generate`: prompts with shared prefixes, arrivals, chunks, cancels, few cells.

In float64 modules of transformers differ by less than 1e-12 between batches, so any mismatch is a bug. In float32 there
are ties: at the first difference the token must be the second of the reference, within rounding.
"""

from __future__ import annotations

import pytest

from engine.core import Core
from engine.types.events import Finished
from tests.engine.kit.mixes import LONGEST, Mix, mix, prompts
from tests.engine.kit.models import END, Models, Reference, References
from tests.engine.kit.play import Answer, Job, play
from tests.selection import quick

JUDGED = ("llama", "qwen3", "gemma", "phi3", "gpt_neox", "olmo2")
ALSO = ("gemma2", "gemma3", "mistral", "cohere", "smollm3", "gpt2")
# Rounding of float32 between two orders of summation, for logits of this size.
ROUNDING = 2e-5


def expected(reference: Reference, job: Job) -> list[int]:
    """The reference's tokens up to the end token."""
    tokens = reference.greedy(job.request.prompt, LONGEST)[: job.request.max_tokens]
    return list(tokens[: tokens.index(END)] if END in tokens else tokens)


def mismatches(
    reference: Reference, traffic: Mix, answers: dict[str, Answer]
) -> list[tuple[Job, list[int], list[int]]]:
    """The jobs with other tokens, expected and actual; the tokens of a cancelled job must be a prefix."""
    found = []
    for job in traffic.jobs:
        answer, right = answers[job.request.id], expected(reference, job)
        if job.leaves is None:
            assert isinstance(answer.end, Finished), f"{job.request.id} did not finish: {answer.end}"
        if answer.tokens != (right[: len(answer.tokens)] if answer.end is None else right):
            found.append((job, right, answer.tokens))
    return found


def is_tie(reference: Reference, job: Job, right: list[int], actual: list[int]) -> bool:
    """Whether rounding explains the first difference."""
    at = next(at for at, pair in enumerate(zip(right, actual, strict=False)) if pair[0] != pair[1])
    top = reference.logits((*job.request.prompt, *right[:at])).topk(2)
    return float(top.values[0] - top.values[1]) < 8 * ROUNDING and actual[at] == int(top.indices[1])


def check_clean(engine: Core) -> None:
    """No sequence runs or waits, and all used cells are evictable."""
    stats = engine.stats()
    assert (0, 0) == (stats.running, stats.waiting)
    assert engine.cache.evictable_cells() == engine.cache.cells - engine.cache.free_cells
    engine.cache.evict(engine.cache.cells)
    assert engine.cache.cells == engine.cache.free_cells


def run(models: Models, references: References, family: str, seeds: range, dtype: str, *, scarce: bool = False) -> int:
    """Play mixes and return the number of compared tokens; fails at the first difference beyond rounding."""
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


@pytest.mark.parametrize("family", quick(("llama", "gpt_neox", "gemma3", "cohere"), JUDGED + ALSO))
def test_any_mix_equals_generate(loaded: Models, reference: References, family: str) -> None:
    """In float64, to the last token."""
    judged = run(loaded, reference, family, range(5), "float64")

    assert 100 < judged


@pytest.mark.parametrize("family", quick(("qwen3", "phi3"), JUDGED))
def test_any_mix_is_equal_in_float32(loaded: Models, reference: References, family: str) -> None:
    """Except for ties."""
    judged = run(loaded, reference, family, range(1000, 1003), "float32")

    assert 100 < judged


@pytest.mark.parametrize("family", quick(("gemma3", "gpt2"), ("llama", "gemma3", "gpt2")))
def test_preemption_does_not_change_the_text(loaded: Models, reference: References, family: str) -> None:
    """With too few cells for the slots."""
    judged = run(loaded, reference, family, range(2000, 2005), "float64", scarce=True)

    assert 100 < judged


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("family", JUDGED + ALSO)
def test_two_hundred_mixes_of_every_family(loaded: Models, reference: References, family: str, dtype: str) -> None:
    """A quarter of them with too few cells."""
    judged = run(loaded, reference, family, range(10_000, 10_150), dtype)
    judged += run(loaded, reference, family, range(10_150, 10_200), dtype, scarce=True)

    assert 6_000 < judged
