"""MTP: drafts of the layer that some checkpoints have for further tokens (multi-token prediction).

A checkpoint keeps it next to the model's layers, and transformers has the module (MtpModel) with the model's decoder
layer, embedding and output layer. Its input is a pair: the model's last hidden state of a token, and the next token. So
it computes only tokens that the model computed in this process: where the model resumed from its prefix tree and the
layer cannot, the layer begins there, with less context. Of several MTP layers the first one is used for all positions.
Pinned to transformers 5.23, like model/hooks.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.draft.slots import DraftSlot, NextTokens, SlotsBySequence, draft_loop, missing_tokens
from engine.errors import ModelUnsupported
from engine.load.load import LoadedModel
from engine.load.read.mtp_layer import has_mtp_layer, read_mtp_layer
from engine.model import hooks
from engine.model.layers import CachedLayer, find_cached_layers
from engine.run.packed import PackedRunner
from engine.run.runner import runners_of
from engine.schedule.draft import ComputedTokens, DraftRequest
from engine.step.input import FINAL_NORM, StepFeatures
from kvcache.cache import Cache
from kvcache.forward import Forward
from kvcache.spec import Span

# Maximum hidden states of a sequence that are kept before the layer computes their tokens.
_PENDING_STATES = 256
# Rows for later states in a buffer of them.
_SPARE_ROWS = 16


@dataclass(frozen=True, slots=True)
class _MtpOutput:
    """Logits [1, logit rows, vocabulary], and hidden states [1, tokens, width] for the next draft position."""

    logits: Tensor
    states: Tensor


class MtpLayer(nn.Module):
    """One layer of transformers' module, with the signature of a model."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.layers, self.config = layers, layers.config

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: Any,
        logits_to_keep: Tensor,
        states: Tensor | None = None,
    ) -> _MtpOutput:
        """Outputs for tokens [1, tokens] with the hidden state [1, tokens, width] of the token before each."""
        if states is None:
            states = self.layers.embed_tokens.weight.new_zeros(*input_ids.shape, self.config.hidden_size)
        output = self.layers.forward_layer(0, states, position_ids + 1, past_key_values, input_ids=input_ids)
        return _MtpOutput(self.layers._project_to_logits(output[:, logits_to_keep]), output)


class MtpRunner(PackedRunner):
    """The MTP layer over its own cache. Belongs to the engine thread."""

    def __init__(self, layer: MtpLayer, layers: Sequence[CachedLayer], target: PackedRunner) -> None:
        """Attention is computed, and tokens are sampled, as `target`, the model's runner, does it."""
        super().__init__(layer, layers, target.mla, target.attend)
        self.sampler = target.sampler
        self._layer = layer

    def run_pairs(
        self, forward: Forward, tokens: Sequence[int], states: Tensor, logit_rows: Sequence[int]
    ) -> _MtpOutput:
        """Outputs for the tokens of all spans, with the hidden states [tokens, width] of the tokens before them."""
        positions = self._tensor([position for span in forward.spans for position in range(span.start, span.stop)])
        batch = {"input_ids": self._tensor(tokens)[None], "position_ids": positions[None]}
        with torch.inference_mode(), hooks.use_backend(self._backend(forward, ())):
            output: _MtpOutput = self._layer(
                **batch,
                past_key_values=hooks.CacheFacade(positions),
                logits_to_keep=self._tensor(logit_rows),
                states=states[None],
            )
        return _MtpOutput(output.logits[0], output.states[0])


@dataclass(frozen=True, slots=True)
class MtpHead:
    """A loaded MTP layer."""

    runner: MtpRunner
    weights_bytes: int


class _PendingStates:
    """Hidden states of a sequence, from the context token `start` on, whose pairs are not computed yet.

    dropped  context tokens that shifts had dropped when they came
    base     context token at which the layer began: its slot has the pairs from there on
    """

    def __init__(self, start: int, dropped: int) -> None:
        self.start, self.dropped, self.base = start, dropped, 0
        # The states are [_first, _first + count) of the rows; a step appends its states to them.
        self._rows, self._first, self.count = torch.empty(0), 0, 0

    @property
    def stop(self) -> int:
        """The first token without a hidden state."""
        return self.start + self.count

    def append(self, start: int, states: Tensor, dropped: int) -> None:
        """Add the hidden states [tokens, width] of computed tokens from `start` on."""
        if dropped != self.dropped:
            # The states move with the context; a layer that had begun later than its start begins again.
            self.start -= dropped - self.dropped
            self.base = 0 if self.base == 0 else self.start
            self.dropped = dropped
        if self.start <= start <= self.stop and self.start >= 0:
            self.count = start - self.start
        else:
            self.start, self.count = start, 0
        stop = self._first + self.count + len(states)
        if stop > len(self._rows):
            rows = states.new_empty(2 * (self.count + len(states)) + _SPARE_ROWS, states.shape[1])
            if self.count:
                rows[: self.count] = self._rows[self._first : self._first + self.count]
            self._rows, self._first, stop = rows, 0, self.count + len(states)
        self._rows[stop - len(states) : stop] = states
        self.count += len(states)

    def between(self, start: int, stop: int) -> Tensor:
        """The hidden states of tokens [start, stop)."""
        return self._rows[self._first + start - self.start : self._first + stop - self.start]

    def release(self, start: int) -> None:
        """Drop the hidden states of tokens before `start`."""
        if start > self.start:
            self._first += start - self.start
            self.count -= start - self.start
            self.start = start


class MtpDrafter:
    """Implements HiddenStateDrafter.

    cache    of the MTP layer, with a slot for each sequence that runs at once
    chunk    maximum pairs per call; a sequence that lacks more gets no draft in this call
    pending  maximum hidden states of a sequence that are kept
    """

    kind = "mtp"

    def __init__(self, cache: Cache, runner: MtpRunner, *, chunk: int, pending: int = _PENDING_STATES) -> None:
        self._cache, self._runner = cache, runner
        self._chunk, self._max_pending = chunk, pending
        self._slots = SlotsBySequence(cache)
        self._pending: dict[str, _PendingStates] = {}

    def read_hidden_states(self, step: Sequence[ComputedTokens]) -> None:
        """Keep the hidden states of a step, and compute pairs where too many are kept."""
        for computed in step:
            request = computed.request
            dropped = request.draw.position - len(request.tokens)
            pending = self._pending.get(request.sequence_id)
            if pending is None:
                pending = self._pending[request.sequence_id] = _PendingStates(computed.start, dropped)
            pending.append(computed.start, computed.hidden_states, dropped)
            if pending.count > self._max_pending:
                self._catch_up(request, pending)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """The layer's continuation of each request; none where a state or most of the context is missing."""
        drafts: list[list[int]] = [[] for _ in requests]
        ready = [index for index, request in enumerate(requests) if self._is_ready(request)]
        pairs, slots = self._follow([requests[index] for index in ready])
        missing = missing_tokens(pairs, slots, capacity=self._cache.capacity, max_tokens=self._chunk)
        pending = [self._pending[request.sequence_id] for request in pairs]
        drafted: dict[int, Tensor] = {}
        continuations = draft_loop(
            pairs,
            slots,
            missing,
            lambda tokens: self._compute(slots, pending, tokens, drafted),
            self._runner.sampler,
        )
        for request, slot, states in zip(pairs, slots, pending, strict=True):
            # Draft tokens were computed with the layer's own hidden states, not the model's.
            self._slots.rewind(slot, len(request.tokens))
            # The state before the last token stays: the same draft may be requested once more.
            states.release(states.base + len(slot.tokens) - 1)
        for index, draft in zip(ready, continuations, strict=True):
            drafts[index] = draft
        return drafts

    def forget(self, sequence_id: str, output: Sequence[int]) -> None:
        """Enter the cached tokens of a finished sequence into the prefix tree."""
        self._pending.pop(sequence_id, None)
        self._slots.forget(sequence_id, output)

    def flush(self, budget_bytes: int) -> bool:
        """Write cached prefixes to the disk cache; False: nothing is left to write."""
        return self._cache.flush_to_disk(budget_bytes) > 0

    def _is_ready(self, request: DraftRequest) -> bool:
        """Whether there is a hidden state of the second last token."""
        pending = self._pending.get(request.sequence_id)
        return pending is not None and pending.start <= len(request.tokens) - 2 < pending.stop

    def _follow(self, requests: Sequence[DraftRequest]) -> tuple[list[DraftRequest], list[DraftSlot]]:
        """The requests as pairs, and their slots. Where states before the kept ones are missing, pairs begin there."""
        pairs = [self._pairs(request) for request in requests]
        slots = self._slots.follow(pairs)
        for index, request in enumerate(requests):
            pending = self._pending[request.sequence_id]
            if pending.base + len(slots[index].tokens) < pending.start:
                pending.base = pending.start
                self._slots.release(request.sequence_id)
                pairs[index] = self._pairs(request)
                (slots[index],) = self._slots.follow([pairs[index]])
                slots[index].reusable = 0
        return pairs, slots

    def _pairs(self, request: DraftRequest) -> DraftRequest:
        """The second tokens of all pairs. Cached pairs depend on the first context token too, so it is in the salt."""
        base = self._pending[request.sequence_id].base
        salt = b"" if base else request.salt + request.tokens[0].to_bytes(4, "little")
        return replace(request, tokens=request.tokens[base + 1 :], salt=salt)

    def _catch_up(self, request: DraftRequest, pending: _PendingStates) -> None:
        """Compute the pairs of the kept hidden states."""
        tokens = request.tokens[: pending.stop + 1]
        later = len(request.tokens) - len(tokens)
        draw = replace(request.draw, position=request.draw.position - later)
        earlier = replace(request, tokens=tokens, draw=draw, limit=0, emitted=request.emitted - later)
        (pairs,), (slot,) = self._follow([earlier])
        missing = missing_tokens([pairs], [slot], capacity=self._cache.capacity, max_tokens=self._chunk)
        if missing and self._compute([slot], [pending], missing, {}) is not None:
            pending.release(pending.base + len(slot.tokens) - 1)
            self._slots.insert_prefix(slot)

    def _compute(
        self,
        slots: Sequence[DraftSlot],
        pending: Sequence[_PendingStates],
        tokens: NextTokens,
        drafted: dict[int, Tensor],
    ) -> Tensor | None:
        """Logits [slots, vocabulary] after the tokens of each slot; None: too few free cells.

        drafted  the layer's own hidden state of each slot's last token, in place of the model's at draft tokens
        """
        spans = [Span(slots[index].slot, len(slots[index].tokens), len(added)) for index, added in tokens.items()]
        if self._cache.evict_for(spans):
            return None
        logit_rows = [stop - 1 for stop in accumulate(span.length for span in spans)]
        states = []
        for index, span in zip(tokens, spans, strict=True):
            first = pending[index].base + span.start
            states.append(drafted[index] if index in drafted else pending[index].between(first, first + span.length))
        with self._cache.forward(spans) as forward:
            batch = [token for added in tokens.values() for token in added]
            output = self._runner.run_pairs(forward, batch, torch.cat(states), logit_rows)
        for index, row, added in zip(tokens, logit_rows, tokens.values(), strict=True):
            drafted[index] = output.states[row : row + 1]
            slots[index].tokens += added
        return output.logits


def has_mtp(target: LoadedModel) -> bool:
    """Whether the model's checkpoint has MTP layers, at one of the published keys."""
    return has_mtp_layer(Path(target.info.folder), target.model.config.get_text_config())


def load_mtp(target: LoadedModel) -> MtpHead:
    """The first MTP layer of a model. Raises ModelUnsupported."""
    packed = next((runner for runner in runners_of(target.runner) if isinstance(runner, PackedRunner)), None)
    if packed is None:
        raise ModelUnsupported(target.info.name, "it runs one sequence at a time, but its MTP layer needs batches")
    reason = target.runner.supports(StepFeatures(hidden_layers=(FINAL_NORM,)))
    if reason is not None:
        raise ModelUnsupported(target.info.name, f"{reason}, and its MTP layer reads them")
    if target.encoder is not None:
        raise ModelUnsupported(target.info.name, "its MTP layer has tokens as input, not the output of an encoder")
    try:
        layers = _load_layers(target)
        layer = MtpLayer(layers)
        plans = find_cached_layers(layer, vocabulary=target.info.vocabulary)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelUnsupported(
            target.info.name, f"its MTP layer cannot be used ({type(error).__name__}: {reason})"
        ) from error
    weights = sum(parameter.numel() * parameter.element_size() for parameter in layers.layers.parameters())
    return MtpHead(MtpRunner(layer, plans, packed), weights)


def _load_layers(target: LoadedModel) -> Any:
    layers = read_mtp_layer(Path(target.info.folder), target.model)
    layers.set_attn_implementation(hooks.ATTENTION_NAME)
    if target.dtype == torch.float64:
        layers.set_experts_implementation("eager")
    layers = layers.to(device=target.model.device, dtype=target.dtype).eval().requires_grad_(False)
    hooks.install_latent(layers)
    return layers
