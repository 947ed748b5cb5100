"""Writes models with published shapes and random weights, for Cellar and, as GGUF, for llama.cpp.

    python -m benchmarks.shapes qwen3-0.6b FOLDER              # config, bfloat16 weights, tokenizer
    python -m benchmarks.shapes qwen3-0.6b FOLDER --gguf FILE  # and the same weights as a GGUF file

Every token above the single bytes is a whole word, so a server can stream each token at once.
"""

from __future__ import annotations

import itertools
import string
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.result import command_parser

END = "<|end|>"
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
COMMON = {"tie_word_embeddings": True, "dtype": "bfloat16", "rms_norm_eps": 1e-6}
SHAPES: dict[str, dict[str, Any]] = {
    # To try the benchmarks themselves.
    "tiny": COMMON
    | {"model_type": "qwen3", "vocab_size": 16_384, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"max_position_embeddings": 4096, "rope_theta": 10_000.0},
    "tiny-qwen3.5": COMMON
    | {"model_type": "qwen3_5_text", "vocab_size": 16_384, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    | {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    | {"linear_conv_kernel_dim": 4, "max_position_embeddings": 4096},
    "smollm2-135m": COMMON
    | {"model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "head_dim": 64}
    | {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    | {"max_position_embeddings": 8192, "rope_theta": 100_000.0},
    "qwen3-0.6b": COMMON
    | {"model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}
    | {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    | {"max_position_embeddings": 40_960, "rope_theta": 1_000_000.0},
    "qwen3-4b": COMMON
    | {"model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 2560, "intermediate_size": 9728, "head_dim": 128}
    | {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"max_position_embeddings": 40_960, "rope_theta": 1_000_000.0},
    "qwen3-8b": COMMON
    | {"model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "head_dim": 128}
    | {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}
    | {"max_position_embeddings": 40_960, "rope_theta": 1_000_000.0},
    "llama-3.2-1b": COMMON
    | {"model_type": "llama", "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64}
    | {"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"max_position_embeddings": 131_072, "rope_theta": 500_000.0},
    # Large models with fewer layers.
    "qwen3-30b-a3b-4-layers": COMMON
    | {"model_type": "qwen3_moe", "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144}
    | {"num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
    | {"max_position_embeddings": 40_960, "rope_theta": 1_000_000.0, "tie_word_embeddings": False},
    "deepseek-v2-16-heads-3-layers": COMMON
    | {"model_type": "deepseek_v2", "vocab_size": 102_400, "hidden_size": 2048, "intermediate_size": 10_944}
    | {"num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 16, "first_k_dense_replace": 1}
    | {"kv_lora_rank": 512, "q_lora_rank": 768, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    | {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408}
    | {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.0}
    | {"max_position_embeddings": 32_768, "tie_word_embeddings": False},
    "glm-4.7-flash-4-layers": COMMON
    | {"model_type": "glm4_moe_lite", "vocab_size": 154_880, "hidden_size": 2048, "intermediate_size": 10_240}
    | {"num_hidden_layers": 4, "num_attention_heads": 20, "num_key_value_heads": 20}
    | {"mlp_layer_types": ["dense", *["sparse"] * 3]}
    | {"kv_lora_rank": 512, "q_lora_rank": 768, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256}
    | {"n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4, "moe_intermediate_size": 1536}
    | {"norm_topk_prob": True, "routed_scaling_factor": 1.8, "max_position_embeddings": 32_768}
    | {"tie_word_embeddings": False},
    "gemma-4-e2b-10-layers": COMMON
    | {"model_type": "gemma4_text", "vocab_size": 262_144, "hidden_size": 1536, "intermediate_size": 6144}
    | {"num_hidden_layers": 10, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256}
    | {"global_head_dim": 512, "num_kv_shared_layers": 5, "use_double_wide_mlp": True, "sliding_window": 512}
    | {"layer_types": [*["sliding_attention"] * 4, "full_attention"] * 2, "vocab_size_per_layer_input": 262_144}
    | {"hidden_size_per_layer_input": 256, "max_position_embeddings": 32_768},
    "qwen3.5-4b-8-layers": COMMON
    | {"model_type": "qwen3_5_text", "vocab_size": 248_320, "hidden_size": 2560, "intermediate_size": 9216}
    | {"num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256}
    | {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
    | {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "max_position_embeddings": 32_768},
    "qwen3.5-0.8b": COMMON
    | {"model_type": "qwen3_5_text", "vocab_size": 248_320, "hidden_size": 1024, "intermediate_size": 3584}
    | {"num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256}
    | {"linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128}
    | {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "max_position_embeddings": 32_768},
    "gpt-oss-20b-4-layers": COMMON
    | {"model_type": "gpt_oss", "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64}
    | {"num_hidden_layers": 4, "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32}
    | {"num_experts_per_tok": 4, "sliding_window": 128, "tie_word_embeddings": False},
    "lfm2-8b-a1b-6-layers": {name: value for name, value in COMMON.items() if name != "rms_norm_eps"}
    | {"model_type": "lfm2_moe", "vocab_size": 65_536, "hidden_size": 2048, "intermediate_size": 7168}
    | {"num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 8, "moe_intermediate_size": 1792}
    | {"num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4, "conv_L_cache": 3, "use_expert_bias": True}
    | {"layer_types": ["conv", "conv", "full_attention"] * 2, "max_position_embeddings": 32_768},
}


def main(arguments: list[str] | None = None) -> int:
    """Write the folder, and the GGUF file with --gguf."""
    parser = command_parser("shapes", __doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--gguf", type=Path, default=None, metavar="FILE", help="also write the weights as GGUF, in bfloat16"
    )
    options = parser.parse_args(arguments)
    write_folder(SHAPES[options.shape], options.folder)
    if options.gguf:
        write_gguf(options.folder, options.gguf)
    return 0


def write_folder(shape: dict[str, Any], folder: Path) -> None:
    """Write a checkpoint in transformers' format: config, weights of a fixed seed, tokenizer."""
    settings = {name: value for name, value in shape.items() if name != "model_type"}
    config = AutoConfig.for_model(shape["model_type"], **settings, eos_token_id=shape["vocab_size"] - 1)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer(shape["vocab_size"]).save_pretrained(folder)


def tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer of `size` tokens."""
    vocabulary = {token: number for number, token in enumerate(tokens(size))}
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    result = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=END)
    result.chat_template = TEMPLATE
    return result


def tokens(size: int) -> list[str]:
    """Return the vocabulary: bytes, words of four letters, the end token."""
    letters = ("".join(word) for word in itertools.product(string.ascii_lowercase, repeat=4))
    words = (f"Ġ{word}" for word in letters)  # the letter for a space in byte-level vocabularies
    single = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*single, *itertools.islice(words, size - len(single) - 1), END]


def write_gguf(folder: Path, path: Path, pre_tokenizer: str | None = None) -> None:
    """Write the checkpoint in `folder` as a GGUF file in bfloat16."""
    from engine.convert.to_gguf import plan_file

    plan_file(folder, "bf16", pre_tokenizer, lambda phase: None).write(path, lambda written, total: None)


if __name__ == "__main__":
    sys.exit(main())
