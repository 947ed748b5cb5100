"""The settings of one tiny random model a family: what is checked for docs/models.md (tests/engine/families.py)."""

from __future__ import annotations

from typing import Any

VOCABULARY = 260
# Windows and chunks of attention shorter than the prompts, so that they matter.
SHORT = 6

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 4,
}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
_WINDOW = {"sliding_window": SHORT}
# The last two layers read the cells of the layers before that are of their type.
_SHARING = ["sliding_attention", "full_attention"] * 3
_INDEXED = {"index_n_heads": 8, "index_head_dim": 16, "index_topk": SHORT}
_SCALED = {"query_pre_attn_scalar": 16}

# What a family is called and made of; a setting that is None is one that the family does not know.
FAMILIES: dict[str, dict[str, Any]] = {
    **{
        name: {}
        for name in [
            "llama",
            "mixtral",
            "ministral3",
            "qwen2",
            "qwen3",
            "gemma",
            "phi",
            "phi3",
            "phimoe",
            "olmo",
            "olmo2",
            "olmoe",
            "flex_olmo",
            "glm",
            "glm4",
            "cohere",
            "smollm3",
            "granite",
            "granitemoe",
            "granitemoeshared",
            "stablelm",
            "gpt_neox",
            "starcoder2",
            "nemotron",
            "persimmon",
            "seed_oss",
            "hunyuan_v1_dense",
            "hunyuan_v1_moe",
            "ernie4_5",
            "ernie4_5_moe",
            "minimax_m2",
            "solar_open",
            "helium",
            "apertus",
            "arcee",
            "bitnet",
            "jetmoe",
            "nanochat",
            "cwm",
            "modernbert-decoder",
            "aria_text",
            "beam",
            "flint",
            "fuyu",
            "granite_swa",
            "granitemoe_swa",
            "hrm_text",
            "hyperclovax",
            "internlm3",
            "iquestcoder",
            "jais2",
            "mellum",
            "minimax_m3_vl_text",
            "ctrl",
            "diffllama",
            "doge",
            "biogpt",
            "gpt_neox_japanese",
        ]
    },
    **{name: _WINDOW for name in ("mistral", "ministral", "cohere2", "exaone4", "olmo3", "mimo_v2_flash", "afmoe")},
    **{name: {**_WINDOW, **_MOE} for name in ("cohere2_moe", "exaone_moe")},
    **{name: {**_ROUTED, **_LATENT} for name in ("axk1", "dots1")},
    **{name: {**_ROUTED, **_LATENT, **_INDEXED} for name in ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4")},
    **{name: {**_MOE, **_ROUTED, **_WINDOW, "moe_num_experts": 4} for name in ("hy_v3", "kolibri1", "laguna")},
    "bloom": {"head_dim": None, "n_layer": 3, "n_head": 4},
    "falcon": {"head_dim": None},
    "codegen": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "rotary_dim": 8},
    "gptj": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "rotary_dim": 8},
    "gpt_neo": {
        "head_dim": None,
        "num_hidden_layers": None,
        "num_layers": 2,
        "attention_types": [[["global", "local"], 1]],
        "window_size": SHORT,
    },
    "mpt": {"d_model": 64, "n_layers": 3, "n_heads": 4, "head_dim": None},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "xglm": {"d_model": 64, "num_layers": 3, "attention_heads": 4, "ffn_dim": 96, "head_dim": None},
    "dbrx": {
        "d_model": 64,
        "n_layers": 3,
        "n_heads": 4,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "qwen2_moe": _MOE,
    "qwen3_moe": _MOE,
    "glm4_moe": _ROUTED,
    "gemma2": {**_WINDOW, **_SCALED},
    "gemma3_text": {**_WINDOW, **_SCALED},
    "vaultgemma": {**_WINDOW, **_SCALED},
    "gemma3n_text": {
        **_WINDOW,
        "layer_types": _SHARING,
        "intermediate_size": [96] * 6,
        "activation_sparsity_pattern": [0.0] * 6,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
    },
    "gemma4_text": {
        **_WINDOW,
        "layer_types": _SHARING,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 32,
    },
    "gemma4_unified_text": {
        **_WINDOW,
        "layer_types": _SHARING,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 32,
    },
    "gpt_oss": {**_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {"num_local_experts": 2, "attention_chunk_size": SHORT, "intermediate_size_mlp": 64},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "deepseek_v2": {**_ROUTED, **_LATENT},
    "deepseek_v3": {**_ROUTED, **_LATENT},
    "glm4_moe_lite": {**_ROUTED, **_LATENT},
    "youtu": _LATENT,
    "minicpm3": _LATENT,
    "longcat_flash": {
        **_LATENT,
        "n_routed_experts": 4,
        "moe_topk": 2,
        "zero_expert_num": 1,
        "expert_ffn_hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_layers": 2,
    },
    "qwen3_next": {**_MOE, **_DELTA, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_MOE, **_DELTA, "shared_expert_intermediate_size": 32},
    "olmo_hybrid": _DELTA,
    "lfm3": {},
    "bailing_hybrid": {**_MOE, **_ROUTED, **_LATENT, "num_hidden_layers": 4, "layer_group_size": 2},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
    "lfm2_moe": {**_MOE, "layer_types": ["conv", "full_attention", "conv"]},
    "mamba": {"state_size": 8, "intermediate_size": 128},
    "falcon_mamba": {"state_size": 8, "intermediate_size": 128},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
    "jamba": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 128},
    "granitemoehybrid": {
        **_MAMBA2,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 32,
    },
    "zamba2": {
        "mamba_d_state": 16,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "hybrid_layer_ids": [1],
        "num_mem_blocks": 1,
        "use_shared_attention_adapter": False,
        "adapter_rank": 8,
    },
    "zamba": {
        "num_hidden_layers": 6,
        "mamba_d_state": 8,
        "n_mamba_heads": 2,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
        "head_dim": None,
        "num_key_value_heads": 4,
    },
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "hybrid_override_pattern": "M*M-",
        "num_hidden_layers": 4,
    },
    "kimi_linear": {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 32},
}


def settings(name: str) -> dict[str, Any]:
    """All settings of a family's configuration."""
    own = {**_BASE, **FAMILIES[name]}
    if "n_embd" in own:
        own |= dict.fromkeys(_NAMED_OTHERWISE)
    return {key: value for key, value in own.items() if value is not None}


_NAMED_OTHERWISE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
