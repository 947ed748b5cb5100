"""Models with sliding-window layers: their output equals separate runs, with the memory of the windows only."""

from __future__ import annotations

import pytest

from engine.core import Core
from engine.types.events import Finished
from kvcache.attention_group import AttentionGroup
from tests.engine.kit.models import VOCABULARY, Models, Reference, References, core
from tests.engine.kit.play import Answer, Job, ask, play

FAMILIES = ("gemma3", "mistral")
PROMPT = tuple(at * 31 % VOCABULARY for at in range(3, 53))
NEW = (5, 6, 7, 8, 9)


def windows(engine: Core) -> list[AttentionGroup]:
    """The groups of sliding-window layers."""
    return [group for group in engine.cache.groups if group.spec.attention_range.kind != "full"]


def answer(engine: Core, name: str, prompt: tuple[int, ...], count: int) -> Answer:
    """The answer to one prompt."""
    return play(engine, [Job(ask(name, prompt, count, ignore_eos=True))])[name]


def greedy(reference: Reference, prompt: tuple[int, ...], count: int) -> list[int]:
    """The greedy tokens, each computed from the whole text."""
    text = prompt
    for _ in range(count):
        text = (*text, int(reference.logits(text).argmax()))
    return list(text[len(prompt) :])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_slot_keeps_its_window(loaded: Models, family: str) -> None:
    """At every step a slot of a window group holds the visible cells only, tokens of the step included."""
    engine = core(loaded(family), slots=2, chunk=8)
    for name in ("a", "b"):
        engine.submit(ask(name, PROMPT, 40, ignore_eos=True))
    most = 0
    while engine.busy:
        engine.step()
        for group in windows(engine):
            most = max(most, group.used_by_slots() - 2 * (group.spec.attention_range.size - 1))

    assert windows(engine)
    assert 0 < most <= 8 + 2


@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_turn_computes_new_tokens_only(loaded: Models, reference: References, family: str) -> None:
    """Windows are reused too, and the answer is that of a separate run."""
    engine = core(loaded(family), slots=2, chunk=8)
    first = answer(engine, "first", PROMPT, 20)
    talk = (*PROMPT, *first.tokens, *NEW)
    second = answer(engine, "second", talk, 20)

    assert [len(PROMPT) + 19] == [started.cached_tokens for started in second.started]
    assert greedy(reference(family), PROMPT, 20) == first.tokens
    assert greedy(reference(family), talk, 20) == second.tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_eviction_between_conversations_does_not_change_the_text(
    loaded: Models, reference: References, family: str
) -> None:
    """Ten conversations take turns with memory for a few windows."""
    engine = core(loaded(family), slots=2, chunk=16, cells=160)
    talks = {f"{number}": (number, *PROMPT[: 20 + number]) for number in range(10)}
    for _ in range(2):
        answers = play(engine, [Job(ask(name, talk, 8, ignore_eos=True)) for name, talk in talks.items()])
        for name, talk in talks.items():
            assert isinstance(answers[name].end, Finished)
            assert greedy(reference(family), talk, 8) == answers[name].tokens
            talks[name] = (*talk, *answers[name].tokens, *NEW)
