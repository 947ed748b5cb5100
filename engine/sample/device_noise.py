"""The arg max of logits plus noise on a device: in one kernel on a GPU, else in torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from engine.sample.noise import gumbel

log = logging.getLogger("cellar.engine")

# From logits divided by the temperature [rows, vocabulary], the minimum logit of each row [rows, 1], and seeds and
# positions [rows], to tokens [rows].
NoisyArgmax: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# Noise is computed for some rows at a time: each of its intermediate results has this number of elements, of 8 bytes.
_NOISE_ELEMENTS = 2**22
# Rows and vocabulary of the check.
_CHECKED_ROWS, _CHECKED_TOKENS = 64, 5003


@cache
def best_noisy_argmax(device: torch.device) -> NoisyArgmax:
    """The Triton kernel on a GPU where it gives the tokens of torch, else torch and one warning in the log."""
    if device.type != "cuda":
        return noisy_argmax
    try:
        # Only torch for GPUs brings triton.
        from engine.kernels.triton import sampling
    except ImportError as error:
        return _without_triton(device, str(error))
    try:
        is_equal = equals_torch(sampling.noisy_argmax, device)
    except sampling.FAILURES as error:
        return _without_triton(device, f"{type(error).__name__}: {error}")
    return sampling.noisy_argmax if is_equal else _without_triton(device, "its tokens differ from those of torch")


def _without_triton(device: torch.device, reason: str) -> NoisyArgmax:
    log.warning("sampling on %s is several times slower, in torch instead of Triton: %s", device, reason)
    return noisy_argmax


def noisy_argmax(scaled: Tensor, floor: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    vocabulary = scaled.shape[-1]
    tokens = torch.arange(vocabulary, device=scaled.device).expand_as(scaled)
    rows = max(_NOISE_ELEMENTS // vocabulary, 1)
    columns = (scaled, floor, seeds[:, None].expand_as(scaled), positions[:, None].expand_as(scaled), tokens)
    argmaxima = []
    for chunk, least, *counters in zip(*(torch.split(column, rows) for column in columns), strict=True):
        scores = chunk.double() + gumbel(*counters)
        argmaxima.append(scores.masked_fill(chunk < least, -torch.inf).argmax(-1))
    return torch.cat(argmaxima)


def equals_torch(function: NoisyArgmax, device: torch.device) -> bool:
    """Whether a function gives the tokens of `noisy_argmax`, for some rows of random logits."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(_CHECKED_ROWS, _CHECKED_TOKENS, generator=generator)
    numbers = torch.randint(-(2**63), 2**63 - 1, (_CHECKED_ROWS,), generator=generator)
    positions = numbers.bitwise_and(2**34 - 1)
    floor = logits.amax(-1, keepdim=True) - torch.linspace(0, 40, _CHECKED_ROWS)[:, None]
    arguments = [part.to(device) for part in (logits, floor, numbers, positions)]
    return torch.equal(function(*arguments), noisy_argmax(*arguments))
