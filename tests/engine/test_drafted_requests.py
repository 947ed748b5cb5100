"""Requests that end or fail inside a draft, and log-probabilities of drafted tokens: the same as without drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch

from engine.core import Core
from engine.draft.controller import DepthController
from engine.draft.depth import Candidate, Depth, FixedDepth, StepOutcome
from engine.draft.speculation import Speculation
from engine.load.load import LoadedModel
from engine.schedule.draft import Drafter, DraftRequest
from engine.schedule.scheduled import ScheduledSequence
from engine.schedule.step import StepResult
from engine.schedule.step_cost import Work
from engine.types.events import Delta, Failed, Finished, TokenLogprob
from engine.types.request import SpeculationParams
from tests.engine.draft.drafters import ScriptedDrafter, always_right, always_wrong
from tests.engine.kit.models import VOCABULARY, Models, core
from tests.engine.kit.play import Answer, Job, ask, play
from tests.selection import quick

PROMPT = (5, 4, 3, 2, 1)
KINDS = ("llama", "gemma3", "llama4", "mamba2", "qwen3_next", "deepseek_v3")
# Other kinds of cache are in the pairs of test_speculation.py.
by_kind = pytest.mark.parametrize("kind", quick(("gemma3", "qwen3_next"), KINDS))


def drafted(loaded: LoadedModel, drafter: Drafter, depth: Depth | None = None) -> Core:
    """An engine with drafts of four tokens, or with a given depth."""
    return core(loaded, speculation=Speculation(None, drafter, depth or FixedDepth(4), lambda: 0.0))


def knowing(outputs: Mapping[str, Sequence[int]], prompt: Sequence[int] = PROMPT) -> ScriptedDrafter:
    """A drafter of the right tokens, by the outputs of all requests."""
    return always_right(outputs, dict.fromkeys(outputs, len(prompt)))


def alone(loaded: LoadedModel, prompt: Sequence[int] = PROMPT, count: int = 24) -> Answer:
    """The output without drafts."""
    return play(core(loaded), [Job(ask("one", prompt, count, ignore_eos=True))])["one"]


def continued_from(engine: Core, loaded: LoadedModel, text: Sequence[int]) -> int:
    """Continue a text, check the output against that without drafts, and return the cached tokens."""
    answer = play(engine, [Job(ask("next", text, 8, ignore_eos=True))])["next"]
    assert alone(loaded, text, 8).tokens == answer.tokens
    return answer.started[0].cached_tokens


@by_kind
def test_a_stop_string_inside_a_draft(loaded: Models, kind: str) -> None:
    """Accepted tokens after it are neither emitted nor cached; the next turn reuses the emitted ones."""
    whole = alone(loaded(kind))
    stop = next(piece for at in range(6, 20) if (piece := whole.text[at : at + 2]) not in whole.text[: at + 1])
    plain = play(core(loaded(kind)), [Job(ask("one", PROMPT, 24, ignore_eos=True, stop=(stop,)))])["one"]
    engine = drafted(loaded(kind), knowing({"one": whole.tokens, "next": ()}))
    answer = play(engine, [Job(ask("one", PROMPT, 24, ignore_eos=True, stop=(stop,)))])["one"]

    assert isinstance(plain.end, Finished)
    assert isinstance(answer.end, Finished)
    assert whole.text[: whole.text.index(stop)] == plain.text == answer.text
    assert ("stop", stop, plain.tokens) == (answer.end.reason, answer.end.stop, answer.tokens)
    emitted = plain.end.usage.completion_tokens
    assert emitted == answer.end.usage.completion_tokens
    assert engine.cache.match_prefix((*PROMPT, *whole.tokens)).length <= len(PROMPT) + emitted
    assert continued_from(engine, loaded(kind), (*PROMPT, *whole.tokens[:emitted], 7, 8)) <= len(PROMPT) + emitted


def test_cached_prefixes_are_evicted_for_drafts(loaded: Models) -> None:
    """A cache full of other outputs allows as many drafts as an empty one."""
    whole, names = alone(loaded("llama")).tokens, [f"{number}" for number in range(6)]
    speculation = Speculation(None, knowing(dict.fromkeys(names, whole)), FixedDepth(4), lambda: 0.0)
    engine = core(loaded("llama"), slots=1, context=40, cells=70, speculation=speculation)
    ends = [play(engine, [Job(ask(name, PROMPT, 24, ignore_eos=True, salt=name.encode()))])[name].end for name in names]

    assert engine.cache.free_cells < len(PROMPT) + len(whole)
    assert all(isinstance(end, Finished) for end in ends)
    accepted = [end.usage.accepted_tokens for end in ends if isinstance(end, Finished)]
    assert [accepted[0]] * len(names) == accepted
    assert accepted[0] > len(whole) // 2


@by_kind
def test_a_stop_token_inside_a_draft(loaded: Models, kind: str) -> None:
    """At every position of a draft it ends the output, and later tokens are not cached."""
    whole = alone(loaded(kind)).tokens
    for at in range(1, 6):
        engine = drafted(loaded(kind), knowing({"one": whole, "next": ()}))
        answer = play(engine, [Job(ask("one", PROMPT, 24, ignore_eos=True, stop_token_ids=(whole[at],)))])["one"]
        first = whole.index(whole[at])

        assert isinstance(answer.end, Finished)
        assert ("stop", whole[at], whole[:first]) == (answer.end.reason, answer.end.stop, answer.tokens)
        assert engine.cache.match_prefix((*PROMPT, *whole)).length <= len(PROMPT) + first
        assert continued_from(engine, loaded(kind), (*PROMPT, *whole[: first + 1], 7)) <= len(PROMPT) + first


@by_kind
def test_a_limit_inside_a_draft(loaded: Models, kind: str) -> None:
    """At every position of a draft the output ends at its limit."""
    whole = alone(loaded(kind)).tokens
    for count in range(1, 8):
        engine = drafted(loaded(kind), knowing({"one": whole}))
        answer = play(engine, [Job(ask("one", PROMPT, count, ignore_eos=True))])["one"]

        assert isinstance(answer.end, Finished)
        assert ("length", whole[:count]) == (answer.end.reason, answer.tokens)
        assert count == answer.end.usage.completion_tokens
        assert 0 == answer.end.usage.rejected_tokens
        assert -(-count // 5) == count - answer.end.usage.accepted_tokens


def entries(engine: Core, count: int) -> list[TokenLogprob]:
    """The log-probabilities of one answer."""
    engine.submit(ask("one", PROMPT, count, ignore_eos=True, logprobs=3))
    found: list[TokenLogprob] = []
    while engine.busy:
        for _, event in engine.step():
            found += event.logprobs if isinstance(event, Delta) else ()
    return found


@by_kind
def test_logprobs_are_the_same(loaded: Models, kind: str) -> None:
    """With right and with wrong drafts every token has the log-probabilities that it has without."""
    whole = alone(loaded(kind)).tokens
    plain = entries(core(loaded(kind)), 24)
    assert 24 == len(plain)
    for drafter in (knowing({"one": whole}), always_wrong({"one": whole}, {"one": len(PROMPT)}, VOCABULARY)):
        with_drafts = entries(drafted(loaded(kind), drafter), 24)

        assert [one.chosen.token for one in plain] == [one.chosen.token for one in with_drafts]
        for one, other in zip(plain, with_drafts, strict=True):
            pairs = zip((one.chosen, *one.top), (other.chosen, *other.top), strict=True)
            assert all(a.token == b.token and a.logprob == pytest.approx(b.logprob, abs=1e-6) for a, b in pairs)


def spoilt(loaded: LoadedModel, drafter: Drafter) -> dict[str, Answer]:
    """The answers of two drafted requests; once, in a step with ten logit rows, the eighth one is NaN."""
    engine = drafted(loaded, drafter)
    spoils = iter([7])

    def spoil(_: object, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        if output.shape[-2] == 10 and (row := next(spoils, None)) is not None:
            output = output.clone()
            output[..., row, :] = torch.nan
        return output

    hook = loaded.model.lm_head.register_forward_hook(spoil)
    answers = play(engine, [Job(ask(name, PROMPT, 20, ignore_eos=True)) for name in ("first", "second")])
    hook.remove()
    assert next(spoils, None) is None, "no step had ten logit rows"
    assert engine.cache.cells == engine.cache.free_cells + engine.cache.evictable_cells()
    return answers


def test_non_finite_logits_after_accepted_drafts_fail_their_request(loaded: Models) -> None:
    """The output of the other request is unchanged."""
    whole = alone(loaded("llama")).tokens
    answers = spoilt(loaded("llama"), knowing({"first": whole, "second": whole}))

    assert isinstance(answers["second"].end, Failed)
    assert whole[:20] == answers["first"].tokens


def test_non_finite_logits_after_a_rejected_draft_are_ignored(loaded: Models) -> None:
    """No token is sampled from such a row."""
    whole = alone(loaded("llama")).tokens
    wrong = always_wrong({"first": whole, "second": whole}, {"first": len(PROMPT), "second": len(PROMPT)}, VOCABULARY)

    assert [whole[:20]] * 2 == [answer.tokens for answer in spoilt(loaded("llama"), wrong).values()]


class Cooling(FixedDepth):
    """Four draft tokens after each cooldown of `steps`; records the batch tokens of calls of `cooldown`."""

    def __init__(self, steps: int) -> None:
        super().__init__(4)
        self._steps = steps
        self.batch_tokens: list[int] = []

    def cooldown(self, kind: str, batch_tokens: int) -> int:
        """The same number of steps each time."""
        self.batch_tokens.append(batch_tokens)
        return self._steps


def test_the_depth_is_chosen_after_a_cooldown(loaded: Models) -> None:
    """In each fourth of 31 steps; a new sequence ends the cooldown."""
    depth, whole = Cooling(4), alone(loaded("llama"), count=32).tokens
    answer = play(drafted(loaded("llama"), knowing({"one": whole}), depth), [Job(ask("one", PROMPT, 32))])["one"]

    assert whole == answer.tokens
    assert 8 == depth.batch_tokens.count(1)
    depth = Cooling(1000)
    play(drafted(loaded("llama"), knowing({}), depth), [Job(ask("a", PROMPT, 32)), Job(ask("b", PROMPT, 32), 9)])
    assert [1, 2, 1] == [tokens for tokens in depth.batch_tokens if tokens < 3]


class Clock:
    """A clock that advances by simulated durations only."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now


class Timed:
    """A drafter with a simulated time for each position, which counts its calls; implements Drafter."""

    def __init__(self, drafter: ScriptedDrafter, clock: Clock, position_seconds: float) -> None:
        self._drafter, self._clock, self._position_seconds = drafter, clock, position_seconds
        self.kind, self.forget = drafter.kind, drafter.forget
        self.calls = 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """The drafts of the drafter."""
        self.calls += 1
        self._clock.now += self._position_seconds * max(request.limit for request in requests)
        return self._drafter.propose(requests)


def paced(loaded: LoadedModel, drafter: Timed, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Core:
    """An engine with the depth controller; a step takes a second, and a tenth more for each token but the first."""
    engine = core(loaded, speculation=Speculation(None, drafter, DepthController(), clock))
    engine._clock = clock
    run = engine._stepper.run

    def timed(scheduled: Sequence[ScheduledSequence], *, returns_states: bool) -> list[StepResult]:
        clock.now += 1 + 0.1 * (sum(each.batch_span.length for each in scheduled) - 1)
        return run(scheduled, returns_states=returns_states)

    monkeypatch.setattr(engine._stepper, "run", timed)
    return engine


def test_drafts_that_are_right_are_chosen(loaded: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step emits more than two tokens in the mean, and the output is unchanged."""
    whole, clock = alone(loaded("llama"), count=100).tokens, Clock()
    engine = paced(loaded("llama"), Timed(knowing({"one": whole}), clock, 0.1), clock, monkeypatch)
    play(engine, [Job(ask("one", PROMPT, 100, ignore_eos=True))])
    before = clock.now
    answer = play(engine, [Job(ask("one", PROMPT, 100, ignore_eos=True))])["one"]

    assert whole == answer.tokens
    assert clock.now - before < 0.4 * 100


def test_step_costs_exclude_the_choice_of_depths(loaded: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Depths are chosen in some steps only; explored depths would seem to take longer than others."""
    whole, clock = alone(loaded("llama")).tokens, Clock()
    engine = paced(loaded("llama"), Timed(knowing({"one": whole}), clock, 0.1), clock, monkeypatch)
    depth = engine._speculation._depth
    choose = depth.choose

    def slowly(candidates: Sequence[Candidate], *, batch_tokens: int) -> list[int]:
        clock.now += 5.0
        return choose(candidates, batch_tokens=batch_tokens)

    monkeypatch.setattr(depth, "choose", slowly)
    play(engine, [Job(ask("one", PROMPT, 24, ignore_eos=True))])
    depth.cost.expect(Work(1, logit_tokens=1))

    assert clock.now > 50
    assert all(seconds < 2 for seconds in depth.cost.seconds([1, 2, 4]))


def test_step_costs_exclude_the_release_of_finished_texts(loaded: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the last step of a text nor the next one includes it."""
    whole, clock = alone(loaded("llama")).tokens, Clock()
    drafter = Timed(knowing({"one": whole, "two": whole}), clock, 0.1)
    engine, took = paced(loaded("llama"), drafter, clock, monkeypatch), list[float]()
    depth, forget = engine._speculation._depth, drafter.forget
    observe = depth.observe

    def slowly(sequence_id: str, output: Sequence[int]) -> None:
        clock.now += 50.0
        forget(sequence_id, output)

    def noted(outcome: StepOutcome) -> None:
        took.append(outcome.seconds)
        observe(outcome)

    monkeypatch.setattr(drafter, "forget", slowly)
    monkeypatch.setattr(depth, "observe", noted)
    for name in ("one", "two"):
        play(engine, [Job(ask(name, PROMPT, 24, ignore_eos=True))])

    assert clock.now > 100
    assert all(0.9 < seconds < 4 for seconds in took)


def test_a_new_sequence_has_its_own_drafters(loaded: Models) -> None:
    """The permitted drafters are determined anew when the running sequences change."""
    texts = {name: alone(loaded("llama")).tokens for name in ("one", "two", "three")}
    engine, none = drafted(loaded("llama"), knowing(texts)), SpeculationParams("none")
    counts = []
    for name, speculation in (("one", SpeculationParams()), ("two", none), ("three", SpeculationParams())):
        play(engine, [Job(ask(name, PROMPT, 24, ignore_eos=True, speculation=speculation))])
        counts.append(sum(engine.stats().drafts[0].drafted))

    assert 0 < counts[0] == counts[1] < counts[2]


def test_rejected_drafts_take_little_time(loaded: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter without accepted tokens is called rarely, at less than 2 % of the time."""
    whole, clock = alone(loaded("llama"), count=100).tokens, Clock()
    drafter = Timed(always_wrong({"one": whole}, {"one": len(PROMPT)}, VOCABULARY), clock, 0.3)
    engine = paced(loaded("llama"), drafter, clock, monkeypatch)
    play(engine, [Job(ask("one", PROMPT, 100, ignore_eos=True))])
    before, calls = clock.now, drafter.calls
    for _ in range(4):
        answer = play(engine, [Job(ask("one", PROMPT, 100, ignore_eos=True))])["one"]
        assert whole == answer.tokens

    assert drafter.calls - calls < 20
    assert clock.now - before < 1.02 * 4 * 101


def test_a_failing_drafter_is_not_called_again(loaded: Models) -> None:
    """No request fails, and the outputs are the same as without drafts."""
    calls = []

    def broken(request: DraftRequest) -> list[int]:
        calls.append(request.sequence_id)
        raise RuntimeError("no draft")

    engine = drafted(loaded("llama"), ScriptedDrafter(broken))
    answers = play(engine, [Job(ask(name, PROMPT, 24)) for name in "ab"])

    assert 1 == len(calls)
    assert {"a": alone(loaded("llama")).tokens, "b": alone(loaded("llama")).tokens} == {
        name: answer.tokens for name, answer in answers.items()
    }
    assert all(isinstance(answer.end, Finished) for answer in answers.values())


@pytest.mark.parametrize("stop", [(), ("a", "e", "i", "o", "u", " ")])
def test_drafters_get_the_output_of_a_finished_request(loaded: Models, stop: tuple[str, ...]) -> None:
    """Once, up to its end, and no draft request after it."""
    calls: list[list[int] | None] = []

    class RecordingDrafter(ScriptedDrafter):
        """Records its calls: None for a proposal, and the output of a finished sequence."""

        def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
            calls.append(None)
            return super().propose(requests)

        def forget(self, sequence_id: str, output: Sequence[int]) -> None:
            calls.append(list(output))

    tokens = alone(loaded("llama")).tokens
    drafter = RecordingDrafter(lambda request: tokens[request.draw.position - len(PROMPT) :])
    answer = play(drafted(loaded("llama"), drafter), [Job(ask("a", PROMPT, 24, stop=stop))])["a"]

    assert isinstance(answer.end, Finished)
    assert [calls[-1]] == [call for call in calls if call is not None]
    assert calls[-1] is not None
    assert tokens[: len(calls[-1])] == calls[-1]
    assert answer.end.usage.completion_tokens == len(calls[-1])
