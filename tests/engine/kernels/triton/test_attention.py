"""The Triton attention kernel equals the float64 reference, with the same bits for any batch."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels import reference
from kvcache.spec import AttentionRange
from tests.engine.kernels.test_attention import Batch, Format, batch
from tests.engine.kernels.triton.interpreter import (
    DEVICE,
    HALF,
    ONE_TILE,
    SMALL,
    Tiling,
    TritonKernels,
    alone,
    cut,
    kernels_module,
    launch,
    on_device,
)

# Sums of float32, and weights rounded to bfloat16 for values of size 4.
TOLERANCE, ROUNDED = 2e-5, 4e-2
# (rows, start) of sequences that share a batch: prompts, decoded tokens, draft tokens.
MIXED = ((40, 3), (1, 130), (5, 63))
DECODING = ((1, 0), (1, 64), (1, 300))
FULL, WINDOW, CHUNK = AttentionRange(), AttentionRange("window", 70), AttentionRange("chunk", 50)


@dataclass(frozen=True)
class Case:
    """A batch, and what bends its scores."""

    plan: tuple[tuple[int, int], ...] = MIXED
    attention_range: AttentionRange = FULL
    stored: torch.dtype = torch.float32
    key_heads: int = 1
    group: int = 2
    width: int = 32
    value_width: int = 32
    layout: str = "permuted"
    softcap: float | None = None
    has_sinks: bool = False
    bidirectional: bool = False
    seed: int = 0

    def batch(self) -> Batch:
        """Its content on the CPU."""
        work = batch(
            self.plan,
            self.attention_range,
            Format(self.stored),
            heads=self.key_heads * self.group,
            key_heads=self.key_heads,
            width=self.width,
            value_width=self.value_width,
            layout=self.layout,
            seed=self.seed,
        )
        if not self.bidirectional:
            return work
        first = work.segments[0]
        ranges = ((first.start + 2, first.start + 7), (first.start + 20, first.start + 40))
        return replace(work, segments=(replace(first, bidirectional=ranges), *work.segments[1:]))

    @property
    def options(self) -> dict[str, Any]:
        """Softcap and sinks."""
        sinks = torch.randn(self.key_heads * self.group, generator=torch.Generator().manual_seed(1))
        return {"softcap": self.softcap} | ({"sinks": sinks} if self.has_sinks else {})


# Each feature once: GQA within and beyond a tile, widths that are no powers of two, formats, ranges, layouts of cells.
CASES = {
    "full, sinks, widths 40 and 24": Case(group=3, width=40, value_width=24, has_sinks=True),
    "window, softcap, bfloat16, runs": Case(
        attention_range=WINDOW, softcap=5.0, stored=torch.bfloat16, layout="runs", key_heads=2, group=1
    ),
    "chunk, int8, a group larger than a tile": Case(
        plan=((5, 48), (1, 80)), attention_range=CHUNK, stored=torch.int8, group=18, width=48
    ),
    "bidirectional, shared cells": Case(plan=((40, 5), (1, 20)), bidirectional=True, layout="shared"),
    "bidirectional in a window, int8": Case(
        plan=((40, 70),), attention_range=AttentionRange("window", 20), bidirectional=True, stored=torch.int8
    ),
    "decoding behind several splits": Case(plan=DECODING, group=4, has_sinks=True, softcap=30.0),
}


def attend(work: Batch, attention_range: AttentionRange, tiling: Tiling, **options: Any) -> Tensor:
    """The output of the kernel on the CPU, from layer 1 of two."""
    moved = on_device(work)
    options = {
        name: own.to(DEVICE, work.query.dtype) if isinstance(own, Tensor) else own for name, own in options.items()
    }
    return TritonKernels(tiling)(moved.inputs(attention_range, **options)).cpu()


def check(case: Case, tiling: Tiling = SMALL) -> None:
    work = case.batch()
    expected = work.expected(case.attention_range, **case.options)

    result = attend(work, case.attention_range, tiling, **case.options)

    torch.testing.assert_close(result.double(), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_equals_reference(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_kernel_equals_reference_for_random_batches(seed: int) -> None:
    chance = random.Random(seed)
    check(
        Case(
            plan=tuple((chance.choice((1, 1, 1, 3, 17, 40)), chance.choice((0, 62, 64, 190, 511))) for _ in range(3)),
            attention_range=chance.choice(
                (FULL, WINDOW, CHUNK, AttentionRange("window", 1), AttentionRange("chunk", 7))
            ),
            stored=chance.choice((torch.float32, torch.bfloat16, torch.float16, torch.int8)),
            key_heads=chance.choice((1, 2)),
            group=chance.choice((1, 2, 3, 4, 7, 8, 20)),
            width=chance.choice((1, 8, 16, 40, 64, 80, 96, 128, 192)),
            value_width=chance.choice((1, 8, 16, 40, 64, 80, 96, 128, 192)),
            layout=chance.choice(("permuted", "runs", "shared")),
            softcap=chance.choice((None, 0.5, 30.0)),
            has_sinks=chance.random() < 0.5,
            seed=seed,
        ),
        chance.choice((SMALL, ONE_TILE, Tiling())),
    )


@pytest.mark.parametrize("stored", [HALF, torch.int8], ids=str)
def test_weights_are_rounded_to_the_dtype_of_queries(stored: torch.dtype) -> None:
    """As by the reference; the output has this dtype."""
    work = Case(plan=((20, 30), (1, 100)), stored=stored).batch()
    half = replace(work, query=work.query.to(HALF))

    result = attend(half, FULL, SMALL)

    assert HALF == result.dtype
    expected = replace(half, query=half.query.float()).expected(FULL)
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=ROUNDED)


@pytest.mark.parametrize("case", [Case(group=3), Case(((9, 30), (1, 80)), WINDOW, torch.int8)], ids=["full", "int8"])
def test_bits_do_not_depend_on_the_batch(case: Case) -> None:
    """Each sequence alone, and beside the others."""
    work = case.batch()

    together = attend(work, case.attention_range, SMALL)

    for number, segment in enumerate(work.segments):
        assert torch.equal(together[segment.batch_slice], attend(alone(work, number), case.attention_range, SMALL))


@pytest.mark.parametrize("attention_range", [FULL, WINDOW], ids=lambda one: one.kind)
def test_bits_do_not_depend_on_chunks_with_one_tile_size(attention_range: AttentionRange) -> None:
    work = Case(plan=((60, 0),), attention_range=attention_range).batch()
    whole, row, parts = attend(work, attention_range, ONE_TILE), 0, []
    for start, stop in ((0, 20), (20, 21), (21, 60)):
        parts.append(cut(work.segments[0], start, stop, row, int(attention_range.oldest_visible(start))))
        row = stop

    assert torch.equal(whole, attend(replace(work, segments=tuple(reversed(parts))), attention_range, ONE_TILE))


def test_split_sums_have_the_bits_of_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(plan=((1, 200), (3, 100)), has_sinks=True)
    split = attend(case.batch(), FULL, SMALL, **case.options)
    monkeypatch.setattr(launch, "PARTIAL_BYTES", 0)

    assert torch.equal(split, attend(case.batch(), FULL, SMALL, **case.options))


def test_nan_of_a_row_stays_in_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Case(plan=((3, 5), (1, 9))).batch()
    clean = attend(work, FULL, SMALL)
    work.query[0, 1] = torch.nan

    result = attend(work, FULL, SMALL)

    assert result[1, 0].isnan().all()
    assert torch.equal(result[[0, 2, 3]], clean[[0, 2, 3]])
    assert torch.equal(result[1, 1], clean[1, 1])


def test_bias_and_float64_are_computed_by_the_reference() -> None:
    work = Case(plan=((3, 5),)).batch()

    def bias(rows: int, before: int) -> Tensor:
        return torch.arange(before + rows, dtype=torch.float32, device=DEVICE).expand(2, rows, -1)

    expected = reference.attend(work.inputs(FULL, bias=lambda rows, before: bias(rows, before).cpu()))
    torch.testing.assert_close(attend(work, FULL, SMALL, bias=bias), expected, rtol=0, atol=TOLERANCE)
    double = replace(work, query=work.query.double())
    torch.testing.assert_close(attend(double, FULL, SMALL), work.expected(FULL), rtol=0, atol=1e-12)


def test_tables_are_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of earlier steps are deleted."""
    monkeypatch.setattr(kernels_module, "_KEPT_TABLES", 2)
    work, kernels = on_device(Case(plan=((1, 40),)).batch()), TritonKernels(SMALL)

    for _ in range(2):
        kernels(work.inputs(FULL))
    assert 1 == len(kernels._tables)
    for _ in range(3):
        kernels(replace(work, segments=tuple(replace(one) for one in work.segments)).inputs(FULL))
    assert 2 == len(kernels._tables)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 1, 16)}, "queries are as wide as keys"),
        ({"query": torch.zeros(3, 1, 32)}, "multiple of key heads"),
        ({"query": torch.zeros(4, 0, 32)}, "segments are in the batch"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, Tensor], message: str) -> None:
    work = replace(Case(plan=((1, 5),), key_heads=2).batch(), **change)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=message):
        attend(work, FULL, SMALL)


def test_a_table_shorter_than_its_rows_is_refused() -> None:
    work = Case(plan=((1, 5),)).batch()
    short = replace(work.segments[0], start=6)

    with pytest.raises(ValueError, match="tables end with the rows"):
        attend(replace(work, segments=(short,)), FULL, SMALL)
