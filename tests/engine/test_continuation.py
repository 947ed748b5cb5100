"""A request with tokens that an earlier stream emitted goes on as that stream: at every token, with the same text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.core import Core
from engine.schedule.replay import REPLAY_TOKENS
from engine.types.events import Delta, Failed, Finished
from engine.types.request import Dry, Grammar, ReasoningLimit, Request, SamplingParams, Xtc
from tests.engine.kit.models import Models, References, core
from tests.engine.kit.play import GREEDY, Answer, Job, ask, play, take

CONTEXT = 24
PROMPT = (5, 4, 3, 2, 1, 0, 5, 4)
COUNT = 14
SEEDED = SamplingParams(temperature=1.5, seed=11)


def sampled(**fields: Any) -> dict[str, Any]:
    """Fields of a request with seeded sampling."""
    return {"sampling": replace(SEEDED, **fields)}


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": sampled(),
    "penalties": sampled(frequency_penalty=1.5, presence_penalty=1.0, repetition_penalty=1.4, penalty_lookback=6),
    "repetitions": {"sampling": replace(GREEDY, dry=Dry(2.0, allowed_length=1))},
    "filters": sampled(xtc=Xtc(0.5, 0.02), top_k=40, typical_p=0.9),
    "bad words": sampled(bad_words=((4, 65), (66,)), allowed_tokens=(65, 66, 67, 68, 69, 70)),
    "minimum": {**sampled(allowed_tokens=(65, 66, 257)), "min_tokens": 8, "ignore_eos": False},
    "grammar": {**sampled(), "grammar": Grammar("start: /[ab]{4}(é|日){2,3}/"), "max_tokens": None},
    "reasoning": {**sampled(), "reasoning_limit": ReasoningLimit(None, (65, 66), 5)},
    "log-probabilities": {**sampled(), "logprobs": 2},
    "context shifts": {**sampled(), "overflow": "shift", "keep": 2, "max_tokens": 45},
}


def request(**fields: Any) -> Request:
    """A request of a stream that can be resumed."""
    changed = {"max_tokens": COUNT, "ignore_eos": True, "tokens_at_once": True, **fields}
    return replace(ask("r", PROMPT), **changed)


def run(engine: Core, asked: Request) -> Answer:
    return play(engine, [Job(asked)])["r"]


def finished(answer: Answer) -> Finished:
    assert isinstance(answer.end, Finished), answer.end
    return answer.end


@pytest.fixture
def engine(loaded: Models) -> Core:
    """With little room, so that a long answer shifts."""
    return core(loaded("llama"), slots=2, context=CONTEXT, chunk=7)


def check_all_cuts(engine: Core, asked: Request) -> Answer:
    """The answer; cut after each token (a long one after some), the two parts of the stream are equal to it."""
    whole = run(engine, asked)
    tokens = [*whole.tokens, *finished(whole).tokens]
    for cut in range(1, len(tokens) + 1, 1 if len(tokens) <= COUNT else 11):
        before = tuple(tokens[:cut])
        after = run(engine, replace(asked, emitted=before))
        replayed = "".join(delta.text for delta in after.started[0].earlier)
        end = finished(after)

        assert before == tuple(token for delta in after.started[0].earlier for token in delta.tokens)
        assert whole.text == replayed + after.text, cut
        assert tokens == [*before, *after.tokens, *end.tokens], cut
        kept = whole.logprobs[cut:]
        assert [entry.text_offset for entry in kept] == [entry.text_offset for entry in after.logprobs]
        logprobs = [entry.chosen.logprob for entry in kept]
        assert logprobs == pytest.approx([entry.chosen.logprob for entry in after.logprobs])
        assert (finished(whole).reason, finished(whole).stop) == (end.reason, end.stop), cut
        # The shifts of a complete answer are not computed again.
        shifts = ("context_shifts", "shifted_tokens") if cut < len(tokens) else ()
        for count in ("prompt_tokens", "completion_tokens", *shifts):
            assert getattr(finished(whole).usage, count) == getattr(end.usage, count), (count, cut)
    return whole


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_continuation_equals_the_rest_of_the_stream(engine: Core, kind: str) -> None:
    answer = check_all_cuts(engine, request(**REQUESTS[kind]))

    assert len(answer.tokens) >= 8
    assert (kind == "context shifts") == (finished(answer).usage.context_shifts > 1)


def test_a_greedy_continuation_equals_generate(engine: Core, reference: References) -> None:
    expected = reference("llama").greedy(PROMPT, COUNT)
    answer = run(engine, request(emitted=expected[:6]))

    assert list(expected[6:]) == answer.tokens


@pytest.mark.parametrize("held", [False, True])
def test_stop_strings_may_span_the_cut(engine: Core, held: bool) -> None:
    """Text is held back that begins a stop string, also where the stop string is then not completed."""
    plain = run(engine, request(sampling=SEEDED)).text
    stops = (f"{plain[3:7]}#", f"{plain[4:6]}#") if held else (f"{plain[3:6]}#", plain[6:9])
    answer = check_all_cuts(engine, request(sampling=SEEDED, stop=stops))

    assert answer.text == (plain if held else plain[: plain.index(plain[6:9])])


def test_stop_expressions_may_span_the_cut(engine: Core) -> None:
    plain = run(engine, request(sampling=SEEDED)).text
    answer = check_all_cuts(engine, request(sampling=SEEDED, stop_regex=(f"(?s:{_escaped(plain[5:8])})",)))

    assert answer.text == plain[: plain.index(plain[5:8]) + 3]


def _escaped(text: str) -> str:
    return "".join(f"\\x{{{ord(character):x}}}" for character in text)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["phi3_long", "qwen3_next", "mamba2", "gemma3"])
def test_all_kinds_of_memory_continue(loaded: Models, family: str) -> None:
    """Recurrent states, windows and rotary factors that change with the length."""
    check_all_cuts(core(loaded(family), slots=2, context=64, chunk=7), request(max_tokens=40, sampling=SEEDED))


class SlowClock:
    """Each reading is a second later, so a step adds the fewest tokens of earlier streams."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_a_long_continuation_is_prepared_between_the_steps_of_others(engine: Core) -> None:
    """Its tokens are added in parts, and the other sequences get a token in each of these steps."""
    whole = run(engine, request(overflow="shift", max_tokens=100))
    engine._clock = SlowClock()
    other = replace(request(overflow="shift", max_tokens=100), id="other")
    engine.submit(other)
    while not [event for _, event in engine.step() if isinstance(event, Delta)]:
        pass
    engine.submit(request(overflow="shift", max_tokens=100, emitted=tuple(whole.tokens[:80])))
    deltas, continued = [], Answer()
    for _ in range(80 // REPLAY_TOKENS - 1):
        assert not engine._sequences["r"].is_replayed
        deltas.append([type(event) for name, event in engine.step() if name == "other"])
    while engine.busy:
        for name, event in engine.step():
            if name == "r":
                take(continued, event)

    assert deltas == [[Delta]] * len(deltas)
    assert continued.tokens == whole.tokens[80:]


@pytest.mark.parametrize("ends", ["cancelled", "deadline"])
def test_a_continuation_may_end_while_it_is_prepared(engine: Core, ends: str) -> None:
    """Nothing is left of it, and the client gets no text twice."""
    engine._clock = SlowClock()
    changes = {"timeout_seconds": 6.0} if ends == "deadline" else {}
    engine.submit(request(max_tokens=100, overflow="shift", emitted=(97,) * 80, stop=("ab",), **changes))
    events = engine.step()
    assert not engine._sequences["r"].is_replayed
    if ends == "cancelled":
        engine.cancel("r")
    while engine.busy:
        events += engine.step()

    assert engine._sequences == {}
    kinds = [type(event) for _, event in events]
    assert kinds == ([] if ends == "cancelled" else [Finished])


def test_tokens_after_the_end_are_refused(engine: Core) -> None:
    whole = run(engine, request())
    answer = run(engine, request(emitted=(*whole.tokens, 65)))

    assert isinstance(answer.end, Failed)
    assert answer.end.caused_by_request
    assert f"'continue_from' has more tokens than the answer, which ends after {COUNT}" == answer.end.reason


@pytest.mark.parametrize("position", [1, 4, 5])
@pytest.mark.parametrize("kind", ["end", "letter"])
def test_tokens_that_the_grammar_forbids_are_refused(engine: Core, kind: str, position: int) -> None:
    """Also inside a character, and the end of an incomplete text; the next request with the grammar is served."""
    grammar = REQUESTS["grammar"]
    whole = run(engine, request(**grammar))
    tokens = [*whole.tokens, *finished(whole).tokens]
    forbidden = tokens[-1] if kind == "end" else 99
    answer = run(engine, request(**grammar, emitted=(*tokens[:position], forbidden, *tokens[position:])))

    assert answer.end == Failed(
        f"the grammar of the request forbids token {forbidden} at position {position} of 'continue_from'",
        caused_by_request=True,
    )
    assert run(engine, request(**grammar, emitted=tuple(tokens[:position]))).tokens == whole.tokens[position:]
