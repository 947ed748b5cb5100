"""Sequences with a shared prefix of cells have the bits that each has alone."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from engine.kernels.cpu.attention.attention import NativeAttention
from kvcache.forward import Segment
from kvcache.spec import AttentionRange
from tests.engine.kernels.test_attention import FLOATS, FORMATS, ROUNDS, Batch, Format, batch
from tests.selection import quick

pytestmark = pytest.mark.usefixtures("one_thread")

# For each sequence: name and length of its shared prefix, number of its own cells, and its rows, the last of them.
Plan = tuple[tuple[str, int, int, int], ...]
PLANS: dict[str, Plan] = {
    "all of one": (("a", 200, 7, 1), ("a", 200, 70, 1), ("a", 200, 1, 1)),
    "beyond a part": (("a", 1024, 3, 1), ("a", 1024, 900, 2), ("a", 1030, 10, 1), ("a", 1024, 1200, 1)),
    "two stacks in turns": (("a", 300, 5, 1), ("b", 260, 9, 2), ("a", 300, 6, 1), ("b", 260, 2, 1), ("a", 290, 1, 1)),
    "some alone": (("a", 40, 300, 1), ("b", 500, 4, 1), ("c", 0, 90, 90), ("b", 500, 1, 1), ("a", 128, 5, 1)),
    "one shares less": (("a", 700, 2, 1), ("a", 700, 3, 1), ("a", 400, 90, 1), ("a", 130, 2, 1), ("a", 640, 1, 1)),
    "more than a block": tuple(("a", 150, 1 + at % 3, 1) for at in range(40)),
    "prompts that go on": (("a", 320, 30, 30), ("a", 320, 8, 8), ("a", 320, 4, 4), ("a", 320, 2, 1)),
}


@dataclass(frozen=True)
class Shape:
    """Of heads."""

    heads: int
    key_heads: int
    width: int
    value_width: int


SHAPES = (Shape(4, 2, 128, 128), Shape(9, 3, 64, 64), Shape(3, 3, 20, 36), Shape(32, 1, 16, 16))


def sharing(plan: Plan, shape: Shape, cells: Format, reach: AttentionRange) -> Batch:
    """A batch of sequences; their cells are tables, or slices where contiguous."""
    lengths = [shared + own for _, shared, own, _ in plan]
    prefixes = {name: max(shared for other, shared, _, _ in plan if other == name) for name, *_ in plan}
    count = sum(prefixes.values()) + sum(lengths)
    pool = batch(((count, 0),), AttentionRange(), cells, layout="runs", **batch_arguments(shape))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    starts, at = {}, 0
    for name, length in prefixes.items():
        starts[name], at = order[at : at + length], at + length
    segments, row = [], 0
    for (name, shared, own, rows), length in zip(plan, lengths, strict=True):
        table = torch.cat((starts[name][:shared], order[at : at + own]))
        start = length - rows
        first = reach.oldest_visible(start)
        segments.append(Segment(slice(row, row + rows), start, table[first:].contiguous(), first))
        row, at = row + rows, at + own
    query = torch.randn(shape.heads, row, shape.width, generator=torch.Generator().manual_seed(2))
    return replace(pool, query=query.bfloat16().float() if cells.rounds else query, segments=tuple(segments))


def batch_arguments(shape: Shape) -> dict[str, int]:
    """The arguments of `batch`."""
    return {name: getattr(shape, name) for name in ("heads", "key_heads", "width", "value_width")}


def alone(work: Batch, native: NativeAttention, reach: AttentionRange, **bend: object) -> Tensor:
    """Each sequence in a call of its own."""
    each = [replace(work, segments=(segment,)).attend(native, reach, **bend) for segment in work.segments]
    return torch.cat([one[segment.batch_slice] for one, segment in zip(each, work.segments, strict=True)])


# Every plan with a format, every format with plans.
QUICK = {*zip(PLANS, itertools.cycle(FORMATS), strict=False)}


@pytest.mark.parametrize(("plan", "cells"), quick(QUICK, itertools.product(PLANS, FORMATS)), ids=str)
def test_shared_prefixes_change_no_bit(native: NativeAttention, plan: str, cells: Format) -> None:
    """In any order; and the output is that of the reference."""
    chance = random.Random(plan)
    for shape in SHAPES:
        work = sharing(PLANS[plan], shape, cells, AttentionRange())
        softcap, sinks = chance.choice((None, 20.0)), chance.choice((None, torch.randn(shape.heads)))

        together = work.attend(native, AttentionRange(), softcap=softcap, sinks=sinks)

        assert torch.equal(alone(work, native, AttentionRange(), softcap=softcap, sinks=sinks), together)
        expected = work.expected(AttentionRange(), softcap=softcap, sinks=sinks)
        torch.testing.assert_close(together.double(), expected, rtol=0, atol=work.tolerance)


@pytest.mark.parametrize(
    "reach", [AttentionRange("window", 90), AttentionRange("chunk", 64)], ids=lambda reach: reach.kind
)
def test_windows_share_nothing(native: NativeAttention, reach: AttentionRange) -> None:
    """Their sequences see different positions."""
    work = sharing(PLANS["all of one"], SHAPES[0], FLOATS, reach)

    assert torch.equal(alone(work, native, reach), work.attend(native, reach))


@pytest.mark.parametrize("cells", [FLOATS, ROUNDS], ids=str)
@pytest.mark.parametrize("threads", [2, 3, 7])
@pytest.mark.parametrize("plan", ["beyond a part", "two stacks in turns", "more than a block"])
def test_bits_do_not_depend_on_threads(native: NativeAttention, plan: str, threads: int, cells: Format) -> None:
    """Threads change the size of stacks."""
    work = sharing(PLANS[plan], SHAPES[1], cells, AttentionRange())
    expected = work.attend(native, AttentionRange())
    torch.set_num_threads(threads)

    assert torch.equal(expected, work.attend(native, AttentionRange()))


def test_slices_and_tables_of_the_same_cells_are_shared(native: NativeAttention) -> None:
    work = sharing((("a", 300, 1, 1), ("a", 300, 1, 1)), SHAPES[0], FLOATS, AttentionRange())
    table = torch.cat((torch.arange(300), torch.tensor([330])))
    segments = (Segment(slice(0, 1), 300, slice(0, 301)), Segment(slice(1, 2), 300, table))
    mixed = replace(work, segments=segments)

    assert torch.equal(alone(mixed, native, AttentionRange()), mixed.attend(native, AttentionRange()))


def test_nan_query_affects_its_row_only(native: NativeAttention) -> None:
    work = sharing(PLANS["all of one"], SHAPES[0], FLOATS, AttentionRange())
    expected = work.attend(native, AttentionRange())
    work.query[0, 1] = torch.nan

    result = work.attend(native, AttentionRange())

    assert result[1, 0].isnan().all()
    assert torch.equal(expected[[0, 2]], result[[0, 2]])
