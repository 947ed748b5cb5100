"""One request from its first token to its end: finish reasons, deltas, logprobs, statistics and failures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine.load.load import LoadedModel
from engine.types.events import Delta, Event, Failed, Finished
from engine.types.request import Grammar, SamplingParams
from tests.engine.kit.models import END, Models, References, core
from tests.engine.kit.play import Answer, Job, ask, play

PROMPT = (5, 4, 3, 2, 1)


def one(loaded: LoadedModel, **fields: object) -> tuple[Answer, Finished]:
    """The answer to the prompt, and its last event."""
    answer = play(core(loaded), [Job(ask("one", PROMPT, **{"count": 20, "ignore_eos": True, **fields}))])["one"]
    assert isinstance(answer.end, Finished), answer.end
    return answer, answer.end


def test_max_tokens_ends_with_length(loaded: Models, reference: References) -> None:
    answer, end = one(loaded("llama"), count=7)

    assert list(reference("llama").greedy(PROMPT, 7)) == answer.tokens
    assert ("length", None, 7) == (end.reason, end.stop, end.usage.completion_tokens)


def test_max_tokens_0_finishes_with_length(loaded: Models) -> None:
    """Without a step."""
    engine = core(loaded("llama"))
    answer = play(engine, [Job(ask("one", PROMPT, 0))])["one"]

    assert isinstance(answer.end, Finished)
    assert ("length", [], 0) == (answer.end.reason, answer.tokens, engine.stats().steps_total)


def test_the_end_token_is_not_text(loaded: Models, reference: References) -> None:
    """It finishes with "stop" and counts as a token."""
    prompt = (1, 2, 3, 4, 5)
    assert END in reference("gemma3").greedy(prompt, 24)

    expected = reference("gemma3").greedy(prompt, 24)
    engine = core(loaded("gemma3"))
    answers = play(engine, [Job(ask("ends", prompt, 40)), Job(ask("goes on", prompt, 40, ignore_eos=True))])
    end = answers["ends"].end
    assert isinstance(end, Finished)
    assert list(expected[:-1]) == answers["ends"].tokens
    assert ("stop", None, len(expected)) == (end.reason, end.stop, end.usage.completion_tokens)
    assert 40 == len(answers["goes on"].tokens)
    assert list(expected) == answers["goes on"].tokens[: len(expected)]


def test_a_stop_token_is_reported(loaded: Models, reference: References) -> None:
    """The first stop token finishes the answer and is not part of it."""
    expected = reference("llama").greedy(PROMPT, 20)
    answer, end = one(loaded("llama"), stop_token_ids=(expected[9], expected[4]))
    first = min(expected.index(expected[9]), expected.index(expected[4]))

    assert list(expected[:first]) == answer.tokens
    assert ("stop", expected[first]) == (end.reason, end.stop)


@pytest.mark.parametrize("ending", ["end token", "stop token", "stop string", "length"])
def test_deltas_and_finish_hold_all_tokens(ending: str, loaded: Models, reference: References) -> None:
    """`completion_tokens` in all; Finished holds the tokens without text, in order."""
    expected = reference("llama").greedy(PROMPT, 20)
    fields: dict[str, object] = {}
    if ending == "stop token":
        fields = {"stop_token_ids": (expected[4],)}
    elif ending == "stop string":
        whole, _ = one(loaded("llama"))
        fields = {"stop": (whole.text[5:9],)}
    elif ending == "end token":
        expected, fields = reference("gemma3").greedy((1, 2, 3, 4, 5), 24), {"ignore_eos": False}

    if ending == "end token":
        answer = play(core(loaded("gemma3")), [Job(ask("one", (1, 2, 3, 4, 5), 40))])["one"]
        assert isinstance(answer.end, Finished)
        end = answer.end
    else:
        answer, end = one(loaded("llama"), **fields)

    count = end.usage.completion_tokens
    assert list(expected[:count]) == [*answer.tokens, *end.tokens]
    assert (ending == "length") == (end.tokens == ())


def test_the_end_token_has_a_logprob(loaded: Models, reference: References) -> None:
    """Every counted token has one; that of the end token is in Finished."""
    expected = reference("llama").greedy(PROMPT, 20)
    answer, end = one(loaded("llama"), stop_token_ids=(expected[9],), logprobs=0)
    _, silent = one(loaded("llama"), stop_token_ids=(expected[9],))

    assert end.end_logprob is not None
    assert expected[9] == end.end_logprob.chosen.token
    assert not end.end_logprob.chosen.in_output
    assert end.usage.completion_tokens == len(answer.logprobs) + 1
    assert silent.end_logprob is None


@pytest.mark.parametrize("special", [True, False])
def test_logprobs_mark_tokens_that_the_text_leaves_out(loaded: Models, special: bool) -> None:
    """Special tokens unless they are included, and end tokens that would end the text; sampled or not."""
    fields: dict[str, object] = {"include_special_tokens": special, "logprobs": 2, "label_tokens": (END, 256)}
    sampling = SamplingParams(temperature=0.0, logit_bias=((256, 100.0),))
    answer, _ = one(loaded("llama"), count=3, sampling=sampling, ignore_eos=False, **fields)

    assert [256] * 3 == answer.tokens
    assert [special] * 3 == [entry.chosen.in_output for entry in answer.logprobs]
    for entry in answer.logprobs:
        omitted = {END} if special else {256, END}
        assert all(other.in_output == (other.token not in omitted) for other in (*entry.top, *entry.labels))


def test_a_stop_string_cuts_the_text(loaded: Models) -> None:
    """The text ends before the stop string, which may start inside a token, and Finished names it."""
    whole, _ = one(loaded("llama"), count=40)
    for start in range(2, len(whole.text) - 3):
        stop = whole.text[start : start + 2]
        answer, end = one(loaded("llama"), count=40, stop=(stop, "never"))

        assert whole.text[: whole.text.index(stop)] == answer.text
        assert ("stop", stop) == (end.reason, end.stop)


def test_text_is_the_tokens_decoded(loaded: Models) -> None:
    """The concatenated deltas equal the decoded tokens."""
    answer, _ = one(loaded("llama"), count=60)
    reader = loaded("llama").tokenizer._tokenizer

    assert reader.decode(answer.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False) == answer.text


def test_a_repeated_prompt_is_cached(loaded: Models) -> None:
    """All but the last token are reused, and the answer is the same."""
    engine = core(loaded("llama"))
    first = play(engine, [Job(ask("first", PROMPT * 8, 5))])["first"]
    rows = engine.stats().batch_tokens_total
    second = play(engine, [Job(ask("second", PROMPT * 8, 5))])["second"]

    assert (0, len(PROMPT * 8) - 1) == (first.started[0].cached_tokens, second.started[0].cached_tokens)
    assert 5 == engine.stats().batch_tokens_total - rows
    assert first.tokens == second.tokens


def test_the_next_turn_reuses_the_conversation(loaded: Models, reference: References) -> None:
    """Prompt and answer of a turn are a cached prefix of the next."""
    engine = core(loaded("llama"))
    first = play(engine, [Job(ask("first", PROMPT * 4, 9, ignore_eos=True))])["first"]
    prompt = (*PROMPT * 4, *first.tokens, 7, 8, 9)
    second = play(engine, [Job(ask("second", prompt, 9, ignore_eos=True))])["second"]

    assert len(PROMPT * 4) + 8 == second.started[0].cached_tokens
    assert list(reference("llama").greedy(prompt, 9)) == second.tokens


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_logprobs_are_raw_model_logprobs(loaded: Models, reference: References, family: str) -> None:
    """Chosen and top tokens equal transformers, in any batch."""
    engine = core(loaded(family), chunk=3)
    jobs = [Job(ask("one", PROMPT, 6, logprobs=4, ignore_eos=True)), Job(ask("other", (9, 9, 8), 9, ignore_eos=True))]
    entries = []
    for job in jobs:
        engine.submit(job.request)
    while engine.busy:
        for name, event in engine.step():
            assert name == "one" or not getattr(event, "logprobs", ())
            entries += getattr(event, "logprobs", ()) if name == "one" else ()

    text = list(PROMPT)
    assert 6 == len(entries)
    for entry in entries:
        spread = reference(family).logits(tuple(text)).double().log_softmax(-1)
        best = spread.topk(4)
        assert int(spread.argmax()) == entry.chosen.token == entry.top[0].token
        assert best.indices.tolist() == [alternative.token for alternative in entry.top]
        assert pytest.approx(best.values.tolist(), abs=1e-6) == [alternative.logprob for alternative in entry.top]
        text.append(entry.chosen.token)


def test_nonfinite_logits_fail_one_request(loaded: Models, reference: References) -> None:
    """One of three has NaN logits; the others are exact, and its cells are free."""
    model = loaded("llama").model
    engine = core(loaded("llama"), slots=3)

    def spoil(_: object, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        if output.shape[-2] == 3:
            output[..., 1, :] = torch.nan
        return output

    hook = model.lm_head.register_forward_hook(spoil)
    prompts = {"first": PROMPT, "second": (9, 9, 9), "third": (8, 7)}
    answers = play(engine, [Job(ask(name, prompt, 10, ignore_eos=True)) for name, prompt in prompts.items()])
    hook.remove()

    assert isinstance(answers["second"].end, Failed)
    for name in ("first", "third"):
        assert list(reference("llama").greedy(prompts[name], 10)) == answers[name].tokens
    assert engine.cache.cells == engine.cache.free_cells + engine.cache.evictable_cells()
    assert 1 == engine.stats().failed_total


def test_a_failing_step_fails_its_sequences(
    loaded: Models, reference: References, caplog: pytest.LogCaptureFixture
) -> None:
    """Other sequences are exact, nothing of the step is cached, and no cell is lost."""
    model = loaded("llama").model
    engine = core(loaded("llama"), slots=2)
    engine.submit(ask("breaks", PROMPT * 3, 10))

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    events = engine.step()
    hook.remove()
    assert isinstance(events[-1][1], Failed)
    assert engine.cache.cells == engine.cache.free_cells

    after = play(engine, [Job(ask("after", PROMPT * 3, 10, ignore_eos=True))])["after"]
    assert list(reference("llama").greedy(PROMPT * 3, 10)) == after.tokens
    assert 0 == after.started[0].cached_tokens


def test_one_broken_sequence_fails_alone(loaded: Models, reference: References) -> None:
    """A grammar that raises: the step is computed again without its sequence, and the other answer is exact."""

    class Broken:
        error = ""

        def allowed_bits(self, draft: Sequence[int]) -> bytes:
            raise MemoryError("no memory for a mask")

        def forced_tokens(self, limit: int) -> list[int]:
            return []

    broken: Any = Broken()
    engine = core(loaded("llama"), slots=2)
    engine.submit(ask("breaks", PROMPT, 10, grammar=Grammar("anything")), broken)
    engine.submit(ask("goes on", PROMPT, 10, ignore_eos=True))
    events = list[tuple[str, Event]]()
    while engine.busy:
        events += engine.step()

    tokens = [token for _, event in events if isinstance(event, Delta | Finished) for token in event.tokens]
    assert list(reference("llama").greedy(PROMPT, 10)) == tokens
    assert ["breaks"] == [name for name, event in events if isinstance(event, Failed)]
    assert 1 == engine.stats().failed_total
    assert engine.cache.cells == engine.cache.free_cells + engine.cache.evictable_cells()


def test_stats_add_up(loaded: Models) -> None:
    """Totals are the sums over the events of the requests."""
    engine = core(loaded("llama"), slots=2, chunk=8)
    jobs = [Job(ask(str(at), PROMPT * (1 + at % 3), 3 + at, ignore_eos=True), at) for at in range(6)]
    answers = play(engine, jobs)
    usages = [answer.end.usage for answer in answers.values() if isinstance(answer.end, Finished)]
    stats = engine.stats()

    assert sum(usage.prompt_tokens for usage in usages) == stats.prompt_tokens_total
    assert sum(usage.cached_tokens for usage in usages) == stats.cached_tokens_total
    assert sum(usage.completion_tokens for usage in usages) == stats.generated_tokens_total
    assert (0, 0, 2) == (stats.running, stats.waiting, stats.slots)
    computed = sum(usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens - 1 for usage in usages)
    assert computed == stats.batch_tokens_total


def test_a_failed_sequence_is_not_cached(loaded: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = core(loaded("llama"))
    runner = engine._stepper._runner
    run = runner._run

    def with_nan(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits, states = run(*arguments)
        return logits * torch.nan, states

    monkeypatch.setattr(runner, "_run", with_nan)
    broken = play(engine, [Job(ask("broken", PROMPT, 5))])["broken"]
    monkeypatch.undo()
    again = play(engine, [Job(ask("again", PROMPT, 5))])["again"]

    assert isinstance(broken.end, Failed)
    assert "the model's output has no finite value here" == broken.end.reason
    assert 0 == again.started[0].cached_tokens
