"""The C++ kernel multiplies what the torch operations multiply, in every variant that this processor can run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from engine.kernels import dispatch, linear
from engine.kernels.cpu import build
from engine.kernels.cpu.linear import NativeLinear
from engine.kernels.packing import Bits, PackedMatrix, pack
from tests.libraries import built

Multiply = Callable[[Tensor, Sequence[PackedMatrix]], list[Tensor]]

# What float32 totals of some dozen groups may be off by, of the greatest product.
TOLERANCE = 1e-6
# Outputs and columns, whole blocks and groups among them.
SHAPES = ((16, 32), (1, 1), (5, 7), (17, 33), (48, 64), (100, 130), (256, 512), (31, 1000))
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 23)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=build.variants("linear"))
def native(request: pytest.FixtureRequest) -> NativeLinear:
    """The kernel of each variant."""
    return NativeLinear(built("linear", request.param))


def rows(count: int, columns: int, seed: int = 0) -> Tensor:
    """Random rows, some of their columns far greater than the rest."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(count, columns, generator=generator)
    return torch.where(torch.rand(columns, generator=generator) < 0.02, 50 * numbers, numbers)


def matrix(outputs: int, columns: int, bits: Bits, seed: int = 0) -> PackedMatrix:
    """A random one."""
    return pack(torch.randn(outputs, columns, generator=torch.Generator().manual_seed(seed)), bits)


def product(multiply: Multiply, numbers: Tensor, packed: PackedMatrix) -> Tensor:
    """With one matrix."""
    [result] = multiply(numbers, [packed])
    return result


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_the_reference(native: NativeLinear, shape: tuple[int, int], bits: Bits) -> None:
    """For shapes with ends of all kinds and any number of rows, against float64."""
    packed = matrix(*shape, bits)
    for count in COUNTS:
        numbers = rows(count, shape[1], seed=count)
        expected = product(linear.multiply, numbers.double(), packed)

        actual = product(native.multiply, numbers, packed)

        assert float((actual - expected).abs().max()) <= TOLERANCE * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("bits", [8, 4])
def test_random_shapes(native: NativeLinear, bits: Bits) -> None:
    """Sixty more, of any sizes."""
    chance = random.Random(bits)
    for seed in range(60):
        outputs, columns, count = (chance.randint(1, most) for most in (90, 300, 20))
        packed, numbers = matrix(outputs, columns, bits, seed), rows(count, columns, seed)
        expected = product(linear.multiply, numbers.double(), packed)

        actual = product(native.multiply, numbers, packed)

        assert float((actual - expected).abs().max()) <= TOLERANCE * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_does_not_depend_on_its_neighbours(native: NativeLinear, bits: Bits) -> None:
    """Bit for bit the same alone, in any place among any number of rows, and whatever these are."""
    packed = matrix(75, 333, bits)
    numbers = rows(40, 333)
    alone = torch.cat([product(native.multiply, numbers[at : at + 1], packed) for at in range(40)])
    for count in range(1, 41):
        for start in (0, 40 - count):
            assert torch.equal(
                alone[start : start + count], product(native.multiply, numbers[start : start + count], packed)
            )
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    numbers[order[20:]] *= 1e6

    assert torch.equal(alone[order[:20]], product(native.multiply, numbers[order], packed)[:20])


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_that_fill_the_cache_are_met_some_at_a_time(native: NativeLinear, bits: Bits) -> None:
    """So many columns that a processor's cache does not hold all rows: each is what it is alone."""
    packed, numbers = matrix(40, 32768, bits), rows(120, 32768)
    together = product(native.multiply, numbers, packed)

    for at in range(0, 120, 7):
        assert torch.equal(product(native.multiply, numbers[at : at + 1], packed), together[at : at + 1])


@pytest.mark.parametrize("bits", [8, 4])
def test_siblings_get_what_each_gets_alone(native: NativeLinear, bits: Bits) -> None:
    """One call for several matrices is several calls, bit for bit, though they have different widths and bits."""
    some = [matrix(outputs, 96, own, seed=outputs) for outputs, own in ((64, bits), (7, 8), (40, 4), (16, bits))]
    for count in (1, 5, 17):
        numbers = rows(count, 96)

        together = native.multiply(numbers, some)

        assert [True] * 4 == [
            torch.equal(product(native.multiply, numbers, one), own) for one, own in zip(some, together, strict=True)
        ]


@pytest.mark.parametrize(("count", "columns"), [(1, 20), (1, 300), (5, 600), (19, 128), (200, 300)])
def test_threads_do_not_show(native: NativeLinear, count: int, columns: int) -> None:
    """Blocks are shared out among them whole; few rows are quantised piece by piece, many tile by tile."""
    packed, numbers = matrix(300, columns, 8), rows(count, columns)
    alone = product(native.multiply, numbers, packed)
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)

        assert torch.equal(alone, product(native.multiply, numbers, packed))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_rows_of_other_types_and_layouts(native: NativeLinear, dtype: torch.dtype) -> None:
    """They are brought to float32, and the products back to their type; rows may lie apart, or in columns."""
    packed, numbers = matrix(33, 40, 8), rows(6, 80).to(dtype)
    expected = product(native.multiply, numbers[:, :40].float().contiguous(), packed).to(dtype)

    assert torch.equal(expected, product(native.multiply, numbers[:, :40], packed))
    assert torch.equal(expected, product(native.multiply, numbers[:, :40].T.contiguous().T, packed))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_stays_alone(native: NativeLinear, wrong: float) -> None:
    """It has no product, and the others have theirs: nothing makes a number of it in silence."""
    packed, numbers = matrix(20, 70, 8), rows(10, 70)
    clean = product(native.multiply, numbers, packed)
    numbers[3, 65] = wrong

    result = product(native.multiply, numbers, packed)
    reference = product(linear.multiply, numbers, packed)

    assert not result[3].isfinite().any()
    assert not reference[3].isfinite().any()
    assert torch.equal(clean[[0, 1, 2, 4, 5, 6, 7, 8, 9]], result[[0, 1, 2, 4, 5, 6, 7, 8, 9]])


def test_numbers_near_the_ends_of_float32(native: NativeLinear) -> None:
    """Tiny groups are zero, great ones are not lost."""
    packed = pack(torch.eye(32), 8)
    numbers = torch.tensor([1e-44, 1e-37, 1e-30, 0.0, 1e38])[:, None].expand(-1, 32).contiguous()

    result = product(native.multiply, numbers, packed)

    assert torch.equal(torch.zeros(32), result[0])
    assert torch.equal(torch.zeros(32), result[3])
    torch.testing.assert_close(result[[2, 4]], numbers[[2, 4]], rtol=1e-2, atol=0)
    torch.testing.assert_close(result, product(linear.multiply, numbers, packed), rtol=1e-5, atol=0)


def test_no_rows_have_no_products(native: NativeLinear) -> None:
    """A step that wants no logits asks for none."""
    assert (0, 33) == product(native.multiply, torch.empty(0, 40), matrix(33, 40, 8)).shape


def test_rows_that_do_not_fit_are_refused(native: NativeLinear) -> None:
    """The kernel sees addresses only, so Python looks at every width first."""
    with pytest.raises(ValueError, match="rows of 39 columns do not fit"):
        native.multiply(torch.zeros(2, 39), [matrix(33, 40, 8)])


def test_rounded_rows_are_near_the_rows() -> None:
    """Each number is off by at most half a step of its group of 32, not of its row: large columns spoil few others."""
    numbers = torch.randn(4, 320, generator=torch.Generator().manual_seed(0))
    numbers[:, 7] = 1000

    error = (linear.round_rows(numbers) - numbers).abs()

    assert float(error[:, 32:].max()) < 5 / 254
    assert 1 < float(error[:, :32].max()) < 1000 / 253


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nobody has chosen a kernel yet, and nobody will remember this choice."""
    dispatch.best_linear.cache_clear()
    yield
    dispatch.best_linear.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_without_a_compiler_torch_multiplies(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line tells what that costs, however many ask."""
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "KERNELS", {"linear": {"generic": ("-changed",)}})

    assert [linear.prepare] * 2 == [dispatch.best_linear() for _ in range(2)]
    assert ["in torch instead of C++: no C++ compiler" in line for line in caplog.messages] == [True]
