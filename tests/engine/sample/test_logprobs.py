"""Log-probabilities equal the model's own alone, with any cache, chunks, drafts and batch."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.draft.depth import FixedDepth
from engine.draft.speculation import Speculation
from engine.sample.logprobs import LogprobQuery, PromptScores, token_logprobs, top_tokens
from engine.types.events import Failed, Finished, Logprob, TokenLogprob
from engine.types.request import Request, SpeculationParams
from tests.engine.draft import drafters
from tests.engine.kit.mixes import prompts
from tests.engine.kit.models import CONTEXT, VOCABULARY, Models, Reference, References, core
from tests.engine.kit.play import Answer, Job, ask, play
from tests.selection import quick

# Full attention, windows, latent attention, hybrid, recurrent; chunks and a delta rule, computed partly in float32.
# With the tolerance of the log-probabilities.
FAMILIES = {
    "llama": 1e-9,
    "gemma3": 1e-9,
    "minicpm3": 1e-9,
    "jamba": 1e-9,
    "mamba": 1e-9,
    "llama4": 1e-5,
    "qwen3_next": 1e-4,
}


def describe(token: int, value: float) -> Logprob:
    """A token without text."""
    return Logprob(token, "", b"", value)


def random_logits(rows: int) -> Tensor:
    """Random logits with a fixed seed."""
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(rows)) * 3


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits(70)
    queries = [LogprobQuery(row, row + 1, 5 if row % 2 else 0, (9, 7)) for row in reversed(range(70))]
    spread = logits.double().log_softmax(-1)

    found = list(token_logprobs(logits, queries, describe))
    for asked, entry in zip(queries, found, strict=True):
        assert entry is not None
        best = spread[asked.row].topk(asked.top_count)
        assert best.indices.tolist() == [other.token for other in entry.top]
        assert [asked.token, 9, 7] == [entry.chosen.token, *(label.token for label in entry.labels)]
        named = [entry.chosen, *entry.labels, *entry.top]
        expected = spread[asked.row][[other.token for other in named]].tolist()
        assert pytest.approx(expected, abs=1e-6) == [other.logprob for other in named]


def test_equal_logprobs_are_ordered_by_id() -> None:
    (entry,) = token_logprobs(torch.zeros(1, VOCABULARY), [LogprobQuery(0, 0, 5)], describe)

    assert entry is not None
    assert [0, 1, 2, 3, 4] == [other.token for other in entry.top]


def test_more_top_logprobs_than_tokens_return_all() -> None:
    every, none = token_logprobs(random_logits(2), [LogprobQuery(0, 4, 1000), LogprobQuery(1, 4, 0)], describe)

    assert every is not None
    assert none is not None
    assert pytest.approx(1.0, abs=1e-6) == sum(math.exp(other.logprob) for other in every.top)
    assert () == none.top


def test_a_row_that_is_not_finite_has_no_logprobs() -> None:
    logits = random_logits(3)
    logits[0, 3], logits[1, 4] = torch.nan, torch.inf

    assert [True, True, False] == [
        entry is None for entry in token_logprobs(logits, [LogprobQuery(row, 0, 2) for row in (0, 1, 2)], describe)
    ]


@pytest.mark.parametrize(("start", "needed"), [(0, [0, 1, 2]), (1, [0, 1, 2]), (3, [2]), (4, [])])
def test_a_prompt_token_is_scored_by_the_row_before_it(start: int, needed: list[int]) -> None:
    scores = PromptScores((5, 6, 7, 8), start)
    rows = list(scores.logit_positions(0, 4))
    scores.extend([TokenLogprob(describe(token, 0.0), ()) for token in (6, 7, 8)[-len(rows) :] if rows])

    assert needed == rows
    assert [] == list(scores.logit_positions(0, 4))
    event = scores.event()
    assert (5, 6, 7, 8)[start:] == event.tokens
    assert [None if at == 0 else (5, 6, 7, 8)[at] for at in range(start, 4)] == [
        None if entry is None else entry.chosen.token for entry in event.entries
    ]


def check(reference: Reference, family: str, request: Request, answer: Answer) -> int:
    """Compare all log-probabilities of a request with the model's own; how many there were."""
    assert isinstance(answer.end, Finished), answer.end
    text = (*request.prompt, *answer.tokens)
    with torch.inference_mode():
        logits = reference.model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    spread, start = logits.log_softmax(-1), request.score_from
    entries: list[tuple[int, TokenLogprob]] = []
    if start is None:
        assert [] == answer.scored
    else:
        (scored,) = answer.scored
        assert request.prompt[start:] == scored.tokens
        assert (start == 0) == (None in scored.entries)
        entries += [(start + at, entry) for at, entry in enumerate(scored.entries) if entry is not None]
        assert len(request.prompt) - max(start, 1) == len(entries)
    entries += list(enumerate(answer.logprobs, len(request.prompt)))
    for position, entry in entries:
        assert text[position] == entry.chosen.token
        assert list(request.label_tokens) == [label.token for label in entry.labels]
        assert (request.logprobs or 0) == len(entry.top)
        for logprob in (entry.chosen, *entry.top, *entry.labels):
            assert pytest.approx(float(spread[position - 1, logprob.token]), abs=FAMILIES[family]) == logprob.logprob
        best = sorted((other.logprob for other in entry.top), reverse=True)
        assert pytest.approx(spread[position - 1].topk(len(best)).values.tolist(), abs=FAMILIES[family]) == best
    return len(entries)


def traffic(seed: int, pool: Sequence[tuple[int, ...]]) -> list[Job]:
    """Requests with prompt scores, logprobs, both or neither, and shared prefixes."""
    chance = random.Random(seed)
    jobs = []
    for number in range(chance.randint(3, 9)):
        prompt = chance.choice(pool)
        fields: dict[str, object] = {}
        if chance.random() < 0.75:
            fields["score_from"] = chance.choice((0, 1, len(prompt), chance.randint(0, len(prompt))))
        if chance.random() < 0.5:
            fields |= {"logprobs": chance.choice((0, 3)), "label_tokens": chance.choice(((), (7, 300 % VOCABULARY)))}
        if chance.random() < 0.3:
            fields["speculation"] = SpeculationParams("none")
        request = ask(f"{seed}-{number}", prompt, chance.choice((0, 0, 1, 6)), ignore_eos=True, **fields)
        jobs.append(Job(request, chance.choice((0, chance.randint(0, 12)))))
    return jobs


def compared(models: Models, references: References, family: str, seeds: range) -> int:
    """Run random traffic with drafts; how many log-probabilities were compared."""
    loaded, reference, pool, count = models(family), references(family), prompts(len(family)), 0
    for seed in seeds:
        chance = random.Random(seed)
        engine = core(
            loaded,
            slots=chance.choice((1, 2, 4)),
            chunk=chance.choice((3, 16, 256)),
            cells=CONTEXT + 30 if seed % 2 == 0 else 4 * CONTEXT,
            speculation=Speculation(None, drafters.random_tokens(VOCABULARY), FixedDepth(3), lambda: 0.0),
        )
        engine._scheduler._max_scored = chance.choice((1, 5, 1000))
        jobs = traffic(seed, pool)
        answers = play(engine, jobs)
        count += sum(check(reference, family, job.request, answers[job.request.id]) for job in jobs)
        assert engine.cache.cells == engine.cache.free_cells + engine.cache.evictable_cells()
    return count


@pytest.mark.parametrize("family", quick([*FAMILIES][::3], FAMILIES))
def test_prompt_scores_equal_the_model_alone_in_any_batch(loaded: Models, reference: References, family: str) -> None:
    assert 50 < compared(loaded, reference, family, range(4 if family in ("llama", "gemma3") else 2))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_scores_equal_the_model_in_many_batches(loaded: Models, reference: References, family: str) -> None:
    assert 1000 < compared(loaded, reference, family, range(100, 140))


def test_a_shared_prefix_is_computed_once(loaded: Models) -> None:
    for family in ("llama", "qwen3_next"):
        engine = core(loaded(family), slots=4)
        prefix = tuple(range(60))
        jobs = [Job(ask(str(at), (*prefix, 100 + at, 7), 0, score_from=60)) for at in range(16)]
        play(engine, jobs)
        assert 62 + 15 * 3 == engine.stats().batch_tokens_total

        engine = core(loaded(family), slots=4)
        for job in jobs:
            play(engine, [job])
        assert 62 + 15 * 3 == engine.stats().batch_tokens_total


def test_logit_rows_of_a_step_are_limited(loaded: Models) -> None:
    model, engine, rows = loaded("llama").model, core(loaded("llama"), chunk=64), []
    engine._scheduler._max_scored = 5
    hook = model.lm_head.register_forward_hook(lambda _, inputs, output: rows.append(output.shape[1]))
    jobs = [Job(ask(str(at), (at, *range(40)), 2, ignore_eos=True, score_from=3 * at)) for at in range(3)]
    play(engine, jobs)
    hook.remove()

    assert max(rows) <= 5 + 3
    assert sum(rows) == 40 + 38 + 35 + 3 * 2


def test_a_scored_prompt_does_not_wait_for_a_shared_prefix(loaded: Models) -> None:
    engine = core(loaded("llama"), chunk=64)
    play(engine, [Job(ask(name, range(30), 0, score_from=0)) for name in ("one", "other")])

    assert (1, 60) == (engine.stats().steps_total, engine.stats().batch_tokens_total)


def test_scored_tokens_are_never_cached_ones(loaded: Models) -> None:
    engine, prompt = core(loaded("llama")), tuple(range(40))
    play(engine, [Job(ask("before", prompt, 4))])
    answers = play(engine, [Job(ask(str(start), prompt, 0, score_from=start)) for start in (30, 1, 0)])

    assert [29, 0, 0] == [answer.started[0].cached_tokens for answer in answers.values()]


def test_zero_max_tokens_end_behind_the_prompt(loaded: Models) -> None:
    engine, prompt = core(loaded("llama"), chunk=7), tuple(range(40))
    answer = play(engine, [Job(ask("scored", prompt, 0, score_from=0))])["scored"]
    again = play(engine, [Job(ask("again", prompt, 1))])["again"]

    assert isinstance(answer.end, Finished)
    assert ("length", None, 0) == (answer.end.reason, answer.end.stop, answer.end.usage.completion_tokens)
    assert ("", [], []) == (answer.text, answer.tokens, answer.logprobs)
    assert 39 == again.started[0].cached_tokens


def test_a_row_that_is_not_finite_fails_its_request_alone(loaded: Models) -> None:
    model, engine = loaded("llama").model, core(loaded("llama"))

    def spoil(_: object, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        output = output.clone()
        output[..., 1, :] = torch.nan
        return output

    hook = model.lm_head.register_forward_hook(spoil)
    answers = play(engine, [Job(ask("scored", range(9), 0, score_from=0)), Job(ask("other", (9, 8, 7), 1))])
    hook.remove()

    assert isinstance(answers["scored"].end, Failed)
    assert isinstance(answers["other"].end, Finished)
    assert 0 == play(engine, [Job(ask("again", range(9), 1))])["again"].started[0].cached_tokens


@pytest.mark.parametrize("size", [1, 5, 255, 256, 257, 2560, 5003, 12_800])
@pytest.mark.parametrize("levels", [1, 3, 50, 10**6])
def test_top_tokens_equal_a_full_sort(size: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(size + levels)
    values = torch.randint(0, levels, (size,), generator=generator).float().log()

    for count in (0, 1, 2, 5, 20, size):
        expected = sorted(enumerate(values.tolist()), key=lambda pair: (-pair[1], pair[0]))[:count]
        assert expected == top_tokens(values, count)


def test_logprobs_of_a_row_ignore_its_neighbours() -> None:
    logits = 5 * torch.randn(6, 5003, generator=torch.Generator().manual_seed(1))
    logits[1, 0] = logits[2, 77] = torch.nan
    logits[3, 5002] = torch.inf
    logits[4] = -torch.inf
    logits[5, ::2] = -torch.inf
    whole = logits.log_softmax(-1)
    queries = [LogprobQuery(row, 7, 5) for row in range(6)]
    together = list(token_logprobs(logits, queries, lambda token, value: Logprob(token, "", b"", value)))

    assert [True, False, False, False, False, True] == [entry is not None for entry in together]
    for row in (0, 5):
        entry = together[row]
        assert entry is not None
        assert whole[row, 7].item() == entry.chosen.logprob
        assert whole[row].topk(5).values.tolist() == [one.logprob for one in entry.top]
        alone = token_logprobs(
            logits[row : row + 1], [LogprobQuery(0, 7, 5)], lambda token, value: Logprob(token, "", b"", value)
        )
        assert entry == next(alone)
