"""Row-invariant products and functions: the logits of quantised models are bit for bit independent of the batch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from engine.kernels import reference
from engine.kernels.attention_input import AttentionFunction, AttentionInput
from engine.kernels.cpu.products.row_invariant import NativeProduct
from engine.kernels.products import POSITIONS, RowInvariantProduct, TiledProduct
from engine.kernels.rounding import Bits
from engine.load.check.selftest import batch_dependence
from engine.model.invariant import RowInvariant, StableTopK, UnreplacedOperations
from engine.native.runner import NativeRunner
from engine.run.runner import runners_of
from kvcache.forward import Segment
from kvcache.kv_buffer import FloatKVBuffer, LayerKV
from kvcache.spec import AttentionRange
from tests.engine.kit import invariance
from tests.engine.kit.invariance import CHECKS
from tests.engine.kit.mixes import mix, prompts
from tests.engine.kit.models import core, load_model
from tests.engine.kit.play import Job, play
from tests.engine.kit.tiny import FAMILIES
from tests.libraries import built, every_variant

pytestmark = pytest.mark.usefixtures("one_thread")

# Latent attention, layers that share cells, the sequential runner, attention beside a state space, a scan of its own,
# experts routed in groups.
ALWAYS = ("deepseek_v3", "gemma4_text", "opt", "falcon_h1", "falcon_mamba", "mpt")
# Its position bias counts from the end of a chunk.
EXCEPTIONS = {"mpt": {"batched = alone": True, "chunks": False, "prefix hit": False}}
PAGE = Path(__file__).parents[3] / "docs" / "models-checked.md"
ROWS = (1, 2, 3, 5, 8, 15, 16, 17, 33)


@pytest.fixture(params=["torch", *every_variant("linear", generic=False)])
def product(request: pytest.FixtureRequest) -> RowInvariantProduct:
    """Every implementation of row-invariant products."""
    return TiledProduct() if request.param == "torch" else NativeProduct(built("linear", request.param))


def random(*shape: int) -> Tensor:
    """Random numbers, seeded by the shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("columns", "outputs"), [(33, 17), (64, 64), (576, 130), (1000, 5), (7, 1)])
def test_product_of_a_row_does_not_depend_on_other_rows(
    product: RowInvariantProduct, columns: int, outputs: int, threads: int
) -> None:
    torch.set_num_threads(threads)
    rows, weight = random(70, columns), random(outputs, columns)
    whole = product.linear(rows, weight)

    torch.testing.assert_close(whole, rows @ weight.T, rtol=1e-5, atol=1e-5 * columns**0.5)
    for count in ROWS:
        assert torch.equal(whole[7 : 7 + count], product.linear(rows[7 : 7 + count], weight))


@pytest.mark.parametrize(("batch", "rows", "inner", "columns"), [(1, 40, 64, 90), (6, 33, 20, 70), (3, 20, 100, 33)])
def test_batched_products_do_not_depend_on_shapes(
    product: RowInvariantProduct, batch: int, rows: int, inner: int, columns: int
) -> None:
    """Rows, columns, matrices and zeros behind the inner columns change no bit."""
    left, right = random(batch, rows, inner), random(batch, inner, columns)
    whole = product.batch(left, right)

    torch.testing.assert_close(whole, left @ right, rtol=1e-5, atol=1e-4)
    for count in ROWS:
        assert torch.equal(whole[:, 3 : 3 + count], product.batch(left[:, 3 : 3 + count], right))
        assert torch.equal(whole[:1, :, :count], product.batch(left[:1], right[:1, :, :count]))
    for more in (1, 24, 64, 100):
        wider = functional.pad(left, (0, more)), torch.cat((right, random(batch, more, columns)), 1)
        assert torch.equal(whole, product.batch(*wider))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "gelu": functional.gelu,
    "gelu_tanh": lambda rows: functional.gelu(rows, approximate="tanh"),
    "softplus": functional.softplus,
    "elu": functional.elu,
    "mish": functional.mish,
    "sum": lambda rows: rows.sum(-1, keepdim=True),
    "mean": lambda rows: torch.mean(rows, -1, keepdim=True),
    "normalize": lambda rows: functional.normalize(rows, dim=-1),
    "rms_norm": lambda rows: functional.rms_norm(rows, rows.shape[-1:]),
    "softmax": lambda rows: rows.softmax(-1),
    "scaled_dot_product_attention": lambda rows: functional.scaled_dot_product_attention(
        rows[:, None], rows[:, None], rows[:, None]
    )[:, 0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_replaced_functions_are_row_invariant(name: str, dtype: torch.dtype) -> None:
    """Torch's own differ by offset and strides."""
    function, invariant = FUNCTIONS[name], RowInvariant(TiledProduct())
    for width in (7, 48, 100):
        rows = (4 * random(23, width)).to(dtype)
        others = (rows, rows.T.contiguous().T, torch.cat((rows, rows), 1)[:, width:])
        with invariant:
            whole = function(rows)
            parts = [
                torch.cat((function(own[:count]), function(own[count:])))
                for own in others
                for count in ROWS
                if count < 23
            ]

        torch.testing.assert_close(whole, function(rows), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
        for part in parts:
            assert torch.equal(whole, part)


@pytest.mark.parametrize("causal", [False, True])
def test_invariant_attention_agrees_with_torch(causal: bool) -> None:
    """Grouped heads, boolean and additive masks, and fully masked rows."""
    query, key, value = random(1, 4, 9, 16), random(1, 2, 9, 16), random(1, 2, 9, 12)
    some = torch.rand(9, 9, generator=torch.Generator().manual_seed(0)) < 0.4
    some[3] = False
    masks = [None] if causal else [None, some, torch.zeros(9, 9).masked_fill(~some, -1e9)]
    for mask in masks:
        settings = {"attn_mask": mask, "is_causal": causal, "scale": 0.3, "enable_gqa": True}
        expected = functional.scaled_dot_product_attention(query, key, value, **settings)  # type: ignore[arg-type]
        with RowInvariant(TiledProduct()):
            actual = functional.scaled_dot_product_attention(query, key, value, **settings)  # type: ignore[arg-type]

        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "attention_range", [AttentionRange(), AttentionRange("window", 20), AttentionRange("chunk", 32)]
)
def test_aligned_attention_agrees_with_the_reference(attention_range: AttentionRange) -> None:
    """Its sums start at multiples of POSITIONS, so no chunk changes a bit."""
    keys, values = (LayerKV(FloatKVBuffer(random(1, 2, 200, 8 + width)), 0) for width in (0, 1))
    keys, query = LayerKV(FloatKVBuffer(random(1, 2, 200, 8)), 0), random(4, 200, 8)

    def attend(start: int, stop: int, form: AttentionFunction) -> Tensor:
        first = attention_range.oldest_visible(start)
        segment = Segment(slice(0, stop - start), start, slice(first, stop), first)
        return form(AttentionInput(query[:, start:stop], keys, values, [segment], attention_range, 0.4))

    with RowInvariant(TiledProduct()):
        whole = attend(0, 200, reference.attend_aligned)
        cuts = (0, 1, 8, 63, 70, POSITIONS * 2, 129, 200)
        parts = [attend(*pair, reference.attend_aligned) for pair in zip(cuts, cuts[1:], strict=False)]

    torch.testing.assert_close(whole, attend(0, 200, reference.attend), rtol=1e-5, atol=1e-5)
    assert torch.equal(whole, torch.cat(parts))


@cache
def quantised(name: str, bits: Bits = 8, native: bool = True) -> invariance.Quantised:
    """The quantised model of a family."""
    return invariance.build(name, bits, native=native)


def holds(model: invariance.Quantised) -> dict[str, bool]:
    """The batch invariance checks of a family."""
    return {name: check(model) for name, check in CHECKS.items()}


@pytest.mark.filterwarnings("ignore")  # transformers warns of settings that only tiny models have
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.slow]) for name in sorted(FAMILIES)]
)
def test_quantised_family_is_batch_invariant(name: str) -> None:
    """In batches, in chunks and behind prefix hits, as docs/models-checked.md says; the check at load agrees."""
    model = quantised(name)
    expected = EXCEPTIONS.get(name, dict.fromkeys(CHECKS, True))

    assert expected == holds(model)
    assert all(expected.values()) == (batch_dependence(model.runner, model.model, model.traits) is None)


def test_models_page_has_every_family() -> None:
    """Exceptions in docs/models-checked.md are explained there."""
    table = PAGE.read_text().split("| family | int8, computed |")[1].split("\n\n")[0]
    rows = {cells[0]: cells[2:] for cells in (line.strip("| ").split(" | ") for line in table.splitlines()[2:])}

    assert sorted(FAMILIES) == sorted(rows)
    for name, cells in rows.items():
        expected = EXCEPTIONS.get(name, dict.fromkeys(CHECKS, True))
        assert expected == dict(zip(CHECKS, (cell == "PASS" for cell in cells), strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ALWAYS)
def test_int4_family_is_batch_invariant(name: str) -> None:
    assert EXCEPTIONS.get(name, dict.fromkeys(CHECKS, True)) == holds(quantised(name, 4))


@pytest.mark.parametrize("name", ["llama", "gemma2", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_torch_alone_is_batch_invariant(name: str) -> None:
    assert {check: True for check in CHECKS} == holds(quantised(name, native=False))


SHAPES = {
    "a weight": ((2, 9, 20), (20, 7)),
    "a vector": ((2, 9, 20), (20,)),
    "a matrix before": ((9, 20), (1, 20, 7)),
    "a matrix before several": ((9, 20), (3, 20, 7)),
    "one matrix for all": ((3, 9, 20), (1, 20, 7)),
    "heads": ((1, 4, 9, 20), (1, 4, 20, 7)),
    "groups of heads": ((2, 4, 9, 20), (2, 1, 20, 7)),
    "one head for all": ((2, 4, 9, 20), (1, 1, 20, 7)),
    "both are spread": ((2, 1, 9, 20), (1, 3, 20, 7)),
    "fewer dimensions": ((4, 9, 20), (2, 1, 20, 7)),
    "angles": ((1, 8, 1), (1, 1, 9)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_invariant_products_broadcast_like_torch(name: str, product: RowInvariantProduct) -> None:
    """Tensors have any strides."""
    left, right = (random(*shape) for shape in SHAPES[name])
    for other in (right, right.mT.contiguous().mT if right.dim() > 1 else right):
        with RowInvariant(product):
            actual = left @ other

        torch.testing.assert_close(actual, left @ right, rtol=1e-5, atol=1e-5)


def test_addmm_and_baddbmm_agree_with_torch(product: RowInvariantProduct) -> None:
    bias, left, right = random(7), random(9, 20), random(20, 7)
    scores, many, others = random(3, 9, 7), random(3, 9, 20), random(3, 20, 7)
    with RowInvariant(product):
        actual = torch.addmm(bias, left, right), scores.baddbmm(batch1=many, batch2=others, beta=0.5, alpha=2.0)

    torch.testing.assert_close(actual[0], bias + left @ right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual[1], 0.5 * scores + 2 * many @ others, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grouped_mm", [functional.grouped_mm, torch.ops.transformers.grouped_mm_fallback])
def test_products_of_experts_are_replaced(product: RowInvariantProduct, grouped_mm: Callable[..., Tensor]) -> None:
    """At the width of a real model: the algorithms of torch differ for long rows only."""
    rows, weights = random(12, 2048).bfloat16(), random(2, 2048, 16).bfloat16()
    ends = torch.tensor([5, 12], dtype=torch.int32)
    with torch.inference_mode(), UnreplacedOperations() as operations, RowInvariant(product):
        whole = grouped_mm(rows, weights, offs=ends)
        alone = grouped_mm(rows[4:6], weights, offs=torch.tensor([1, 2], dtype=torch.int32))

    assert not operations.names
    assert torch.equal(whole[4:6], alone)
    torch.testing.assert_close(whole[:5], rows[:5] @ weights[0], rtol=2e-2, atol=1.0)


def test_operations_outside_of_replacements_are_recorded() -> None:
    """Those of recurrences, which run token by token, are not."""
    rows = random(4, 8)
    with torch.inference_mode(), UnreplacedOperations() as operations, RowInvariant(TiledProduct()):
        functional.silu(functional.linear(rows, rows).softmax(-1)).sum(-1)
        with torch._C.DisableTorchFunction():
            torch.matmul(rows, rows.T)
        assert not operations.names
        torch.einsum("ij,kj->ik", rows, rows)

    assert operations.names == {"einsum"}


@pytest.mark.parametrize("inner", [100, 300, 700])
def test_shared_values_of_heads_ignore_trailing_zeros(product: RowInvariantProduct, inner: int) -> None:
    """Sums over positions of values shared by all heads do not depend on the number of positions."""
    weights, values = random(1, 4, 9, inner), random(1, 1, inner, 12)
    with RowInvariant(product):
        whole = weights @ values
        wider = functional.pad(weights, (0, 400)) @ torch.cat((values, random(1, 1, 400, 12)), 2)

    torch.testing.assert_close(whole, weights @ values, rtol=1e-4, atol=1e-4)
    assert torch.equal(whole, wider)


@pytest.mark.parametrize("settings", [{"quantize": "int8"}, {"quantize": "int8", "kernels": "torch"}, {}])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_load_reports_batch_invariance(family: str, settings: dict[str, str], folder: Callable[[str], Path]) -> None:
    """The native step and quantised models are batch invariant; other modules round."""
    loaded = load_model(folder(family), "float32", **settings)

    assert loaded.info.batch_invariant == (bool(settings) or isinstance(runners_of(loaded.runner)[0], NativeRunner))


def _replace_nothing(mode: RowInvariant, product: RowInvariantProduct) -> None:
    """A constructor after which torch computes as ever."""
    TorchFunctionMode.__init__(mode)
    mode._functions = {}


def test_model_that_is_not_batch_invariant_is_logged(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The capabilities report it too."""
    monkeypatch.setattr(RowInvariant, "__init__", _replace_nothing)
    with caplog.at_level(logging.WARNING, "cellar.engine"):
        loaded = load_model(folder("deepseek_v3"), "float32", quantize="int8", kernels="torch")

    assert not loaded.info.batch_invariant
    assert 1 == sum("is not batch invariant" in line for line in caplog.messages)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_int8_text_without_native_step_is_batch_invariant(kernels: str, folder: Callable[[str], Path]) -> None:
    loaded = load_model(folder("deepseek_v3"), "float32", quantize="int8", kernels=kernels)
    some = mix(1, prompts(5))
    answers = play(some.core(loaded), some.jobs)

    for job in some.jobs:
        alone = play(core(loaded, slots=1, chunk=256), [Job(job.request)])[job.request.id].tokens
        tokens = answers[job.request.id].tokens
        assert tokens == (alone if job.leaves is None else alone[: len(tokens)])


@pytest.mark.parametrize("dim", [-1, 1, 0])
@pytest.mark.parametrize("in_order", [True, False])
def test_topk_selects_the_first_of_equal_scores(dim: int, in_order: bool) -> None:
    """As a function and as a method, sorted or not."""
    chance = torch.Generator().manual_seed(0)
    for k in range(1, 8):
        scores = torch.randint(0, 4, (8, 9, 12), generator=chance).float()
        values, positions = (
            part.narrow(dim, 0, k) for part in torch.sort(scores, dim=dim, descending=True, stable=True)
        )
        with StableTopK():
            by_function = torch.topk(scores, k, dim=dim, sorted=in_order)
            by_method = scores.topk(k, dim, sorted=in_order)
        for result in (by_function, by_method):
            assert torch.equal(positions.sort(dim).values, result.indices.sort(dim).values)
            assert torch.equal(scores.gather(dim, result.indices), result.values)
            assert not in_order or torch.equal(values, result.values)


def test_topk_without_ties_is_unchanged() -> None:
    """Also with NaN scores and for the smallest scores."""
    scores = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    broken = torch.where(scores > 1.0, torch.nan, torch.zeros_like(scores))
    expected = [scores.topk(7), broken.topk(7), broken.topk(7, largest=False), torch.zeros(4).topk(0)]
    with StableTopK():
        result = [scores.topk(7), broken.topk(7), broken.topk(7, largest=False), torch.zeros(4).topk(0)]

    for right, own in zip(expected, result, strict=True):
        assert torch.equal(right.indices, own.indices)
