"""Storage formats: errors of stored rows and sizes of cells."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kvcache.cache import Cache
from kvcache.kv_buffer import HadamardInt8KVBuffer, Int8KVBuffer, KVBuffer, LayerKV, allocate_kv_buffers
from kvcache.rotary import rotate
from kvcache.spec import AttentionRange, GroupSpec, LayerSpec, Rotation, Span

HEADS, CELLS, WIDTH = 3, 64, 128
FORMATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8]
KINDS = [Int8KVBuffer, HadamardInt8KVBuffer]
ROTATION = Rotation("half", 0, tuple(10000.0 ** (-at / 64) for at in range(64)))


def draw(seed: int, *shape: int, outliers: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random rows with four outlier columns, twelve times as large as the others."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(shape, generator=generator, dtype=dtype)
    rows[..., torch.randperm(shape[-1], generator=generator)[:outliers]] *= 12
    return rows


def int8(kind: type[Int8KVBuffer], *parts: int, heads: int = HEADS, cells: int = CELLS) -> Int8KVBuffer:
    """An empty buffer of one layer."""
    codes = torch.zeros(1, heads, cells, sum(parts), dtype=torch.int8)
    return kind(codes, torch.zeros(1, heads, cells, len(parts)), parts)


def through(buffer: KVBuffer, rows: Tensor) -> Tensor:
    """Rows after a write and a read, in float64."""
    cells = slice(0, rows.shape[1])
    buffer.write(0, cells, rows)
    return buffer.transform(buffer.read(0, cells, torch.float64))


def samples() -> Iterator[Tensor]:
    """Rows of many sizes: with outlier columns, constant, zero."""
    for seed, outliers in enumerate((0, 1, 4, 64)):
        sizes = torch.tensor([1e-30, 1e-6, 1e-3, 1.0, 7.0, 1e4, 1e30, 0.0])[torch.arange(CELLS) % 8]
        yield draw(seed, HEADS, CELLS, WIDTH, outliers=outliers) * sizes[:, None]
    yield torch.ones(HEADS, CELLS, WIDTH)


@pytest.mark.parametrize("kind", KINDS)
def test_int8_error_is_at_most_half_a_scale(kind: type[Int8KVBuffer]) -> None:
    for rows in samples():
        buffer = int8(kind, WIDTH)
        buffer.write(0, slice(0, CELLS), rows)
        spread = buffer.transform(rows).double()
        error = (buffer.read(0, slice(0, CELLS), torch.float64) - spread).abs()
        scale = buffer.scales[0].double()

        assert bool((error <= scale / 2 * (1 + 1e-4)).all())
        torch.testing.assert_close(scale, spread.abs().amax(-1, keepdim=True) / 127, rtol=1e-6, atol=1.2e-38)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_quantised_rows_ignore_their_neighbours(kind: type[Int8KVBuffer], dtype: torch.dtype) -> None:
    rows = draw(1, HEADS, CELLS, WIDTH, outliers=4).to(dtype)
    together, single, scattered = (int8(kind, WIDTH) for _ in range(3))
    together.write(0, slice(0, CELLS), rows)
    for at in range(CELLS):
        single.write(0, slice(at, at + 1), rows[:, at : at + 1])
    scattered.write(0, torch.arange(CELLS).flip(0), rows.flip(1))

    for name, tensor in together.tensors.items():
        assert torch.equal(tensor, single.tensors[name])
        assert torch.equal(tensor, scattered.tensors[name])


def test_each_part_has_its_own_scale() -> None:
    rotated = draw(2, 1, CELLS, 16)
    errors = []
    for size in (1.0, 1000.0):
        rows = torch.cat((size * draw(3, 1, CELLS, 48), rotated), -1)
        errors.append(
            float((through(int8(HadamardInt8KVBuffer, 48, 16, heads=1), rows)[..., 48:] - rotated).abs().max())
        )

    assert errors[0] == pytest.approx(errors[1], rel=1e-3)
    assert errors[0] < 0.03


def test_transformed_queries_and_keys_give_the_same_scores() -> None:
    for parts in ((48, 16), (WIDTH,)):
        buffer = int8(HadamardInt8KVBuffer, *parts)
        query, keys = (draw(seed, HEADS, 5, sum(parts), dtype=torch.float64) for seed in (4, 5))
        first = buffer.transform(keys)[..., : parts[0]]

        torch.testing.assert_close(
            buffer.transform(query) @ buffer.transform(keys).mT, query @ keys.mT, rtol=0, atol=1e-12
        )
        torch.testing.assert_close(buffer.transform(first), keys[..., : parts[0]], rtol=0, atol=1e-12)


def test_values_that_are_not_finite_read_back_as_nan() -> None:
    for broken in (float("nan"), float("inf")):
        rows = draw(6, HEADS, 3, WIDTH)
        rows[:, 1, 7] = broken
        back = through(int8(HadamardInt8KVBuffer, WIDTH), rows)

        assert not bool(back[:, 1].isfinite().any())
        assert bool(back[:, ::2].isfinite().all())


def attention(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, weights and outputs."""
    scores = query @ keys.mT / query.shape[-1] ** 0.5
    weights = scores.softmax(-1)
    return scores, weights, weights @ values


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outliers", [0, 4])
def test_attention_error_is_within_the_bounds(kind: type[Int8KVBuffer], outliers: int) -> None:
    """Scores by query and half a scale, weights by tanh(eps / 2), outputs by both."""
    query, keys, values = (
        draw(seed, HEADS, CELLS, WIDTH, outliers=columns, dtype=torch.float64)
        for seed, columns in ((7, 0), (8, outliers), (9, 0))
    )
    buffer = int8(kind, WIDTH)
    read, kept = through(buffer, keys), through(int8(Int8KVBuffer, WIDTH), values)
    scores, weights, output = attention(query, keys, values)
    other_scores, other_weights, other_output = attention(query, read, kept)
    error = (other_scores - scores).abs()
    variation = (other_weights - weights).abs().sum(-1) / 2
    lost = (other_output - output).norm(dim=-1)
    longest = values.norm(dim=-1).amax(-1, keepdim=True)
    rounded = (kept - values).norm(dim=-1).amax(-1, keepdim=True)

    assert bool((error <= query.norm(dim=-1)[..., None] * buffer.scales[0, :, None, :, 0] / 2 * 1.0001).all())
    assert bool((variation <= torch.tanh(error.amax(-1) / 2)).all())
    assert bool((lost <= 2 * variation * longest + rounded).all())


def test_the_transform_reduces_the_error_of_outlier_columns() -> None:
    query, keys, values = (
        draw(seed, 8, 512, WIDTH, outliers=columns, dtype=torch.float64) for seed, columns in ((7, 0), (8, 4), (9, 0))
    )
    _, weights, _ = attention(query, keys, values)
    distances, variations = [], []
    for kind in KINDS:
        read = through(int8(kind, WIDTH, heads=8, cells=512), keys)
        distances.append(float((read - keys).norm() / keys.norm()))
        variations.append(float((attention(query, read, values)[1] - weights).abs().sum(-1).mean() / 2))

    assert distances[0] > 3 * distances[1]
    assert variations[0] > 3 * variations[1]
    assert distances[1] < 6e-3
    assert variations[1] < 7e-3


@pytest.mark.parametrize("stored", FORMATS)
def test_rows_are_read_in_the_requested_dtype(stored: torch.dtype) -> None:
    spec = GroupSpec(HEADS, WIDTH, 32, AttentionRange(), (0, 1), (ROTATION, ROTATION))
    near = {torch.int8: 2e-2, torch.bfloat16: 4e-3, torch.float16: 5e-4}.get(stored, 1e-6)
    for buffer in allocate_kv_buffers(spec, CELLS, stored, torch.device("cpu")):
        rows, scattered = draw(1, HEADS, CELLS, buffer.width), torch.randperm(CELLS)
        buffer.write(1, scattered, rows)
        for dtype in (torch.float32, torch.float64):
            read = LayerKV(buffer, 1).read(scattered, dtype)
            assert dtype == read.dtype
            torch.testing.assert_close(LayerKV(buffer, 1).transform(read).float(), rows, rtol=0, atol=near * 5)
            assert torch.equal(read, LayerKV(buffer, 1).read(slice(0, CELLS), dtype)[:, scattered])
        assert not LayerKV(buffer, 0).read(slice(0, CELLS), torch.float32).any()


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize(("key", "value", "latent"), [(128, 128, 0), (64, 32, 0), (576, 0, 512)])
def test_cell_bytes_equal_the_allocated_bytes(stored: torch.dtype, key: int, value: int, latent: int) -> None:
    spec = GroupSpec(2, key, value, AttentionRange(), (0, 1, 2), (ROTATION,) * 3, latent)
    both = allocate_kv_buffers(spec, CELLS, stored, torch.device("cpu"))
    taken = sum(tensor.nbytes for buffer in both for tensor in buffer.tensors.values())

    assert taken == CELLS * spec.cell_bytes(stored)
    if stored == torch.int8:
        assert 0.25 < spec.cell_bytes(stored) / spec.cell_bytes(torch.float32) < 0.28


@pytest.mark.parametrize(("stored", "most"), [(torch.int8, 0.025), (torch.bfloat16, 0.01), (torch.float16, 1.5e-3)])
def test_key_error_after_sixteen_shifts_is_small(stored: torch.dtype, most: float) -> None:
    layer = LayerSpec(HEADS, WIDTH, 4, AttentionRange(), ROTATION)
    cache = Cache([layer], slots=2, capacity=CELLS, cells=2 * CELLS, dtype=stored)
    keys = draw(3, HEADS, CELLS, WIDTH, outliers=4)
    with cache.forward([Span(0, 0, CELLS)]) as forward:
        forward.store_kv(0, keys, draw(4, HEADS, CELLS, 4))
    cache.copy_prefix(0, 1, CELLS)
    group, own = cache.layer_group(0)
    saved = group.pool.save(group.table(1))
    for _ in range(16):
        cache.shift(0, 1, 2)
    expected = rotate(keys[:, 33:].double(), -32, ROTATION)
    buffer = group.pool.keys
    read = buffer.transform(buffer.read(own, torch.from_numpy(group.table(0)[1:].copy()), torch.float64))

    assert float((read - expected).norm() / expected.norm()) < most
    assert all(torch.equal(tensor, saved[name]) for name, tensor in group.pool.save(group.table(1)).items())
    shifted = group.pool.save(group.table(0)[1:]).items()
    values = {name: tensor for name, tensor in shifted if name.startswith("values")}
    assert all(torch.equal(tensor, saved[name][:, :, 33:]) for name, tensor in values.items())
