"""The drafter that looks up what was said before, in its own text and in others'."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from engine.draft.lookup import LookupDrafter
from engine.draft.outputs import OutputStore
from engine.sample.penalties import PenaltyHistory
from engine.sample.sampler import SamplingContext
from engine.schedule.draft import Drafter, DraftRequest
from engine.types.request import SamplingParams
from tests.engine.draft.drafters import always_right, always_wrong, of_random_length, partly_right, says_the_end

GREEDY = SamplingParams(temperature=0.0)


def want(
    tokens: Sequence[int],
    limit: int = 8,
    *,
    name: str = "a",
    salt: bytes = b"",
    prediction: Sequence[int] = (),
    emitted: int = 0,
    position: int | None = None,
) -> DraftRequest:
    """What a sequence asks for; its text is as long as its tokens, where nothing else is said."""
    draw = SamplingContext(GREEDY, 0, len(tokens) if position is None else position, PenaltyHistory(GREEDY, (), 10))
    return DraftRequest(name, tokens, limit, draw, salt, prediction, emitted)


def drafter(capacity: int = 1000) -> LookupDrafter:
    """One with a store of that many tokens."""
    return LookupDrafter(OutputStore(capacity))


def say(looked_up: LookupDrafter, output: Sequence[int], *, name: str, salt: bytes = b"") -> None:
    """A whole request that says an output."""
    looked_up.propose([want([0], name=name, salt=salt)])
    looked_up.forget(name, output)


def test_a_repetition_in_the_prompt_is_proposed() -> None:
    """What followed the last two tokens before, in each of several sequences."""
    first, second = [1, 2, 3, 4, 5, 6, 9, 3, 4], [7, 7, 8, 1, 5, 7, 8]

    assert [[5, 6, 9, 3], [1, 5, 7, 8]] == drafter().propose([want(first), want(second, name="b")])


def test_the_longer_the_match_the_longer_the_draft() -> None:
    """Two tokens for each token of the match, and never more than the limit; one token alone proposes nothing."""
    text = list(range(40))

    assert 4 == len(drafter().propose([want([*text, 98, 3, 4], 20)])[0])
    assert 10 == len(drafter().propose([want([*text, 98, 3, 4, 5, 6, 7], 20)])[0])
    assert 3 == len(drafter().propose([want([*text, 98, 3, 4, 5, 6, 7], 3)])[0])
    assert [[]] == drafter().propose([want([*text, 98, 3], 20)])
    assert [[]] == drafter().propose([want([*text, 98, 3, 4], 0)])


def test_what_was_emitted_counts() -> None:
    """It continues the text, of which nothing is read twice."""
    looked_up = drafter()

    assert [[]] == looked_up.propose([want([1, 2, 3])])
    assert [[7, 8, 5, 6]] == looked_up.propose([want([1, 2, 3, 5, 6, 7, 8, 5, 6])])
    assert [[]] == looked_up.propose([want([1, 2, 3, 5, 6, 7, 8, 5, 6, 9])])


def test_tokens_dropped_by_a_shift_are_still_searched() -> None:
    """The text is what was said, not what the context has of it."""
    looked_up = drafter()
    looked_up.propose([want([1, 2, 3, 4, 5, 6])])
    shifted = [1, 6, 7, 2, 3]

    assert [[4, 5, 6, 7]] == looked_up.propose([want(shifted, position=9)])


def test_a_prediction_is_proposed_from_the_first_token_on() -> None:
    """Behind the prompt comes its beginning; after a deviation it is found again; its end is not run over."""
    looked_up = drafter()
    prompt, prediction = [1, 2, 3], [10, 11, 12, 13, 14, 15]

    assert [prediction] == looked_up.propose([want(prompt, prediction=prediction)])

    assert [[14, 15]] == looked_up.propose([want([*prompt, 10, 99, 12, 13], prediction=prediction)])


def test_a_prediction_fits_behind_the_first_tokens_too() -> None:
    """Where the first token was emitted before anybody asked, the prediction goes on behind it."""
    looked_up = drafter()

    assert [[12, 13]] == looked_up.propose([want([1, 2, 3, 10, 11], prediction=[10, 11, 12, 13], emitted=2)])


def test_outputs_of_other_requests_are_proposed() -> None:
    """A finished output serves a sequence that never saw it; the end of that output ends the draft."""
    looked_up = drafter()
    say(looked_up, [21, 22, 23, 24], name="other")

    assert [[23, 24]] == looked_up.propose([want([1, 21, 22])])


def test_salts_do_not_mix() -> None:
    """Nothing said under one salt is proposed under another."""
    looked_up = drafter()
    say(looked_up, [21, 22, 23, 24], name="other", salt=b"left")

    assert [[]] == looked_up.propose([want([1, 21, 22], salt=b"right")])
    assert [[23, 24]] == looked_up.propose([want([1, 21, 22], name="b", salt=b"left")])


def test_the_longer_match_wins() -> None:
    """Its own text where that matches as long, the store where that matches longer."""
    looked_up = drafter()
    say(looked_up, [20, 21, 22, 23, 24], name="other")

    assert [[50, 7]] == looked_up.propose([want([21, 22, 50, 7, 21, 22], 2)])
    assert [[23, 24]] == looked_up.propose([want([21, 22, 50, 7, 20, 21, 22], 2, name="b")])


def test_an_output_that_comes_while_a_sequence_runs_serves_it() -> None:
    """The end of its text is looked up on a shelf that was not there before."""
    looked_up = drafter()
    looked_up.propose([want([1, 21, 22])])
    say(looked_up, [21, 22, 23, 24], name="other")

    assert [[23, 24]] == looked_up.propose([want([1, 21, 22])])


def test_the_store_stays_within_its_capacity() -> None:
    """Whatever is said by however many clients; of an output that is too long the end is kept."""
    chance, store = random.Random(3), OutputStore(200)
    for number in range(200):
        output = [chance.randrange(50) for _ in range(chance.choice((0, 1, 5, 30, 500)))]
        store.add(bytes([number % 7]), output)

        assert store.tokens <= 200

    nothing = OutputStore(0)
    nothing.add(b"", [1, 2, 3])

    assert 0 == nothing.tokens


def test_proposed_outputs_stay_in_the_store() -> None:
    """An output that is repeated now and then survives many others; its neighbour that nobody wants does not."""
    looked_up = drafter(capacity=60)
    say(looked_up, [21, 22, 23, 24], name="wanted")
    say(looked_up, [31, 32, 33, 34], name="unwanted")
    for number in range(40):
        say(looked_up, [100 + number, 200 + number, 300 + number], name=f"filler {number}")
        looked_up.propose([want([1, 21, 22], name=f"asks {number}")])
        looked_up.forget(f"asks {number}", [])

    assert [[23, 24]] == looked_up.propose([want([1, 21, 22], name="y")])
    assert [[]] == looked_up.propose([want([1, 31, 32], name="z")])


def test_a_long_prompt_is_read_at_once() -> None:
    """There is nothing to catch up with."""
    assert [[5, 6, 7, 8]] == drafter().propose([want([*range(10_000), 3, 4])])


def test_a_forgotten_sequence_leaves_nothing_but_its_output() -> None:
    """The same name again is a new sequence; forgetting what was never known is fine."""
    looked_up = drafter()
    looked_up.propose([want([1, 2, 3, 4, 1, 2])])
    looked_up.forget("a", [])
    looked_up.forget("nobody", [])

    assert [[]] == looked_up.propose([want([9, 1, 2])])


ALL: list[Drafter] = [
    drafter(),
    always_right({"a": [5, 6, 7]}, {"a": 2}),
    always_wrong({"a": [5, 6, 7]}, {"a": 2}, 10),
    partly_right({"a": [5, 6, 7]}, {"a": 2}, 10),
    of_random_length(10),
    says_the_end(0),
]


@pytest.mark.parametrize("any_drafter", ALL, ids=lambda each: type(each).__name__)
def test_every_drafter_keeps_to_the_limit(any_drafter: Drafter) -> None:
    """At most what is wanted, one list for each want."""
    for limit in (0, 1, 3):
        (proposed,) = any_drafter.propose([want([1, 2], limit)])

        assert len(proposed) <= limit


def test_scripts_know_where_a_text_stands() -> None:
    """The right one says what comes next, the wrong one never does."""
    right, wrong = always_right({"a": [5, 6, 7]}, {"a": 2}), always_wrong({"a": [5, 6, 7]}, {"a": 2}, 8)

    assert [[6, 7]] == right.propose([want([1, 2, 5], 4)])
    assert [[7, 0]] == wrong.propose([want([1, 2, 5], 4)])
