"""Tiny checkpoints with tokenizers that GGUF has, to convert."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from engine.convert.convert import Conversion
from engine.convert.gguf_file import WeightType
from tests.engine.kit.multimodal import tiny_config, whole_model
from tests.engine.kit.tiny import settings

SIZE = 320
TEXT = ["The quick brown fox jumps over 12 lazy dogs; the cellar is cool and dark, and dogs like the dark."] * 3
# <|end|> and <|start|>.
ENDS = [1, 2]
TEMPLATE = "{% for message in messages %}<|start|>{{ message.content }}<|end|>{% endfor %}"
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}
TEMPERED = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1 + pair / 8 for pair in range(8)],
    "long_factor": [2.0 + pair for pair in range(8)],
}
HYBRID = {"attention_multiplier": 0.3, "embedding_multiplier": 3, "residual_multiplier": 0.5, "mamba_n_groups": 2}
NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
}
GEMMA4 = {"vocab_size_per_layer_input": SIZE, "final_logit_softcapping": 30.0}
GEMMA4_EQUAL = {"attention_k_eq_v": True, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
# By name, a model type and settings.
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 16384}),
    "llama yarn": ("llama", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 7}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3 long": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64, "sliding_window": None}),
    "granite": ("granite", {"attention_multiplier": 0.3, "embedding_multiplier": 3, "residual_multiplier": 0.5}),
    "glm4": ("glm4", {}),
    "glm4_moe_lite": ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "sparse"]}),
    "glm4_moe": ("glm4_moe", {"use_qk_norm": True, "first_k_dense_replace": 1}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "lfm2": ("lfm2", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]}),
    "gpt_oss": ("gpt_oss", {}),
    "seed_oss": ("seed_oss", {}),
    "exaone4": ("exaone4", {"num_hidden_layers": 5}),
    "exaone4 full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5_moe": ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}),
    "hunyuan": ("hunyuan_v1_dense", {}),
    "hunyuan alpha": ("hunyuan_v1_dense", {"rope_parameters": ALPHA}),
    "hunyuan_moe": ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2}),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "lfm2_moe": ("lfm2_moe", {}),
    "ministral3": ("ministral3", {"rope_parameters": TEMPERED}),
    "granite_hybrid": ("granitemoehybrid", {**HYBRID, "num_local_experts": 0, "shared_intermediate_size": 48}),
    "granite_hybrid experts": ("granitemoehybrid", {**HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite_hybrid rotary": ("granitemoehybrid", {**HYBRID, "position_embedding_type": "rope"}),
    "falcon_h1": ("falcon_h1", {}),
    "falcon_h1 norm": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h_moe": ("nemotron_h", NEMOTRON),
    "nemotron_h_moe latent": ("nemotron_h", {**NEMOTRON, "moe_latent_size": 16}),
    "granitemoe": ("granitemoe", {"attention_multiplier": 0.3, "embedding_multiplier": 3}),
    "gemma4": ("gemma4_text", GEMMA4),
    "gemma4 wide": ("gemma4_text", {**GEMMA4, "use_double_wide_mlp": True}),
    "gemma4 keys": (
        "gemma4_text",
        {**GEMMA4_EQUAL, "num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"},
    ),
    "gemma4 experts": (
        "gemma4_text",
        {**GEMMA4_EQUAL, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "qwen3_next": ("qwen3_next", {}),
}


def save_checkpoint(name: str, folder: Path) -> Any:
    """Write a random checkpoint in float32 with no constant parameter; returns the model."""
    kind, own = CHECKPOINTS[name]
    model = save_model(kind, folder, **own)
    byte_level().save_pretrained(folder)
    return model


# Types with inputs beside text, whose text is written: settings of the text.
MULTIMODAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        [
            "deepseek_vl",
            "exaone4_5",
            "glmasr",
            "got_ocr2",
            "idefics3",
            "internvl",
            "kimi_k25",
            "lfm2_vl",
            "lighton_ocr",
            "llava",
            "llava_next",
            "llava_next_video",
            "llava_onevision",
            "minicpm_ocr",
            "minicpmv4_6",
            "minicpmv4_7",
            "mistral3",
            "moss_transcribe_diarize",
            "ovis2",
            "qianfan_ocr",
            "qwen2_audio",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen3_asr",
            "smolvlm",
            "video_llama_3",
            "video_llava",
            "vipllava",
            "voxtral",
        ],
        {},
    ),
    "gemma3": {"query_pre_attn_scalar": 8},
    "gemma4": {"vocab_size_per_layer_input": SIZE},
    "idefics2": {"sliding_window": None},
}


def save_multimodal(kind: str, folder: Path) -> Any:
    """Write a random checkpoint of a type of MULTIMODAL with all its parts; returns the model."""
    config = tiny_config(kind, **{"vocab_size": SIZE, **MULTIMODAL[kind]})
    config.eos_token_id = ENDS
    model = whole_model(config)
    model.save_pretrained(folder)
    byte_level().save_pretrained(folder)
    return model


def save_model(kind: str, folder: Path, **own: Any) -> Any:
    """Write a random model of a type without a tokenizer; returns it."""
    config = AutoConfig.for_model(kind, **settings(kind) | {"vocab_size": SIZE} | own)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model


def byte_level(*splits: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with BOS; `splits` are regular expressions before GPT-2's own."""
    backend = Tokenizer(models.BPE())
    first = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin|>", "<|end|>", "<|start|>"]
    trainer = trainers.BpeTrainer(vocab_size=SIZE - 8, initial_alphabet=alphabet, special_tokens=special)
    backend.train_from_iterator(TEXT, trainer)
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def byte_fallback(*, prefix: bool) -> PreTrainedTokenizerFast:
    """A BPE tokenizer of SentencePiece's kind, with or without a space in front of a text."""
    trained = Tokenizer(models.BPE())
    replace = normalizers.Replace(" ", "\u2581")
    trained.normalizer = replace
    trained.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=60))
    learnt = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learnt["vocab"]]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(
        models.BPE(vocabulary, every_split(learnt), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace]) if prefix else replace
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(steps)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def every_split(learnt: dict[str, Any]) -> list[tuple[str, str]]:
    """The merges of SentencePiece: all pairs of tokens that make a token, the tokens in the order of their merges."""
    known, made = learnt["vocab"], ["".join(pair) for pair in learnt["merges"]]
    cuts = ((token, at) for token in dict.fromkeys(made) for at in range(1, len(token)))
    return [(token[:at], token[at:]) for token, at in cuts if token[:at] in known and token[at:] in known]


def conversion(
    source: Path | str, target: Path, weight_type: WeightType | None = None, *, overwrite: bool = False
) -> Conversion:
    """A conversion without output."""
    return Conversion(
        source=str(source),
        target=target,
        weight_type=weight_type,
        overwrite=overwrite,
        on_phase=lambda phase: None,
        on_progress=lambda written, total: None,
    )
