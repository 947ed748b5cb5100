"""The arg max of logits plus noise (engine/sample/noise.py) in one pass over the logits."""

from __future__ import annotations

import subprocess

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

# Errors of compilers and drivers.
FAILURES = (TritonError, RuntimeError, OSError, subprocess.CalledProcessError)

_BLOCK_TOKENS = 1024


@triton.jit
def noise_kernel(
    scaled: tl.tensor,
    floors: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    scores: tl.tensor,
    tokens: tl.tensor,
    vocabulary: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """The largest score of a block of tokens of one row, and its token, the first of several; both [rows, blocks]."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens_of_block = block * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(
        scaled + row * vocabulary + tokens_of_block, mask=tokens_of_block < vocabulary, other=float("-inf")
    )
    position, zeros = tl.load(positions + row), tl.zeros([BLOCK], tl.uint32)
    low, high = (zeros + (position & 0xFFFFFFFF).to(tl.uint32)), (zeros + (position >> 32).to(tl.uint32))
    word, _, _, _ = tl.philox(tl.load(seeds + row), low, high, tokens_of_block.to(tl.uint32), zeros)
    uniform = (word.to(tl.float64) + 0.5) / 4294967296.0
    noisy = logits.to(tl.float64) - tl.log(-tl.log(uniform))
    noisy = tl.where((tokens_of_block < vocabulary) & (logits >= tl.load(floors + row)), noisy, float("-inf"))
    best, index = tl.max(noisy, 0, return_indices=True)
    entry = row * tl.num_programs(1) + block
    tl.store(scores + entry, best)
    tl.store(tokens + entry, block * BLOCK + index)


def noisy_argmax(scaled: Tensor, floor: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """See engine/sample/device_noise.py."""
    rows, vocabulary = scaled.shape
    shape = (rows, triton.cdiv(vocabulary, _BLOCK_TOKENS))
    scores = torch.empty(shape, dtype=torch.float64, device=scaled.device)
    tokens = torch.empty(shape, dtype=torch.long, device=scaled.device)
    arguments = (scaled.contiguous(), floor.contiguous(), seeds.contiguous(), positions.contiguous())
    noise_kernel[shape](*arguments, scores, tokens, vocabulary, BLOCK=_BLOCK_TOKENS)
    return tokens.gather(-1, scores.argmax(-1, keepdim=True))[:, 0]
