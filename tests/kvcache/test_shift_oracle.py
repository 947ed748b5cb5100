"""A shifted key equals the key that a real model of one layer computes at the new position.

In one layer a key depends on its token and its position only, so transformers gives the expected keys.
"""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from kvcache.cache import Cache
from kvcache.spec import LayerSpec, Rotation, Span

CASES = {
    "llama": ("LlamaConfig", {"head_dim": 16}, "half"),
    "llama3 scaling": (
        "LlamaConfig",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        "half",
    ),
    "gpt_neox, a quarter rotated": ("GPTNeoXConfig", {"rotary_pct": 0.25}, "half"),
    "cohere": ("CohereConfig", {}, "interleaved"),
}
# transformers rounds its angles to float32 whatever the model's type: at position 60 that is 2e-6 radians.
TOLERANCE = 2e-6


class Model:
    """A model of one layer with random weights, as a source of keys."""

    def __init__(self, case: str, dtype: torch.dtype) -> None:
        name, own, layout = CASES[case]
        config = getattr(transformers, name)(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=512,
            initializer_range=0.2,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            **own,
        )
        torch.manual_seed(0)
        self.model: Any = AutoModelForCausalLM.from_config(config).to(dtype).eval()
        self.layout: Literal["half", "interleaved"] = layout

    def rows(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Keys and values [heads, tokens, width] of tokens at positions 0, 1, 2, ..."""
        store = DynamicCache()
        with torch.inference_mode():
            self.model(input_ids=torch.tensor([tokens]), past_key_values=store, use_cache=True)
        return store.layers[0].keys[0].clone(), store.layers[0].values[0].clone()

    @property
    def spec(self) -> LayerSpec:
        """The cache geometry of the layer."""
        (frequencies,) = [
            buffer.double() for name, buffer in self.model.named_buffers() if name.endswith("rotary_emb.inv_freq")
        ]
        keys, values = self.rows([3])
        rotation = Rotation(self.layout, 0, tuple(frequencies.tolist()))
        return LayerSpec(keys.shape[0], keys.shape[-1], values.shape[-1], rotation=rotation)


def fill(cache: Cache, model: Model, slot: int, tokens: list[int]) -> None:
    """Fill a slot with tokens as the model computes them from the start."""
    keys, values = model.rows(tokens)
    start = cache.cached_length(slot)
    with cache.forward([Span(slot, start, len(tokens) - start)]) as forward:
        forward.store_kv(0, keys[:, start:], values[:, start:])


def stored(cache: Cache, slot: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a slot in position order."""
    group, own = cache.layer_group(0)
    cells = torch.from_numpy(group.table(slot).copy())
    return group.pool.keys.rows[own][:, cells], group.pool.values.rows[own][:, cells]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_shifted_keys_equal_keys_computed_at_the_new_positions(case: str, dtype: torch.dtype) -> None:
    model = Model(case, dtype)
    cache = Cache([model.spec], slots=2, capacity=80, cells=160, dtype=dtype)
    tokens = [at * 7 % 61 + 3 for at in range(60)]
    fill(cache, model, 0, tokens)
    cache.copy_prefix(0, 1, 40)
    left = list(tokens)
    for keep, drop in ((4, 20), (0, 17), (11, 1)):
        cache.shift(0, keep, drop)
        del left[keep : keep + drop]
        left += [9, 8, 7]
        fill(cache, model, 0, left)

    expected = (*model.rows(left), *model.rows(tokens[:40]))
    allowed = TOLERANCE * float(expected[0].abs().max())
    for right, actual in zip(expected, (*stored(cache, 0), *stored(cache, 1)), strict=True):
        torch.testing.assert_close(actual, right, rtol=0, atol=allowed)
