"""Quantised experts: the survey, agreement with the original, quantisation error and memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations import use_experts_implementation

from engine.kernels import dispatch, linear
from engine.kernels.linear import PrepareMatrices
from engine.kernels.packing import PackedMatrix
from engine.kernels.rounding import Bits, pack_floats
from engine.quantize import quantize, quantizer, store
from engine.quantize.experts import QuantizedExperts
from engine.quantize.plan import LayerSurvey, QuantizationPlan
from engine.quantize.stacks import experts_of
from engine.quantize.store import WeightStore
from tests.engine.kit.models import load_model

Folder = Callable[[str], Path]
EXPERTS, WIDTH, COLUMNS = 5, 48, 64
# Flags of transformers' interface: matrices to the right of rows, biases, gates, norms.
KINDS = ((False, False, True, False), (True, True, True, False), (False, False, False, True), (True, False, True, True))

pytestmark = pytest.mark.usefixtures("one_thread")


def experts(kind: tuple[bool, bool, bool, bool], width: int = WIDTH, columns: int = COLUMNS) -> nn.Module:
    """Random experts of transformers' interface."""
    transposed, has_bias, gated, normed = kind
    inner, outputs = "gate_up_proj" if gated else "up_proj", (1 + gated) * width

    class Own(nn.Module):
        def __init__(self, config: object) -> None:
            super().__init__()
            self.act_fn, self.post_expert_norm = nn.SiLU(), nn.RMSNorm(columns)
            for name, rows, row in ((inner, outputs, columns), ("down_proj", columns, width)):
                shape = (row, rows) if transposed else (rows, row)
                setattr(self, name, nn.Parameter(torch.randn(EXPERTS, *shape) / row**0.5, requires_grad=False))
                if has_bias:
                    setattr(self, f"{name}_bias", nn.Parameter(torch.randn(EXPERTS, rows), requires_grad=False))

    torch.manual_seed(0)
    decorate = use_experts_implementation(
        is_transposed=transposed, has_bias=has_bias, has_gate=gated, has_post_expert_norm=normed
    )
    quantised: nn.Module = decorate(Own)(SimpleNamespace(_experts_implementation="batched_mm"))
    return quantised.requires_grad_(False)


class Model(nn.Module):
    """Two layers with experts, one of them unused, and a router."""

    def __init__(self, kind: tuple[bool, bool, bool, bool] = KINDS[0]) -> None:
        super().__init__()
        self.router, self.first, self.unused = nn.Linear(COLUMNS, EXPERTS), experts(kind), experts(kind)

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [count, COLUMNS]."""
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        quantised: Tensor = self.first(rows, chosen, weights)
        return quantised


def surveyed(model: nn.Module) -> QuantizationPlan:
    """The plan of a survey during a run of the model."""
    survey = LayerSurvey(model)
    model(torch.randn(3, COLUMNS))
    return survey.close()


def lost(expected: Tensor, actual: Tensor) -> float:
    """The relative error."""
    return float((actual - expected).norm() / expected.norm())


def quantized(module: nn.Module, bits: Bits, prepare: PrepareMatrices = linear.prepare) -> QuantizedExperts:
    """The quantised replacement of experts."""
    model = nn.Sequential(module)
    survey = LayerSurvey(model)
    columns = one.down.weight.shape[1] if (one := experts_of(module)) is not None else 0
    module(torch.zeros(1, columns), *_chosen(1))
    quantize.quantize(model, survey.close(), WeightStore("a", bits), prepare)
    quantised = model[0]
    assert isinstance(quantised, QuantizedExperts)
    return quantised


def _chosen(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    weights, chosen = torch.rand(rows, EXPERTS, generator=generator).topk(2)
    return chosen, weights


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("bits", "allowed"), [(8, 0.025), (4, 0.18)])
def test_quantised_experts_approximate_the_original(
    kind: tuple[bool, bool, bool, bool], bits: Bits, allowed: float
) -> None:
    """In every layout of transformers, also without rows."""
    module, rows, chosen = experts(kind), torch.randn(40, COLUMNS), _chosen(40)
    expected = module(rows, *chosen)

    quantised = quantized(module, bits)

    assert lost(expected, quantised(rows, *chosen)) < allowed
    assert (0, COLUMNS) == quantised(rows[:0], *(one[:0] for one in chosen)).shape
    assert [] == [parameter for parameter in quantised.parameters() if parameter.dim() == 3]


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1]], ids=str)
def test_parts_of_experts_have_the_same_products(kind: tuple[bool, bool, bool, bool]) -> None:
    """Gate and up projections in a matrix each, with biases too."""
    module, rows, chosen = experts(kind), torch.randn(40, COLUMNS), _chosen(40)
    own = experts_of(module)
    assert own is not None
    divided = replace(own, up=replace(own.up, parts=2))
    down = [pack_floats(weight, 8) for weight in own.down.matrices]

    whole, parts = (
        QuantizedExperts(each, [pack_floats(weight, 8) for weight in each.up.matrices], down, linear.prepare)
        for each in (own, divided)
    )

    assert (EXPERTS, 2 * EXPERTS) == (len(whole.up), len(parts.up))
    assert torch.equal(whole(rows, *chosen), parts(rows, *chosen))


def test_expert_index_beyond_all_experts_adds_nothing() -> None:
    """Routers mark unused ranks this way."""
    quantised, rows, (chosen, weights) = quantized(experts(KINDS[0]), 8), torch.randn(6, COLUMNS), _chosen(6)
    expected = quantised(rows, chosen[:, :1], weights[:, :1])
    chosen[:, 1] = EXPERTS

    assert torch.equal(expected, quantised(rows, chosen, weights))


@pytest.mark.parametrize("bits", [8, 4])
def test_expert_output_of_a_row_is_batch_invariant(bits: Bits) -> None:
    """Bit for bit with the C++ kernel."""
    quantised = quantized(experts(KINDS[0]), bits, dispatch.best_linear())
    rows, (chosen, weights) = torch.randn(30, COLUMNS), _chosen(30)
    expected = quantised(rows, chosen, weights)

    for start, stop in ((0, 1), (7, 8), (3, 20), (29, 30)):
        assert torch.equal(expected[start:stop], quantised(rows[start:stop], chosen[start:stop], weights[start:stop]))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("share", [0.0, 0.02])
def test_expert_quantisation_error_is_that_of_dense_layers(bits: Bits, share: float) -> None:
    """With and without outlier columns, 50 times as large."""
    module = experts(KINDS[0], width=256, columns=256)
    inner, down = (getattr(module, name)[0].clone() for name in ("gate_up_proj", "down_proj"))
    large = torch.rand(256, generator=torch.Generator().manual_seed(1)) < share
    rows = torch.where(large, 50.0, 1.0) * torch.randn(64, 256, generator=torch.Generator().manual_seed(2))
    chosen, weights = torch.zeros(64, 1, dtype=torch.long), torch.ones(64, 1)
    expected = module(rows, chosen, weights)
    gate, up = linear.multiply(rows, [pack_floats(inner, bits)])[0].chunk(2, -1)
    dense = linear.multiply(functional.silu(gate) * up, [pack_floats(down, bits)])[0]

    assert lost(expected, quantized(module, bits)(rows, chosen, weights)) <= 1.01 * lost(expected, dense)
    assert lost(expected, dense) < (0.06 if bits == 8 else 0.25)


def test_survey_finds_called_experts() -> None:
    """Experts that are not called are not quantised."""
    found = surveyed(model := Model())

    assert ["first"] == list(found.experts)
    assert EXPERTS * 3 * WIDTH * COLUMNS == found.weights - sum(layer.weight.numel() for layer in found.layers)
    quantize.quantize(model, found, WeightStore("a", 8), linear.prepare)
    assert isinstance(model.first, QuantizedExperts)
    assert not isinstance(model.unused, QuantizedExperts)


def test_auto_quantisation_counts_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "best_linear", lambda: lambda matrices: None)
    found = surveyed(Model())
    many = QuantizationPlan((), found.skipped, {str(at): found.experts["first"] for at in range(2**11)})

    assert 2**25 < many.weights
    assert [None, 8, 4] == [
        quantize.bits_for("auto", one, room) for one, room in ((found, 2**40), (many, 2**40), (many, 1))
    ]


def test_expert_weights_are_freed_one_parameter_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the down projections are packed, all up projections are freed."""
    model, has_up_projection = Model(), list[bool]()

    def packed(weight: Tensor, *others: object) -> PackedMatrix:
        has_up_projection.append(getattr(model.first, "gate_up_proj", None) is not None)
        return pack_floats(weight, *others)  # type: ignore[arg-type]

    found = surveyed(model)
    monkeypatch.setattr(quantizer, "pack_floats", packed)
    own = model.first
    quantize.quantize(model, QuantizationPlan((), found.skipped, found.experts), WeightStore("a", 8), linear.prepare)

    assert [True] * EXPERTS + [False] * EXPERTS == has_up_projection
    assert {} == dict(own.named_parameters(recurse=False))


def test_bytes_of_counts_quantised_experts() -> None:
    """Codes, scales, biases, routers and other weights."""
    model = Model(KINDS[1])
    found = surveyed(model)
    quantize.quantize(model, QuantizationPlan((), found.skipped, found.experts), WeightStore("a", 4), linear.prepare)
    packed = [*model.first.up, *model.first.down]  # type: ignore[misc]

    assert 2 * EXPERTS == len(packed)
    packed_bytes = sum(one.codes.nbytes + one.scales.nbytes for one in packed)
    assert sum(one.nbytes for one in model.parameters()) + packed_bytes == quantize.bytes_of(model)


def test_quantised_experts_are_reused_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MIN_BYTES", 0)
    first, second = Model(), Model()
    second.load_state_dict(first.state_dict())
    quantize.quantize(first, surveyed(first), WeightStore("a", 4, tmp_path), linear.prepare)
    monkeypatch.setattr(quantizer, "pack_fitted", lambda *_: pytest.fail("it was there"))

    quantize.quantize(second, surveyed(second), WeightStore("a", 4, tmp_path), linear.prepare)

    rows = torch.randn(5, COLUMNS)
    assert torch.equal(first(rows), second(rows))


@pytest.mark.parametrize(
    ("family", "summary"), [("qwen3_next", "the experts of 4 layers"), ("llama4", "weights of experts")]
)
def test_log_summary_counts_experts(
    folder: Folder, caplog: pytest.LogCaptureFixture, family: str, summary: str
) -> None:
    """Quantised ones, and experts in an unsupported layout."""
    with caplog.at_level(logging.INFO, "cellar.engine"):
        loaded = load_model(folder(family), "float32", quantize="int8")

    assert summary in caplog.text
    assert (family == "qwen3_next") == any(isinstance(one, QuantizedExperts) for one in loaded.model.modules())
