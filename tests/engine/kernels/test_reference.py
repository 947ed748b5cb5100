"""Attention over cells equals the definition in float64, for scattered, shared and shifted cells."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from engine.kernels.attention_input import AttentionInput
from engine.kernels.reference import attend
from kvcache.cache import Cache
from kvcache.forward import Forward
from kvcache.rotary import rotate
from kvcache.spec import AttentionRange, LayerSpec, Rotation, Span
from tests.selection import quick

HEADS, KEY_HEADS, WIDTH, VALUE_WIDTH = 6, 2, 8, 4
ROTATION = Rotation("half", 2, (1.0, 0.2, 0.03))
REACHES = [
    AttentionRange(),
    AttentionRange("window", 1),
    AttentionRange("window", 5),
    AttentionRange("window", 100),
    AttentionRange("chunk", 4),
    AttentionRange("chunk", 1),
]
BENDS = [{}, {"softcap": 2.0}, {"sinks": True}, {"softcap": 2.0, "sinks": True}]


class Words:
    """Random queries, keys and values of tokens; keys are rotated to positions."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.q = torch.randn(50, HEADS, WIDTH, generator=generator, dtype=torch.float64)
        self.k = torch.randn(50, KEY_HEADS, WIDTH, generator=generator, dtype=torch.float64)
        self.v = torch.randn(50, KEY_HEADS, VALUE_WIDTH, generator=generator, dtype=torch.float64)
        self.sinks = torch.randn(HEADS, generator=generator, dtype=torch.float64)

    def rows(self, tokens: list[int], start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [heads, rows, width] of tokens from position `start` on."""
        q = torch.stack([rotate(self.q[token], start + at, ROTATION) for at, token in enumerate(tokens)], 1)
        k = torch.stack([rotate(self.k[token], start + at, ROTATION) for at, token in enumerate(tokens)], 1)
        return q, k, self.v[tokens].transpose(0, 1).contiguous()


def by_definition(words: Words, tokens: list[int], at: int, reach: AttentionRange, bend: dict[str, object]) -> Tensor:
    """The output [heads, value_width] of the query at a position."""
    first = {"full": 0, "window": max(at - reach.size + 1, 0), "chunk": at - at % max(reach.size, 1)}[reach.kind]
    q, k, v = words.rows(tokens[: at + 1], 0)
    result = []
    for head in range(HEADS):
        own = head * KEY_HEADS // HEADS
        scores = [float(q[head, at] @ k[own, other]) * WIDTH**-0.5 for other in range(first, at + 1)]
        score = torch.tensor(scores, dtype=torch.float64)
        if "softcap" in bend:
            score = 2.0 * torch.tanh(score / 2.0)
        if "sinks" in bend:
            score = torch.cat((score, words.sinks[head][None]))
        weights = score.softmax(-1)[: at + 1 - first]
        result.append(weights @ v[own, first : at + 1])
    return torch.stack(result)


def step(
    cache: Cache, words: Words, plan: list[tuple[int, list[int]]], reach: AttentionRange, bend: dict[str, object]
) -> Tensor:
    """A forward of new tokens for some slots: the attention output [rows, heads, value_width]."""
    spans = [Span(slot, cache.cached_length(slot), len(tokens)) for slot, tokens in plan]
    rows = [words.rows(tokens, span.start) for span, (_, tokens) in zip(spans, plan, strict=True)]
    q, k, v = (torch.cat(part, 1) for part in zip(*rows, strict=True))
    sinks = words.sinks if "sinks" in bend else None
    softcap = 2.0 if "softcap" in bend else None
    with cache.forward(spans) as forward:
        return attended(forward, q, k, v, reach, softcap, sinks)


def attended(
    forward: Forward,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reach: AttentionRange,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Store, then attend, as a layer does."""
    forward.store_kv(0, k, v)
    keys, values = forward.layer_kv(0)
    segments = forward.segments(0)
    return attend(AttentionInput(q, keys, values, segments, reach, WIDTH**-0.5, softcap, sinks))


@pytest.mark.parametrize("bend", quick(BENDS[::2], BENDS), ids=lambda bend: "+".join(bend) or "plain")
@pytest.mark.parametrize("reach", REACHES, ids=lambda reach: f"{reach.kind}-{reach.size}")
def test_attention_over_cells_equals_the_definition(reach: AttentionRange, bend: dict[str, object]) -> None:
    """Prompt chunks and single rows of three slots, with copies and shifts between them."""
    words, chance = Words(), random.Random(1)
    spec = LayerSpec(KEY_HEADS, WIDTH, VALUE_WIDTH, reach, ROTATION)
    cache = Cache([spec], slots=3, capacity=40, cells=90, dtype=torch.float64)
    cached: list[list[int]] = [[], [], []]
    for round_ in range(14):
        if round_ % 4 == 2:
            source, target = chance.sample(range(3), 2)
            cached[target] = cached[source][: cache.copy_prefix(source, target, len(cached[source]) - 1)]
        if round_ % 5 == 4 and len(cached[0]) > 4:
            shifted = cache.shift(0, 1, 2)
            cached[0] = (cached[0][:1] + cached[0][3:])[:shifted]
        plan = [(slot, [chance.randrange(50) for _ in range(chance.choice((1, 1, 4)))]) for slot in (2, 0, 1)]
        output = step(cache, words, plan, reach, bend)
        expected = []
        for slot, tokens in plan:
            cached[slot] += tokens
            length = len(cached[slot])
            expected += [
                by_definition(words, cached[slot], at, reach, bend) for at in range(length - len(tokens), length)
            ]
        torch.testing.assert_close(output, torch.stack(expected), rtol=0, atol=1e-12)
