"""Tiny decoders with random weights, and their packed and native runners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from engine.kernels import linear
from engine.kernels.formats import WeightFormat
from engine.kernels.packing import PackedMatrix
from engine.load.check import selection as choosing
from engine.load.check.selftest import ModelTraits, find_runner
from engine.model import hooks, recurrence
from engine.native.runner import NativeRunner
from engine.quantize.experts import QuantizedExperts
from engine.quantize.layers import QuantizedLinear, SharedInputGroup
from engine.quantize.plan import LayerSurvey, QuantizationPlan, replace_modules
from engine.quantize.quantize import quantize
from engine.quantize.store import WeightStore
from engine.run.packed import PackedRunner
from engine.run.runner import ModelRunner, runners_of
from engine.step.input import FINAL_NORM, HiddenRows, StepInput
from kvcache.cache import Cache
from kvcache.spec import Span
from tests.engine.kernels.weights import random_matrix
from tests.engine.kit.tiny import VOCABULARY, settings

CONTEXT = 256

# Bits of a weight: float32, bfloat16, or quantised to 8 or 4.
Weights = Literal[32, 16, 8, 4]
# Slots and their rows: chunks, single rows, or both.
Step = Sequence[tuple[int, int]]
Steps = Sequence[Step]


@dataclass(frozen=True)
class TinyModel:
    """A model, its packed runner, and the selected runner."""

    model: Any
    packed: PackedRunner
    runner: ModelRunner
    recurrent: bool = False

    def cache(self, runner: ModelRunner, stored: torch.dtype = torch.float32) -> Cache:
        """An empty cache with capacity for all steps."""
        specs, state_bytes = [plan.spec for plan in runner.layers], 2**30 if self.recurrent else None
        return Cache(specs, slots=8, capacity=CONTEXT, cells=8 * CONTEXT, dtype=stored, state_bytes=state_bytes)

    def step(self, cache: Cache, runner: ModelRunner, step: Step) -> tuple[Tensor, Tensor]:
        """Logits and hidden states of every row of a step."""
        spans = [Span(slot, cache.cached_length(slot), rows) for slot, rows in step]
        tokens = [token(*place) for place in places(spans)]
        rows = list(range(len(tokens)))
        with cache.forward(spans) as forward:
            output = runner.run(StepInput(forward, tokens, rows, HiddenRows(rows)))
            return output.logits, output.hidden_states[FINAL_NORM]

    def states(self, runner: ModelRunner, steps: Steps, stored: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Logits and hidden states of every row, by slot and position."""
        cache = self.cache(runner, stored)
        by_position: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        for step in steps:
            own = places([Span(slot, cache.cached_length(slot), rows) for slot, rows in step])
            by_position |= dict(zip(own, zip(*self.step(cache, runner, step), strict=True), strict=True))
        logits, states = zip(*(by_position[place] for place in sorted(by_position)), strict=True)
        return torch.stack(logits), torch.stack(states)


def places(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Slot and position of each row."""
    return [(span.slot, at) for span in spans for at in range(span.start, span.stop)]


def token(slot: int, position: int) -> int:
    """A token for a position of a slot."""
    return (31 * slot + 7 * position + position * position) % VOCABULARY


@cache
def tiny_model(family: str, weights: Weights = 32) -> TinyModel:
    """The tiny model of a family; its norms and biases are random too."""
    return model_of_config(AutoConfig.for_model(family, **settings(family)), weights)


def model_of_config(
    config: Any, weights: Weights = 32, formats: Sequence[WeightFormat] = (), *, gate_parts: int = 1
) -> TinyModel:
    """A tiny model with a configuration.

    formats     of random quantised matrices in place of its own, one after the other; none: as `weights` says
    gate_parts  2: gate and up projections of experts have a format each
    """
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if weights == 16 else torch.float32
    torch.manual_seed(0)
    family = config.model_type
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    # Buffers with one number scale the layers.
    for tensor in (*model.parameters(), *(buffer for buffer in model.buffers() if buffer.shape == (1,))):
        if tensor.dim() == 1:
            tensor += 0.3 * torch.randn_like(tensor)
    hooks.install_latent(model)
    recurrent = recurrence.install(model)
    traits = ModelTraits(vocabulary=config.get_text_config().vocab_size, recurrent=recurrent, dtype=dtype)
    survey = LayerSurvey(model)
    packed = find_runner(family, model, traits)
    plan = survey.close()
    assert isinstance(packed, PackedRunner)
    if formats:
        experts = {name: replace(own, up=replace(own.up, parts=gate_parts)) for name, own in plan.experts.items()}
        replace_weights(model, replace(plan, experts=experts), formats)
    elif weights == 8 or weights == 4:
        quantize(model, plan, WeightStore(family, weights), linear.prepare)
    runner = choosing.select(model, packed, traits, context=CONTEXT).runner
    return TinyModel(model, packed, runner, recurrent)


def replace_weights(model: Any, plan: QuantizationPlan, formats: Sequence[WeightFormat]) -> None:
    """Replace the layers and experts of a plan by random matrices of some formats, one after the other."""
    some = count()

    def matrix(weight: Tensor) -> PackedMatrix:
        at, (outputs, columns) = next(some), weight.shape
        return random_matrix(formats[at % len(formats)], outputs, columns, at, size=float(weight.float().std()))

    replacements: dict[nn.Module, nn.Module] = {}
    for group in plan.groups:
        matrices = [matrix(layer.weight) for layer in group]
        shared = SharedInputGroup(linear.prepare(matrices))
        for number, (layer, packed) in enumerate(zip(group, matrices, strict=True)):
            replacements[layer.module] = QuantizedLinear(shared, number, packed, layer)
    for experts in plan.experts.values():
        up, down = ([matrix(weight) for weight in stack.matrices] for stack in (experts.up, experts.down))
        replacements[experts.module] = QuantizedExperts(experts, up, down, linear.prepare)
    replace_modules(model, replacements)


def native(family: str, weights: Weights = 32) -> TinyModel:
    """The tiny model of a family that the native step supports."""
    model = tiny_model(family, weights)
    assert isinstance(runners_of(model.runner)[0], NativeRunner)
    return model
