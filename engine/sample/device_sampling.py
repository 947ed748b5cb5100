"""Sampling on a device, with the tokens of `sample_tokens`: one copy to the device, and one wait for the tokens.

No shape depends on numbers of the device, so nothing but the tokens is waited for. Rows with other filters than top-k,
top-p and min-p, and with timestamps, are sampled on the host: one more wait. Sums of a device may round otherwise than
those of the CPU: that matters to ties at the border of top-p only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sample.device_noise import best_noisy_argmax
from engine.sample.logprobs import at_least_float32
from engine.sample.noise import MAX_NOISE, MIN_NOISE
from engine.sample.sampler import SamplingContext, as_int64, sample_tokens

# Draft tokens of requests with top-k or top-p are among this number of largest logits.
_DRAFT_WIDTH = 64
# Bytes of a row of token bits are a multiple of it.
_WORD_BYTES = 8


class SamplingBatch:
    """The contexts of the rows of logits of one step, as arrays for the device.

    arrays     by name
    host_rows  the rows to sample on the host
    """

    def __init__(self, contexts: Sequence[SamplingContext], vocabulary: int) -> None:
        self._contexts = contexts
        random = [row for row, context in enumerate(contexts) if not context.greedy or context.masks_by_logits]
        self.host_rows = [row for row in random if _is_for_host(contexts[row])]
        self._random = [row for row in random if not _is_for_host(contexts[row])]
        modifying = self._contexts if any(context.modifies_logits for context in contexts) else ()
        parts = {
            **_bias_arrays(modifying),
            **_penalty_arrays(modifying),
            **_dry_arrays(modifying),
            **_mask_arrays(modifying, vocabulary),
            **self._random_arrays(),
            "host_rows": np.asarray(self.host_rows, np.int64),
        }
        self.arrays = {name: array for name, array in parts.items() if array.size}

    def __len__(self) -> int:
        return len(self._contexts)

    @property
    def host_contexts(self) -> list[SamplingContext]:
        """The contexts of `host_rows`."""
        return [self._contexts[row] for row in self.host_rows]

    def sorted_width(self, vocabulary: int) -> int:
        """The number of largest logits that top-k and top-p depend on."""
        params = [self._contexts[row].params for row in self._random]
        if any(param.top_p < 1.0 and param.top_k <= 0 for param in params):
            return vocabulary
        return min(max((param.top_k for param in params), default=0), vocabulary)

    def _random_arrays(self) -> dict[str, NDArray[Any]]:
        """Rows, seeds, positions and top-k of the rows with noise; temperatures, top-p and min-p."""
        contexts = [self._contexts[row] for row in self._random]
        numbers = [
            self._random,
            [as_int64(context.seed) for context in contexts],
            [context.position for context in contexts],
            [max(context.params.top_k, 0) for context in contexts],
        ]
        filters = [(context.params.temperature, context.params.top_p, context.params.min_p) for context in contexts]
        return {"random": np.asarray(numbers, np.int64), "filters": np.asarray(filters, np.float64).T}


def sample_batch(logits: Tensor, batch: SamplingBatch, arrays: Sequence[Tensor]) -> list[int | None]:
    """The next token of each row of logits [rows, vocabulary]; `arrays` are `batch.arrays` on the device."""
    tokens = [None if token < 0 else token for token in sample_rows(logits, batch, arrays).tolist()]
    if batch.host_rows:
        rows = dict(zip(batch.arrays, arrays, strict=True))["host_rows"]
        on_host = logits.index_select(0, rows).cpu()
        for row, token in zip(batch.host_rows, sample_tokens(on_host, batch.host_contexts), strict=True):
            tokens[row] = token
    return tokens


def sampling_numbers(contexts: Sequence[SamplingContext], size: int, ahead: int = 0) -> NDArray[np.int64]:
    """The numbers [6, size] of `sample_numbered`, for the tokens `ahead` positions after those of the contexts.

    Seeds, positions and top-k; temperature (0: greedy), top-p and min-p as bits of float64. The last rows are greedy.
    """
    numbers = np.zeros((6, size), np.int64)
    filters = numbers[3:].view(np.float64)
    for column, context in enumerate(contexts):
        params = context.params
        numbers[:3, column] = as_int64(context.seed), context.position + ahead, max(params.top_k, 0)
        filters[:, column] = 0.0 if context.greedy else params.temperature, params.top_p, params.min_p
    return numbers


def sample_numbered(logits: Tensor, numbers: Tensor) -> Tensor:
    """Tokens [rows] by `sampling_numbers`, with the same operations for all of them; -1: no finite maximum.

    Top-k and top-p keep at most _DRAFT_WIDTH tokens: these are draft tokens.
    """
    logits, (seeds, positions, top_k) = at_least_float32(logits), numbers[:3]
    temperature, top_p, min_p = numbers[3:].view(torch.float64)
    is_greedy = temperature == 0
    scaled = logits / temperature.masked_fill(is_greedy, 1.0).to(logits.dtype)[:, None]
    floor = _floor(scaled, top_k, top_p, min_p, min(_DRAFT_WIDTH, logits.shape[-1]))
    drawn = best_noisy_argmax(logits.device)(scaled, floor, seeds, positions)
    tokens = torch.where(is_greedy, logits.argmax(-1), drawn)
    return tokens.masked_fill(~logits.amax(-1).isfinite(), -1)


def sample_rows(logits: Tensor, batch: SamplingBatch, arrays: Sequence[Tensor]) -> Tensor:
    """Tokens [rows] on the device, undefined for `host_rows`; -1 for a row without finite maximum."""
    named = dict(zip(batch.arrays, arrays, strict=True))
    return _sample(at_least_float32(logits), named, batch.sorted_width(logits.shape[-1]))


def _sample(logits: Tensor, arrays: Mapping[str, Tensor], sorted_width: int) -> Tensor:
    modified = _modified(logits, arrays)
    tokens = modified.argmax(-1)
    if "random" in arrays:
        rows, seeds, positions, top_k = arrays["random"]
        temperature, top_p, min_p = arrays["filters"]
        scaled = modified.index_select(0, rows) / temperature.to(logits.dtype)[:, None]
        floor = _floor(scaled, top_k, top_p, min_p, sorted_width)
        tokens.index_copy_(0, rows, best_noisy_argmax(scaled.device)(scaled, floor, seeds, positions))
    return tokens.masked_fill(~modified.amax(-1).isfinite(), -1)


def _modified(logits: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
    """The logits after bias, penalties and constraints, as in `modified_logits`."""
    changes = {"bias": _add_bias, "penalties": _penalise, "dry": _penalise_repetition, "masked_rows": _mask}
    present = [change for name, change in changes.items() if name in arrays]
    modified = logits.clone() if present else logits
    for change in present:
        change(modified, arrays)
    return modified


def _add_bias(logits: Tensor, arrays: Mapping[str, Tensor]) -> None:
    rows, tokens = arrays["bias"]
    logits.index_put_((rows, tokens), arrays["bias_values"].to(logits.dtype), accumulate=True)


def _penalise(logits: Tensor, arrays: Mapping[str, Tensor]) -> None:
    """Repetition, frequency and presence penalties."""
    rows, tokens, counts = arrays["penalties"].long()
    repetition, frequency, presence = arrays["penalty_factors"].index_select(1, rows)
    values, factor = logits[rows, tokens], repetition.to(logits.dtype)
    values = torch.where(values > 0, values / factor, values * factor)
    penalty = frequency.float() * counts.float() + presence.float() * (counts > 0).float()
    logits.index_put_((rows, tokens), values - penalty.to(logits.dtype))


def _penalise_repetition(logits: Tensor, arrays: Mapping[str, Tensor]) -> None:
    """DRY penalties."""
    rows, tokens = arrays["dry"]
    logits.index_put_((rows, tokens), logits[rows, tokens] - arrays["dry_values"].to(logits.dtype))


def _mask(logits: Tensor, arrays: Mapping[str, Tensor]) -> None:
    """Minus infinity for the tokens without a bit."""
    rows, bits, vocabulary = arrays["masked_rows"], arrays["allowed_bits"], logits.shape[-1]
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = ((bits[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :vocabulary]
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill(~allowed, -torch.inf))


def _floor(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, sorted_width: int) -> Tensor:
    """The minimum logit of all filters [rows, 1], as in filters.py."""
    best = scaled.amax(-1, keepdim=True)
    floor = torch.maximum(best - (MAX_NOISE - MIN_NOISE), best + min_p.to(scaled.dtype)[:, None].log())
    if sorted_width == 0:
        return floor
    values = scaled.topk(sorted_width, dim=-1).values
    least = _top_k_floor(values, top_k[:, None], scaled.shape[-1])
    return torch.maximum(torch.maximum(floor, least), _top_p_floor(scaled, values, least, top_p[:, None]))


def _top_k_floor(values: Tensor, top_k: Tensor, vocabulary: int) -> Tensor:
    """The minimum logit of top-k [rows, 1]; `values` are the largest logits in descending order."""
    last = values.gather(-1, (top_k - 1).clamp(0, values.shape[-1] - 1))
    return last.masked_fill((top_k == 0) | (top_k >= vocabulary), -torch.inf)


def _top_p_floor(scaled: Tensor, values: Tensor, least: Tensor, top_p: Tensor) -> Tensor:
    """The minimum logit of top-p [rows, 1]; `values` are the largest logits in descending order."""
    total = scaled.masked_fill(scaled < least, -torch.inf).logsumexp(-1, keepdim=True)
    mass = (values - total).exp().double()
    inside = mass.cumsum(-1) - mass < top_p
    inside[:, 0] = True
    floor = values.masked_fill(~inside, torch.inf).amin(-1, keepdim=True)
    return floor.masked_fill(top_p >= 1.0, -torch.inf)


def _bias_arrays(contexts: Iterable[SamplingContext]) -> dict[str, NDArray[Any]]:
    """Rows and tokens of logit biases, and the biases."""
    biases = [(row, *pair) for row, context in enumerate(contexts) for pair in context.params.logit_bias]
    rows, tokens, values = zip(*biases, strict=True) if biases else ((), (), ())
    return {"bias": np.asarray((rows, tokens), np.int64), "bias_values": np.asarray(values, np.float64)}


def _penalty_arrays(contexts: Iterable[SamplingContext]) -> dict[str, NDArray[Any]]:
    """Rows, tokens and counts of tokens with penalties; repetition, frequency and presence penalties of all rows."""
    entries, factors = [np.empty((3, 0), np.int32)], []
    for row, context in enumerate(contexts):
        tokens, counts = context.history.token_counts()
        params = context.params
        entries.append(np.stack([np.full(len(tokens), row, np.int32), tokens.astype(np.int32), counts]))
        factors.append((params.repetition_penalty, params.frequency_penalty, params.presence_penalty))
    penalised = np.concatenate(entries, axis=1)
    return {"penalties": penalised, "penalty_factors": np.asarray(factors if penalised.size else [], np.float64).T}


def _dry_arrays(contexts: Iterable[SamplingContext]) -> dict[str, NDArray[Any]]:
    """Rows and tokens of DRY penalties, and the penalties."""
    by_row = [(row, *context.history.dry_penalties(context.params)) for row, context in enumerate(contexts)]
    entries = [(row, token) for row, tokens, _ in by_row for token in tokens]
    values = [penalties.numpy() for *_, penalties in by_row]
    return {
        "dry": np.asarray(entries, np.int64).reshape(-1, 2).T,
        "dry_values": np.concatenate([np.empty(0), *values]),
    }


def _mask_arrays(contexts: Iterable[SamplingContext], vocabulary: int) -> dict[str, NDArray[Any]]:
    """The rows with constraints, and the bitmasks of their tokens."""
    masks = dict(_allowed_bits(contexts, vocabulary))
    size = -(-vocabulary // (8 * _WORD_BYTES)) * _WORD_BYTES
    bits = np.zeros((len(masks), size), np.uint8)
    for row, mask in zip(bits, masks.values(), strict=True):
        part = mask[:size]
        row[: len(part)] = np.frombuffer(part, np.uint8)
    return {"masked_rows": np.asarray(list(masks), np.int64), "allowed_bits": bits}


def _is_for_host(context: SamplingContext) -> bool:
    return context.masks_by_logits or not context.has_floor_filters


def _allowed_bits(contexts: Iterable[SamplingContext], vocabulary: int) -> Iterator[tuple[int, bytes]]:
    for row, context in enumerate(contexts):
        if context.constraints is not None and not context.masks_by_logits:
            yield row, context.constraints.allowed_bits(vocabulary)
