"""N-gram lookup in the text of the sequence and in the outputs of finished requests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.draft.lookup import LookupDrafter
from engine.draft.outputs import OutputStore
from engine.sample.penalties import PenaltyHistory
from engine.sample.sampler import SamplingContext
from engine.schedule.draft import Drafter, DraftRequest
from engine.types.request import SamplingParams
from tests.engine.draft.drafters import always_right, always_wrong, end_tokens, partly_right, random_tokens

GREEDY = SamplingParams(temperature=0.0)


def draft_request(
    tokens: Sequence[int],
    limit: int = 8,
    *,
    name: str = "a",
    salt: bytes = b"",
    prediction: Sequence[int] = (),
    emitted: int = 0,
    position: int | None = None,
) -> DraftRequest:
    """The request of a sequence; `position` None: no context shift dropped tokens."""
    draw = SamplingContext(GREEDY, 0, len(tokens) if position is None else position, PenaltyHistory(GREEDY, (), 10))
    return DraftRequest(name, tokens, limit, draw, salt, prediction, emitted)


def drafter(capacity: int = 1000) -> LookupDrafter:
    """A drafter with a store of `capacity` tokens."""
    return LookupDrafter(OutputStore(capacity))


def finish(lookup: LookupDrafter, output: Sequence[int], *, name: str, salt: bytes = b"") -> None:
    """A whole request with an output."""
    lookup.propose([draft_request([0], name=name, salt=salt)])
    lookup.forget(name, output)


def test_a_repetition_in_the_prompt_is_proposed() -> None:
    """The tokens after an earlier occurrence of the last two tokens, for each of several sequences."""
    first, second = [1, 2, 3, 4, 5, 6, 9, 3, 4], [7, 7, 8, 1, 5, 7, 8]

    assert [[5, 6, 9, 3], [1, 5, 7, 8]] == drafter().propose([draft_request(first), draft_request(second, name="b")])


def test_the_longer_the_match_the_longer_the_draft() -> None:
    """Two tokens for each token of the match, and never more than the limit; one token alone proposes nothing."""
    text = list(range(40))

    assert 4 == len(drafter().propose([draft_request([*text, 98, 3, 4], 20)])[0])
    assert 10 == len(drafter().propose([draft_request([*text, 98, 3, 4, 5, 6, 7], 20)])[0])
    assert 3 == len(drafter().propose([draft_request([*text, 98, 3, 4, 5, 6, 7], 3)])[0])
    assert [[]] == drafter().propose([draft_request([*text, 98, 3], 20)])
    assert [[]] == drafter().propose([draft_request([*text, 98, 3, 4], 0)])


def test_emitted_tokens_are_searched() -> None:
    """From one request to the next the text grows."""
    lookup = drafter()

    assert [[]] == lookup.propose([draft_request([1, 2, 3])])
    assert [[7, 8, 5, 6]] == lookup.propose([draft_request([1, 2, 3, 5, 6, 7, 8, 5, 6])])
    assert [[]] == lookup.propose([draft_request([1, 2, 3, 5, 6, 7, 8, 5, 6, 9])])


def test_tokens_dropped_by_a_shift_are_still_searched() -> None:
    """The text is searched, not the context."""
    lookup = drafter()
    lookup.propose([draft_request([1, 2, 3, 4, 5, 6])])
    shifted = [1, 6, 7, 2, 3]

    assert [[4, 5, 6, 7]] == lookup.propose([draft_request(shifted, position=9)])


def test_a_prediction_is_proposed_from_the_first_token_on() -> None:
    """After the prompt its start is proposed; after a deviation it is found again, up to its end."""
    lookup = drafter()
    prompt, prediction = [1, 2, 3], [10, 11, 12, 13, 14, 15]

    assert [prediction] == lookup.propose([draft_request(prompt, prediction=prediction)])

    assert [[14, 15]] == lookup.propose([draft_request([*prompt, 10, 99, 12, 13], prediction=prediction)])


def test_a_prediction_continues_after_emitted_tokens() -> None:
    """Tokens may be emitted before the first draft request."""
    lookup = drafter()

    assert [[12, 13]] == lookup.propose([draft_request([1, 2, 3, 10, 11], prediction=[10, 11, 12, 13], emitted=2)])


def test_outputs_of_other_requests_are_proposed() -> None:
    """The end of the output ends the draft."""
    lookup = drafter()
    finish(lookup, [21, 22, 23, 24], name="other")

    assert [[23, 24]] == lookup.propose([draft_request([1, 21, 22])])


def test_salts_do_not_mix() -> None:
    """No output under one salt is proposed under another."""
    lookup = drafter()
    finish(lookup, [21, 22, 23, 24], name="other", salt=b"left")

    assert [[]] == lookup.propose([draft_request([1, 21, 22], salt=b"right")])
    assert [[23, 24]] == lookup.propose([draft_request([1, 21, 22], name="b", salt=b"left")])


def test_the_longer_match_wins() -> None:
    """A match in the own text, unless the store has a longer one."""
    lookup = drafter()
    finish(lookup, [20, 21, 22, 23, 24], name="other")

    assert [[50, 7]] == lookup.propose([draft_request([21, 22, 50, 7, 21, 22], 2)])
    assert [[23, 24]] == lookup.propose([draft_request([21, 22, 50, 7, 20, 21, 22], 2, name="b")])


def test_a_running_sequence_uses_new_outputs() -> None:
    """An output that is added between two of its requests."""
    lookup = drafter()
    lookup.propose([draft_request([1, 21, 22])])
    finish(lookup, [21, 22, 23, 24], name="other")

    assert [[23, 24]] == lookup.propose([draft_request([1, 21, 22])])


def test_the_store_stays_within_its_capacity() -> None:
    """With any number of salts; of an output that is too long the end is kept."""
    chance, store = random.Random(3), OutputStore(200)
    for number in range(200):
        output = [chance.randrange(50) for _ in range(chance.choice((0, 1, 5, 30, 500)))]
        store.add(bytes([number % 7]), output)

        assert store.tokens <= 200

    nothing = OutputStore(0)
    nothing.add(b"", [1, 2, 3])

    assert 0 == nothing.tokens


def test_proposed_outputs_stay_in_the_store() -> None:
    """An output that is proposed now and then is not evicted; one that is never proposed is."""
    lookup = drafter(capacity=60)
    finish(lookup, [21, 22, 23, 24], name="used")
    finish(lookup, [31, 32, 33, 34], name="unused")
    for number in range(40):
        finish(lookup, [100 + number, 200 + number, 300 + number], name=f"filler {number}")
        lookup.propose([draft_request([1, 21, 22], name=f"asks {number}")])
        lookup.forget(f"asks {number}", [])

    assert [[23, 24]] == lookup.propose([draft_request([1, 21, 22], name="y")])
    assert [[]] == lookup.propose([draft_request([1, 31, 32], name="z")])


def test_a_long_prompt_is_read_at_once() -> None:
    """With the first request."""
    assert [[5, 6, 7, 8]] == drafter().propose([draft_request([*range(10_000), 3, 4])])


def test_a_forgotten_sequence_leaves_nothing_but_its_output() -> None:
    """The same name again is a new sequence; an unknown name has no effect."""
    lookup = drafter()
    lookup.propose([draft_request([1, 2, 3, 4, 1, 2])])
    lookup.forget("a", [])
    lookup.forget("unknown", [])

    assert [[]] == lookup.propose([draft_request([9, 1, 2])])


ALL: list[Drafter] = [
    drafter(),
    always_right({"a": [5, 6, 7]}, {"a": 2}),
    always_wrong({"a": [5, 6, 7]}, {"a": 2}, 10),
    partly_right({"a": [5, 6, 7]}, {"a": 2}, 10),
    random_tokens(10),
    end_tokens(0),
]


@pytest.mark.parametrize("any_drafter", ALL, ids=lambda each: type(each).__name__)
def test_every_drafter_keeps_to_the_limit(any_drafter: Drafter) -> None:
    """One list for each request."""
    for limit in (0, 1, 3):
        (proposed,) = any_drafter.propose([draft_request([1, 2], limit)])

        assert len(proposed) <= limit


def test_scripted_drafters_follow_the_position() -> None:
    """The right one proposes the next tokens, the wrong one other tokens."""
    right, wrong = always_right({"a": [5, 6, 7]}, {"a": 2}), always_wrong({"a": [5, 6, 7]}, {"a": 2}, 8)

    assert [[6, 7]] == right.propose([draft_request([1, 2, 5], 4)])
    assert [[7, 0]] == wrong.propose([draft_request([1, 2, 5], 4)])


def test_outputs_of_uncacheable_requests_are_not_stored() -> None:
    lookup = drafter()
    lookup.propose([replace(draft_request([0], name="other"), cacheable=False)])
    lookup.forget("other", [21, 22, 23, 24])

    assert [[]] == lookup.propose([draft_request([1, 21, 22])])
