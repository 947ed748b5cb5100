"""The models as networks: a fresh Llama of a given shape and its logits at the positions that count."""

from typing import cast

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from models.recipe.plan import POSITIONS, VOCABULARY, Shape
from models.recipe.rows import END, Batch


def build(shape: Shape, seed: int) -> LlamaForCausalLM:
    """An untrained model."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=shape.hidden,
            intermediate_size=shape.inner,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.key_heads,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=END,
            pad_token_id=0,
            attn_implementation="sdpa",
        )
    )


def parameters(model: LlamaForCausalLM) -> int:
    """How many numbers the model learns; the tied embedding counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def logits(model: LlamaForCausalLM, batch: Batch, least: float) -> Tensor:
    """Predictions [N, V] of the N tokens that weigh at least `least`; padding is at the end and needs no mask."""
    hidden = model.model(input_ids=batch.ids[:, :-1], use_cache=False).last_hidden_state
    return cast("Tensor", model.lm_head(hidden[chosen(batch, least)]))


def chosen(batch: Batch, least: float) -> Tensor:
    """Which positions [B, L - 1] predict a token that weighs at least `least`."""
    return batch.weights[:, 1:] >= least
