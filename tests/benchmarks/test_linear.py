"""The benchmark of quantised products prints its table, and measures the errors of the format."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cpu import linear
from engine.kernels.cpu.products.linear import NativeLinear
from tests.libraries import built


def test_a_line_has_a_cell_for_every_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of tiny matrices."""
    monkeypatch.setattr(linear, "POOL_BYTES", 2**20)
    monkeypatch.setattr(linear, "MANY", 32)
    torch.set_num_threads(1)
    native = NativeLinear(built("linear"))

    cells = linear.line(native, 64, 96, 8, rounds=1).strip("| ").split(" | ")

    assert len(linear.HEADS) == len(cells)
    assert ["64 x 96", "int8"] == cells[:2]


def test_formats_are_compared_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "POOL_BYTES", 2**20)
    monkeypatch.setattr(linear, "FORMAT_ROWS", (1, 2, 3))
    torch.set_num_threads(1)

    lines = linear.format_lines(NativeLinear(built("linear")), ("int4", "q6_k"), (64, 96), rounds=1)
    first, second = (own.strip("| ").split(" | ") for own in lines)

    assert len(linear.FORMAT_HEADS) == len(first) == len(second)
    assert ["int4", "4.50"] == first[:2]
    assert ["1.00", "1.00", "1.00"] == first[-3:]
    assert ["q6_k", "6.56"] == second[:2]


def test_outliers_spoil_a_group_and_not_a_row() -> None:
    """The error grows where a few columns are very large, but not by much."""
    torch.set_num_threads(1)
    plain, planted = (linear.error(128, 512, 8, share, 50.0) for share in (0.0, 0.01))

    assert 0.005 < plain < 0.01 < planted < 0.03
