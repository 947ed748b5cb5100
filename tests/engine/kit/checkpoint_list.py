"""Fifty checkpoints with many downloads in the second half of 2026, by the mechanisms of their models.

Picked by hand from public reports: no complete ranking of downloads was at hand, and the order is none. Mechanisms are
those of the checkpoint's family in transformers; widths and scalars are those of the kit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_SIX = [_LOCAL] * 5 + [_GLOBAL]
_TIED = {"tie_word_embeddings": True}
_UNTIED = {"tie_word_embeddings": False}
_ROUTED = {"norm_topk_prob": True, **_UNTIED}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA31 = {"rope_parameters": {**_LLAMA3, "factor": 8.0}, "max_position_embeddings": 131072, **_UNTIED}
_LLAMA32 = {"rope_parameters": {**_LLAMA3, "factor": 32.0}, "max_position_embeddings": 131072, **_TIED}
# A quarter of a head is rotated, by positions of three axes.
_QWEN35_ROPE = {
    "rope_type": "default",
    "rope_theta": 10000000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
_QWEN35 = {"head_dim": 32, "rope_parameters": _QWEN35_ROPE}
_VL_ROPE = {"rope_type": "default", "rope_theta": 5000000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_GEMMA3 = {"num_hidden_layers": 6, "layer_types": _SIX}
_GEMMA3_ROPE = {
    _LOCAL: {"rope_type": "default", "rope_theta": 10000.0},
    _GLOBAL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
}
_GEMMA3_LARGE = {**_GEMMA3, "rope_parameters": _GEMMA3_ROPE}
_GEMMA3N = {"activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0], "final_logit_softcapping": 30.0}
_GEMMA4 = {"final_logit_softcapping": 30.0}
_E2B_LAYERS = ([_LOCAL] * 4 + [_GLOBAL]) * 2
_E2B = {"num_hidden_layers": 10, "layer_types": _E2B_LAYERS, "num_kv_shared_layers": 5, "use_double_wide_mlp": True}
_E4B = {"num_hidden_layers": 12, "layer_types": _SIX * 2, "num_kv_shared_layers": 6}
_GEMMA4_LARGE = {
    **_GEMMA4,
    **_GEMMA3,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
}
_GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
_MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# Three quarters of a head of 16 are rotated.
_PHI4_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 6,
    "long_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 3.0],
}
_PHI4 = {"rope_parameters": _PHI4_ROPE, "original_max_position_embeddings": 64, "sliding_window": None, **_TIED}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MINIMAX_ROPE = {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5}
_NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
}
_GRANITE = {"attention_multiplier": 0.3, "embedding_multiplier": 3, "residual_multiplier": 0.5, **_EXPERTS}
_LFM2 = {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 2}


@dataclass(frozen=True, slots=True)
class Published:
    """A checkpoint.

    hub         its name on the hub
    model_type  of its config.json
    text_type   of its text configuration, if the checkpoint has other parts
    mechanisms  settings of its text that select operations; widths are those of the kit
    mtp         None, or where its MTP layer is: "apart" from the layers of the model, or "after" them
    """

    hub: str
    model_type: str
    mechanisms: dict[str, Any] = field(default_factory=dict)
    text_type: str | None = None
    mtp: str | None = None

    @property
    def name(self) -> str:
        """The name without the organisation."""
        return self.hub.partition("/")[2]

    @property
    def shape(self) -> str:
        """Equal for checkpoints that differ in widths only."""
        return repr(replace(self, hub=""))


PUBLISHED = (
    Published("Qwen/Qwen3-0.6B", "qwen3", _TIED),
    Published("Qwen/Qwen3-1.7B", "qwen3", _TIED),
    Published("Qwen/Qwen3-4B", "qwen3", _TIED),
    Published("Qwen/Qwen3-8B", "qwen3", _UNTIED),
    Published("Qwen/Qwen3-30B-A3B", "qwen3_moe", _ROUTED),
    Published("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3_moe", _ROUTED),
    Published("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3_next", _ROUTED, mtp="apart"),
    Published("Qwen/Qwen3-VL-2B-Instruct", "qwen3_vl", {"rope_parameters": _VL_ROPE, **_TIED}, "qwen3_vl_text"),
    Published("Qwen/Qwen3.5-0.8B", "qwen3_5", {**_QWEN35, **_TIED}, "qwen3_5_text", "apart"),
    Published("Qwen/Qwen3.5-2B", "qwen3_5", {**_QWEN35, **_TIED}, "qwen3_5_text", "apart"),
    Published("Qwen/Qwen3.5-4B", "qwen3_5", {**_QWEN35, **_TIED}, "qwen3_5_text", "apart"),
    Published("Qwen/Qwen3.5-9B", "qwen3_5", {**_QWEN35, **_UNTIED}, "qwen3_5_text", "apart"),
    Published("Qwen/Qwen3.5-27B", "qwen3_5", {**_QWEN35, **_UNTIED}, "qwen3_5_text", "apart"),
    Published("Qwen/Qwen3.5-35B-A3B", "qwen3_5_moe", {**_QWEN35, **_UNTIED}, "qwen3_5_moe_text", "apart"),
    Published("Qwen/Qwen3.6-27B", "qwen3_5", {**_QWEN35, **_UNTIED}, "qwen3_5_text", "apart"),
    Published("Qwen/Qwen3.6-35B-A3B", "qwen3_5_moe", {**_QWEN35, **_UNTIED}, "qwen3_5_moe_text", "apart"),
    Published("Qwen/Qwen2.5-0.5B-Instruct", "qwen2", _TIED),
    Published("Qwen/Qwen2.5-1.5B-Instruct", "qwen2", _TIED),
    Published("Qwen/Qwen2.5-7B-Instruct", "qwen2", _UNTIED),
    Published("google/gemma-3-270m-it", "gemma3_text", _GEMMA3),
    Published("google/gemma-3-1b-it", "gemma3_text", _GEMMA3),
    Published("google/gemma-3-4b-it", "gemma3", _GEMMA3_LARGE, "gemma3_text"),
    Published("google/gemma-3-12b-it", "gemma3", _GEMMA3_LARGE, "gemma3_text"),
    Published("google/gemma-3-27b-it", "gemma3", _GEMMA3_LARGE, "gemma3_text"),
    Published("google/gemma-3n-E4B-it", "gemma3n", _GEMMA3N, "gemma3n_text"),
    Published("google/gemma-4-E2B-it", "gemma4", {**_GEMMA4, **_E2B}, "gemma4_text"),
    Published("google/gemma-4-E4B-it", "gemma4", {**_GEMMA4, **_E4B}, "gemma4_text"),
    Published("google/gemma-4-26B-A4B-it", "gemma4", {**_GEMMA4_LARGE, **_GEMMA4_EXPERTS}, "gemma4_text"),
    Published("google/gemma-4-31B-it", "gemma4", _GEMMA4_LARGE, "gemma4_text"),
    Published("meta-llama/Llama-3.2-1B-Instruct", "llama", _LLAMA32),
    Published("meta-llama/Llama-3.2-3B-Instruct", "llama", _LLAMA32),
    Published("meta-llama/Llama-3.1-8B-Instruct", "llama", _LLAMA31),
    Published("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4", {"num_hidden_layers": 4}, "llama4_text"),
    Published("mistralai/Mistral-7B-Instruct-v0.3", "mistral", {"sliding_window": None}),
    Published("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistral3", {"sliding_window": None}, "mistral"),
    Published("mistralai/Ministral-3-8B-Instruct-2512", "mistral3", {"rope_parameters": _MINISTRAL_ROPE}, "ministral3"),
    Published("openai/gpt-oss-20b", "gpt_oss"),
    Published("openai/gpt-oss-120b", "gpt_oss"),
    Published("microsoft/Phi-4-mini-instruct", "phi3", _PHI4),
    Published("HuggingFaceTB/SmolLM2-135M-Instruct", "llama", _TIED),
    Published("HuggingFaceTB/SmolLM3-3B", "smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], **_TIED}),
    Published("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "qwen2", _UNTIED),
    Published("deepseek-ai/DeepSeek-V3.2", "deepseek_v32", mtp="after"),
    Published("moonshotai/Kimi-K2.5", "kimi_k25", text_type="deepseek_v3"),
    Published("zai-org/GLM-4.7-Flash", "glm4_moe_lite", mtp="after"),
    Published("zai-org/GLM-5", "glm_moe_dsa", mtp="after"),
    Published("MiniMaxAI/MiniMax-M2", "minimax_m2", {"rope_parameters": _MINIMAX_ROPE, **_EXPERTS}),
    Published("LiquidAI/LFM2-8B-A1B", "lfm2_moe", _LFM2),
    Published("ibm-granite/granite-4.0-h-tiny", "granitemoehybrid", _GRANITE),
    Published("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron_h", _NEMOTRON),
)
