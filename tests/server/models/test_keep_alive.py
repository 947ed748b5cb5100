"""Durations of Ollama."""

from __future__ import annotations

import math

import pytest

from server.models.keep_alive import parse_keep_alive


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0, 0.0),
        (300, 300.0),
        (1.5, 1.5),
        (-1, math.inf),
        ("0", 0.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1.5s", 1.5),
        ("250ms", 0.25),
        ("-1m", math.inf),
        ("-0", 0.0),
    ],
)
def test_a_duration_is_seconds(value: object, seconds: float) -> None:
    assert parse_keep_alive(value) == pytest.approx(seconds)


@pytest.mark.parametrize("value", ["", "5 minutes", "m", "5mm5", True, [], math.nan, "1e3"])
def test_other_values_are_errors(value: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_keep_alive(value)
