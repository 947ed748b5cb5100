"""Quantises the layers of a loaded model, or repacks them from its GGUF file."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from engine.config import BUNDLED_NAME, EngineConfig
from engine.errors import ModelUnsupported
from engine.gguf.matrices import FileMatrices
from engine.kernels import dispatch, linear
from engine.kernels.linear import PrepareMatrices
from engine.kernels.rounding import Bits
from engine.load.resources import release_freed_memory
from engine.load.selftest import default_attention
from engine.quantize.calibration import CalibrationText, calibrate, read_text
from engine.quantize.plan import QuantizationPlan
from engine.quantize.quantize import bits_for, quantize, repack
from engine.quantize.store import WeightStore
from engine.text.tokenizer import Tokenizer

log = logging.getLogger("cellar.engine")


@dataclass(frozen=True, slots=True)
class LayersToQuantize:
    """The layers of a model to replace.

    plan      None: the settings exclude quantisation
    matrices  those of the model's GGUF file if layers keep its formats
    identity  of the original weights
    """

    model: Any
    plan: QuantizationPlan | None
    matrices: FileMatrices | None
    identity: str


@dataclass(frozen=True, slots=True)
class QuantizedLayers:
    """The weights of the replaced layers.

    format  name of their format; None: no layer is replaced
    key     of further dependencies of the weights, such as a calibration text
    """

    format: str | None = None
    key: str = ""


def quantize_layers(
    config: EngineConfig, layers: LayersToQuantize, available_bytes: int, tokenizer: Future[Tokenizer]
) -> QuantizedLayers:
    """Replace the layers of a plan by the settings. Raises ModelUnsupported."""
    if layers.plan is None:
        return QuantizedLayers()
    bits = None if layers.matrices is not None else bits_for(config.quantize, layers.plan, available_bytes)
    if layers.matrices is None and bits is None:
        return QuantizedLayers()
    prepare = linear.prepare if config.kernels == "torch" else dispatch.best_linear()
    if prepare is linear.prepare:
        log.warning(_without_kernels(config, layers.matrices))
    try:
        if layers.matrices is not None:
            quantised = _repack(layers.model, layers.plan, layers.matrices, prepare)
        else:
            assert bits is not None
            quantised = _quantize(config, layers, bits, prepare, tokenizer)
    except ValueError as error:
        raise ModelUnsupported(config.model or BUNDLED_NAME, f"its weights cannot be quantised: {error}") from error
    _release_files(layers.model)
    return quantised


def _without_kernels(config: EngineConfig, matrices: FileMatrices | None) -> str:
    """The cost of quantised weights that torch multiplies (measured with int8), and the settings that avoid it."""
    weights = f"--quantize {config.quantize}" if matrices is None else f"{matrices.label} weights"
    others = "without --quantize" if matrices is None else "with --dtype float32 or bfloat16"
    return f"{weights} without compiled kernels: decoding is about 8 times slower than {others}, prompts 3 times"


def _repack(model: Any, plan: QuantizationPlan, matrices: FileMatrices, prepare: PrepareMatrices) -> QuantizedLayers:
    if matrices.deferred is not None:
        matrices.deferred.close(matrices.exact_parameters(model, plan))
        release_freed_memory()
    plan = matrices.limit(plan)
    repack(model, plan, matrices.embedding(model, plan), matrices, prepare, label=matrices.label)
    matrices.log_loss()
    return QuantizedLayers(matrices.label)


def _quantize(
    config: EngineConfig, layers: LayersToQuantize, bits: Bits, prepare: PrepareMatrices, tokenizer: Future[Tokenizer]
) -> QuantizedLayers:
    model, plan = layers.model, layers.plan
    assert plan is not None
    text = CalibrationText(read_text(config.calibration), lambda part: tokenizer.result().encode(part))
    store = WeightStore(layers.identity if bits == 8 else f"{layers.identity} {text.digest}", bits)
    quantize(model, plan, store, prepare, lambda: calibrate(model, plan, text, default_attention(model)))
    # The formats of int4 weights depend on the calibration text, and cells on them.
    return QuantizedLayers(f"int{bits}", store.key if bits == 4 else "")


def _release_files(model: Any) -> None:
    """Copy the remaining weights: one small tensor in a mapped file would keep the whole file mapped."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
