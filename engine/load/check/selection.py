"""Selects the runner of a model: the native step if it supports the architecture and has equal logits, else the torch
runner.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from engine.kernels.cpu.attention.attention import FORMATS
from engine.kernels.cpu.build.libraries import LibraryUnavailable
from engine.kernels.packing import PackedMatrix
from engine.load.check.selftest import ModelTraits, logit_difference
from engine.model import rope
from engine.model.margins import within
from engine.native.decoder import DecoderSpec, UnsupportedArchitecture
from engine.native.detection import find_decoder, linears
from engine.native.float32_mode import Float32Mode
from engine.native.runner import NativeRunner
from engine.native.step_library import step_library
from engine.native.weight_layout import move_weights
from engine.run.packed import PackedRunner
from engine.run.runner import FirstSupporting, LocalRunner

# Loaded once.
loaded_library = cache(step_library)

log = logging.getLogger("cellar.engine")

# Dtypes of weights that the native step reads.
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class RunnerSelection:
    """The fastest runner of a model, and the reason why it is not the native step; None: it is."""

    runner: LocalRunner
    reason: str | None = None


def select(
    model: Any,
    runner: LocalRunner,
    traits: ModelTraits,
    *,
    context: int,
    checked: bool = False,
) -> RunnerSelection:
    """Select the runner of a model in CPU memory: the native step if it can replace `runner`.

    The native step computes in float32, whatever the dtype of the weights.

    traits   the traits that `runner` was found with
    context  positions of the model
    checked  whether an earlier start compared the logits of both
    """
    try:
        runner = _require_packed(runner, traits)
        decoder, long_decoder = _decoders(model, runner, vocabulary=traits.vocabulary, context=context)
        library = loaded_library()
        move_weights(model)
        make = partial(NativeRunner, runner, decoder, library, long_decoder=long_decoder)
        native, reason = (
            make(),
            None if checked else _difference(model, runner, make(rounds_to_bfloat16=False), decoder, traits),
        )
    except (UnsupportedArchitecture, LibraryUnavailable) as error:
        log.info("layers run in torch operations, not in one native call: %s", error.reason)
        return RunnerSelection(runner, error.reason)
    if reason is not None:
        log.warning("layers run in torch operations, because %s", reason)
        return RunnerSelection(runner, reason)
    return RunnerSelection(FirstSupporting([native, runner]))


def _difference(
    model: Any, runner: PackedRunner, unrounded: NativeRunner, decoder: DecoderSpec, traits: ModelTraits
) -> str | None:
    """The error of the native step; None: its logits agree with the logits of the modules."""
    float32_traits, kv_dtype = replace(traits, dtype=torch.float32), traits.kv_dtype or traits.dtype
    # In int8 cells a small difference may change the code of a row.
    checks = {torch.float32: logit_tolerance(decoder)} | (
        {kv_dtype: max(logit_tolerance(decoder), 0.1)} if kv_dtype == torch.int8 else {}
    )
    for cell_dtype, allowed in checks.items():
        with Float32Mode(model):
            error = logit_difference(runner, unrounded, model, float32_traits, cell_dtype)
        if not within("the native step changes no logits", error, allowed):
            return f"the native step changes logits by {error:.2g}, where {allowed:.2g} is rounding"
    return None


def _require_packed(runner: LocalRunner, traits: ModelTraits) -> PackedRunner:
    """The runner, if the native step can replace it. Raises UnsupportedArchitecture."""
    kv_dtype = traits.kv_dtype or traits.dtype
    if traits.dtype not in _WEIGHT_DTYPES:
        raise UnsupportedArchitecture(f"its weights are {traits.dtype}")
    if kv_dtype not in FORMATS:
        raise UnsupportedArchitecture(f"its keys and values are stored as {kv_dtype}")
    if traits.encoder is not None:
        raise UnsupportedArchitecture("it has an encoder")
    if not isinstance(runner, PackedRunner):
        raise UnsupportedArchitecture("it runs one sequence at a time")
    if runner.mla == "expand" and any(layer.spec.latent_width for layer in runner.layers):
        raise UnsupportedArchitecture("its latents are expanded (--mla expand)")
    return runner


def _decoders(
    model: Any, runner: PackedRunner, *, vocabulary: int, context: int
) -> tuple[DecoderSpec, DecoderSpec | None]:
    """The decoder, and the decoder with the rotation beyond the original length if the context has such positions.

    Raises UnsupportedArchitecture.
    """
    original = context if runner.switch is None else runner.switch.original_length
    with Float32Mode(model):
        decoder = find_decoder(model, runner.layers, vocabulary=vocabulary, context=min(context, original))
        if runner.switch is None:
            return decoder, None
        with rope.use_long_factors():
            return decoder, find_decoder(model, runner.long_factor_layers, vocabulary=vocabulary, context=context)


def logit_tolerance(decoder: DecoderSpec) -> float:
    """Largest difference of logits, relative to the largest logit.

    The detection of the architecture compares each layer far more strictly; a misplaced layer would change logits by
    their full size. In quantised layers small differences change the codes of rows: a model of 1.2 billion random
    weights differs by 0.037. Routers choose other experts if two have nearly equal weight: random models differ by up
    to 0.14.
    """
    if not any(isinstance(linear.weight, PackedMatrix) for linear in linears(decoder)):
        return 1e-3
    return 0.25 if decoder.has_experts else 0.1
