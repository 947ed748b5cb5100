"""Tiny random models of many families in folders, as the loader reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from engine.config import EngineConfig
from engine.core import Core
from engine.draft.speculation import Speculation
from engine.load.load import LoadedModel, load

CONTEXT = 128
END = 257
VOCABULARY = 272

# Weights of std 0.2 give logits of std 1.6, so that a wrong row changes tokens and rounding does not.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "bos_token_id": 256,
    "eos_token_id": END,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

_ALTERNATING = ["sliding_attention", "full_attention"]

_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_LATENT = {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16}
_JAMBA = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
}

# Rotary factors that change at this length.
ORIGINAL = 40
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 3.0, 6.0, 12.0],
    "original_max_position_embeddings": ORIGINAL,
}
# Queries are scaled by position, from this length on.
_TEMPERED = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 8,
    "llama_4_scaling_beta": 0.5,
}
_RESTARTING = {"rope_parameters": _LONGROPE, "original_max_position_embeddings": ORIGINAL}
_SCALED_ROPE = {"rope_parameters": {**_LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3}}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma": ("GemmaConfig", {}),
    "phi3": ("Phi3Config", {}),
    "phi3_long": ("Phi3Config", _RESTARTING),
    "phimoe_long": ("PhimoeConfig", {**_RESTARTING, **_SCALED_ROPE, "num_local_experts": 4}),
    "llama_long": ("LlamaConfig", {"rope_parameters": _LONGROPE}),
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.5}),
    "olmo2": ("Olmo2Config", {}),
    "gemma2": ("Gemma2Config", {"sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 8, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 8}),
    "gemma4_experts": (
        "Gemma4TextConfig",
        {
            "sliding_window": 8,
            "layer_types": _ALTERNATING,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "global_head_dim": 8,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": 6}),
    "ministral3": ("Ministral3Config", {"sliding_window": None, "rope_parameters": _TEMPERED}),
    "cohere": ("CohereConfig", {"logit_scale": 1.0}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", _MOE),
    "qwen3_next": ("Qwen3NextConfig", {**_MOE, **_DELTA, "num_hidden_layers": 4}),
    "olmo_hybrid": ("OlmoHybridConfig", {**_DELTA, "num_hidden_layers": 4}),
    "deepseek_v2": ("DeepseekV2Config", {**_LATENT, "q_lora_rank": 12}),
    "deepseek_v3": ("DeepseekV3Config", {**_LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "minicpm3": ("MiniCPM3Config", {**_LATENT, "q_lora_rank": 12}),
    "mamba": ("MambaConfig", {"state_size": 8}),
    "mamba2": ("Mamba2Config", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 16}),
    "jamba": ("JambaConfig", {**_JAMBA, "mamba_d_state": 8, "use_mamba_kernels": False}),
    "bamba": ("BambaConfig", {**_MAMBA2, "attn_layer_indices": [1]}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
    "llama4": ("Llama4TextConfig", {"num_local_experts": 2, "attention_chunk_size": 8, "intermediate_size_mlp": 48}),
    "llama4_full": (
        "Llama4TextConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_chunk_size": 8,
            "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0],
            "floor_scale": 8,
            "attn_scale": 0.5,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}),
}


def save_model(family: str, folder: Path) -> Path:
    """Write a tiny model of a family, the same at every call, with a tokenizer."""
    name, own = FAMILIES[family]
    settings = {**_COMMON, **own}
    if family == "gpt2":
        shared = ("vocab_size", "initializer_range", "bos_token_id", "eos_token_id")
        settings = {key: settings[key] for key in (*own, *shared)}
    config = getattr(transformers, name)(**settings)
    torch.manual_seed(sum(family.encode()))
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = END
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer: a token for each byte, a start, an end, and a few merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    pieces = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("i", "n")]
    specials = ["<start>", "<end>"]
    vocabulary |= {token: len(letters) + at for at, token in enumerate(specials)}
    vocabulary |= {left + right: len(letters) + len(specials) + at for at, (left, right) in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pieces))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<start>",
        eos_token="<end>",
        chat_template="{% for message in messages %}<start>{{ message.role }}: {{ message.content }}<end>{% endfor %}",
    )
    wrapped.save_pretrained(folder)


def load_model(folder: Path, dtype: str = "float64", **settings: Any) -> LoadedModel:
    """The model of a folder, loaded by the engine's loader."""
    return load(EngineConfig(model=str(folder), dtype=dtype, **{"context": CONTEXT, **settings}), lambda phase: None)


def core(
    loaded: LoadedModel,
    *,
    slots: int = 4,
    cells: int | None = None,
    context: int = CONTEXT,
    speculation: Speculation | None = None,
    itl_target_ms: Literal["auto"] | float = 0.0,
    **settings: Any,
) -> Core:
    """An engine core without a thread, over a model shared by many tests.

    Without a latency target its chunks do not depend on the speed of this machine, so steps can be counted.
    """
    cells = slots * context if cells is None else cells
    info = dataclasses.replace(loaded.info, slots=slots, context=context)
    memory = dataclasses.replace(loaded.memory, cells=cells)
    config = EngineConfig(
        model=info.folder,
        device=info.device,
        context=context,
        slots=slots,
        cells=cells,
        itl_target_ms=itl_target_ms,
        **settings,
    )
    return Core(dataclasses.replace(loaded, info=info, memory=memory), config, speculation)


class Reference:
    """transformers alone: one sequence, its own cache and attention."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        if dtype == torch.float64:
            self.model.set_experts_implementation("eager")
        self.greedy = cache(self._greedy)

    def _greedy(self, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
        """The tokens that `generate` appends to a prompt."""
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            answer = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
            )
        return tuple(answer[0, len(prompt) :].tolist())

    def logits(self, tokens: tuple[int, ...]) -> torch.Tensor:
        """The logits after some tokens, computed in one forward."""
        with torch.inference_mode():
            logits: torch.Tensor = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        return logits[0, -1]


# The fixtures `loaded` and `reference`.
Models = Callable[..., LoadedModel]
References = Callable[..., Reference]
