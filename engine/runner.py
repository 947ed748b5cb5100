"""Runs the model over the spans of one forward, every layer attending to its own sequence's cells."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine import hooks
from engine.kernels import latent, reference
from engine.plan import LayerPlan
from kvcache.forward import Forward


class Runner:
    """A model whose attention reads and writes the shared cache. Belongs to the engine thread."""

    def __init__(self, model: Any, layers: Sequence[LayerPlan]) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._homes = {plan.layer: index for index, plan in enumerate(layers)}

    def run(self, forward: Forward, tokens: Sequence[int], wanted: Sequence[int]) -> Tensor:
        """Logits [wanted, vocabulary] after an open forward's rows.

        tokens  of all spans, one after the other
        wanted  the rows of the packed batch to know the logits of, in order
        """
        positions = [position for span in forward.spans for position in range(span.start, span.stop)]
        with torch.inference_mode(), hooks.listening(_Step(forward, self._homes)):
            return hooks.forward(self._model, self._tensor(tokens), self._tensor(positions), self._tensor(wanted))

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self._device)


class _Step:
    """A listener (hooks.Listener) for one forward: stores each layer's rows, then attends to the whole sequence."""

    def __init__(self, forward: Forward, homes: Mapping[int, int]) -> None:
        self._forward = forward
        self._homes = homes

    def attend(self, call: hooks.Call) -> Tensor:
        """The attention output of one layer, [rows, heads, value_width]."""
        layer = self._homes[call.layer]
        self._forward.write(layer, call.key, call.value)
        keys, values = self._forward.stored(layer)
        segments, reach = self._forward.segments(layer), self._forward.reach(layer)
        if call.latent is not None:
            return latent.attend(call.query, keys, segments, reach, call.latent, scale=call.scale)
        return reference.attend(
            call.query,
            keys,
            values,
            segments,
            reach,
            scale=call.scale,
            softcap=call.softcap,
            sinks=call.sinks,
        )

    def recur(self, name: Hashable, run: hooks.Run) -> list[Tensor]:
        """Run a recurrent operation for each span, from the slot's state to its next one."""
        outputs, row = [], 0
        for span in self._forward.spans:
            output, state = run(row, row + span.length, self._forward.state(span, name))
            self._forward.put_state(span, name, state)
            outputs.append(output)
            row += span.length
        return outputs
