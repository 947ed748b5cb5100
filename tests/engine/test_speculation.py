"""Speculation never changes a text: whoever drafts, however deep, on every kind of cache, whatever else happens."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.load import Loaded
from tests.engine.speculated import Case, covering, differences, every

Models = Callable[..., Loaded]


@pytest.mark.parametrize("case", covering(), ids=repr)
def test_drafts_do_not_change_the_text(loaded: Models, case: Case) -> None:
    """Every request says in float64 what it says alone without drafts; every pair of circumstances is met."""
    assert [] == differences(case, loaded)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", sorted({case.kind for case in every()}))
def test_drafts_do_not_change_the_text_in_any_combination(loaded: Models, kind: str) -> None:
    """The same for all combinations."""
    cases = [case for case in every() if case.kind == kind]

    assert [] == [(case, wrong) for case in cases if (wrong := differences(case, loaded))]
