"""The benchmark of attention prints a cell for every head of its tables."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cpu import attention
from benchmarks.cpu.attention import TITLES, AttentionBatch, AttentionBench, AttentionShape, Limits
from engine.kernels.cpu.attention.attention import NativeAttention
from tests.libraries import built

SHAPE = AttentionShape("tiny", 4, 2, 16)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> NativeAttention:
    """The kernel, over small pools."""
    monkeypatch.setattr(attention, "POOL_BYTES", 2**20)
    torch.set_num_threads(1)
    return NativeAttention(built("attention"))


def test_a_line_has_a_cell_for_every_head(native: NativeAttention) -> None:
    """With separate tables, and with a shared prefix."""
    batch, limits = AttentionBatch("verify", 2, 70, sequences=3), Limits(1e9, 1e9)
    alone = attention.row(SHAPE, batch, torch.float32, native, limits, rounds=1)
    shared = attention.shared_row(
        SHAPE, AttentionBatch("decode", 1, 200, sequences=3, prefix=130), torch.float32, native, rounds=1
    )

    assert ["tiny", "verify 2 x3", "70"] == alone.strip("| ").split(" | ")[:3]
    assert ["tiny", "3", "130"] == shared.strip("| ").split(" | ")[:3]
    assert (len(TITLES), 6) == (alone.count(" | ") + 1, shared.count(" | ") + 1)


def test_the_limit_is_what_takes_longer() -> None:
    """Reading two rows of 16 for each of 2 heads and 21 cells, or 32 products for each of 4 heads and cells seen."""
    bench = AttentionBench(SHAPE, AttentionBatch("decode", 1, 20), torch.float32)

    assert 2 * 2 * 21 * 16 * 4 == Limits(1.0, 1e9).seconds(bench)
    assert 32 * 4 * 21 == Limits(1e9, 1.0).seconds(bench)


def test_those_that_share_have_the_rest_to_themselves() -> None:
    """Every cell of the pool is a sequence's own or of the prefix."""
    segments = AttentionBench(SHAPE, AttentionBatch("decode", 1, 20, 3, prefix=8), torch.float32).tables()
    tables = [torch.as_tensor(segment.cells).tolist() for segment in segments]

    assert tables[0][:8] == tables[1][:8] == tables[2][:8]
    assert list(range(8 + 3 * 13)) == sorted({cell for table in tables for cell in table})
