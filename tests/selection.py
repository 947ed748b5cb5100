"""Parameters of which some are slow: cases of one mechanism that differ in a number or a name only."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def quick(chosen: Collection[Any], values: Iterable[Any]) -> list[ParameterSet]:
    """All values as parameters of a test; values that are not chosen are slow."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=[] if value in chosen else [pytest.mark.slow]
        )
        for value in values
    ]
