"""Writes models with published shapes and random weights, for Cellar and, as GGUF, for llama.cpp.

    python -m benchmarks.shapes qwen3-0.6b FOLDER              # config, bfloat16 weights, tokenizer
    python -m benchmarks.shapes qwen3-0.6b FOLDER --gguf FILE  # and the same weights for llama.cpp (pip install gguf)

Every token above the single bytes is a whole word, so a server can stream each token at once.
"""

from __future__ import annotations

import argparse
import itertools
import string
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

END = "<|end|>"
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
COMMON = {"tie_word_embeddings": True, "dtype": "bfloat16", "rms_norm_eps": 1e-6}
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": COMMON
    | {"model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "head_dim": 64}
    | {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    | {"max_position_embeddings": 8192, "rope_theta": 100_000.0},
    "qwen3-0.6b": COMMON
    | {"model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}
    | {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    | {"max_position_embeddings": 40_960, "rope_theta": 1_000_000.0},
    "llama-3.2-1b": COMMON
    | {"model_type": "llama", "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64}
    | {"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"max_position_embeddings": 131_072, "rope_theta": 500_000.0},
}
GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GGUF_TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def main(arguments: list[str] | None = None) -> int:
    """Write the folder, and the GGUF file with --gguf."""
    parser = argparse.ArgumentParser(prog="benchmarks.shapes", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--gguf", type=Path, default=None, metavar="FILE", help="also write the weights for llama.cpp, in bfloat16"
    )
    given = parser.parse_args(arguments)
    write_folder(SHAPES[given.shape], given.folder)
    if given.gguf:
        write_gguf(SHAPES[given.shape], given.folder, given.gguf)
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


def write_gguf(shape: dict[str, Any], folder: Path, path: Path) -> None:
    """Write the weights in `folder` with llama.cpp's tensor names."""
    import gguf  # no dependency of this project

    writer = gguf.GGUFWriter(path, shape["model_type"])
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_rope_dimension_count(shape["head_dim"])
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_vocab_size(shape["vocab_size"])
    words = tokens(shape["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types([*[gguf.TokenType.NORMAL] * (len(words) - 1), gguf.TokenType.CONTROL])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(len(words) - 1)
    writer.add_eos_token_id(len(words) - 1)
    writer.add_add_bos_token(False)
    for name, tensor in gguf_tensors(shape, folder):
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor.float().numpy())
        else:
            raw = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(name, tensor.contiguous().view(torch.uint8).numpy(), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(shape: dict[str, Any], folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of a checkpoint with llama.cpp's name for it."""
    weights = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    # llama.cpp rotates adjacent columns in its "llama" architecture, halves in "qwen3"; transformers rotates halves.
    paired = {"attn_q", "attn_k"} if shape["model_type"] == "llama" else set()
    for name, tensor in weights.items():
        if name in GGUF_TOP:
            yield GGUF_TOP[name], tensor
        elif name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            gguf_name = GGUF_LAYER[rest.removesuffix(".weight")]
            yield (
                f"blk.{layer}.{gguf_name}.weight",
                pair_columns(tensor, shape["head_dim"]) if gguf_name in paired else tensor,
            )


def pair_columns(weight: Tensor, width: int) -> Tensor:
    """Return a projection [heads * width, columns] with the rotated halves interleaved."""
    return weight.unflatten(0, (-1, 2, width // 2)).transpose(1, 2).flatten(0, 2)


if __name__ == "__main__":
    sys.exit(main())
