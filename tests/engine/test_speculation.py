"""Speculative decoding never changes a text: with every drafter, depth and kind of cache."""

from __future__ import annotations

import pytest

from tests.engine.kit.models import Models
from tests.engine.kit.speculated import KINDS, Case, covering, differences, every, played
from tests.selection import quick

CASES = ("none", "right", "itself", "wrong")


# These have every kind of cache, batch, chunk and event; all cases have every pair.
QUICK = (1, 2, 3, 5, 6, 7)
SOME = [pytest.param(case, marks=[] if at in QUICK else pytest.mark.slow) for at, case in enumerate(covering())]


@pytest.mark.parametrize("case", SOME, ids=repr)
def test_drafts_do_not_change_the_text(loaded: Models, case: Case) -> None:
    """Each request in float64 equals a separate run without drafts."""
    assert [] == differences(case, loaded)


@pytest.mark.parametrize("kind", quick(("full",), KINDS))
def test_the_cases_are_not_empty(loaded: Models, kind: str) -> None:
    """Right drafts are nearly all accepted, the model's own mostly, wrong ones never."""
    drafts = {name: played(Case(name, kind, 3, 64, "nothing"), loaded).drafts for name in CASES}

    assert {} == drafts["none"]
    drafted, accepted = drafts["right"]["scripted"]
    assert accepted > 0.9 * drafted > 30
    drafted, accepted = drafts["itself"]["model"]
    assert accepted > 0.6 * drafted > 20
    drafted, accepted = drafts["wrong"]["scripted"]
    assert 0 == accepted < 100 < drafted


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", sorted({case.kind for case in every()}))
def test_drafts_do_not_change_the_text_in_any_combination(loaded: Models, kind: str) -> None:
    cases = [case for case in every() if case.kind == kind]

    assert [] == [(case, wrong) for case in cases if (wrong := differences(case, loaded))]
