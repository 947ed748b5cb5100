"""Ranges of tokens that see each other, as those of an image do in Gemma 3: exact in any batch and in any chunks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model, get_block_sequence_ids_for_mask

from engine.load import Loaded
from kvcache.cache import Cache
from kvcache.errors import BadSpan
from kvcache.spec import Span

# Longer than the window of 8, so that its first tokens do not see all of it alike.
RANGE, NONE = (9, 21), (0, 0)
LENGTH = 30
PROMPT = tuple(torch.randint(3, 250, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist())
OTHER = PROMPT[::-1]


@pytest.fixture
def model(loaded: Callable[..., Loaded]) -> Loaded:
    """A full and a window layer, in float64."""
    return loaded("gemma3")


def alone(model: Loaded, tokens: tuple[int, ...], mutual: tuple[int, int] = RANGE) -> Tensor:
    """The logits after some tokens by transformers, with the masks that it makes for the tokens of an image."""
    kinds = torch.zeros(1, len(tokens), dtype=torch.long)
    kinds[:, slice(*mutual)] = 1
    config = model.model.config
    way = config._attn_implementation
    model.model.set_attn_implementation("eager")
    with torch.inference_mode():
        masks = create_masks_for_vision_model(
            config=config,
            inputs_embeds=torch.zeros(1, len(tokens), 1, dtype=torch.float64),
            attention_mask=None,
            past_key_values=None,
            position_ids=torch.arange(len(tokens))[None],
            block_sequence_ids=get_block_sequence_ids_for_mask(kinds),
        )
        logits: Tensor = model.model(input_ids=torch.tensor([tokens]), attention_mask=masks, use_cache=False).logits
    model.model.set_attn_implementation(way)
    return logits[0, -1]


def cache(model: Loaded) -> Cache:
    """An empty cache."""
    specs = [plan.spec for plan in model.layers]
    return Cache(specs, slots=3, capacity=2 * LENGTH, cells=6 * LENGTH, dtype=torch.float64)


def feed(model: Loaded, cache: Cache, *parts: tuple[int, tuple[int, ...], int]) -> list[Tensor]:
    """One forward that brings slots to (slot, tokens, length); a range that lies ahead is mutual in slots 0 and 1."""
    spans = []
    for slot, _, length in parts:
        start = cache.length(slot)
        spans.append(Span(slot, start, length - start, (RANGE,) if slot < 2 and start <= RANGE[0] < length else ()))
    rows = [
        token for span, (_, tokens, _) in zip(spans, parts, strict=True) for token in tokens[span.start : span.stop]
    ]
    wanted = (torch.tensor([span.length for span in spans]).cumsum(0) - 1).tolist()
    with cache.forward(spans) as forward:
        return list(model.runner.run(forward, rows, wanted))


@pytest.mark.parametrize("stops", [(30,), (9, 21, 30), (4, 25, 30), (9, 22, 23, 30), (1, 9, 21, 22, 30)])
def test_chunks_around_a_range_say_what_one_forward_says(model: Loaded, stops: tuple[int, ...]) -> None:
    """Whatever the chunks are before and after the range, the logits are those of transformers with such masks."""
    memory = cache(model)
    for stop in stops:
        rows = feed(model, memory, (0, PROMPT, stop), (2, OTHER, stop))

    assert torch.allclose(alone(model, PROMPT), rows[0], rtol=0, atol=1e-5)
    assert torch.allclose(alone(model, OTHER, NONE), rows[1], rtol=0, atol=1e-5)


def test_the_range_matters(model: Loaded) -> None:
    """The prompt says something else where its tokens see only those before them."""
    assert not torch.allclose(alone(model, PROMPT), alone(model, PROMPT, NONE), atol=1e-3)


@pytest.mark.parametrize("length", [5, 9, 21, 24, 29])
def test_a_copy_goes_on_before_and_after_a_range(model: Loaded, length: int) -> None:
    """A slot that shares what stands before or behind the range gets the logits of a cold start."""
    memory = cache(model)
    for stop in (9, 21, 30):
        feed(model, memory, (0, PROMPT, stop))
    standing = memory.copy_prefix(0, 1, length)
    if RANGE[0] < standing < RANGE[1]:
        standing = memory.rewind(1, RANGE[0])

    row = feed(model, memory, (1, PROMPT, LENGTH))[0]

    assert torch.allclose(alone(model, PROMPT), row, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mutual", [(3, 5), (8, 11), (9, 9), (0, 20)])
def test_a_range_must_be_wholly_in_the_span(model: Loaded, mutual: tuple[int, int]) -> None:
    """A range that begins before the rows, ends behind them or is empty is refused, and nothing has changed."""
    memory = cache(model)
    feed(model, memory, (0, PROMPT, 4))

    with pytest.raises(BadSpan), memory.forward([Span(0, 4, 6, (mutual,))]):
        pass

    assert 4 == memory.length(0)
