"""A full context: the answer finishes with "length", or the context shifts and the text continues."""

from __future__ import annotations

import pytest
import torch

from engine.core import Core
from engine.load.load import LoadedModel
from engine.types.events import Finished, Usage
from kvcache.cache import Cache
from tests.engine.kit.models import Models, References, core
from tests.engine.kit.play import Answer, Job, ask, play, take
from tests.selection import quick

CONTEXT = 24
PROMPT = (5, 4, 3, 2, 1, 0, 5, 4)


def finished(answer: Answer) -> Finished:
    """The last event of an answer, which must be Finished."""
    assert isinstance(answer.end, Finished), answer.end
    return answer.end


def one(loaded: LoadedModel, count: int | None, **fields: object) -> Answer:
    """The answer to the prompt in a small context."""
    engine = core(loaded, slots=2, context=CONTEXT, chunk=7)
    return play(engine, [Job(ask("one", PROMPT, count, ignore_eos=True, **fields))])["one"]


@pytest.mark.parametrize("count", [None, CONTEXT - len(PROMPT), 1000])
def test_a_full_context_finishes_with_length(loaded: Models, reference: References, count: int | None) -> None:
    """The answer has all tokens that fit, and is exact."""
    answer = one(loaded("llama"), count, overflow="length")

    assert list(reference("llama").greedy(PROMPT, CONTEXT - len(PROMPT))) == answer.tokens
    assert "length" == finished(answer).reason
    assert 0 == finished(answer).usage.context_shifts


def test_a_prompt_one_below_capacity_gets_one_token(loaded: Models) -> None:
    engine = core(loaded("llama"), context=CONTEXT)
    answer = play(engine, [Job(ask("one", range(CONTEXT - 1), 10))])["one"]

    assert 1 == len(answer.tokens)


@pytest.mark.parametrize(
    "family", quick(("cohere", "gemma3", "gpt2"), ("llama", "gpt_neox", "cohere", "smollm3", "gemma3", "gpt2"))
)
def test_a_shifted_sequence_continues(loaded: Models, reference: References, family: str) -> None:
    """To the requested length; up to the first shift it equals the answer without shifts."""
    answer = one(loaded(family), 70, overflow="shift", keep=2)
    usage = finished(answer).usage

    assert 70 == len(answer.tokens) == usage.completion_tokens
    assert "length" == finished(answer).reason
    plain = CONTEXT + 1 - len(PROMPT)
    assert list(reference(family).greedy(PROMPT, plain)) == answer.tokens[:plain]


def test_shifts_are_counted(loaded: Models) -> None:
    """Each shift drops the older half of the droppable tokens: eleven of twenty-four, two kept."""
    usage = finished(one(loaded("llama"), 70, overflow="shift", keep=2)).usage
    shifts = -(-(len(PROMPT) + 70 - 1 - CONTEXT) // 11)

    assert Usage(len(PROMPT), 70, 0, shifts, 11 * shifts) == usage


def test_unlimited_output_with_shifts_is_one_context_long(loaded: Models) -> None:
    assert CONTEXT == len(one(loaded("llama"), None, overflow="shift").tokens)


@pytest.mark.parametrize("keep", quick((0, 5, 1000), (0, 1, 5, 12, 23, 1000)))
def test_every_keep_value_works(loaded: Models, keep: int) -> None:
    """Some tokens stay droppable."""
    assert 60 == len(one(loaded("llama"), 60, overflow="shift", keep=keep).tokens)


def test_kept_tokens_stay_and_moved_keys_are_rotated(loaded: Models) -> None:
    """Keys of the first layer depend on token and position only, so they are compared with recomputed ones."""
    engine = core(loaded("llama"), slots=2, context=CONTEXT)
    engine.submit(ask("one", PROMPT, 70, overflow="shift", keep=3, ignore_eos=True))
    while not (found := engine._scheduler.running) or not found[0].usage().context_shifts:
        engine.step()
    (sequence,) = engine._scheduler.running
    everything = [*PROMPT, *sequence.output]
    dropped = sequence.usage().shifted_tokens
    assert everything[:3] + everything[3 + dropped :] == sequence.tokens

    assert sequence.slot is not None
    length = engine.cache.cached_length(sequence.slot)
    fresh = core(loaded("llama"), slots=2, context=CONTEXT)
    fresh.submit(ask("fresh", sequence.tokens[:length], 5, ignore_eos=True))
    fresh.step()
    (other,) = fresh._scheduler.running
    assert other.slot is not None
    expected = keys(fresh.cache, other.slot, length)
    torch.testing.assert_close(keys(engine.cache, sequence.slot, length), expected, rtol=0, atol=1e-5)


def keys(cache: Cache, slot: int, length: int) -> torch.Tensor:
    """The keys of a slot in the first layer, in order."""
    group, own = cache.layer_group(0)
    return group.pool.keys.rows[own][:, torch.from_numpy(group.table(slot)[:length].copy())]


def test_shifted_cells_are_not_shared(loaded: Models, reference: References) -> None:
    """A prompt with the tokens of a shifted sequence reuses the kept prefix only, and its answer is exact."""
    engine = core(loaded("llama"), slots=2, context=CONTEXT)
    engine.submit(ask("shifts", PROMPT, 40, overflow="shift", keep=4, ignore_eos=True))
    while not (found := engine._scheduler.running) or found[0].usage().context_shifts < 2:
        engine.step()
    tokens = tuple(found[0].tokens[:16])
    during = play_along(engine, tokens, "during")
    engine.cancel("shifts")
    after = play_along(engine, tokens, "after")
    expected = list(reference("llama").greedy(tokens, 8))

    assert [expected] * 2 == [during.tokens, after.tokens]
    assert 4 == during.started[0].cached_tokens


def play_along(engine: Core, tokens: tuple[int, ...], name: str) -> Answer:
    """An answer beside running sequences."""
    answer = Answer()
    engine.submit(ask(name, tokens, 8, ignore_eos=True))
    while answer.end is None:
        for whose, event in engine.step():
            if whose == name:
                take(answer, event)
    return answer


@pytest.mark.parametrize("family", quick(("llama", "lfm2"), ("llama", "gpt2", "lfm2")))
def test_protected_ranges_stay(loaded: Models, family: str) -> None:
    """Shifts drop tokens before a protected range, then tokens after it."""
    prompt = tuple(range(1, 19))
    engine = core(loaded(family), slots=2, context=CONTEXT, chunk=7)
    engine.submit(ask("one", prompt, 60, overflow="shift", keep=2, protected=((11, 18),), ignore_eos=True))
    shifts = set()
    while (found := engine._scheduler.running) or engine.busy:
        for sequence in found:
            tokens = ",".join(map(str, sequence.tokens))
            shifts.add(sequence.usage().context_shifts)
            assert tokens.startswith("1,2,")
            assert ",".join(map(str, prompt[11:])) in tokens
        engine.step()

    assert len(shifts) > 4


def test_nothing_droppable_finishes_with_length(loaded: Models) -> None:
    """All tokens but the last are protected."""
    protected = ((0, CONTEXT - 1),)
    engine = core(loaded("llama"), slots=2, context=CONTEXT)
    request = ask("one", range(CONTEXT - 1), 60, overflow="shift", protected=protected, ignore_eos=True)
    answer = play(engine, [Job(request)])["one"]

    assert ("length", 2) == (finished(answer).reason, finished(answer).usage.completion_tokens)
    assert 0 == finished(answer).usage.context_shifts


def test_recurrent_states_are_carried_on_request_only(loaded: Models) -> None:
    """Rebuilt states equal the states of a new prompt; carried ones depend on the dropped tokens."""
    outputs = {
        how: one(loaded("lfm2"), 70, overflow="shift", keep=2, recurrent_shift=how) for how in ("rebuild", "carry")
    }
    plain = CONTEXT + 1 - len(PROMPT)
    everything = [*PROMPT, *outputs["rebuild"].tokens]
    view = [*everything[:2], *everything[13 : len(PROMPT) + plain]]
    fresh = play(core(loaded("lfm2"), slots=2, context=CONTEXT), [Job(ask("fresh", view, 8, ignore_eos=True))])["fresh"]

    assert outputs["rebuild"].tokens[:plain] == outputs["carry"].tokens[:plain]
    assert fresh.tokens == outputs["rebuild"].tokens[plain : plain + 8]
    assert outputs["rebuild"].tokens != outputs["carry"].tokens
    assert 70 == len(outputs["carry"].tokens)


def test_a_shift_does_not_move_shared_cells(loaded: Models, reference: References) -> None:
    """Sequences with the same prompt are unchanged."""
    engine = core(loaded("llama"), slots=3, context=CONTEXT, chunk=7)
    jobs = [
        Job(ask("shifts", PROMPT, 60, overflow="shift", keep=0, ignore_eos=True)),
        *(Job(ask(f"plain {at}", PROMPT, 14, overflow="length", ignore_eos=True), at * 7 + 1) for at in range(8)),
    ]
    answers = play(engine, jobs)
    expected = list(reference("llama").greedy(PROMPT, 14))

    assert [expected] * 8 == [answers[f"plain {at}"].tokens for at in range(8)]


@pytest.mark.parametrize("overflow", ["length", "shift"])
def test_the_overflow_setting_is_the_default(loaded: Models, overflow: str) -> None:
    engine = core(loaded("llama"), context=CONTEXT, overflow=overflow)
    answer = play(engine, [Job(ask("one", PROMPT, 40, ignore_eos=True))])["one"]

    assert (40 if overflow == "shift" else CONTEXT - len(PROMPT)) == len(answer.tokens)


@pytest.mark.parametrize("prompt", quick((1, 15), (1, 8, 12, 15)))
def test_a_single_sequence_shifts_in_a_full_cache(loaded: Models, prompt: int) -> None:
    """With cells for one context, its own cached prompt is evicted."""
    engine = core(loaded("llama"), slots=1, context=16)
    answer = play(engine, [Job(ask("one", range(prompt), 40, overflow="shift", ignore_eos=True))])["one"]

    assert 40 == finished(answer).usage.completion_tokens


@pytest.mark.parametrize("cells", quick((19, 31), range(19, 32, 2)))
def test_two_shifts_in_one_step_with_too_few_cells(loaded: Models, cells: int) -> None:
    """A sequence that is preempted before its shift resumes."""
    for first in (6, 8, 10, 13):
        engine = core(loaded("llama"), slots=2, context=16, cells=cells, overflow="shift")
        jobs = [
            Job(ask(name, range(first + at), 40, ignore_eos=True, keep=first % 3), at) for at, name in enumerate("ab")
        ]
        answers = play(engine, jobs)

        assert [40, 40] == [finished(answer).usage.completion_tokens for answer in answers.values()]


@pytest.mark.slow
def test_shifts_with_few_cells_finish(loaded: Models) -> None:
    """Shared prompts, shifts and preemptions: all requests finish, and no cell is lost."""
    for seed in range(12):
        settings = {"cells": CONTEXT + 3 + 2 * seed, "chunk": (3, 64)[seed % 2], "overflow": "shift"}
        engine = core(loaded("llama"), slots=3, context=CONTEXT, **settings)
        prompts = [range(10 + seed % 6), range(11 + seed % 6), range(8)]
        jobs = [Job(ask(str(at), prompt, 50, ignore_eos=True, keep=seed % 5), at) for at, prompt in enumerate(prompts)]
        answers = play(engine, jobs)
        engine.cache.evict(engine.cache.cells)

        assert [50] * 3 == [finished(answer).usage.completion_tokens for answer in answers.values()]
        assert engine.cache.cells == engine.cache.free_cells
