"""Sequences that share cells have the bits in the native step that each has alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.step.input import StepInput
from kvcache.cache import Cache
from kvcache.spec import Span
from tests.engine.native.decoders import CONTEXT, TinyModel, native, token
from tests.libraries import built

built("step")

PREFIX = 200
# For each slot the length of its shared prefix, and its new rows.
SLOTS = ((PREFIX, 1), (PREFIX, 1), (150, 3), (PREFIX, 2), (20, 1), (190, 1))


pytestmark = pytest.mark.usefixtures("one_thread")


def logits_of(model: TinyModel, steps: Sequence[Sequence[int]], stored: torch.dtype) -> Tensor:
    """Logits of all slots' rows, by slot; steps list the slots of each forward."""
    specs = [plan.spec for plan in model.runner.layers]
    cache = Cache(specs, slots=len(SLOTS), capacity=CONTEXT, cells=len(SLOTS) * CONTEXT, dtype=stored)
    with cache.forward([Span(0, 0, PREFIX)]) as forward:
        model.runner.run(StepInput(forward, [token(0, at) for at in range(PREFIX)], [PREFIX - 1]))
    for slot, (shared, _) in enumerate(SLOTS[1:], 1):
        assert shared == cache.copy_prefix(0, slot, shared)
    logits: dict[int, Tensor] = {}
    for slots in steps:
        spans = [Span(slot, *SLOTS[slot]) for slot in slots]
        places = [(span.slot, at) for span in spans for at in range(span.start, span.stop)]
        with cache.forward(spans) as forward:
            output = model.runner.run(
                StepInput(forward, [token(*place) for place in places], range(len(places)))
            ).logits
        owners = torch.tensor([slot for slot, _ in places])
        logits |= {slot: output[owners == slot] for slot in slots}
    return torch.cat([logits[slot] for slot in sorted(logits)])


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_shared_cells_change_no_bit(family: str, stored: torch.dtype) -> None:
    """With one thread or three."""
    model, everyone = native(family), range(len(SLOTS))
    expected = logits_of(model, [[slot] for slot in everyone], stored)

    assert torch.equal(expected, logits_of(model, [everyone], stored))
    torch.set_num_threads(3)
    assert torch.equal(expected, logits_of(model, [everyone], stored))
