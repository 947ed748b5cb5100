"""Who runs a model: the native step where the model is of its shape and it says the same, else the runner as it is."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from engine.kernels.cpu import build
from engine.kernels.cpu.build import NoLibrary
from engine.kernels.cpu.native import FORMATS
from engine.kernels.packing import Packed
from engine.load.selftest import Facts, difference
from engine.model import rope
from engine.model.margins import within
from engine.model.runner import Runner
from engine.model.sequential_runner import GatheringRunner
from engine.native.decoder import Decoder, NoShape
from engine.native.library import Library
from engine.native.placing import place
from engine.native.runner import NativeRunner
from engine.native.shape import find_decoder, linears
from engine.native.widening import Widened

log = logging.getLogger("cellar.engine")

# In what the native step finds weights.
_KNOWN = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Selection:
    """The fastest runner of a model, and why it is not the native step; None: it is."""

    runner: Runner | GatheringRunner
    reason: str | None = None


def select(
    model: Any, plain: Runner | GatheringRunner, facts: Facts, *, context: int, checked: bool = False
) -> Selection:
    """Select the runner of a model in the processor's memory: the native step where it can stand for `plain`.

    The native step computes in float32, whatever the model's weights are.

    facts    those that `plain` was found with
    context  positions that the model knows
    checked  whether an earlier start compared the logits of both
    """
    try:
        plain = _packed(plain, facts)
        with Widened(model):
            decoder, extended = _decoders(model, plain, vocabulary=facts.vocabulary, context=context)
        library = _library()
        place(model)
        make = partial(NativeRunner, plain, decoder, library, extended=extended)
        native, reason = make(), None if checked else _difference(model, plain, make(rounds=False), decoder, facts)
    except (NoShape, NoLibrary) as error:
        log.info("layers run in torch operations, not in one native call: %s", error.reason)
        return Selection(plain, error.reason)
    if reason is not None:
        log.warning("layers run in torch operations, for %s", reason)
        return Selection(plain, reason)
    return Selection(native)


def _difference(model: Any, plain: Runner, unrounded: NativeRunner, decoder: Decoder, facts: Facts) -> str | None:
    """What the native step does wrong; None: its logits are those of the modules."""
    exact, stored = replace(facts, dtype=torch.float32), facts.stored or facts.dtype
    # Where a row is rounded to 8 bits in its cell, a code may fall the other way.
    checks = {torch.float32: _allowed(decoder)} | (
        {stored: max(_allowed(decoder), 0.1)} if stored == torch.int8 else {}
    )
    for kind, allowed in checks.items():
        with Widened(model):
            size = difference(plain, unrounded, model, exact, kind)
        if not within("the native step changes no logits", size, allowed):
            return f"the native step changes logits by {size:.2g}, where {allowed:.2g} is rounding"
    return None


def _packed(plain: Runner | GatheringRunner, facts: Facts) -> Runner:
    """The runner that the native step can stand for. Raises NoShape."""
    stored = facts.stored or facts.dtype
    if facts.dtype not in _KNOWN:
        raise NoShape(f"its weights are {facts.dtype}")
    if stored not in FORMATS:
        raise NoShape(f"its keys and values are stored as {stored}")
    if facts.encoder is not None:
        raise NoShape("it has an encoder")
    if not isinstance(plain, Runner):
        raise NoShape("it runs one sequence at a time")
    if not plain.layers:
        raise NoShape("it stores no keys and values")
    return plain


def _decoders(model: Any, plain: Runner, *, vocabulary: int, context: int) -> tuple[Decoder, Decoder | None]:
    """The decoder, and as it turns beyond the original length if there are such positions. Raises NoShape."""
    original = context if plain.switch is None else plain.switch.original
    decoder = find_decoder(model, plain.layers, vocabulary=vocabulary, context=min(context, original))
    if plain.switch is None:
        return decoder, None
    with rope.extending():
        return decoder, find_decoder(model, plain.extended_layers, vocabulary=vocabulary, context=context)


def _allowed(decoder: Decoder) -> float:
    """How far logits may differ, in parts of the largest: where rows are quantised, codes may fall the other way.

    The parts were compared far more strictly before; here a part in the wrong place would show, which changes most of a
    logit. 1.2 billion random weights differ by 0.037. Routers choose other experts where two are wanted all but
    equally: random models differ by up to 0.14 so.
    """
    if not any(isinstance(linear.weight, Packed) for linear in linears(decoder)):
        return 1e-3
    return 0.25 if any(mlp.experts is not None for _, mlp in decoder.layers) else 0.1


@cache
def _library() -> Library:
    """Raises NoLibrary."""
    variants = build.variants("step")
    if not variants:
        raise NoLibrary("it needs AVX2 or AVX-512, which this processor has not")
    file = build.library("step", variants[0])
    try:
        return Library(file)
    except OSError as error:
        raise NoLibrary(f"the library cannot be loaded: {error}") from error
