"""Who runs a model: the native step where the model is of its shape and it says the same, else the runner as it is."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from engine.kernels.cpu import build
from engine.kernels.cpu.attention import FORMATS
from engine.kernels.cpu.build import LibraryUnavailable
from engine.kernels.packing import PackedMatrix
from engine.load.selftest import ModelTraits, logit_difference
from engine.model import rope
from engine.model.margins import within
from engine.model.runner import PackedRunner
from engine.model.sequential_runner import SequentialRunner
from engine.native.decoder import DecoderSpec, UnsupportedArchitecture
from engine.native.detection import find_decoder, linears
from engine.native.float32_mode import Float32Mode
from engine.native.runner import NativeRunner
from engine.native.step_library import StepLibrary
from engine.native.weight_layout import move_weights

log = logging.getLogger("cellar.engine")

# In what the native step finds weights.
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class RunnerSelection:
    """The fastest runner of a model, and why it is not the native step; None: it is."""

    runner: PackedRunner | SequentialRunner
    reason: str | None = None


def select(
    model: Any, runner: PackedRunner | SequentialRunner, traits: ModelTraits, *, context: int, checked: bool = False
) -> RunnerSelection:
    """Select the runner of a model in the processor's memory: the native step where it can stand for `runner`.

    The native step computes in float32, whatever the model's weights are.

    facts    those that `runner` was found with
    context  positions that the model knows
    checked  whether an earlier start compared the logits of both
    """
    try:
        runner = _require_packed(runner, traits)
        with Float32Mode(model):
            decoder, extended = _decoders(model, runner, vocabulary=traits.vocabulary, context=context)
        library = _library()
        move_weights(model)
        make = partial(NativeRunner, runner, decoder, library, extended=extended)
        native, reason = make(), None if checked else _difference(model, runner, make(rounds=False), decoder, traits)
    except (UnsupportedArchitecture, LibraryUnavailable) as error:
        log.info("layers run in torch operations, not in one native call: %s", error.reason)
        return RunnerSelection(runner, error.reason)
    if reason is not None:
        log.warning("layers run in torch operations, for %s", reason)
        return RunnerSelection(runner, reason)
    return RunnerSelection(native)


def _difference(
    model: Any, runner: PackedRunner, unrounded: NativeRunner, decoder: DecoderSpec, traits: ModelTraits
) -> str | None:
    """What the native step does wrong; None: its logits are those of the modules."""
    exact, stored = replace(traits, dtype=torch.float32), traits.kv_dtype or traits.dtype
    # Where a row is rounded to 8 bits in its cell, a code may fall the other way.
    checks = {torch.float32: _tolerance(decoder)} | (
        {stored: max(_tolerance(decoder), 0.1)} if stored == torch.int8 else {}
    )
    for kind, allowed in checks.items():
        with Float32Mode(model):
            size = logit_difference(runner, unrounded, model, exact, kind)
        if not within("the native step changes no logits", size, allowed):
            return f"the native step changes logits by {size:.2g}, where {allowed:.2g} is rounding"
    return None


def _require_packed(runner: PackedRunner | SequentialRunner, traits: ModelTraits) -> PackedRunner:
    """The runner that the native step can stand for. Raises UnsupportedArchitecture."""
    stored = traits.kv_dtype or traits.dtype
    if traits.dtype not in _WEIGHT_DTYPES:
        raise UnsupportedArchitecture(f"its weights are {traits.dtype}")
    if stored not in FORMATS:
        raise UnsupportedArchitecture(f"its keys and values are stored as {stored}")
    if traits.encoder is not None:
        raise UnsupportedArchitecture("it has an encoder")
    if not isinstance(runner, PackedRunner):
        raise UnsupportedArchitecture("it runs one sequence at a time")
    if not runner.layers:
        raise UnsupportedArchitecture("it stores no keys and values")
    return runner


def _decoders(
    model: Any, runner: PackedRunner, *, vocabulary: int, context: int
) -> tuple[DecoderSpec, DecoderSpec | None]:
    """The decoder, and as it turns beyond the original length if there are such positions. Raises UnsupportedArchitecture."""
    original = context if runner.switch is None else runner.switch.original_length
    decoder = find_decoder(model, runner.layers, vocabulary=vocabulary, context=min(context, original))
    if runner.switch is None:
        return decoder, None
    with rope.extending():
        return decoder, find_decoder(model, runner.extended_layers, vocabulary=vocabulary, context=context)


def _tolerance(decoder: DecoderSpec) -> float:
    """How far logits may differ, in parts of the largest: where rows are quantised, codes may fall the other way.

    The parts were compared far more strictly before; here a part in the wrong place would show, which changes most of a
    logit. 1.2 billion random weights differ by 0.037. Routers choose other experts where two are wanted all but
    equally: random models differ by up to 0.14 so.
    """
    if not any(isinstance(linear.weight, PackedMatrix) for linear in linears(decoder)):
        return 1e-3
    return 0.25 if any(mlp.experts is not None for _, mlp in decoder.layers) else 0.1


@cache
def _library() -> StepLibrary:
    """Raises LibraryUnavailable."""
    variants = build.variants("step")
    if not variants:
        raise LibraryUnavailable("it needs AVX2 or AVX-512, which this processor has not")
    file = build.library("step", variants[0])
    try:
        return StepLibrary(file)
    except OSError as error:
        raise LibraryUnavailable(f"the library cannot be loaded: {error}") from error
