"""How long texts become, from those that ended."""

from __future__ import annotations

import random

import pytest

from engine.draft.lengths import Lengths


def known(*lengths: int) -> Lengths:
    """What is known after some outputs."""
    result = Lengths()
    for length in lengths:
        result.observe(length)
    return result


def test_what_is_left_is_that_of_longer_texts() -> None:
    """Texts that ended sooner say nothing of one that goes on."""
    assert 90 == pytest.approx(known(*[100] * 100).left(10), rel=0.05)
    assert 55 == pytest.approx(known(*[10, 100] * 50).left(0), rel=0.05)
    assert 60 == pytest.approx(known(*[10, 100] * 50).left(40), rel=0.05)


def test_of_few_texts_nothing_is_known() -> None:
    """Who is longer than all of them goes on as long again."""
    assert 64 == known().left(0)
    assert 64 == known(10, 20).left(30)
    assert 500 == known(10, 20).left(500)


def test_who_is_longer_than_all_goes_on_as_the_longest_did() -> None:
    """Where all end at once so does the next one; where some go on for long it may too, the longer the longer it is."""
    chance = random.Random(0)
    spread = known(*(int(chance.expovariate(0.01)) for _ in range(128)))

    assert 50 < spread.left(600) < 250
    assert 5 > known(*[90] * 100, *range(90, 98)).left(94)
    assert 300 == known(*[100] * 100).left(400)


def test_the_latest_texts_count() -> None:
    """Old ones are forgotten, one for each that ends."""
    lengths = known(*range(1000), *[50] * 200)

    assert 40 == pytest.approx(lengths.left(10), rel=0.05)
    assert 1 == lengths.left(50)
