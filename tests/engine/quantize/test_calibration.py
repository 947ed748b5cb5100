"""Statistics over a calibration text, and weights quantised with them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from engine.config import ConfigError, EngineConfig
from engine.kernels.packing import PackedStorage
from engine.load.load import load
from engine.model import hooks
from engine.quantize import store
from engine.quantize.calibration import CalibrationText, LayerStatistics, calibrate, read_text
from engine.quantize.plan import LayerSurvey, QuantizationPlan
from engine.quantize.quantizer import Quantizer, planned_matrices

Folder = Callable[[str], Path]
WORDS = "".join(chr(97 + number % 26) for number in range(2000))


def encode(text: str) -> list[int]:
    """A token for each letter, at most 90 of a part."""
    return [5 + (ord(letter) * at) % 200 for at, letter in enumerate(text[:90])]


def planned(folder: Path) -> tuple[Any, QuantizationPlan]:
    """A model in float32, and the plan for it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    survey = LayerSurvey(model)
    with torch.inference_mode():
        model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)
    return model, survey.close()


def calibrated(folder: Path) -> tuple[Any, QuantizationPlan, dict[str, LayerStatistics]]:
    """The model, its plan and the statistics."""
    model, plan = planned(folder)
    return (
        model,
        plan,
        dict(calibrate(model, plan, CalibrationText(WORDS, encode), hooks.use_attention(model, "eager"))),
    )


def test_every_layer_has_statistics(folder: Folder) -> None:
    """Of inputs with a mean square of 1, shared by layers with the same input."""
    model, plan, found = calibrated(folder("llama"))

    assert {layer.name for layer in plan.layers} == set(found)
    for group in plan.groups:
        assert 1 == len({id(found[layer.name].inputs) for layer in group})
    for layer in plan.layers:
        own = found[layer.name]
        assert own.sensitivity is not None
        assert layer.weight.shape == (len(own.sensitivity), own.inputs.shape[1])
        torch.testing.assert_close(own.inputs.float().square().mean(-1), torch.ones(len(own.inputs)), rtol=0.02, atol=0)
    assert all(not parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_expected_divergence_is_near_the_measured_one(folder: Folder) -> None:
    """Noise in the weights of one layer changes the predictions as its statistics say, within a factor of 3."""
    model, plan, found = calibrated(folder("llama"))
    sequences = [torch.tensor([tokens]) for tokens in CalibrationText(WORDS, encode).sequences()]
    generator = torch.Generator().manual_seed(0)

    for layer in plan.layers[:4] + plan.layers[-1:]:
        noise = 0.02 * layer.weight.std() * torch.randn(layer.weight.shape, generator=generator)
        own = found[layer.name]
        assert own.sensitivity is not None
        errors = (own.inputs.float() @ noise.T).square().mean(0)
        expected = float(own.sensitivity @ errors)
        measured = [divergence(model, layer.module, noise, tokens) for tokens in sequences]

        assert expected / 3 < sum(measured) / len(measured) < 3 * expected


def divergence(model: Any, module: nn.Module, noise: torch.Tensor, tokens: torch.Tensor) -> float:
    """Mean divergence in nats of the predictions with noise in the weights of a layer."""
    scores = []
    with torch.inference_mode():
        for sign in (1, -1):
            scores.append(model(input_ids=tokens, use_cache=False).logits[0].double().log_softmax(-1))
            module.weight += sign * noise
    return float(functional.kl_div(scores[1], scores[0], reduction="sum", log_target=True)) / tokens.numel()


def test_experts_have_the_statistics_of_their_inputs(folder: Folder) -> None:
    """Their down projections have none, and more bits instead."""
    _, plan, found = calibrated(folder("qwen3_next"))
    quantizer = Quantizer(4, plan, found)

    for name in plan.experts:
        assert found[name].sensitivity is None
    for matrix in planned_matrices(plan):
        if matrix.statistics is None or matrix.statistics in plan.experts:
            assert ("q5_k" if matrix.statistics is None else "q4_k") == quantizer.formats[matrix.name]


def test_a_model_that_fails_is_quantised_without_statistics(
    folder: Folder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plan = planned(folder("llama"))
    attention = model.config._attn_implementation
    monkeypatch.setattr(type(model), "forward", _raise)
    found = calibrate(model, plan, CalibrationText(WORDS, encode), hooks.use_attention(model, "eager"))

    assert {} == found
    assert "without a calibration (RuntimeError: no text alone)" in caplog.text
    assert attention == model.config._attn_implementation
    assert {"q5_k"} == set(Quantizer(4, plan, found).formats.values())


def _raise(*_: object, **__: object) -> None:
    raise RuntimeError("no text alone")


def test_statistics_are_the_same_every_time(folder: Folder) -> None:
    first, second = (calibrated(folder("llama"))[2] for _ in range(2))

    assert all(torch.equal(first[name].inputs, second[name].inputs) for name in first)
    assert all(torch.equal(first[name].sensitivity, second[name].sensitivity) for name in first)  # type: ignore[arg-type]


def test_built_in_text_has_parts_of_equal_length() -> None:
    """Enough of them for four sequences of 256 tokens, with 5 letters a token."""
    text = CalibrationText(read_text(None), lambda part: list(range(len(part) // 5)))

    assert [256] * 4 == [len(tokens) for tokens in text.sequences()]


def test_formats_are_stored_with_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A second start needs no calibration; another text has weights and an identity of its own."""
    monkeypatch.setattr(store, "MIN_BYTES", 0)
    monkeypatch.setattr(store, "cache_folder", lambda kind: tmp_path / kind)
    own = tmp_path / "text.txt"
    own.write_text("def f(x):\n    return [x * y for y in range(x)]\n" * 100, encoding="utf-8")
    settings: dict[str, Any] = {"context": 256, "slots": 1, "quantize": "int4"}
    with caplog.at_level(logging.INFO, "cellar.engine"):
        first = load(EngineConfig(**settings), lambda phase: None)
        other = load(EngineConfig(**settings, calibration=str(own)), lambda phase: None)
        monkeypatch.setattr("engine.load.layers.calibrate", lambda *_: pytest.fail("it was stored"))
        second = load(EngineConfig(**settings), lambda phase: None)

    assert first.identity == second.identity != other.identity
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        logits = [one.model(input_ids=tokens, use_cache=False).logits for one in (first, second)]
    assert torch.equal(*logits)
    assert 2 == len(list((tmp_path / "weights").iterdir()))
    bits = [float(line.split("int4: ")[1].split(" bits")[0]) for line in caplog.messages if " bits a weight" in line]
    assert 3 == len(bits)
    assert all(4.6 < each <= 5.2 for each in bits)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xff", b" \n"], ids=["missing", "binary", "empty"])
def test_unreadable_calibration_text_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(ConfigError, match=r"calibration .*text\.txt (cannot be read as UTF-8 text|is empty)"):
        EngineConfig(calibration=str(file))


def test_an_important_direction_is_rounded_better(folder: Folder) -> None:
    """Weights quantised with statistics lose less of the outputs than without, on the same inputs."""
    _, plan, found = calibrated(folder("llama"))
    quantizers = [Quantizer(4, plan, found), Quantizer(4, plan, {})]
    quantizers[1].formats = quantizers[0].formats
    lost = [0.0, 0.0]
    for layer in plan.layers:
        for number, quantizer in enumerate(quantizers):
            storage = PackedStorage([(*layer.weight.shape, quantizer.formats[layer.name])])
            wrong = quantizer.quantize(layer.name, layer.weight, storage).unpack(torch.float32) - layer.weight
            outputs = found[layer.name].inputs.float() @ wrong.T
            lost[number] += math.log(float(outputs.square().mean()))

    assert lost[0] < lost[1] - 0.1 * len(plan.layers)
