"""The C++ linear kernel equals the torch reference, in each variant that this processor runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from engine.kernels import dispatch, linear
from engine.kernels.cpu.build import libraries
from engine.kernels.cpu.products.linear import NativeLinear
from engine.kernels.formats import LAYOUTS, WeightFormat
from engine.kernels.packing import PackedMatrix, pack
from engine.kernels.rounding import pack_floats
from tests.engine.kernels.weights import random_matrix, random_rows
from tests.libraries import built, every_variant
from tests.selection import quick

Multiply = Callable[[Tensor, Sequence[PackedMatrix]], list[Tensor]]

# The error of float32 totals of some dozen groups, relative to the largest product. Minimums are twice the terms.
TOLERANCE, MINIMUMS_TOLERANCE = 1e-6, 2e-6
# (outputs, columns), with and without whole blocks and groups.
SHAPES = ((16, 32), (1, 1), (5, 7), (17, 33), (48, 64), (100, 130), (256, 512), (31, 1000))
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 23)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=every_variant("linear"))
def native(request: pytest.FixtureRequest) -> NativeLinear:
    """The kernel of each variant."""
    return NativeLinear(built("linear", request.param))


def rows(count: int, columns: int, seed: int = 0) -> Tensor:
    """Random rows with some large columns."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(count, columns, generator=generator)
    return torch.where(torch.rand(columns, generator=generator) < 0.02, 50 * numbers, numbers)


def matrix(outputs: int, columns: int, format: WeightFormat, seed: int = 0) -> PackedMatrix:
    """A random matrix."""
    return random_matrix(format, outputs, columns, seed)


def is_close(expected: Tensor, actual: Tensor, format: WeightFormat) -> bool:
    """Whether products differ by the rounding of float32 totals only."""
    tolerance = MINIMUMS_TOLERANCE if LAYOUTS[format].has_minimums else TOLERANCE
    return float((actual - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))


def product(multiply: Multiply, numbers: Tensor, packed: PackedMatrix) -> Tensor:
    """The product with one matrix."""
    [result] = multiply(numbers, [packed])
    return result


@pytest.mark.parametrize("format", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_equal_the_reference(native: NativeLinear, shape: tuple[int, int], format: WeightFormat) -> None:
    """Against float64, for sizes that are no multiples of blocks and groups."""
    packed = matrix(*shape, format)
    for count in COUNTS:
        numbers = rows(count, shape[1], seed=count)
        expected = product(linear.multiply, numbers.double(), packed)

        actual = product(native.multiply, numbers, packed)

        assert is_close(expected, actual, format)


@pytest.mark.parametrize("format", LAYOUTS)
def test_random_shapes(native: NativeLinear, format: WeightFormat) -> None:
    chance = random.Random(format)
    for seed in range(30):
        outputs, columns, count = (chance.randint(1, most) for most in (90, 300, 20))
        packed, numbers = matrix(outputs, columns, format, seed), rows(count, columns, seed)
        expected = product(linear.multiply, numbers.double(), packed)

        actual = product(native.multiply, numbers, packed)

        assert is_close(expected, actual, format)


@pytest.mark.parametrize("format", LAYOUTS)
def test_bits_of_a_row_do_not_depend_on_the_batch(native: NativeLinear, format: WeightFormat) -> None:
    packed = matrix(75, 333, format)
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


# One of each kind of scales.
@pytest.mark.parametrize("format", quick(("int8", "q4_1", "q4_k", "q6_k"), LAYOUTS))
def test_rows_larger_than_the_cache_keep_their_bits(native: NativeLinear, format: WeightFormat) -> None:
    packed, numbers = matrix(40, 32768, format), rows(120, 32768)
    together = product(native.multiply, numbers, packed)

    for at in range(0, 120, 7):
        assert torch.equal(product(native.multiply, numbers[at : at + 1], packed), together[at : at + 1])


def test_matrices_of_all_formats_in_one_call(native: NativeLinear) -> None:
    """Each with the bits of its own call."""
    outputs = (64, 7, 40, 16)
    some = [matrix(outputs[at % 4], 296, format, seed=at) for at, format in enumerate(LAYOUTS)]
    for count in (1, 5, 17, 40):
        numbers = rows(count, 296)

        together = native.multiply(numbers, some)

        for one, own in zip(some, together, strict=True):
            assert torch.equal(product(native.multiply, numbers, one), own)


@pytest.mark.parametrize("format", ["int8", "q4_k", "q6_k"])
@pytest.mark.parametrize(("count", "columns"), [(1, 20), (1, 300), (5, 600), (19, 128), (200, 300)])
def test_bits_do_not_depend_on_threads(native: NativeLinear, format: WeightFormat, count: int, columns: int) -> None:
    packed, numbers = matrix(300, columns, format), rows(count, columns)
    alone = product(native.multiply, numbers, packed)
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)

        assert torch.equal(alone, product(native.multiply, numbers, packed))


@pytest.mark.slow
@pytest.mark.parametrize("format", LAYOUTS)
def test_all_variants_have_the_same_bits(format: WeightFormat) -> None:
    """Where multiplications and additions are fused: in all but the generic one."""
    kernels = [NativeLinear(built("linear", name)) for name in libraries.variants("linear") if name != "generic"]
    packed = matrix(75, 333, format)
    for count in (1, 7, 40):
        results = [product(kernel.multiply, rows(count, 333, seed=count), packed) for kernel in kernels]

        assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_rows_of_other_dtypes_and_layouts(native: NativeLinear, dtype: torch.dtype) -> None:
    """Products have the dtype of the rows."""
    packed, numbers = matrix(33, 40, "int8"), rows(6, 80).to(dtype)
    expected = product(native.multiply, numbers[:, :40].float().contiguous(), packed).to(dtype)

    assert torch.equal(expected, product(native.multiply, numbers[:, :40], packed))
    assert torch.equal(expected, product(native.multiply, numbers[:, :40].T.contiguous().T, packed))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_row_affects_itself_only(native: NativeLinear, wrong: float) -> None:
    packed, numbers = matrix(20, 70, "int8"), rows(10, 70)
    clean = product(native.multiply, numbers, packed)
    numbers[3, 65] = wrong

    result = product(native.multiply, numbers, packed)
    reference = product(linear.multiply, numbers, packed)

    assert not result[3].isfinite().any()
    assert not reference[3].isfinite().any()
    assert torch.equal(clean[[0, 1, 2, 4, 5, 6, 7, 8, 9]], result[[0, 1, 2, 4, 5, 6, 7, 8, 9]])


def test_numbers_near_the_limits_of_float32(native: NativeLinear) -> None:
    """Groups of denormals are zero, large numbers are kept."""
    packed = pack_floats(torch.eye(32), 8)
    numbers = torch.tensor([1e-44, 1e-37, 1e-30, 0.0, 1e38])[:, None].expand(-1, 32).contiguous()

    result = product(native.multiply, numbers, packed)

    assert torch.equal(torch.zeros(32), result[0])
    assert torch.equal(torch.zeros(32), result[3])
    torch.testing.assert_close(result[[2, 4]], numbers[[2, 4]], rtol=1e-2, atol=0)
    torch.testing.assert_close(result, product(linear.multiply, numbers, packed), rtol=1e-5, atol=0)


@pytest.mark.parametrize("format", LAYOUTS)
def test_extreme_scales(native: NativeLinear, format: WeightFormat) -> None:
    """The largest, the smallest subnormal and zero, of both signs, as scales of outputs."""
    own, count = random_rows(format, 40, 300), 14
    rows_of_scales = own.scales if own.super_scales is None else own.super_scales
    largest = 2.0**100 if rows_of_scales.dtype == torch.bfloat16 else 65504.0
    for at, scale in enumerate((largest, -largest, 2.0**-24, -(2.0**-24), 2.0**-15, 0.0, -0.0)):
        rows_of_scales[at] = scale
    numbers = rows(count, 300)
    sizes = numbers.double().abs() @ own.unpack(torch.float64).abs().T
    expected = product(linear.multiply, numbers.double(), pack(own))
    for some in (count, 1):
        actual = product(native.multiply, numbers[:some], pack(own))

        assert bool(((actual - expected[:some]).abs() <= TOLERANCE * sizes[:some]).all())


@pytest.mark.parametrize("format", LAYOUTS)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_rows_of_zeros_and_non_finite_rows(native: NativeLinear, format: WeightFormat, wrong: float) -> None:
    packed, numbers = matrix(40, 70, format), rows(20, 70)
    clean = product(native.multiply, numbers, packed)
    numbers[3, 65], numbers[7] = wrong, 0

    result = product(native.multiply, numbers, packed)

    assert not result[3].isfinite().any()
    assert torch.equal(torch.zeros(40), result[7])
    assert torch.equal(clean[8:], result[8:])


def test_no_rows_give_no_products(native: NativeLinear) -> None:
    assert (0, 33) == product(native.multiply, torch.empty(0, 40), matrix(33, 40, "int8")).shape


def test_rows_of_another_width_are_refused(native: NativeLinear) -> None:
    with pytest.raises(ValueError, match="rows of 39 columns do not fit"):
        native.multiply(torch.zeros(2, 39), [matrix(33, 40, "int8")])


def test_rounding_error_of_rows() -> None:
    """At most half a step of the group of 32."""
    numbers = torch.randn(4, 320, generator=torch.Generator().manual_seed(0))
    numbers[:, 7] = 1000

    error = (linear.round_rows(numbers) - numbers).abs()

    assert float(error[:, 32:].max()) < 5 / 254
    assert 1 < float(error[:, :32].max()) < 1000 / 253


@pytest.fixture
def fresh() -> Iterator[None]:
    """Clear the cached choice of kernels."""
    dispatch.best_linear.cache_clear()
    yield
    dispatch.best_linear.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_torch_multiplies_without_a_compiler(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With one warning in the log."""
    monkeypatch.setattr(libraries, "PREBUILT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    changed = dict.fromkeys(libraries.KERNELS["linear"], ("-changed",))
    monkeypatch.setattr(libraries, "KERNELS", {"linear": changed})

    assert [linear.prepare] * 2 == [dispatch.best_linear() for _ in range(2)]
    assert ["in torch instead of C++: no C++ compiler" in line for line in caplog.messages] == [True]
