"""Quantises the layers of a loaded model, or repacks them from its GGUF file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from engine.config import BUNDLED_NAME, EngineConfig
from engine.errors import ModelUnsupported
from engine.gguf.matrices import FileMatrices
from engine.kernels import dispatch, linear
from engine.kernels.linear import PrepareMatrices
from engine.kernels.rounding import Bits
from engine.load.machine.resources import release_freed_memory
from engine.model import hooks
from engine.quantize.calibration import CalibrationText, LayerStatistics, calibrate, read_text
from engine.quantize.plan import QuantizationPlan
from engine.quantize.quantize import bits_for, bytes_of, quantize, repack
from engine.quantize.store import WeightStore
from engine.text.tokenizer import Tokenizer

log = logging.getLogger("cellar.engine")


@dataclass(frozen=True, slots=True)
class LayersToQuantize:
    """A model in CPU memory, some layers of which are to be replaced.

    matrices         those of the model's GGUF file if layers keep its formats
    identity         of the original weights
    dtype            of the activations
    available_bytes  of memory for the model on its device
    tokenizer        of the model, for the calibration
    """

    model: Any
    matrices: FileMatrices | None
    identity: str
    dtype: torch.dtype
    available_bytes: int
    tokenizer: Future[Tokenizer]


@dataclass(frozen=True, slots=True)
class QuantizedLayers:
    """The weights of the replaced layers.

    format  name of their format; None: no layer is replaced
    key     of further dependencies of the weights, such as a calibration text
    """

    format: str | None = None
    key: str = ""


def quantize_layers(config: EngineConfig, layers: LayersToQuantize, plan: QuantizationPlan | None) -> QuantizedLayers:
    """Replace the layers of a plan by the settings; the matrices are on the device of the settings.

    plan  None: the settings exclude quantisation

    Raises ModelUnsupported.
    """
    if plan is None:
        return QuantizedLayers()
    bits = None if layers.matrices is not None else _bits(config, layers, plan)
    if layers.matrices is None and bits is None:
        return QuantizedLayers()
    prepare = _products(config, layers.dtype)
    if prepare is linear.prepare:
        log.warning(_without_kernels(config, layers.matrices))
    try:
        if layers.matrices is not None:
            quantised = _repack(layers.model, plan, layers.matrices, prepare)
        else:
            assert bits is not None
            quantised = _quantize(config, layers, plan, bits, prepare)
    except ValueError as error:
        raise ModelUnsupported(config.model or BUNDLED_NAME, f"its weights cannot be quantised: {error}") from error
    if config.device == "cpu":
        _release_files(layers.model)
    return quantised


def _bits(config: EngineConfig, layers: LayersToQuantize, plan: QuantizationPlan) -> Bits | None:
    stored_bytes = bytes_of(layers.model)
    bits = bits_for(config.quantize, plan, layers.available_bytes, device=config.device, stored_bytes=stored_bytes)
    if config.quantize == "auto" and config.device != "cpu":
        log.info("--quantize auto: weights are %s on %s", "as stored" if bits is None else f"int{bits}", config.device)
    return bits


def _products(config: EngineConfig, dtype: torch.dtype) -> PrepareMatrices:
    """The products of quantised matrices."""
    if config.device != "cpu":
        return dispatch.device_products(dtype, config.device, one_tile=config.batch_invariant)
    return linear.prepare if config.kernels == "torch" else dispatch.best_linear()


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
    repack(model, plan, matrices.embeddings(model, plan), matrices, prepare, label=matrices.label)
    matrices.pack_latents(model)
    matrices.log_loss()
    return QuantizedLayers(matrices.label)


def _quantize(
    config: EngineConfig, layers: LayersToQuantize, plan: QuantizationPlan, bits: Bits, prepare: PrepareMatrices
) -> QuantizedLayers:
    model = layers.model
    text = CalibrationText(read_text(config.calibration), lambda part: layers.tokenizer.result().encode(part))
    store = WeightStore(layers.identity if bits == 8 else f"{layers.identity} {text.digest}", bits)
    quantize(model, plan, store, prepare, lambda: _calibrate(model, plan, text))
    # The formats of int4 weights depend on the calibration text, and cells on them.
    return QuantizedLayers(f"int{bits}", store.key if bits == 4 else "")


def _calibrate(model: Any, plan: QuantizationPlan, text: CalibrationText) -> Mapping[str, LayerStatistics]:
    return calibrate(model, plan, text, hooks.use_attention(model, hooks.default_attention(model)))


def _release_files(model: Any) -> None:
    """Copy the remaining weights: one small tensor in a mapped file would keep the whole file mapped."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
