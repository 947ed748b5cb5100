"""Finds the decoder of the common shape in a loaded model: from what its layers take and make, not from any name.

Every part is computed anew from what the trace has of the part before, and must give what the trace has behind it. So
a model that does anything else on its way, whatever it is, has no shape here and runs as transformers wrote it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from engine.native.attention import find_way
from engine.native.decoder import Attention, Decoder, Linear, Mlp, NoShape
from engine.native.mlp import find_mlp
from engine.native.norm import find_norm
from engine.native.same import agree
from engine.native.trace import Attended, Event, Multiplied, Normed, trace
from engine.plan import LayerPlan

# Events by letter: Linear, Norm, Attention. A layer: its norm, projections with norms of heads, attention and output, a
# norm where the second half has its own, inner matrices and the last.
_LAYER = re.compile(r"NL{1,3}(?:N?L){0,2}N?AL(N?)(L{2,3})")
_END = "NL"


def find_decoder(model: Any, plans: Sequence[LayerPlan], *, vocabulary: int, context: int) -> Decoder:
    """The model as a decoder of the common shape. Raises NoShape.

    plans    of its layers that store (engine/plan.py)
    context  positions that it knows
    """
    seen = trace(model, vocabulary=vocabulary, context=context)
    if any(plan.readers for plan in plans):
        raise NoShape("some of its layers share their keys and values")
    cut = list(_cut(seen.events))
    if len(cut) - 1 != len(plans):
        raise NoShape("its layers are not of one norm, projections, attention and matrices each")
    first = cut[0][0]
    assert isinstance(first, Normed)
    states = first.taken
    scale = _scale(seen.embeddings, states)
    layers = []
    for number, events in enumerate(cut[:-1]):
        attention, mlp, states = _layer(events, seen.positions, number, plans[number], states)
        layers.append((attention, mlp))
    last, head = cut[-1]
    assert isinstance(last, Normed)
    assert isinstance(head, Multiplied)
    agree("its last norm", states, last.taken)
    agree("its output layer", last.made, head.taken)
    agree("its logits", head.made, seen.logits)
    return Decoder(model.get_input_embeddings(), scale, tuple(layers), find_norm(last), head.linear)


def _cut(events: Sequence[Event]) -> Iterator[Sequence[Event]]:
    """The events of each layer, and the two behind the last one; fewer where they are of another order."""
    letters = "".join({Multiplied: "L", Normed: "N", Attended: "A"}[type(event)] for event in events)
    at = 0
    while (found := _LAYER.match(letters, at)) is not None:
        yield events[at : found.end()]
        at = found.end()
    if letters[at:] != _END:
        raise NoShape("its layers are not of one norm, projections, attention and matrices each")
    yield events[at:]


def _scale(embeddings: Tensor, states: Tensor) -> float:
    """What embeddings are multiplied by."""
    wide = embeddings.double()
    found = float((wide * states.double()).sum() / (wide * wide).sum())
    scale = 1.0 if abs(found - 1.0) < 1e-6 else found
    agree("its embeddings", embeddings.float() * scale, states)
    return scale


def _layer(
    events: Sequence[Event], positions: Tensor, number: int, plan: LayerPlan, states: Tensor
) -> tuple[Attention, Mlp, Tensor]:
    """Both halves of a layer, and the states behind it."""
    norm, *rest = events
    assert isinstance(norm, Normed)
    agree("a layer's first norm", states, norm.taken)
    at = next(at for at, event in enumerate(rest) if isinstance(event, Attended))
    seen, output = rest[at : at + 2]
    assert isinstance(seen, Attended)
    assert isinstance(output, Multiplied)
    agree("what follows attention", seen.made, output.taken)
    way = find_way(norm, rest[:at], seen.call, positions, plan)
    attention = Attention(layer=number, way=way, output=output.linear)
    mlp, made = find_mlp(norm, output, rest[at + 2 :])
    return attention, mlp, states + output.made + made


def linears(decoder: Decoder) -> Iterator[Linear]:
    """All matrices."""
    for attention, mlp in decoder.layers:
        yield from itertools.chain(attention.way.projections, (attention.output,), mlp.inner, (mlp.down,))
    yield decoder.head
