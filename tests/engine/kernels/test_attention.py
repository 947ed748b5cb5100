"""The C++ attention kernel equals the float64 reference, in each variant that this processor runs."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import cycle, product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.attention_input import AttentionInput
from engine.kernels.cpu.attention.attention import KernelBuffer, NativeAttention
from kvcache.forward import Segment
from kvcache.kv_buffer import FloatKVBuffer, Int8KVBuffer, KVBuffer, LayerKV, allocate_kv_buffers
from kvcache.spec import AttentionRange, GroupSpec
from tests.selection import quick

# The error of float32 sums of a few thousand terms of size 1; stored formats are exact in float64 on both sides.
TOLERANCE = 3e-6
# With softmax weights rounded to bfloat16, each by up to 1/512, for values of size 4.
ROUNDED = 8e-3
REACHES = (
    AttentionRange(),
    AttentionRange("window", 1),
    AttentionRange("window", 70),
    AttentionRange("window", 4000),
    AttentionRange("chunk", 64),
    AttentionRange("chunk", 7),
)
WIDTHS = (1, 5, 8, 12, 16, 24, 40, 64, 72, 80, 128, 192)
# (rows, start) of sequences that share a batch.
BATCHES = (
    ((1, 0),),
    ((1, 300), (1, 63), (1, 64), (1, 1100)),
    ((4, 500), (1, 0), (2, 62), (16, 1020)),
    ((70, 0), (1, 130), (65, 60)),
)


pytestmark = pytest.mark.usefixtures("one_thread")


class Format(NamedTuple):
    """The KV dtype of a pool, and whether the kernel may round to bfloat16."""

    stored: torch.dtype
    rounds: bool = False

    def __str__(self) -> str:
        return f"{self.stored}".removeprefix("torch.") + ("-rounded" if self.rounds else "")


FLOATS, ROUNDS = Format(torch.float32), Format(torch.bfloat16, rounds=True)
FORMATS = (FLOATS, Format(torch.bfloat16), ROUNDS, Format(torch.int8))


@dataclass(frozen=True)
class Batch:
    """A packed batch and its pool; cells of no sequence are NaN."""

    query: Tensor
    keys: KVBuffer
    values: KVBuffer
    segments: tuple[Segment, ...]
    rounds: bool = False

    @property
    def tolerance(self) -> float:
        """The maximum error of a row."""
        return ROUNDED if self.rounds else TOLERANCE

    def inputs(self, attention_range: AttentionRange, **options: Any) -> AttentionInput:
        """The input of attention, from layer 1 of two."""
        keys, values, scale = LayerKV(self.keys, 1), LayerKV(self.values, 1), self.query.shape[-1] ** -0.5
        return AttentionInput(self.query, keys, values, self.segments, attention_range, scale, **options)

    def attend(self, native: NativeAttention, attention_range: AttentionRange, **options: Any) -> Tensor:
        """The output of the kernel."""
        inputs = self.inputs(attention_range, **options)
        if self.rounds:
            assert isinstance(self.keys, FloatKVBuffer)
            assert isinstance(self.values, FloatKVBuffer)
            own = [KernelBuffer(rows[1], None, rows.shape[-1]) for rows in (self.keys.rows, self.values.rows)]
            return native.attend_float32(inputs, self.query, *own, rounds_to_bfloat16=True)
        return native.attend(inputs)

    def expected(self, attention_range: AttentionRange, **options: Any) -> Tensor:
        """The output of the reference in float64."""
        options = {name: own.double() if isinstance(own, Tensor) else own for name, own in options.items()}
        return reference.attend(replace(self.inputs(attention_range, **options), query=self.query.double()))


def batch(
    plan: tuple[tuple[int, int], ...],
    attention_range: AttentionRange,
    cells: Format,
    *,
    heads: int,
    key_heads: int,
    width: int,
    value_width: int,
    layout: str,
    seed: int = 0,
) -> Batch:
    """Random content. The layout of cells: "runs", "permuted" over the pool, or "shared" by all sequences."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [start + rows - attention_range.oldest_visible(start) for rows, start in plan]
    count = sum(lengths) + 9
    order = torch.randperm(count, generator=generator)
    segments, row, at = [], 0, 0
    for (rows, start), length in zip(plan, lengths, strict=True):
        begin = 0 if layout == "shared" else at
        own = slice(at, at + length) if layout == "runs" else order[begin : begin + length].contiguous()
        segments.append(Segment(slice(row, row + rows), start, own, attention_range.oldest_visible(start)))
        row, at = row + rows, at + length
    spec = GroupSpec(key_heads, width, value_width, attention_range, (0, 1), (None, None))
    keys, values = allocate_kv_buffers(spec, count, cells.stored, torch.device("cpu"))
    for buffer in (keys, values):
        fill_with_nan(buffer)
        for segment in segments:
            length = segment.start + segment.batch_slice.stop - segment.batch_slice.start - segment.oldest_visible
            buffer.write(1, segment.cells, torch.randn(key_heads, length, buffer.width, generator=generator))
    query = torch.randn(row, heads, width, generator=generator).transpose(0, 1)
    # Rounded here, so that the reference gets the same queries.
    query = query.bfloat16().float() if cells.rounds else query
    return Batch(query, keys, values, tuple(segments), cells.rounds)


def fill_with_nan(buffer: KVBuffer) -> None:
    assert isinstance(buffer, FloatKVBuffer | Int8KVBuffer)
    (buffer.scales if isinstance(buffer, Int8KVBuffer) else buffer.rows).fill_(torch.nan)


@pytest.mark.parametrize(
    ("attention_range", "cells"),
    quick([*zip(REACHES, cycle(FORMATS), strict=False)], product(REACHES, FORMATS)),
    ids=str,
)
def test_kernel_equals_reference(native: NativeAttention, attention_range: AttentionRange, cells: Format) -> None:
    """Random shapes, cell tables, group sizes, softcaps and sinks."""
    chance = random.Random(f"{attention_range}{cells}")
    for seed, plan in enumerate(BATCHES * 2):
        key_heads, group = chance.choice((1, 2, 3)), chance.choice((1, 2, 3, 4, 5, 8))
        width, value_width = chance.choice(WIDTHS), chance.choice(WIDTHS)
        layout = chance.choice(("runs", "permuted", "shared"))
        work = batch(
            plan,
            attention_range,
            cells,
            heads=key_heads * group,
            key_heads=key_heads,
            width=width,
            value_width=value_width,
            layout=layout,
            seed=seed,
        )
        sinks = torch.randn(key_heads * group) if chance.random() < 0.5 else None
        softcap = chance.choice((None, 0.5, 30.0))

        result = work.attend(native, attention_range, softcap=softcap, sinks=sinks)

        expected = work.expected(attention_range, softcap=softcap, sinks=sinks)
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=work.tolerance)


@pytest.mark.parametrize("cells", [FLOATS, ROUNDS], ids=str)
@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize(
    "attention_range",
    [AttentionRange(), AttentionRange("window", 1500)],
    ids=lambda attention_range: attention_range.kind,
)
def test_bits_do_not_depend_on_threads(
    native: NativeAttention, attention_range: AttentionRange, threads: int, cells: Format
) -> None:
    """Few blocks are cut into parts for more threads."""
    work = batch(
        ((1, 3000), (3, 1000)),
        attention_range,
        cells,
        heads=4,
        key_heads=1,
        width=64,
        value_width=64,
        layout="permuted",
    )
    alone = work.attend(native, attention_range)
    torch.set_num_threads(threads)

    assert torch.equal(alone, work.attend(native, attention_range))


@pytest.mark.parametrize("cells", [FLOATS, ROUNDS], ids=str)
def test_bits_of_one_sequence_do_not_depend_on_threads(native: NativeAttention, cells: Format) -> None:
    """The queries of one token are cut into a block for each thread."""
    work = batch(
        ((1, 700),), AttentionRange(), cells, heads=40, key_heads=1, width=72, value_width=64, layout="permuted"
    )
    alone = work.attend(native, AttentionRange())
    for threads in (2, 3, 5):
        torch.set_num_threads(threads)
        assert torch.equal(alone, work.attend(native, AttentionRange()))


@pytest.mark.parametrize("cells", [FLOATS, ROUNDS], ids=str)
def test_bits_do_not_depend_on_block_size(native: NativeAttention, cells: Format) -> None:
    """Blocks of a prompt are smaller with more threads."""
    whole = batch(
        ((500, 40),), AttentionRange(), cells, heads=4, key_heads=1, width=72, value_width=40, layout="permuted"
    )
    expected = whole.attend(native, AttentionRange())
    (segment,) = whole.segments
    alone = replace(whole, segments=(replace(segment, batch_slice=slice(497, 500), start=537),))

    assert torch.equal(expected[497:], alone.attend(native, AttentionRange())[497:])
    for threads in (2, 5):
        torch.set_num_threads(threads)
        assert torch.equal(expected, whole.attend(native, AttentionRange()))


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("cells", [FLOATS, ROUNDS], ids=str)
def test_running_maximum_grows_slowly_or_at_once(native: NativeAttention, cells: Format, rows: int) -> None:
    """The softmax state is scaled at each new maximum."""
    work = batch(
        ((rows, 1400),), AttentionRange(), cells, heads=2, key_heads=1, width=64, value_width=64, layout="runs"
    )
    work.query[:] = work.query.abs()
    length = rows + 1400
    size = torch.cat((torch.linspace(0, 4, length - 200), torch.linspace(4, 12, 200)))
    work.keys.write(1, slice(0, length), size.reshape(1, length, 1).expand(1, length, 64).contiguous())

    result = work.attend(native, AttentionRange())

    torch.testing.assert_close(result.double(), work.expected(AttentionRange()), rtol=0, atol=3 * work.tolerance)


@pytest.mark.parametrize("width", [40, 64, 128])
@pytest.mark.parametrize("cells", FORMATS, ids=str)
@pytest.mark.parametrize(
    "attention_range",
    [AttentionRange(), AttentionRange("window", 90), AttentionRange("chunk", 50)],
    ids=lambda attention_range: attention_range.kind,
)
def test_bits_do_not_depend_on_chunks_or_batch(
    native: NativeAttention, attention_range: AttentionRange, cells: Format, width: int
) -> None:
    """A prompt in one forward, in several, or beside other sequences."""
    length = 150
    whole = batch(
        ((length, 0),), attention_range, cells, heads=6, key_heads=2, width=width, value_width=width, layout="permuted"
    )
    expected = whole.attend(native, attention_range)
    (segment,) = whole.segments
    assert isinstance(segment.cells, Tensor)
    cut, cuts = [], (0, 1, 2, 10, 75, 76, 149, length)
    for start, stop in zip(cuts, cuts[1:], strict=False):
        first = attention_range.oldest_visible(start)
        cut.append(Segment(slice(start, stop), start, segment.cells[first:stop].contiguous(), first))
    chunked = replace(whole, segments=tuple(reversed(cut)))

    assert torch.equal(expected, chunked.attend(native, attention_range))


@pytest.mark.parametrize("cells", FORMATS, ids=str)
def test_single_row_has_the_bits_of_its_prompt(native: NativeAttention, cells: Format) -> None:
    """Few lines are computed by other code than many."""
    length = 1100
    whole = batch(
        ((length, 0),), AttentionRange(), cells, heads=3, key_heads=1, width=72, value_width=20, layout="runs"
    )
    expected = whole.attend(native, AttentionRange())

    for row in (0, 1, 63, 64, 127, 700, 1023, 1024, length - 1):
        alone = replace(whole, segments=(Segment(slice(row, row + 1), row, slice(0, row + 1)),))
        assert torch.equal(expected[row], alone.attend(native, AttentionRange())[row])


@pytest.mark.parametrize("cells", [FLOATS, ROUNDS], ids=str)
def test_denormals_have_the_same_bits_for_few_and_many_lines(native: NativeAttention, cells: Format) -> None:
    """bfloat16 pair products flush denormals to zero."""
    whole = batch(((60, 200),), AttentionRange(), cells, heads=3, key_heads=1, width=64, value_width=64, layout="runs")
    for buffer in (whole.keys, whole.values):
        buffer.write(1, slice(0, 260), 1e-20 * torch.logspace(0, -20, 260)[None, :, None] * torch.randn(1, 260, 64))
    whole.query[:30] *= 1e-18
    expected = whole.attend(native, AttentionRange())

    for row in (0, 17, 40, 59):
        alone = replace(whole, segments=(Segment(slice(row, row + 1), 200 + row, slice(0, 201 + row)),))
        assert torch.equal(expected[row], alone.attend(native, AttentionRange())[row])


@pytest.mark.parametrize("rows", [1, 30])
def test_rounded_softmax_weights_add_up_to_one(native: NativeAttention, rows: int) -> None:
    """They are rounded before they are summed: equal values are the output."""
    work = batch(((rows, 50),), AttentionRange(), ROUNDS, heads=2, key_heads=1, width=64, value_width=64, layout="runs")
    work.values.write(1, slice(0, rows + 50), torch.full((1, rows + 50, 64), 3.0))

    torch.testing.assert_close(work.attend(native, AttentionRange()), torch.full((rows, 2, 64), 3.0), rtol=0, atol=1e-5)


def test_float32_queries_are_not_rounded(native: NativeAttention) -> None:
    """Over bfloat16 cells too."""
    work = batch(((3, 400),), AttentionRange(), ROUNDS, heads=2, key_heads=1, width=64, value_width=64, layout="runs")
    exact = replace(work, rounds=False).attend(native, AttentionRange())
    half = replace(work, rounds=False, query=work.query.bfloat16()).attend(native, AttentionRange())

    torch.testing.assert_close(exact.double(), work.expected(AttentionRange()), rtol=0, atol=TOLERANCE)
    assert torch.equal(work.attend(native, AttentionRange()).bfloat16(), half)


def test_no_rows_give_no_output(native: NativeAttention) -> None:
    """A batch without segments, and a segment without rows."""
    work = batch(((1, 5),), AttentionRange(), FLOATS, heads=2, key_heads=1, width=8, value_width=16, layout="runs")
    empty = Batch(work.query[:, :0], work.keys, work.values, ())
    idle = Batch(work.query, work.keys, work.values, (Segment(slice(0, 0), 3, slice(0, 3)), *work.segments))

    assert empty.attend(native, AttentionRange()).shape == (0, 2, 16)
    assert torch.equal(work.attend(native, AttentionRange()), idle.attend(native, AttentionRange()))


def test_output_has_the_dtype_of_queries(native: NativeAttention) -> None:
    """float64 is computed by the reference."""
    work = batch(
        ((3, 5),), AttentionRange(), Format(torch.bfloat16), heads=2, key_heads=1, width=8, value_width=8, layout="runs"
    )
    half = Batch(work.query.bfloat16(), work.keys, work.values, work.segments)
    double = Batch(work.query.double(), work.keys, work.values, work.segments)

    assert half.attend(native, AttentionRange()).dtype == torch.bfloat16
    assert torch.equal(double.attend(native, AttentionRange()), work.expected(AttentionRange()))


def test_bias_is_computed_by_the_reference(native: NativeAttention) -> None:
    work = batch(((3, 5),), AttentionRange(), FLOATS, heads=2, key_heads=1, width=8, value_width=8, layout="runs")

    def bias(rows: int, before: int) -> Tensor:
        return torch.arange(before + rows, dtype=torch.float64).expand(2, rows, -1)

    result = work.attend(native, AttentionRange(), bias=lambda rows, before: bias(rows, before).float())

    torch.testing.assert_close(result.double(), work.expected(AttentionRange(), bias=bias), rtol=0, atol=TOLERANCE)


def test_bidirectional_ranges_are_computed_by_the_reference(native: NativeAttention) -> None:
    work = batch(((6, 5),), AttentionRange(), FLOATS, heads=2, key_heads=1, width=8, value_width=8, layout="runs")
    (segment,) = work.segments
    mutual = Batch(work.query, work.keys, work.values, (replace(segment, bidirectional=((6, 10),)),))

    result = mutual.attend(native, AttentionRange())

    torch.testing.assert_close(result.double(), mutual.expected(AttentionRange()), rtol=0, atol=TOLERANCE)
    assert not torch.equal(result, work.attend(native, AttentionRange()))


@pytest.mark.parametrize("cells", [FLOATS, ROUNDS], ids=str)
def test_nan_query_affects_its_row_only(native: NativeAttention, cells: Format) -> None:
    work = batch(((3, 5), (1, 9)), AttentionRange(), cells, heads=2, key_heads=1, width=8, value_width=8, layout="runs")
    clean = work.attend(native, AttentionRange())
    work.query[0, 1] = torch.nan

    result = work.attend(native, AttentionRange())

    assert result[1, 0].isnan().all()
    assert torch.equal(result[[0, 2, 3]], clean[[0, 2, 3]])
    assert torch.equal(result[1, 1], clean[1, 1])


@pytest.mark.parametrize("cell", [-1, 10_000])
def test_cell_outside_the_pool_is_refused(native: NativeAttention, cell: int) -> None:
    """A hole, or a cell that does not exist."""
    work = batch(((1, 5),), AttentionRange(), FLOATS, heads=2, key_heads=1, width=8, value_width=8, layout="permuted")
    assert isinstance(work.segments[0].cells, Tensor)
    work.segments[0].cells[2] = cell

    with pytest.raises(IndexError, match="outside the pool"):
        work.attend(native, AttentionRange())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 1, 16)}, "queries are as wide as keys"),
        ({"query": torch.zeros(3, 1, 8)}, "multiple of key heads"),
        ({"query": torch.zeros(2, 0, 8)}, "segments are in the batch"),
        ({"segments": (Segment(slice(0, 1), 5, slice(0, 5)),)}, "tables end with the rows"),
        ({"segments": (Segment(slice(0, 1), 5, torch.zeros(5, dtype=torch.int64)),)}, "tables end with the rows"),
        ({"segments": (Segment(slice(0, 1), 5, torch.zeros(6, dtype=torch.int32)),)}, "tables end with the rows"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(native: NativeAttention, change: dict[str, object], message: str) -> None:
    """The kernel gets addresses only, so Python checks the shapes."""
    work = batch(((1, 5),), AttentionRange(), FLOATS, heads=4, key_heads=2, width=8, value_width=8, layout="runs")
    wrong = Batch(**{"query": work.query, "keys": work.keys, "values": work.values, "segments": work.segments} | change)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=message):
        wrong.attend(native, AttentionRange())


def test_sinks_must_have_one_number_a_head(native: NativeAttention) -> None:
    work = batch(((1, 5),), AttentionRange(), FLOATS, heads=4, key_heads=2, width=8, value_width=8, layout="runs")

    with pytest.raises(ValueError, match="every head has a sink"):
        work.attend(native, AttentionRange(), sinks=torch.zeros(3))
