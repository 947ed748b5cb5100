"""Finds the decoder of the common shape in a loaded model: from what its layers take and make, not from any name.

Every part is computed anew from what the trace has of the part before, and must give what the trace has behind it. So
a model that does anything else on its way, whatever it is, has no shape here and runs as transformers wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.model.layers import LayerPlan
from engine.native.attention import find_gates, find_way
from engine.native.decoder import Attention, Decoder, Ending, Layer, Linear, Norm, NoShape, Recurrence, Way
from engine.native.half import find_mlp
from engine.native.recurrence import find_recurrence
from engine.native.same import agree, ratio, same
from engine.native.trace import trace
from engine.native.walk import Walk


def find_decoder(model: Any, plans: Sequence[LayerPlan], *, vocabulary: int, context: int) -> Decoder:
    """The model as a decoder of the common shape. Raises NoShape.

    plans    of its layers that store (engine/model/layers.py)
    context  positions that it knows
    """
    if any(plan.readers for plan in plans):
        raise NoShape("some of its layers share their keys and values")
    seen = trace(model, vocabulary=vocabulary, context=context)
    walk = Walk(seen.events)
    try:
        states = walk.next_taken()
        scale = ratio(seen.embeddings, states)
        agree("its first layer", seen.embeddings * scale, states)
        layers, storing = [], iter(plans)
        for recurs in walk.recurrences():
            plan = None if recurs else next(storing, None)
            layer, states = _layer(walk, seen.positions, plan, states)
            layers.append(layer)
        ending = _ending(walk, states, seen.logits, _numbers(model))
    except NoShape as error:
        if seen.unknown:
            raise NoShape(f"{error.reason}; it has layers of the kind {seen.unknown[0]}") from error
        raise
    return Decoder(model.get_input_embeddings().weight, scale, tuple(layers), ending)


def _layer(walk: Walk, positions: Tensor, plan: LayerPlan | None, states: Tensor) -> tuple[Layer, Tensor]:
    """Both halves of a layer, and the states behind it; one without a plan stores no cells."""
    norm, entering = walk.norm(states)
    way, attended = _way(walk, norm, entering, positions, plan)
    output = walk.linear("what follows attention", attended)
    after, made = walk.norm(output.made)
    taken = walk.next_states(states)
    parallel = same(states, taken) or same(entering, taken)
    share = 1.0 if parallel else ratio(made, taken - states)
    own = states if parallel else states + share * made
    mlp, states = find_mlp(walk, own, norm, entering, made if parallel else None)
    return (Attention(way=way, output=output.linear, after=after, share=share), mlp), states


def _way(
    walk: Walk, norm: Norm, entering: Tensor, positions: Tensor, plan: LayerPlan | None
) -> tuple[Way | Recurrence, Tensor]:
    """How a layer attends, and the rows that this makes."""
    if plan is None:
        return find_recurrence(norm, entering, walk.until_output(entering))
    before, seen = walk.until_attention()
    way = find_way(norm, entering, before, seen.call, positions, plan)
    return find_gates(way, before, seen.made, walk.next_taken())


def _ending(walk: Walk, states: Tensor, logits: Tensor, numbers: Sequence[float]) -> Ending:
    """What follows the last layer; `numbers` are those that may bound logits."""
    norm, made = walk.norm(states)
    if norm.kind == "none":
        raise NoShape("it has no norm behind its last layer")
    head = walk.linear("its output layer", made)
    scale = ratio(head.made, logits)
    if same(head.made * scale, logits):
        return Ending(norm, head.linear, scale, 0.0)
    for cap in numbers:
        if same(cap * torch.tanh(head.made / cap), logits):
            return Ending(norm, head.linear, 1.0, cap)
    raise NoShape("its logits are made in another way")


def _numbers(model: Any) -> list[float]:
    """What a model's settings have of numbers above zero."""
    values = model.config.get_text_config().to_dict().values()
    return sorted({float(value) for value in values if isinstance(value, int | float) and value > 0})


def linears(decoder: Decoder) -> Iterator[Linear]:
    """All matrices."""
    for attention, mlp in decoder.layers:
        yield from (*attention.way.projections, attention.output)
        if mlp.gated is not None:
            yield from (*mlp.gated.inner, mlp.gated.down)
        if mlp.experts is not None:
            yield from (*mlp.experts.inner.matrices(), *mlp.experts.down.matrices())
    yield decoder.ending.head
