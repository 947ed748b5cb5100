"""Sizes in errors, logs and plans."""

from __future__ import annotations

import pytest

from engine.errors import EmbedderTooLarge
from engine.types.sizes import format_size

SIZES = [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (2**20, "1.0 MiB"), (3 * 2**29, "1.5 GiB")]


@pytest.mark.parametrize(("size", "text"), SIZES)
def test_the_unit_fits_the_size(size: int, text: str) -> None:
    assert format_size(size) == text


def test_errors_do_not_round_small_sizes_to_zero() -> None:
    assert "needs 12.0 MiB of 300.0 KiB available" in str(EmbedderTooLarge("m", 12 * 2**20, 300 * 2**10))
