"""Checkpoints: they exist where requested, are found again, and never change the text."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import pytest

from engine.core import Core
from tests.engine.kit.models import Models, core
from tests.engine.kit.play import Job, ask, play
from tests.selection import quick

RECURRENT = ["lfm2", "mamba2"]
PROMPT = tuple((11 * at + 3) % 250 for at in range(60))


def cached(engine: Core, prompt: tuple[int, ...], name: str, **fields: object) -> int:
    """The cached tokens of a prompt."""
    return play(engine, [Job(ask(name, prompt, 2, ignore_eos=True, **fields))])[name].started[0].cached_tokens


@pytest.mark.parametrize("family", RECURRENT)
def test_a_prompt_resumes_at_its_checkpoints(loaded: Models, family: str) -> None:
    """Other positions resume at the checkpoint before."""
    engine = core(loaded(family), slots=2, chunk=256)
    cached(engine, PROMPT, "first", checkpoints=(13, 40))

    assert 13 == cached(engine, (*PROMPT[:13], 251), "at the first")
    assert 40 == cached(engine, (*PROMPT[:40], 251), "at the second")
    assert 40 == cached(engine, (*PROMPT[:50], 251), "behind the second")
    assert len(PROMPT) - 1 == cached(engine, PROMPT, "the same again")


@pytest.mark.parametrize("family", RECURRENT)
def test_the_third_prompt_resumes_at_a_divergence(loaded: Models, family: str) -> None:
    """The second prompt diverges from the first without a state there, and makes a checkpoint."""
    engine = core(loaded(family), slots=2, chunk=256)
    found = [cached(engine, (*PROMPT[:27], *tail), str(tail)) for tail in ((1, 2, 3), (4, 5, 6), (7, 8, 9))]

    assert [0, 0, 27] == found


@pytest.mark.parametrize(
    ("family", "longer"),
    quick([("lfm2", 1), ("mamba2", 2), ("qwen3_next", 2)], product((*RECURRENT, "qwen3_next"), (1, 2))),
)
def test_a_prompt_resumes_where_an_answer_ended(loaded: Models, family: str, longer: int) -> None:
    """The cached length stays a checkpoint when the prompt's own tokens are inserted behind it."""
    engine = core(loaded(family), slots=2, chunk=256)
    first = play(engine, [Job(ask("first", PROMPT, 12, ignore_eos=True))])["first"].tokens
    prompt = (*PROMPT, *first[:-1], *range(1, 1 + longer))

    reused = len(prompt) - longer

    assert reused == cached(engine, prompt, "second")
    assert len(prompt) - 1 == cached(engine, prompt, "third")
    assert reused == cached(engine, (*prompt[:reused], 251), "diverges there")


@pytest.mark.parametrize("family", RECURRENT)
def test_long_prompts_have_regular_checkpoints(loaded: Models, family: str) -> None:
    """With an interval of 16, at most 15 tokens are computed twice."""
    engine = core(loaded(family), slots=2, chunk=256, checkpoint=16)
    cached(engine, PROMPT, "first")

    for leaves in (16, 31, 47, 50):
        assert leaves // 16 * 16 == cached(engine, (*PROMPT[:leaves], 251), f"at {leaves}")


@pytest.mark.parametrize("family", quick(("gemma3", "lfm2"), ("llama", "gemma3", *RECURRENT)))
def test_a_shared_prefix_is_computed_once(loaded: Models, family: str) -> None:
    """By concurrent requests, for every kind of memory."""
    engine = core(loaded(family), slots=6, chunk=256)
    users = [Job(ask(str(at), (*PROMPT[:37], 100 + at, 7), 1, ignore_eos=True)) for at in range(6)]
    play(engine, users)

    assert 37 + 6 * 2 == engine.stats().batch_tokens_total


@pytest.mark.parametrize("family", quick(("gemma3", "mamba2"), ("llama", "gemma3", "mistral", *RECURRENT)))
def test_a_repeated_prompt_costs_one_token_after_eviction(loaded: Models, family: str) -> None:
    """The end of a prompt is evicted last."""
    engine = core(loaded(family), slots=2, cells=140, chunk=16)
    cached(engine, PROMPT, "first")
    cached(engine, tuple(reversed(PROMPT)), "other")

    assert len(PROMPT) - 1 == cached(engine, PROMPT, "again")


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_windows_stay_cached_at_checkpoints(loaded: Models, family: str) -> None:
    """The end of a message can resume after the cells around it were evicted."""
    engine = core(loaded(family), slots=2, cells=300, chunk=16)
    cached(engine, PROMPT, "first", checkpoints=(13, 40))
    cached(engine, tuple(reversed(PROMPT)), "other")
    group = next(group for group in engine.cache.groups if group.spec.attention_range.kind == "window")
    held = group.pool.cells - group.pool.free_cells

    assert held < 2 * len(PROMPT)
    assert 40 == cached(engine, (*PROMPT[:40], 251), "at the second mark")
    assert 13 == cached(engine, (*PROMPT[:13], 251), "at the first")


def test_stats_count_evicted_and_trimmed_tokens(loaded: Models, tmp_path: Path) -> None:
    """Trimmed, evicted, flushed to disk and loaded again."""
    engine = core(loaded("gemma3"), slots=2, cells=300, chunk=16, disk_cache=str(tmp_path))
    cached(engine, PROMPT, "first", checkpoints=(13, 40))
    cached(engine, tuple(reversed(PROMPT)), "other")
    engine.cache.reset_prefix_cache()
    while engine.flush_when_idle():
        pass
    cached(engine, PROMPT, "again")
    counts, stats = engine.cache.prefix_counts, engine.stats()

    assert 0 < min(counts.evicted, counts.trimmed, counts.loaded, counts.written)
    assert (counts.evicted, counts.trimmed) == (stats.evicted_tokens_total, stats.trimmed_tokens_total)
    assert (counts.loaded, counts.written) == (stats.loaded_tokens_total, stats.written_tokens_total)


@pytest.mark.parametrize("family", quick(("gemma3", "lfm2"), ("llama", "gemma3", *RECURRENT)))
def test_checkpoints_do_not_change_the_text(loaded: Models, family: str) -> None:
    """Random checkpoints, intervals and chunks over prompts with shared prefixes."""
    chance = random.Random(5)
    prompts = [(*PROMPT[: chance.randint(1, 60)], chance.randrange(250), chance.randrange(250)) for _ in range(12)]
    plain = play(core(loaded(family), slots=12), [Job(ask(str(at), prompt, 6)) for at, prompt in enumerate(prompts)])
    for seed in range(3):
        chance = random.Random(seed)
        settings = {"chunk": chance.choice((5, 16, 256)), "checkpoint": chance.choice((4, 16, 1024))}
        marked = [
            Job(
                ask(str(at), prompt, 6, checkpoints=tuple(chance.randint(-2, 70) for _ in range(4))),
                chance.randint(0, 12),
            )
            for at, prompt in enumerate(prompts)
        ]
        answers = play(core(loaded(family), slots=3, **settings), marked)

        assert {name: answer.tokens for name, answer in plain.items()} == {
            name: answer.tokens for name, answer in answers.items()
        }
