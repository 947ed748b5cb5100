"""Tokens that a grammar forces are drafted without a draft model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.draft.depth import FixedDepth
from engine.draft.forced import ForcedDrafter
from engine.draft.speculation import Speculation
from engine.load.load import LoadedModel
from engine.types.request import Grammar, SamplingParams, SpeculationParams
from tests.engine.draft import drafters
from tests.engine.kit.models import VOCABULARY, core
from tests.engine.kit.play import Job, ask, play

SAMPLING = SamplingParams(temperature=0.9, seed=3)
GRAMMAR = Grammar('start: ("yes: it is so" | "no: it is not so") /[0-9]{2}/')


@pytest.mark.parametrize("beside", [False, True])
def test_forced_tokens_are_drafted_and_accepted(loaded: Callable[..., LoadedModel], beside: bool) -> None:
    """All of them, also beside a drafter of random tokens, which drafts where no token is forced."""
    target, request = loaded("llama"), ask("one", (5, 6, 7), 30, sampling=SAMPLING, grammar=GRAMMAR)
    wrong = drafters.random_tokens(VOCABULARY) if beside else None
    engine = core(target, speculation=Speculation(None, wrong, FixedDepth(8), lambda: 0.0, forced=ForcedDrafter()))

    answer, alone = play(engine, [Job(request)])["one"], play(core(target), [Job(request)])["one"]

    counts = {one.kind: one for one in engine.stats().drafts}["grammar"]
    assert alone.tokens == answer.tokens
    assert counts.accepted == counts.drafted
    assert sum(counts.accepted) > 6


def test_requests_without_drafter_get_no_drafts(loaded: Callable[..., LoadedModel]) -> None:
    """Nor do requests without a grammar."""
    engine = core(
        loaded("llama"), speculation=Speculation(None, None, FixedDepth(8), lambda: 0.0, forced=ForcedDrafter())
    )
    none = SpeculationParams("none")
    play(engine, [Job(ask("a", (5, 6), 8, grammar=GRAMMAR, speculation=none)), Job(ask("b", (5, 6), 8))])

    assert [0] == [sum(one.drafted) for one in engine.stats().drafts]
    assert () == engine._speculation.kinds


def test_the_forced_drafter_is_skipped_without_a_grammar(loaded: Callable[..., LoadedModel]) -> None:
    """Steps without a grammar do not count in its cooldown."""
    asked: list[str] = []

    class RecordingDepth(FixedDepth):
        def cooldown(self, kind: str, batch_tokens: int) -> int:
            asked.append(kind)
            return super().cooldown(kind, batch_tokens)

    engine = core(
        loaded("llama"), speculation=Speculation(None, None, RecordingDepth(8), lambda: 0.0, forced=ForcedDrafter())
    )
    play(engine, [Job(ask("a", (5, 6), 8))])
    before = list(asked)
    play(engine, [Job(ask("b", (5, 6), 8)), Job(ask("c", (5, 6), 8, grammar=GRAMMAR))])

    assert before == []
    assert asked.count("grammar") == len(asked) > 0
