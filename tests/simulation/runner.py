"""Runs a model of hashes over the cells of the real cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from engine.model.layers import CachedLayer
from engine.run.runner import ModelRunner
from engine.sample.sampler import SamplingContext, TorchSampler
from engine.step.input import StepFeatures, StepInput
from engine.step.output import StepOutput, sampled_output
from kvcache.attention_group import AttentionGroup
from kvcache.cell_pool import CellPool
from kvcache.forward import Forward
from kvcache.kv_buffer import CellIndex
from tests.simulation.faults import Faults
from tests.simulation.hash_model import HashModel, Numbers, rotations

STATE = "state"


class FaultySampler(TorchSampler):
    """The sampler of the product, which fails when a fault is due."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def sample(self, logits: torch.Tensor, contexts: list[SamplingContext]) -> list[int | None]:
        self._faults.raise_if("sampling")
        return super().sample(logits, contexts)


class HashRunner(ModelRunner):
    """Implements ModelRunner.

    salt_of     a number for the salt of a slot's sequence
    clock_step  called with the tokens of each step
    violations  cells that a sequence read and should not have: another salt, or another position
    """

    def __init__(
        self, model: HashModel, faults: Faults, salt_of: Callable[[int], int], clock_step: Callable[[int], None]
    ) -> None:
        self.model, self._faults, self._salt_of, self._clock_step = model, faults, salt_of, clock_step
        self.layers = self.long_factor_layers = tuple(
            CachedLayer(index, spec) for index, spec in enumerate(model.specs)
        )
        self.switch = None
        self.sampler = FaultySampler(faults)
        self.violations: list[str] = []

    def supports(self, features: StepFeatures) -> str | None:
        return None

    def run(self, step: StepInput) -> StepOutput:
        self._faults.raise_if("forward")
        forward, model = step.forward, self.model
        self._clock_step(len(step.tokens))
        tokens = model.embed(step.tokens)
        salts = [self._salt_of(span.slot) for span in forward.spans]
        lengths = [span.length for span in forward.spans]
        positions = _ranges([span.start for span in forward.spans], lengths)
        token_salts = np.repeat(np.asarray(salts, np.float64), lengths)
        numbers = tokens
        for layer in range(len(model.ranges)):
            self._store(forward, layer, numbers, positions, token_salts)
            if layer == 0:
                self._faults.raise_if("layer")
            numbers = self._attend(forward, layer, numbers, positions, salts)
        if model.recurrent:
            numbers = self._recur(forward, tokens, numbers)
        logits = model.logits(numbers[np.asarray(step.logit_rows, np.int64)])
        if len(logits) and self._faults.is_due("nan"):
            logits[self._faults.choose(len(logits))] = np.nan
        return sampled_output(step, self.sampler, torch.from_numpy(logits), {})

    def _store(
        self,
        forward: Forward,
        layer: int,
        numbers: Numbers,
        positions: NDArray[np.int64],
        salts: NDArray[np.float64],
    ) -> None:
        values = np.empty((len(numbers), 2))
        values[:, 0], values[:, 1] = numbers, salts
        keys = values[:, :1] * rotations(forward.capacity)[positions]
        forward.store_kv(layer, torch.from_numpy(keys)[None], torch.from_numpy(values)[None])

    def _attend(
        self, forward: Forward, layer: int, numbers: Numbers, queries: NDArray[np.int64], salts: list[int]
    ) -> Numbers:
        """The output of a layer, from the cells of its segments."""
        segments, (group, group_layer) = forward.segments(layer), forward.cache.layer_group(layer)
        cells = [_cell_numbers(segment.cells) for segment in segments]
        counts = [len(part) for part in cells]
        oldest = [segment.oldest_visible for segment in segments]
        positions = _ranges(oldest, counts)
        keys, values = read_cells(group, group_layer, np.concatenate(cells))
        expected = values[:, :1] * rotations(forward.capacity)[positions]
        if not (np.abs(keys - expected) <= 1e-3).all():
            self.violations.append(f"layer {layer} reads keys of other positions")
        if (values[:, 1] != np.repeat(np.asarray(salts, np.float64), counts)).any():
            self.violations.append(f"layer {layer} reads cells of another salt")
        weights = self.model.weigh(layer, values[:, 0].astype(np.uint64), positions)
        sums = np.zeros(len(weights) + 1, np.uint64)
        weights.cumsum(out=sums[1:])
        # Of each batch token: the place of position 0 of its sequence among the sums.
        starts = [before - first for before, first in zip(accumulate(counts, initial=0), oldest, strict=False)]
        places = np.repeat(starts, [span.length for span in forward.spans])
        first_seen = forward.attention_range(layer).oldest_visible(queries)
        return self.model.combine(sums[places + queries + 1] - sums[places + first_seen], numbers)

    def _recur(self, forward: Forward, tokens: Numbers, numbers: Numbers) -> Numbers:
        states, row = [], 0
        for span in forward.spans:
            tensor = forward.recurrent_state(span.slot, span.start, STATE)
            state = 0 if tensor is None else int(tensor)
            stops = {stop for _, stop in span.state_ranges}
            for position in range(span.start, span.stop):
                state = self.model.next_state(state, int(tokens[row]))
                states.append(state)
                row += 1
                if position + 1 in stops:
                    forward.store_recurrent_state(span.slot, position + 1, STATE, torch.tensor(state))
        return self.model.with_states(numbers, states)


def _ranges(starts: list[int], lengths: list[int]) -> NDArray[np.int64]:
    """The numbers from each start on."""
    parts = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _cell_numbers(cells: CellIndex) -> NDArray[np.int64]:
    return np.arange(cells.start, cells.stop) if isinstance(cells, slice) else cells.numpy()


def read_cells(
    group: AttentionGroup, layer: int, cells: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Keys and values [cells, 2] of the one head of a layer."""
    keys, values = _rows(group.pool)
    return keys[layer, 0][cells], values[layer, 0][cells]


@lru_cache(8)
def _rows(pool: CellPool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Views of the keys and the values of a pool, which stay at their place."""
    return pool.keys.tensors["rows"].numpy(), pool.values.tensors["rows"].numpy()
